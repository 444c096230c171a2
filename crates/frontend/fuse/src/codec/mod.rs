//! The kernel's FUSE protocol as pure bytes: requests decoded, replies encoded. No I/O.
//!
//! Supports version 7.31 and newer. Requests are checked for completeness and bounds, not
//! for meaning.

mod attr;
mod fields;
mod init;
mod reply;
mod request;

pub use attr::{Attr, Entry, Kind, SetAttr, StatFs, Time};
pub use init::{Capabilities, InitReply, InitRequest};
pub use reply::{DirectoryPage, Reply, open_flags};
pub use request::{Decoded, HEAD, Header, MAX_WRITE, Operation, Request, read_flags, write_flags};
