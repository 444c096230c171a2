//! The names of modules and types consist of words of `docs/glossary.md`.
//!
//! A word is known if it is in a bold term of the glossary or in its last section, [`COMMON`], which lists
//! words that mean here what they mean everywhere. Names are split at `_` and at capitals; plurals and the
//! endings of verbs are taken off.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use crate::{Source, Violation, paths, units};

/// Heading of the section of common words.
pub const COMMON: &str = "## Common words, used as everywhere";

/// What `docs/glossary.md` says.
#[derive(Default)]
pub struct Glossary {
    /// Bold terms and their lines, in order; `true` for a term with a row of its own.
    pub terms: Vec<(String, usize, bool)>,
    /// Common words in order, with their lines.
    pub common: Vec<(String, usize)>,
}

impl Glossary {
    /// Reads the bold terms and the section of common words.
    pub fn parse(source: &Source) -> Glossary {
        let mut glossary = Glossary::default();
        let mut is_common = false;
        for (index, line) in source.text.lines().enumerate() {
            if line.starts_with("## ") {
                is_common = line == COMMON;
            } else if is_common {
                let words = line.split([',', ' ', '.']).filter(|word| !word.is_empty());
                glossary.common.extend(words.map(|word| (word.to_lowercase(), index + 1)));
            } else {
                let row = line.strip_prefix('|').unwrap_or_default();
                let own = row.split(" | ").next().unwrap_or_default().matches("**").count() / 2;
                for (number, term) in line.split("**").skip(1).step_by(2).enumerate() {
                    glossary.terms.push((term.replace('`', "").to_lowercase(), index + 1, number < own));
                }
            }
        }
        glossary
    }

    /// All words that names may use, as they are written and as [`stems`] of them.
    fn words(&self) -> BTreeSet<String> {
        let terms = self.terms.iter().map(|(term, _, _)| term);
        let common = self.common.iter().map(|(word, _)| word);
        terms.chain(common).flat_map(|term| split(term)).flat_map(|word| stems(&word)).collect()
    }
}

/// A name of code and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub name: String,
    pub path: String,
    pub line: usize,
}

/// Returns the modules and the visible types and traits of a Rust file.
pub fn names(source: &Source, src: &str) -> Vec<Name> {
    let of = |name: String, line| Name { name, path: source.path.clone(), line };
    let mut names: Vec<Name> = paths::module_of(&source.path, src).into_iter().map(|name| of(name, 0)).collect();
    let mut found = Types::default();
    found.visit_file(&paths::parse(source));
    names.extend(found.0.into_iter().map(|(name, line)| of(name, line)));
    names
}

/// Words of names that the glossary does not have; each word once, where it comes first.
pub fn check_names(names: &[Name], glossary: &Glossary) -> Vec<Violation> {
    let known = glossary.words();
    let mut unknown: BTreeMap<String, &Name> = BTreeMap::new();
    for name in names {
        for word in split(&name.name) {
            if !stems(&word).iter().any(|stem| known.contains(stem)) {
                unknown.entry(word).or_insert(name);
            }
        }
    }
    let violation = |(word, name): (String, &Name)| Violation {
        path: name.path.clone(),
        line: name.line,
        what: format!("`{word}` of `{}` is not in docs/glossary.md: use its word, or define this one", name.name),
    };
    unknown.into_iter().map(violation).collect()
}

/// Terms defined twice, and common words that are terms, repeated or out of order.
pub fn check_order(source: &Source) -> Vec<Violation> {
    let glossary = Glossary::parse(source);
    let mut violations = Vec::new();
    let mut seen = BTreeSet::new();
    for (term, line, is_row) in &glossary.terms {
        if *is_row && !seen.insert(term) {
            violations.push(Violation::new(source, *line, format!("**{term}** is defined twice: one row per term")));
        }
    }
    let mut before = "";
    for (word, line) in &glossary.common {
        if before >= word.as_str() {
            violations.push(Violation::new(source, *line, format!("`{word}` behind `{before}`: sort the words")));
        }
        if seen.contains(word) {
            violations.push(Violation::new(source, *line, format!("`{word}` is common and a term: once is enough")));
        }
        before = word;
    }
    violations
}

/// Terms that no other file has, in whatever spelling: `copy ahead`, `copy_ahead`, `CopyAhead`.
pub fn check_used(source: &Source, others: &[&Source]) -> Vec<Violation> {
    let mut all = String::new();
    for other in others {
        all.push_str(&normal(&other.text));
        all.push(' ');
    }
    let mut violations = Vec::new();
    for (term, line, is_row) in Glossary::parse(source).terms {
        let term = normal(&term);
        if is_row && !all.contains(&term) && !all.contains(&term.replace(' ', "")) {
            violations.push(Violation::new(source, line, format!("**{term}** is used nowhere: remove it")));
        }
    }
    violations
}

