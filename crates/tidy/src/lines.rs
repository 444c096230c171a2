//! No line is longer than 120 characters, no file longer than its limit.
//!
//! In Markdown the rule holds for prose. Rows of tables, lines that hold a URL or one word only (a link that
//! cannot be broken) and indented or fenced code that shows output are exempt, but not in `README.md` and
//! `ARCHITECTURE.md`.

use crate::{Source, Violation};

pub const MAX_LINE_COUNT: usize = 120;
pub const MAX_SOURCE_COUNT: usize = 600;
pub const MAX_TEST_COUNT: usize = 700;

/// Documents read first: no exemption in them.
const STRICT: [&str; 2] = ["README.md", "ARCHITECTURE.md"];

/// Lines above [`MAX_LINE_COUNT`] characters.
pub fn check_lines(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut is_fenced = false;
    for (index, line) in source.text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
        }
        let length = line.chars().count();
        let is_code = is_fenced || line.starts_with("    ");
        if length > MAX_LINE_COUNT && !(source.is_markdown() && is_exempt(&source.path, line, is_code)) {
            let what = format!("line of {length} characters, at most {MAX_LINE_COUNT}: wrap it");
            violations.push(Violation::new(source, index + 1, what));
        }
    }
    violations
}

fn is_exempt(path: &str, line: &str, is_code: bool) -> bool {
    let is_table = line.trim_start().starts_with('|');
    let is_link = line.contains("://") || line.split_whitespace().count() == 1;
    !STRICT.contains(&path) && (is_table || is_link || is_code)
}

/// Rust files above [`MAX_SOURCE_COUNT`] lines, or [`MAX_TEST_COUNT`] lines of test code.
pub fn check_file(source: &Source) -> Vec<Violation> {
    let limit = if source.is_test() { MAX_TEST_COUNT } else { MAX_SOURCE_COUNT };
    let length = source.text.lines().count();
    if !source.is_rust() || length <= limit {
        return Vec::new();
    }
    let what = format!("file of {length} lines, at most {limit}: cut it where the concepts part");
    vec![Violation::new(source, 0, what)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(path: &str, text: &str) -> Vec<usize> {
        check_lines(&Source::new(path, text)).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn a_line_above_the_limit_is_found() {
        let long = format!("short\n// {}\n", "é".repeat(118));
        assert_eq!(lines_of("a.rs", &long), [2]);
        assert_eq!(lines_of("scripts/test", &long), [2]);
        assert_eq!(lines_of("a.rs", &format!("// {}\n", "é".repeat(117))), [0; 0]);
    }

    #[test]
    fn tables_links_and_code_are_exempt_in_markdown_but_for_the_first_documents() {
        let words = "word ".repeat(30);
        let row = format!("| {words} |\n");
        assert_eq!(lines_of("docs/a.md", &words), [1]);
        assert_eq!(lines_of("docs/a.md", &row), [0; 0]);
        assert_eq!(lines_of("docs/a.md", &format!("```\n{words}\n```\n{words}\n")), [4]);
        assert_eq!(lines_of("docs/a.md", &format!("https://{}\n", "x".repeat(120))), [0; 0]);
        assert_eq!(lines_of("README.md", &row), [1]);
        assert_eq!(lines_of("a.rs", &row), [1]);
    }

    #[test]
    fn a_long_file_is_found_and_tests_have_another_limit() {
        let text = "x\n".repeat(601);
        assert_eq!(check_file(&Source::new("src/a.rs", &text)).len(), 1);
        assert_eq!(check_file(&Source::new("src/a/tests.rs", &text)).len(), 0);
        assert_eq!(check_file(&Source::new("tests/a.rs", &"x\n".repeat(701))).len(), 1);
        assert_eq!(check_file(&Source::new("a.md", &text)).len(), 0);
    }
}
