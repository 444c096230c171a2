//! The metadata contexts that BLOCK_STATUS can tell of, and what their numbers mean.

/// Holes and zeroes, with the flags of the NBD protocol.
pub const ALLOCATION: &str = "base:allocation";
/// Who refers to the data: [`DEPTH_HOLE`], [`DEPTH_OWN`] or [`DEPTH_SHARED`].
pub const DEPTH: &str = "qemu:allocation-depth";
/// What has changed since a snapshot, whose name follows.
pub const CHANGED: &str = "qemu:dirty-bitmap:";

/// Of [`DEPTH`]: nothing is mapped here.
pub const DEPTH_HOLE: u32 = 0;
/// Of [`DEPTH`]: data that only this volume or snapshot refers to.
pub const DEPTH_OWN: u32 = 1;
/// Of [`DEPTH`]: data that another volume or snapshot refers to, too.
pub const DEPTH_SHARED: u32 = 2;
