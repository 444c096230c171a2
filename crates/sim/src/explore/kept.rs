//! Seeds that once found a failure, kept permanently.

use super::Recipe;
use crate::history::Profile;

const FILE: &str = include_str!("../../seeds/kept.txt");

/// A kept run and why it was kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What to run.
    pub recipe: Recipe,
    /// The failure.
    pub why: String,
}

/// All kept runs.
pub fn kept() -> Vec<Kept> {
    parse(FILE)
}

/// The environment of a seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct World {
    /// The profile; `None`: drawn from the seed.
    pub profile: Option<Profile>,
    /// Bytes of its cache; `None`: drawn from the seed.
    pub cache: Option<usize>,
    /// With memory that outlives the process.
    pub lasting: bool,
    /// With freed space retained.
    pub retain: bool,
    /// With a small shared cache.
    pub shared: bool,
}

impl World {
    /// Parses `origins/12288` or `-/12288/lasting/retain/shared`; `-`: drawn from the seed.
    pub(super) fn parse(text: &str) -> World {
        let mut words = text.split('/');
        let profile = words.next().and_then(Profile::from_name);
        let mut world = World { profile, ..World::default() };
        for word in words {
            match word {
                "lasting" => world.lasting = true,
                "retain" => world.retain = true,
                "shared" => world.shared = true,
                bytes => world.cache = bytes.parse().ok(),
            }
        }
        world
    }
}

/// Parses one run per line: seed, steps, [`World`], then why it is there.
fn parse(text: &str) -> Vec<Kept> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let seed = words.next()?.parse().ok()?;
            let steps = words.next()?.parse().ok()?;
            let World { profile, cache, lasting, retain, shared } = words.next().map_or(World::default(), World::parse);
            let why = words.collect::<Vec<_>>().join(" ");
            let recipe = Recipe { profile, cache, lasting, retain, shared, ..Recipe::new(seed, steps) };
            Some(Kept { recipe, why })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_file_is_understood() {
        let lines = FILE.lines().filter(|l| !l.trim().is_empty() && !l.starts_with('#')).count();
        assert_eq!(kept().len(), lines);
        let parsed = parse("# no\n\n7 300 forks lost a snapshot\n8 20 -/4096\n9 20 -/4096/lasting/retain\n");
        assert_eq!((parsed[1].recipe.lasting, parsed[2].recipe.lasting), (false, true));
        assert_eq!((parsed[1].recipe.retain, parsed[2].recipe.retain), (false, true));
        assert_eq!((parsed[0].recipe.cache, parsed[1].recipe.cache), (None, Some(4096)));
        assert_eq!(parsed[0].recipe.profile, Some(Profile::Forks));
        assert_eq!((parsed[0].recipe.seed, parsed[0].why.as_str()), (7, "lost a snapshot"));
        assert_eq!((parsed[1].recipe.steps, parsed[1].recipe.profile), (20, None));
    }
}
