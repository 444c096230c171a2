//! Sets of names, given as patterns.

use anyhow::{Context, Result};
use glob::Pattern;

/// Names or patterns with `*`, `?` and `[…]`; a `*` matches a `/`, too.
#[derive(Clone, Debug)]
pub struct Patterns(Vec<Pattern>);

impl Patterns {
    /// Parses patterns that are separated by commas.
    pub fn parse(text: &str) -> Result<Patterns> {
        let parsed = |part: &str| Pattern::new(part).with_context(|| format!("'{part}' is no pattern of names"));
        Ok(Patterns(text.split(',').filter(|part| !part.is_empty()).map(parsed).collect::<Result<_>>()?))
    }

    /// The pattern of all names.
    pub fn all() -> Patterns {
        Patterns(vec![Pattern::new("*").expect("a pattern")])
    }

    /// Whether one of the patterns matches `name`.
    pub fn include(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| pattern.matches(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_patterns_are_separated_by_commas() {
        let patterns = Patterns::parse("db,ci/*,vm-?").unwrap();
        for name in ["db", "ci/a", "ci/a/b", "vm-1"] {
            assert!(patterns.include(name), "{name}");
        }
        for name in ["db2", "ci", "vm-10", ""] {
            assert!(!patterns.include(name), "{name}");
        }
        assert!(Patterns::all().include("a/b") && !Patterns::parse("").unwrap().include("a"));
        assert!(Patterns::parse("a[").unwrap_err().to_string().contains("'a[' is no pattern"));
    }
}
