//! Escapes in names: `%` and two hexadecimal digits for a byte that a name cannot have itself. So a mount has files of
//! all names that Linux allows, and `@` still separates the name of a snapshot.

/// The marks that names of volumes and snapshots may contain besides letters, digits, spaces and escapes.
pub const NAME_MARKS: &str = "._-+=~#:,";

/// Whether `c` may be in a part of a name: ASCII that needs no escape in JSON or in a label of Prometheus, and other
/// scripts without what is invisible or changes the direction of text. A space is neither the first nor the last
/// character of a part, and `%` begins an escape. The rule is part of the format: it depends on no table of Unicode,
/// since those change.
pub fn is_name_character(c: char) -> bool {
    match c {
        '\0'..='\x7f' => c.is_ascii_alphanumeric() || c == ' ' || c == '%' || NAME_MARKS.contains(c),
        '\u{80}'..='\u{a0}' | '\u{2000}'..='\u{206f}' | '\u{fe00}'..='\u{feff}' => false,
        _ => true,
    }
}

/// Returns the part of a name for the file name `shown`, which has neither `/` nor NUL.
pub fn escape_name(shown: &[u8]) -> String {
    let mut name = String::with_capacity(shown.len());
    for chunk in shown.utf8_chunks() {
        for c in chunk.valid().chars() {
            match is_name_character(c) && c != '%' {
                true => name.push(c),
                false => c.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| push_escape(&mut name, byte)),
            }
        }
        chunk.invalid().iter().for_each(|&byte| push_escape(&mut name, byte));
    }
    if name.starts_with(' ') {
        name.replace_range(..1, "%20");
    }
    if name.ends_with(' ') {
        name.truncate(name.len() - 1);
        push_escape(&mut name, b' ');
    }
    name
}

fn push_escape(name: &mut String, byte: u8) {
    let digit = |value: u8| char::from(if value < 10 { b'0' + value } else { b'A' - 10 + value });
    name.extend(['%', digit(byte >> 4), digit(byte & 15)]);
}

/// Returns the file name for a part of a name. A `%` that begins no escape stands for itself.
pub fn unescape_name(name: &str) -> Vec<u8> {
    let mut shown = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        let digit = |at: usize| char::from(*behind.get(at)?).to_digit(16);
        let escaped = if byte == b'%' { digit(0).zip(digit(1)) } else { None };
        (rest, _) = match escaped {
            Some((high, low)) => (&behind[2..], shown.push((high << 4 | low) as u8)),
            None => (behind, shown.push(byte)),
        };
    }
    shown
}

/// Whether all escapes in a part of a name are necessary, and written as [`escape_name`] writes them: so that no two
/// names stand for one file name.
pub fn has_sound_escapes(part: &str) -> bool {
    let shown = unescape_name(part);
    !shown.iter().any(|byte| [0, b'/'].contains(byte)) && escape_name(&shown) == part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_name_has_a_name_of_its_own() {
        let all: [(&[u8], &str); 10] = [
            (b"config.json", "config.json"),
            (b"rabbit@host", "rabbit%40host"),
            (b"100%", "100%25"),
            (b" a b ", "%20a b%20"),
            (b" ", "%20"),
            ("Stra\u{df}e".as_bytes(), "Stra\u{df}e"),
            (b"Copy (1)", "Copy %281%29"),
            (b"a\"\\\n", "a%22%5C%0A"),
            (b"\xff", "%FF"),
            ("\u{a0}e\u{301}\u{202e}".as_bytes(), "%C2%A0e\u{301}%E2%80%AE"),
        ];
        for (shown, name) in all {
            assert_eq!(escape_name(shown), name);
            assert_eq!(unescape_name(name), shown);
            assert!(has_sound_escapes(name), "{name}");
        }
        for byte in (1..=255).filter(|&byte| byte != b'/') {
            assert_eq!(unescape_name(&escape_name(&[byte])), [byte]);
        }
    }

    #[test]
    fn one_name_of_each_file_is_sound() {
        for bad in ["%", "a%4", "%41", "%2e", "%2E", "%5c", "a%20b", "%00", "%2F", "%C3%9F", "a%zz"] {
            assert!(!has_sound_escapes(bad), "{bad}");
        }
        assert_eq!(unescape_name("a%zz%"), b"a%zz%");
    }
}
