//! Bytes on disk: encoding and decoding only, no I/O. docs/format.md describes every byte.
//!
//! Everything is little-endian. Whatever is decoded came from outside: every number is checked
//! before it is used.

mod checksum;
mod count_log;
mod counts;
mod cursor;
mod entry;
#[cfg(test)]
mod golden;
mod group;
mod heartbeat;
pub mod kept;
mod layout;
pub mod ordered;
mod record;
mod settings;
mod stamp;
mod superblock;
mod table;
mod upper_bits;
mod volume;

pub use checksum::{Seed, page_checksum};
pub use count_log::{BlockChange, CountLog, LeafChange, count_log_page, decode_count_log, encode_count_segment};
pub use counts::{BlockCounts, CountEntry, CountPage, LEAF_BLOCKS, PINNED, Slot};
pub use entry::{Entry, Kind, MAPPED_LEVEL, TableRef};
pub use group::{Decoded, Group, Witness, decode_group, encode_group, find_group, witness_sum};
pub use heartbeat::{HEARTBEAT_PAGE, Heartbeat, MAX_HOST};
pub use kept::{KeptKey, KeptKind};
pub use layout::{CountNode, Layout, SUPERBLOCK_PAGES};
pub use ordered::TreeRoot;
pub use record::{Moved, Record};
pub use settings::{BreakPolicy, COPIER_USERS, CopierSettings, GatherPolicy, NoSuchPolicy, Throttle};
pub use stamp::{Stamp, ZONES};
pub use superblock::{BEATS_APART, JournalStart, NotSuper, Superblock};
pub use table::{decode_table, encode_table};
pub use volume::{
    Attributes, Identity, MAX_NAME, MAX_ORIGIN_TEXT, MAX_STAMPED_TEXT, NO_VOLUME, OriginFull, Protects, SLOTS_PER_PAGE,
    SnapshotFlags, VolumeRecord, VolumeState, decode_directory_page, encode_directory_page,
};
