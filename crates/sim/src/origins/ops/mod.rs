//! The operations on an origin and beside it: a file each, or one for a few that are alike, and a row each in
//! the table.

pub mod clone;
pub mod delete;
pub mod discard;
pub mod fault;
pub mod flush;
pub mod lives;
pub mod read;
pub mod rollback;
pub mod snapshot;
pub mod sweep;
pub mod target;
pub mod upkeep;
pub mod write;

use super::run::Origins;
use crate::driver::Operation;

/// All operations, in the order in which histories draw them. New ones come last.
pub static TABLE: &[&Operation<Origins>] = &[
    &read::READ,
    &write::WRITE,
    &write::APPEND,
    &read::CHASE,
    &write::RAGGED,
    &write::ZERO,
    &discard::DISCARD,
    &flush::FLUSH,
    &snapshot::SNAPSHOT,
    &snapshot::INDEPENDENT,
    &snapshot::GROUP,
    &clone::CLONE,
    &clone::FLATTEN,
    &delete::DELETE,
    &delete::DELETE_OLDEST,
    &delete::DELETE_AND_CUT,
    &rollback::ROLLBACK,
    &rollback::ROLLED_BACK,
    &upkeep::CHECKPOINT,
    &upkeep::CHECK,
    &upkeep::SETTLE,
    &lives::REOPEN,
    &lives::CUT,
    &lives::KILL,
    &fault::FAULT,
    &sweep::SWEEP,
    &fault::STRIKE,
    &sweep::THIN,
    &upkeep::SET,
    &lives::UNPROTECT,
];
