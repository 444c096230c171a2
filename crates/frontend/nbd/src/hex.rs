//! Bytes as hexadecimal digits in serialized state.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};
use zeroize::Zeroizing;

/// Serializes bytes; for `#[serde(with)]`.
pub(crate) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    // The bytes may be a key.
    let mut text = Zeroizing::new(String::with_capacity(2 * bytes.len()));
    text.extend(digits.map(|digit| char::from(DIGITS[usize::from(digit)])));
    to.serialize_str(&text)
}

/// Deserializes bytes; for `#[serde(with)]`.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = Zeroizing::new(String::deserialize(from)?);
    let digit = |digit: u8| char::from(digit).to_digit(16).ok_or_else(|| D::Error::custom("no hexadecimal digit"));
    let pair = |pair: &[u8]| match pair {
        [high, low] => Ok((digit(*high)? << 4 | digit(*low)?) as u8),
        _ => Err(D::Error::custom("half of a byte")),
    };
    text.as_bytes().chunks(2).map(pair).collect()
}
