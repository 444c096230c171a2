//! Finds the comments of a source text: of Rust outside literals, of scripts behind `#`.

use crate::Source;

/// A line of comment text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comment {
    pub line: usize,
    pub text: String,
}

/// Returns the comments of a Rust file or script, line by line; none of other files.
pub fn of(source: &Source) -> Vec<Comment> {
    if source.is_rust() {
        of_rust(&source.text)
    } else if source.is_markdown() {
        Vec::new()
    } else {
        of_script(&source.text)
    }
}

/// A `#` at the beginning of a line or behind a space begins a comment; `#!` of the first line does not.
pub fn of_script(text: &str) -> Vec<Comment> {
    let mut comments = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let start = if line.starts_with('#') { Some(0) } else { line.find(" #").map(|at| at + 1) };
        if let Some(start) = start
            && !(index == 0 && line.starts_with("#!"))
        {
            comments.push(Comment { line: index + 1, text: line[start + 1..].to_string() });
        }
    }
    comments
}

/// Line and block comments, documentation included; what literals hold is no comment.
pub fn of_rust(text: &str) -> Vec<Comment> {
    let bytes = text.as_bytes();
    let mut comments = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => {
                let end = end_of_line(text, at);
                comments.push(Comment { line, text: text[at + 2..end].to_string() });
                end
            }
            b'/' if bytes[at..].starts_with(b"/*") => {
                let end = end_of_block(bytes, at);
                for (index, part) in text[at..end].lines().enumerate() {
                    comments.push(Comment { line: line + index, text: part.to_string() });
                }
                end
            }
            b'"' => end_of_string(bytes, at),
            b'r' | b'b' | b'c' if !is_in_word(bytes, at) => end_of_raw_string(bytes, at).unwrap_or(at + 1),
            b'\'' => end_of_character(text, at),
            _ => at + 1,
        };
        line += bytes[at..end].iter().filter(|&&byte| byte == b'\n').count();
        at = end;
    }
    comments
}

fn end_of_line(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |length| at + length)
}

/// Block comments nest.
fn end_of_block(bytes: &[u8], at: usize) -> usize {
    let (mut depth, mut at) = (0, at);
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

fn end_of_string(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Whether the byte before belongs to the same identifier.
fn is_in_word(bytes: &[u8], at: usize) -> bool {
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_')
}

/// `r"…"`, `r#"…"#`, `br"…"`, `cr"…"`.
fn end_of_raw_string(bytes: &[u8], at: usize) -> Option<usize> {
    let raw = if bytes[at] == b'r' { at } else { at + 1 };
    if bytes.get(raw) != Some(&b'r') {
        return None;
    }
    let hashes = bytes[raw + 1..].iter().take_while(|&&byte| byte == b'#').count();
    let start = raw + 1 + hashes;
    if bytes.get(start) != Some(&b'"') {
        return None;
    }
    let closing: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let length = bytes[start + 1..].windows(closing.len()).position(|part| part == closing);
    Some(length.map_or(bytes.len(), |length| start + 1 + length + closing.len()))
}

/// Tells a character (`'a'`, `'\''`) from a lifetime (`'a`).
fn end_of_character(text: &str, at: usize) -> usize {
    let rest = &text[at + 1..];
    if rest.starts_with('\\') {
        return rest[2..].find('\'').map_or(text.len(), |length| at + 3 + length + 1);
    }
    let Some(first) = rest.chars().next() else { return at + 1 };
    if rest[first.len_utf8()..].starts_with('\'') { at + 1 + first.len_utf8() + 1 } else { at + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_found_and_literals_are_skipped() {
        let text = "//! one\nlet a = \"// no\"; // two\nlet b = '\"'; /* three\nfour */ let c = r#\"\" // no\"#;\n\
            fn f<'a>(x: &'a str) {} // five\nlet d = '\\''; // six\n";
        let found: Vec<_> = of_rust(text).into_iter().map(|comment| (comment.line, comment.text)).collect();
        let expected = [(1, "! one"), (2, " two"), (3, "/* three"), (4, "four */"), (5, " five"), (6, " six")];
        assert_eq!(found, expected.map(|(line, text)| (line, text.to_string())));
    }

    #[test]
    fn comments_of_scripts_are_found() {
        let found = of_script("#!/bin/sh\n# one\nx=${y#z} # two\n");
        assert_eq!(found.iter().map(|comment| comment.line).collect::<Vec<_>>(), [2, 3]);
    }
}
