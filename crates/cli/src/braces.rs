//! Lists of names in one word: `kids/{001..100}` and `vm/{a,b}`, as a shell expands them.

use anyhow::{Context, Result, bail, ensure};

/// Most names of one word.
const NAMES_COUNT: usize = 1 << 20;

/// Returns the names that `word` stands for: one for each part of each pair of braces, in order. The leading
/// `plain_len` bytes stay as they are.
pub fn expand(word: &str, plain_len: usize) -> Result<Vec<String>> {
    let (plain, rest) = word.split_at(plain_len);
    let mut names = vec![plain.to_string()];
    let mut rest = rest;
    while let Some((before, behind)) = rest.split_once('{') {
        let (inside, after) =
            behind.split_once('}').with_context(|| format!("'{word}': there is no '}}' behind '{{'"))?;
        let parts = parts_of(inside).with_context(|| format!("'{word}'"))?;
        ensure!(
            names.len().saturating_mul(parts.len()) <= NAMES_COUNT,
            "'{word}' stands for more than {NAMES_COUNT} names"
        );
        names = names.iter().flat_map(|name| parts.iter().map(move |part| format!("{name}{before}{part}"))).collect();
        rest = after;
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    Ok(names)
}

fn parts_of(inside: &str) -> Result<Vec<String>> {
    if let Some((first, last)) = inside.split_once("..") {
        return numbers(first, last);
    }
    ensure!(inside.contains(','), "{{{inside}}} is neither a list, as in {{a,b}}, nor a range, as in {{01..20}}");
    Ok(inside.split(',').map(str::to_string).collect())
}

/// Returns all numbers from `first` to `last`, with as many digits if one of them begins with 0.
fn numbers(first: &str, last: &str) -> Result<Vec<String>> {
    let is_number = |text: &str| !text.is_empty() && text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit());
    if !is_number(first) || !is_number(last) {
        bail!("{{{first}..{last}}} is no range of numbers of up to 9 digits, as in {{01..20}}");
    }
    let is_padded = [first, last].iter().any(|text| text.len() > 1 && text.starts_with('0'));
    let width = if is_padded { first.len().max(last.len()) } else { 0 };
    let (from, to): (usize, usize) = (first.parse()?, last.parse()?);
    ensure!(from.abs_diff(to) < NAMES_COUNT, "{{{first}..{last}}} has more than {NAMES_COUNT} numbers");
    let shown = |n: usize| format!("{n:0width$}");
    Ok(if from <= to { (from..=to).map(shown).collect() } else { (to..=from).rev().map(shown).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_lists_are_expanded_in_order() {
        assert_eq!(expand("plain", 0).unwrap(), ["plain"]);
        assert_eq!(expand("k/{08..11}", 0).unwrap(), ["k/08", "k/09", "k/10", "k/11"]);
        assert_eq!(expand("{9..11}x", 0).unwrap(), ["9x", "10x", "11x"]);
        assert_eq!(expand("{3..1}", 0).unwrap(), ["3", "2", "1"]);
        assert_eq!(expand("a{,b}/{1..2}", 0).unwrap(), ["a/1", "a/2", "ab/1", "ab/2"]);
        assert_eq!(expand("/p{x}/v{a,b}", 5).unwrap(), ["/p{x}/va", "/p{x}/vb"]);
    }

    #[test]
    fn what_is_no_list_is_refused_by_name() {
        for (word, why) in [
            ("a{1..", "no '}'"),
            ("a{b}", "neither a list"),
            ("a{1..x}", "no range"),
            ("a{0..999999999}", "more than"),
            ("{1..2000}{1..2000}", "more than"),
        ] {
            let error = format!("{:#}", expand(word, 0).unwrap_err());
            assert!(error.contains(why) && error.contains(word), "{error}");
        }
    }
}
