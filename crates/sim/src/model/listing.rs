//! What a pool lists: names, sizes and, in histories that set them, properties.

use std::collections::BTreeMap;

use super::Volume;

/// The volumes and snapshots by full name.
pub type Listing = BTreeMap<String, Listed>;

/// Properties that one verb sets together. Other histories have the default for all volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    /// Chunk in bytes.
    pub chunk: u64,
    /// Whether a first write to a shared chunk copies it.
    pub copies: bool,
    /// Most bytes that it may refer to; 0: no limit.
    pub quota: u64,
    /// Whether its scattered pages are gathered above some percentage.
    pub gathers: bool,
    /// Whether it drops what is there already.
    pub compares: bool,
    /// Whether written zeroes become holes.
    pub makes_holes: bool,
}

impl Properties {
    /// Returns those of a clone of a volume that has these.
    pub fn of_clone(self) -> Properties {
        Properties { quota: 0, ..self }
    }
}

/// When a volume or snapshot expires, a label, and an extended attribute. Most histories have the default for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lifetime {
    /// Seconds since 1970; 0: it does not expire.
    pub expires: u64,
    /// The value of the label; 0: there is none.
    pub label: u32,
    /// The value of an extended attribute, which copies have, too; 0: there is none.
    pub xattr: u32,
}

/// A volume or snapshot as it is listed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// Length in bytes.
    pub size: u64,
    /// Its properties; a snapshot's are the default.
    pub properties: Properties,
    /// When it expires, and its label.
    pub lifetime: Lifetime,
}

impl From<u64> for Listed {
    fn from(size: u64) -> Listed {
        Listed { size, properties: Properties::default(), lifetime: Lifetime::default() }
    }
}

impl std::fmt::Debug for Listed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.size)?;
        if self.properties != Properties::default() {
            write!(f, " {:?}", self.properties)?;
        }
        if self.lifetime != Lifetime::default() {
            write!(f, " {:?}", self.lifetime)?;
        }
        Ok(())
    }
}

impl Volume {
    /// Returns what a listing shows of it.
    pub fn listed(&self) -> Listed {
        let properties = if self.of.is_none() { self.properties } else { Properties::default() };
        Listed { size: self.size, properties, lifetime: self.lifetime }
    }
}
