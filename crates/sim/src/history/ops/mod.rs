//! The operations on a pool with volumes: a file each, or one for a few that are alike, and a row each in the
//! table.
//!
//! An operation is a name, its weight in the histories of each profile, and the function that starts it.
//! That one decides what the operation works on, submits the call of the engine, and says what its end means
//! for the model.

pub mod audit;
pub mod bound;
pub mod burst;
pub mod clear;
pub mod control;
pub mod copying;
pub mod create;
pub mod delete;
pub mod fault;
pub mod flush;
mod folder;
pub mod folder_bound;
pub mod fork;
pub mod gather;
mod hard_links;
pub mod inherit;
pub mod lifetime;
mod links;
pub mod lives;
pub mod names;
pub mod properties;
pub mod quota;
pub mod read;
pub mod rename;
pub mod replace;
pub mod resize;
pub mod rewrite;
pub mod share;
pub mod succession;
pub mod target;
pub mod unnamed;
pub mod upkeep;
pub mod write;

use super::op::Profile::{self, *};
use super::run::Volumes;
use crate::driver::Operation;

/// All operations, in the order in which histories draw them. New ones come last.
#[rustfmt::skip]
pub static TABLE: &[&Operation<Volumes>] = &[
    &succession::HEIR,
    &names::NAMES,
    &unnamed::UNNAMED,
    &read::READ,
    &write::WRITE,
    &write::APPEND,
    &write::RAGGED,
    &burst::BURST,
    &write::IN_PLACE,
    &flush::FLUSH,
    &flush::FLUSH_POOL,
    &create::CREATE_ALL,
    &fork::CLONE_ALL,
    &properties::SET_ALL,
    &clear::DISCARD,
    &clear::ZERO,
    &create::CREATE,
    &fork::SNAPSHOT,
    &fork::GROUP,
    &fork::CLONE,
    &share::CLONE_RANGE,
    &replace::REPLACE,
    &replace::USURP,
    &replace::ROLLBACK,
    &rename::RENAME,
    &resize::RESIZE,
    &delete::DELETE,
    &upkeep::GROW,
    &write::FILL,
    &upkeep::CHECKPOINT,
    &quota::SET_QUOTA,
    &gather::GATHER,
    &gather::SET_GATHER,
    &fault::FAULT,
    &upkeep::CHECK,
    &copying::SET_COPYING,
    &copying::SET_COPIER,
    &upkeep::SETTLE,
    &lives::REOPEN,
    &lives::CUT,
    &lives::KILL,
    &copying::SET_CHUNK,
    &audit::AUDIT,
    &share::OVERLAP,
    &folder::SNAPSHOT_FOLDER,
    &folder::FORK,
    &folder::ROLLBACK_FOLDER,
    &folder::ROLLBACK_TO,
    &folder::SWAP,
    &folder::ROLLBACK_LIVE,
    &links::LINKS,
    &folder::KEEP_SNAPSHOTS,
    &lifetime::SET_LIFETIME,
    &lifetime::MAKE_EXPIRING,
    &lifetime::DELETE_EXPIRED,
    &rewrite::REWRITE,
    &rewrite::WRITE_ZEROES,
    &bound::SET_BOUND,
    &folder_bound::SET_FOLDER_BOUND,
    &folder_bound::MOVE,
    &folder_bound::SWAP_FOLDERS,
    &folder_bound::DELETE_BELOW,
    &inherit::SET_INHERITED,
    &inherit::CLONE_INTO,
    &lifetime::SET_XATTR,
    &hard_links::HARD_LINKS,
];

/// Operations that the histories of a profile draw right after another one, not at their place in the table:
/// the kept seeds have that order.
pub const DRAWN_AFTER: &[(Profile, &str, &str)] = &[
    (Races, "create", "delete"),
    (Blocks, "reopen", "cut"),
    (Blocks, "check", "reopen"),
    (Blocks, "fill", "check"),
    (Journal, "reopen", "kill"),
    (Crowd, "cut", "audit"),
    (Crowd, "reopen", "cut"),
    (Files, "audit", "checkpoint"),
    (Ranges, "audit", "checkpoint"),
    (Large, "audit", "checkpoint"),
    (Large, "overlap", "audit"),
    (Copies, "fault", "cut"),
    (Copies, "set-copying", "set-chunk"),
    (Copies, "set-copier", "set-copying"),
    (Gathering, "burst", "in-place"),
    (Gathering, "replace", "rollback"),
    (Gathering, "fault", "cut"),
    (Gathering, "fill", "fault"),
    (Hosts, "grow", "gather"),
    (Names, "fault", "kill"),
];
