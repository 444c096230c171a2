//! Sequential writes to a volume that has a snapshot (W1).

pub mod ext4;
