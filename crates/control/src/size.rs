//! Sizes as text: IEC units, 1024 each; parsing is exact to the byte.

use anyhow::{Result, bail};

const UNITS: &str = "KMGTPE";

/// Parses a number, optionally followed by `K M G T P E`, alone or with `iB` or `B` (`20G`, `1.5TiB`,
/// `4096`, `512B`). Every unit is a power of 1024. A fraction must give a whole number of bytes.
///
/// # Errors
/// A message for people: the text is no number with a known unit, is too large, or is no whole number of
/// bytes.
pub fn parse(text: &str) -> Result<u64> {
    let text = text.trim();
    if text.starts_with('-') {
        bail!("'{text}' is negative: a size is positive");
    }
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = shift_of(unit.trim())
        .ok_or_else(|| anyhow::anyhow!("'{text}' is not a size: the unit is one of K M G T P E (1024 each)"))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || number.ends_with('.') || fraction.contains('.') {
        bail!("'{text}' is not a size: write a number and a unit, such as 20G or 1.5T");
    }
    let too_large = || anyhow::anyhow!("'{text}' is too large: sizes go up to 16 EiB less one byte");
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let bytes = whole.checked_mul(1 << shift).ok_or_else(too_large)?;
    bytes.checked_add(fraction_of(text, fraction, shift)?).ok_or_else(too_large)
}

fn shift_of(unit: &str) -> Option<u32> {
    let mut rest = unit.chars();
    let Some(first) = rest.next() else { return Some(0) };
    let tail = rest.as_str();
    if first.eq_ignore_ascii_case(&'b') && tail.is_empty() {
        return Some(0);
    }
    let at = UNITS.find(first.to_ascii_uppercase())?;
    matches!(tail, "" | "iB" | "B" | "ib" | "b" | "IB").then_some(10 * (at as u32 + 1))
}

fn fraction_of(text: &str, digits: &str, shift: u32) -> Result<u64> {
    if digits.len() > 18 {
        bail!("'{text}' has too many digits behind the point");
    }
    let Ok(value) = digits.parse::<u128>() else { return Ok(0) };
    let scale = 10u128.pow(digits.len() as u32);
    let bytes = value << shift;
    if !bytes.is_multiple_of(scale) {
        bail!("'{text}' is not a whole number of bytes");
    }
    Ok((bytes / scale) as u64)
}

/// Formats `bytes` with three digits and a unit (`1.50G`, `64K`, `0`).
pub fn human(bytes: u64) -> String {
    if bytes < 1024 {
        return bytes.to_string();
    }
    let mut unit = (63 - bytes.leading_zeros()) / 10;
    let mut value = bytes as f64 / (1u64 << (10 * unit)) as f64;
    if value >= 999.5 && unit < 6 {
        value /= 1024.0;
        unit += 1;
    }
    let letter = &UNITS[unit as usize - 1..unit as usize];
    if value.fract() == 0.0 || value >= 99.95 {
        format!("{value:.0}{letter}")
    } else if value >= 9.995 {
        format!("{value:.1}{letter}")
    } else {
        format!("{value:.2}{letter}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512B", 512),
            ("1K", 1024),
            ("1k", 1024),
            ("1KiB", 1024),
            ("2MB", 2 << 20),
            ("20G", 20 << 30),
            ("1.5T", 3 << 39),
            ("1P", 1 << 50),
            (" 3 M ", 3 << 20),
        ] {
            assert_eq!(parse(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in
            ["", "G", "-1", "1Q", "1GG", "1.G", ".5G", "1.2.3K", "0.3B", "1.0001K", "99999999999E", "17E", "1e3"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn people_see_three_digits() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1K"),
            (1536, "1.50K"),
            (10 << 30, "10G"),
            (1_234_567, "1.18M"),
            ((1 << 30) - 1, "1.00G"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
    }
}
