//! `fork()` for disks: snapshots, clones and thin provisioning for block storage, in user space.
//!
//! A [`Pool`] lies on a [`Device`] and holds volumes. [`Pool::volume`] opens one for I/O. The
//! engine has no threads, no clock and no executor of its own: whoever embeds it brings a device
//! and a [`Runtime`].
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod device;
mod error;
mod format;
mod journal;
mod map;
pub mod planted;
mod pool;
mod runtime;
mod space;
mod sync;
mod types;
mod volume;

pub use device::{Buf, Device};
pub use error::{Error, ErrorKind, Result};
pub use pool::{
    CheckReport, CreateOptions, DiffClass, DiffRun, FormatOptions, Mode, OpenOptions, Pool, PoolInfo, Usage,
    VolumeInfo, WhenFull,
};
pub use runtime::{LocalFuture, Runtime};
pub use types::{BLOCK_SIZE, MAX_POOL_SIZE, MAX_VOLUME_SIZE, PAGE_SIZE, VolumeId};
pub use volume::{Extent, Volume};
