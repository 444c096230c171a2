//! Names of the metadata contexts that BLOCK_STATUS reports, and the meaning of their numbers.

/// Holes and zeroes, with the flags of the NBD protocol.
pub const ALLOCATION: &str = "base:allocation";
/// References to the data: [`DEPTH_HOLE`], [`DEPTH_OWN`] or [`DEPTH_SHARED`].
pub const DEPTH: &str = "qemu:allocation-depth";
/// Changes since a snapshot, whose name follows.
pub const CHANGED: &str = "qemu:dirty-bitmap:";

/// In [`DEPTH`]: nothing is mapped.
pub const DEPTH_HOLE: u32 = 0;
/// In [`DEPTH`]: data to which only this volume or snapshot refers.
pub const DEPTH_OWN: u32 = 1;
/// In [`DEPTH`]: data to which another volume or snapshot refers, too.
pub const DEPTH_SHARED: u32 = 2;
