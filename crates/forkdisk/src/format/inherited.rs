//! Properties that a folder gives to clones that are made below it.

use std::collections::BTreeMap;

use crate::types::{MAX_VOLUME_SIZE, PAGE_SIZE, is_chunk};

use super::cursor::{Append, Reader};
use super::{BreakPolicy, GatherPolicy, Writes, Zeroes};

/// A property that clones inherit from a folder. Its value is a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum CloneProperty {
    /// [`Changes::chunk`](crate::Changes::chunk), in bytes.
    Chunk,
    /// [`Changes::break_policy`](crate::Changes::break_policy): 0 for `split`, 1 for `copy`.
    Break,
    /// [`Changes::quota`](crate::Changes::quota), in bytes; 0: none.
    Quota,
    /// [`Changes::gather`](crate::Changes::gather), as the byte on disk.
    Gather,
    /// [`ExtensionChanges::diverge`](crate::ExtensionChanges::diverge), in bytes; 0: none.
    Diverge,
    /// [`ExtensionChanges::reserve`](crate::ExtensionChanges::reserve), in bytes; 0: none.
    Reserve,
    /// Seconds from the time of the clone until it expires; 0: never.
    Expires,
    /// [`ExtensionChanges::writes`](crate::ExtensionChanges::writes): 0 for `all`, 1 for `compare`.
    Writes,
    /// [`ExtensionChanges::zeroes`](crate::ExtensionChanges::zeroes): 0 for `written`, 1 for `holes`.
    Zeroes,
}

/// Values of properties that clones inherit.
pub type Inherited = BTreeMap<CloneProperty, u64>;

/// Longest time until a clone expires, in seconds: a hundred years.
const MAX_EXPIRES_SECONDS: u64 = 100 * 366 * 86_400;

impl CloneProperty {
    /// Whether this is a value that the property can have.
    pub fn allows(self, value: u64) -> bool {
        let is_size = |least: u64| value == 0 || (least..=MAX_VOLUME_SIZE).contains(&value);
        match self {
            CloneProperty::Chunk => is_chunk(value),
            CloneProperty::Break | CloneProperty::Writes | CloneProperty::Zeroes => value <= 1,
            CloneProperty::Quota => is_size(1),
            CloneProperty::Gather => u8::try_from(value).ok().and_then(GatherPolicy::decoded).is_some(),
            CloneProperty::Diverge | CloneProperty::Reserve => is_size(PAGE_SIZE as u64),
            CloneProperty::Expires => value <= MAX_EXPIRES_SECONDS,
        }
    }

    /// The value that a text stands for: a number of bytes or seconds, or the name of a policy.
    pub fn value_of(self, text: &str) -> Option<u64> {
        let value = match self {
            CloneProperty::Break => u64::from(text.parse::<BreakPolicy>().ok()? == BreakPolicy::Copy),
            CloneProperty::Gather => u64::from(text.parse::<GatherPolicy>().ok()?.encoded()),
            CloneProperty::Writes => u64::from(text.parse::<Writes>().ok()? == Writes::Compare),
            CloneProperty::Zeroes => u64::from(text.parse::<Zeroes>().ok()? == Zeroes::Holes),
            _ => text.parse().ok()?,
        };
        self.allows(value).then_some(value)
    }

    /// The text that stands for a value.
    pub fn text_of(self, value: u64) -> String {
        match self {
            CloneProperty::Break => break_policy(value).to_string(),
            CloneProperty::Gather => gather_policy(value).map_or_else(String::new, |policy| policy.to_string()),
            CloneProperty::Writes => writes(value).to_string(),
            CloneProperty::Zeroes => zeroes(value).to_string(),
            _ => value.to_string(),
        }
    }
}

/// The break policy with this number.
pub fn break_policy(value: u64) -> BreakPolicy {
    if value == 1 { BreakPolicy::Copy } else { BreakPolicy::Split }
}

/// The policy of gathering with this number.
pub fn gather_policy(value: u64) -> Option<GatherPolicy> {
    u8::try_from(value).ok().and_then(GatherPolicy::decoded)
}

/// What the number says about written bytes.
pub fn writes(value: u64) -> Writes {
    if value == 1 { Writes::Compare } else { Writes::All }
}

/// What the number says about written zeroes.
pub fn zeroes(value: u64) -> Zeroes {
    if value == 1 { Zeroes::Holes } else { Zeroes::Written }
}

/// Encodes values: of each the number of the property and the value.
pub(super) fn encode(all: &Inherited) -> Vec<u8> {
    let mut out = Vec::new();
    for (property, value) in all {
        let number = CloneProperty::ALL.iter().position(|known| known == property).unwrap_or_default();
        Append::u8(&mut out, number as u8);
        Append::u64(&mut out, *value);
    }
    out
}

/// Decodes what [`encode`] wrote; `None` if it makes no sense.
pub(super) fn decode(bytes: &[u8]) -> Option<Inherited> {
    let (mut r, mut all, mut last) = (Reader(bytes), Inherited::new(), None);
    while !r.0.is_empty() {
        let (number, value) = (r.u8()?, r.u64()?);
        let property = *CloneProperty::ALL.get(usize::from(number))?;
        (last < Some(number) && property.allows(value)).then_some(())?;
        last = Some(number);
        all.insert(property, value);
    }
    (!all.is_empty()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_property_makes_the_trip_and_others_are_damage() {
        let all: Inherited = CloneProperty::ALL.iter().map(|&property| (property, 1 << 20)).collect();
        let valid: Inherited = all.into_iter().map(|(p, v)| (p, if p.allows(v) { v } else { 1 })).collect();
        assert_eq!(decode(&encode(&valid)), Some(valid.clone()));
        for (property, value) in valid {
            assert_eq!(property.value_of(&property.text_of(value)), Some(value), "{property}");
        }
        let one = |number: u8, value: u64| [&[number][..], &value.to_le_bytes()].concat();
        for bad in [
            Vec::new(),
            one(9, 0),
            one(0, 5000),
            one(1, 2),
            one(2, MAX_VOLUME_SIZE + 1),
            one(3, 100),
            one(4, 4095),
            one(6, u64::MAX),
            vec![2, 0, 0],
            [one(2, 1), one(2, 1)].concat(),
            [one(4, 0), one(2, 1)].concat(),
        ] {
            assert_eq!(decode(&bad), None, "{bad:?}");
        }
    }

    #[test]
    fn texts_are_numbers_or_names() {
        for (property, text, value) in [
            (CloneProperty::Quota, "1048576", Some(1 << 20)),
            (CloneProperty::Gather, "20%", Some(20)),
            (CloneProperty::Writes, "compare", Some(1)),
            (CloneProperty::Zeroes, "some", None),
            (CloneProperty::Diverge, "100", None),
            (CloneProperty::Chunk, "1M", None),
        ] {
            assert_eq!(property.value_of(text), value, "{property}={text}");
        }
    }
}
