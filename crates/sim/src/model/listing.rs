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
}

impl Properties {
    /// Returns those of a clone of a volume that has these.
    pub fn of_clone(self) -> Properties {
        Properties { quota: 0, ..self }
    }
}

/// A volume or snapshot as it is listed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// Length in bytes.
    pub size: u64,
    /// Its properties; a snapshot's are the default.
    pub properties: Properties,
}

impl From<u64> for Listed {
    fn from(size: u64) -> Listed {
        Listed { size, properties: Properties::default() }
    }
}

impl std::fmt::Debug for Listed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.properties == Properties::default() {
            true => write!(f, "{}", self.size),
            false => write!(f, "{} {:?}", self.size, self.properties),
        }
    }
}

impl Volume {
    /// Returns what a listing shows of it.
    pub fn listed(&self) -> Listed {
        let properties = if self.of.is_none() { self.properties } else { Properties::default() };
        Listed { size: self.size, properties }
    }
}