/// Lower case, with one space between words.
fn normal(text: &str) -> String {
    let words: Vec<&str> = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    words.join(" ").to_lowercase()
}

/// Splits `snake_case`, `CamelCase` and phrases into words in lower case, without digits.
pub fn split(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let characters: Vec<char> = name.chars().collect();
    for (index, &c) in characters.iter().enumerate() {
        let is_lower = |at: usize| characters.get(at).is_some_and(|c| c.is_lowercase());
        let begins = c.is_uppercase() && index > 0 && (is_lower(index - 1) || is_lower(index + 1));
        if begins || !c.is_alphabetic() {
            words.push(String::new());
        }
        if c.is_alphabetic() {
            words.last_mut().expect("never empty").extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Returns `word` and what is left without the ending of a plural or of a verb.
pub fn stems(word: &str) -> Vec<String> {
    let mut stems = vec![word.to_string()];
    let mut add = |ending: &str, instead: &[&str]| {
        if let Some(stem) = word.strip_suffix(ending)
            && stem.len() > 2
        {
            stems.extend(instead.iter().map(|instead| format!("{stem}{instead}")));
            let mut letters = stem.chars().rev();
            if ending.len() > 1 && letters.next() == letters.next() {
                stems.push(stem[..stem.len() - 1].to_string());
            }
        }
    };
    add("ies", &["y"]);
    add("es", &["", "e"]);
    add("s", &[""]);
    add("ing", &["", "e"]);
    add("ed", &["", "e"]);
    stems
}

#[derive(Default)]
struct Types(Vec<(String, usize)>);

impl Types {
    fn add(&mut self, visibility: &syn::Visibility, name: &syn::Ident) {
        if !matches!(visibility, syn::Visibility::Inherited) {
            self.0.push((name.to_string(), name.span().start().line));
        }
    }
}

impl<'ast> Visit<'ast> for Types {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.vis, &item.ident);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.vis, &item.ident);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.vis, &item.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add(&item.vis, &item.ident);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !units::is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Glossary\n\n| word | what it is |\n|---|---|\n| **pool**, **free space** | holds **jobs** |\n\
        | **birth** | `**` |\n\n## Common words, used as everywhere\n\nbuffer, handle,\nlist.\n";

    fn glossary(text: &str) -> Source {
        Source::new("docs/glossary.md", text)
    }

    #[test]
    fn an_unknown_word_of_a_module_or_type_is_found() {
        let source = Source::new(
            "src/soon/buffers.rs",
            "pub struct PoolList;\npub(crate) enum Far {}\nstruct Own;\npub trait JobHandle {}\n\
             #[cfg(test)]\nmod tests { pub struct Planted; }\npub type FreedSpace = u8;\n",
        );
        let found = check_names(&names(&source, "src/"), &Glossary::parse(&glossary(TEXT)));
        let words: Vec<_> = found.iter().map(|found| (found.line, found.what.split('`').nth(1))).collect();
        assert_eq!(words, [(2, Some("far")), (0, Some("soon"))]);
    }

    #[test]
    fn names_are_split_and_stemmed() {
        assert_eq!(split("HTTPServer2"), ["http", "server"]);
        assert_eq!(split("copy_ahead of CopyStats"), ["copy", "ahead", "of", "copy", "stats"]);
        for (word, stem) in [("entries", "entry"), ("dropped", "drop"), ("sharing", "share"), ("boxes", "box")] {
            assert!(stems(word).contains(&stem.to_string()), "{word}");
        }
    }

    #[test]
    fn a_term_defined_twice_and_unsorted_common_words_are_found() {
        assert_eq!(check_order(&glossary(TEXT)), []);
        let twice = TEXT.replace("**birth**", "**pool**");
        assert_eq!(check_order(&glossary(&twice)).len(), 1);
        assert_eq!(check_order(&glossary(&TEXT.replace("buffer", "zebra"))).len(), 1);
        assert_eq!(check_order(&glossary(&TEXT.replace("buffer", "birth"))).len(), 1);
    }

    #[test]
    fn a_term_that_nothing_uses_is_found() {
        let other = Source::new("a.rs", "struct FreeSpace; // a pool\n");
        let found = check_used(&glossary(TEXT), &[&other]);
        assert_eq!(found.iter().map(|found| found.line).collect::<Vec<_>>(), [6]);
    }
}
