//! Sequential writes to a volume, or to an origin in place, that has a snapshot (W1).

pub mod attached;
pub mod ext4;
pub mod origin;
