//! Comments name requests, tasks and callers, not persons.
//!
//! In comments of Rust files and scripts none of [`PERSONS`] may stand; `whose` may, since things have it, too.
//! Documents may speak of people.

use crate::{Source, Violation, comments};

/// Words for persons.
pub const PERSONS: [&str; 10] =
    ["who", "whom", "whoever", "nobody", "somebody", "anybody", "everybody", "someone", "anyone", "everyone"];

/// Comments with a word of [`PERSONS`]; text in quotation marks or backquotes is quoted and may have it.
pub fn check(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for comment in comments::of(source) {
        for word in words_of(&unquoted(&comment.text)) {
            if PERSONS.contains(&word.as_str()) {
                let what = format!("`{word}` in a comment: say the caller, the request, the writer, …");
                violations.push(Violation::new(source, comment.line, what));
            }
        }
    }
    violations
}

/// The words of `text` in lower case; `it's` is two.
pub fn words_of(text: &str) -> Vec<String> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect()
}

/// `text` without what stands between backquotes or quotation marks.
fn unquoted(text: &str) -> String {
    let mut result = String::new();
    for (index, outer) in text.split('`').enumerate() {
        if index % 2 == 0 {
            result.extend(outer.split('"').step_by(2));
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_in_a_comment_is_found() {
        let text =
            "//! Whoever asks.\nlet who = \"who\"; // the caller, as `who` or \"nobody\" says\n/* a\n * who */\n";
        let lines = |path: &str| check(&Source::new(path, text)).iter().map(|found| found.line).collect::<Vec<_>>();
        assert_eq!(lines("a.rs"), [1, 4]);
        assert_eq!(lines("docs/a.md"), [0; 0]);
        assert_eq!(check(&Source::new("scripts/a", "# for somebody\nwho\n")).len(), 1);
    }
}
