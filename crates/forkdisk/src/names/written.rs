//! Values as they are written in JSON and other formats: by their names.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::ErrorKind;
use crate::format::{BreakPolicy, CloneProperty, GatherPolicy, Inherited, OriginFull, Writes, Zeroes};
use crate::types::{Mode, VolumeKind};

use super::{SnapshotFlags, parse_uuid, uuid_text};

macro_rules! by_name {
    ($($kind:ty),*) => { $(
        impl Serialize for $kind {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$kind, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    )* };
}

by_name!(BreakPolicy, ErrorKind, GatherPolicy, Mode, OriginFull, VolumeKind, Writes, Zeroes);

impl Serialize for SnapshotFlags {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.names())
    }
}

impl<'de> Deserialize<'de> for SnapshotFlags {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<SnapshotFlags, D::Error> {
        let names = Vec::<String>::deserialize(deserializer)?;
        SnapshotFlags::from_names(names.iter().map(String::as_str)).map_err(de::Error::custom)
    }
}

/// Properties that clones inherit: their names, and their values as texts.
pub mod inherited {
    use super::*;

    pub fn serialize<S: Serializer>(all: &Inherited, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(all.iter().map(|(property, value)| (property.name(), property.text_of(*value))))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Inherited, D::Error> {
        let texts = BTreeMap::<String, String>::deserialize(deserializer)?;
        let parsed = |(name, text): (&String, &String)| {
            let property: CloneProperty = name.parse().map_err(de::Error::custom)?;
            let value = property.value_of(text);
            Ok((property, value.ok_or_else(|| de::Error::custom(format!("'{text}' is no value of {name}")))?))
        };
        texts.iter().map(parsed).collect()
    }
}

/// The identity of a pool, as text.
pub mod uuid {
    use super::*;

    pub fn serialize<S: Serializer>(uuid: &[u8; 16], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&uuid_text(uuid))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; 16], D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_uuid(&text).ok_or_else(|| de::Error::custom(format!("'{text}' is no UUID")))
    }
}

/// A number that is null if it is 0.
pub mod none_if_zero {
    use super::*;

    pub fn serialize<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        Some(*number).filter(|number| *number > 0).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(0))
    }
}

/// A text that is null if it is empty.
pub mod none_if_empty {
    use super::*;

    pub fn serialize<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
        Some(text).filter(|text| !text.is_empty()).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or_default())
    }
}
