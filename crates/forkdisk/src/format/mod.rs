//! Bytes on disk: encoding and decoding only, no I/O. docs/format.md describes every byte.
//!
//! Everything is little-endian. All decoded input is untrusted: every number is checked before it is used.

mod checksum;
mod count_log;
mod counts;
mod cursor;
mod entry;
mod extension;
#[cfg(test)]
mod golden;
mod group;
mod heartbeat;
pub mod inherited;
mod layout;
pub mod ordered;
mod record;
mod settings;
mod slot;
mod stamp;
mod superblock;
mod table;
mod transaction;
mod upper_bits;
mod volume;

pub use checksum::{Seed, page_checksum};
pub use count_log::{BlockChange, CountLog, LeafChange, count_log_page, decode_count_log, encode_count_segment};
pub use counts::{BlockCounts, CountEntry, CountPage, LEAF_BLOCKS, PINNED, Slot};
pub use entry::{Kind, MAPPED_LEVEL, MapEntry, TableRef};
pub use extension::{
    Bound, Extension, LABEL_BYTES, Lease, MAX_CREATED_BY_BYTES, MAX_LABEL_KEY_BYTES, MAX_LABELS_BYTES,
    MAX_XATTR_NAME_BYTES, WritePolicy, Writes, Zeroes,
};
pub use group::{
    DataChecksum, Decoded, JournalGroup, data_checksum, decode_group, encode_group, find_group, length_of_group,
};
pub use heartbeat::{HEARTBEAT_PAGE, Heartbeat, MAX_HOST_BYTES};
pub use inherited::{CloneProperty, Inherited};
pub use layout::{CountNode, Layout, SUPERBLOCK_PAGES};
pub use ordered::TreeRoot;
pub use ordered::{ExceptionKey, ExceptionKind};
pub use record::{MovedRun, Record};
pub use settings::{BreakPolicy, COPIER_USERS, CopierSettings, GatherPolicy, NoSuchPolicy, Throttle};
pub use slot::{DirectorySlot, SLOTS_PER_PAGE, decode_directory_page, encode_directory_page};
pub use stamp::{Stamp, ZONES};
pub use superblock::{BEATS_APART, JournalStart, NotSuper, Superblock};
pub use table::{decode_table, encode_table};
pub use volume::{
    Attributes, FileKind, Identity, MAX_NAME_BYTES, MAX_ORIGIN_TEXT_BYTES, MAX_STAMPED_TEXT_BYTES, NO_VOLUME,
    OriginFull, OriginRecord, SnapshotFlags, VolumeRecord, VolumeState,
};
