//! `fork()` for disks: snapshots, clones and thin provisioning for block storage, in user space.
//!
//! A [`Pool`] lies on a [`Device`], one file or disk, and holds *volumes*: disks of any length up to
//! 1 PiB that take space only for what was written to them. A snapshot or clone of a volume is
//! one journal record, whatever its size; afterwards neither depends on the other, and the first
//! write to a shared page goes to a new page. A pool lives on one thread: [`Pool`], [`Volume`] and their futures are
//! not `Send`, and requests from other threads reach it by a channel.
//!
//! # What the caller provides
//!
//! The engine has no threads, no clock and no executor. The program that embeds it provides
//! a [`Device`] (reads, writes, flushes of byte ranges) and a [`Runtime`] (spawns tasks, sleeps).
//! The crate `forkdisk-uring` has both for Linux, on io_uring; its example `branch` shows every verb on a
//! pool file. For tests and first steps (example `first_pool`) there are [`testing::Inline`], a runtime on the
//! calling thread, and [a device in memory](testing::MemoryDevice):
//!
//! ```
//! use std::rc::Rc;
//!
//! use forkdisk::device::Buf;
//! use forkdisk::testing::MemoryDevice;
//! use forkdisk::testing::Inline;
//! use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool};
//!
//! # fn main() -> forkdisk::Result<()> {
//! let runtime = Inline::new();
//! let disk = MemoryDevice::new(16 << 20);
//! runtime.run(async {
//!     let now = 1_700_000_000;
//!     Pool::format(&disk, &FormatOptions::new(16 << 20, [7; 16], now)).await?;
//!     let pool = Pool::open(disk.clone(), Rc::new(runtime.clone()), OpenOptions::default()).await?;
//!
//!     // A volume may be larger than its pool: only what is written takes space.
//!     pool.create("base", &CreateOptions::new(1 << 40, now)).await?;
//!     let base = pool.volume("base")?;
//!     base.write(4096, Buf::copy_of(b"hello"), false).await.0?;
//!     base.flush().await?;
//!
//!     pool.snapshot(&[("base", "then")], now).await?;
//!     pool.clone_volume("base@then", "branch", now).await?;
//!     pool.volume("branch")?.write(4096, Buf::copy_of(b"adieu"), false).await.0?;
//!
//!     let (result, buf) = base.read(4096, pool.buffer(5)).await;
//!     result?;
//!     assert_eq!(&buf[..], b"hello");
//!     pool.close().await
//! })
//! # }
//! ```
//!
//! # Units
//!
//! Offsets, lengths and sizes are bytes; times (`now`) are seconds since 1970, given by the caller. Reads and
//! writes may have any offset and length; multiples of 4 KiB ([`PAGE_SIZE`]) are best, others cost
//! a read of each page they touch in part. Space is shared and freed in pages, and is contiguous in blocks of
//! 1 MiB ([`BLOCK_SIZE`]) where possible. Names are `volume` or `volume@snapshot`, with `/` between
//! folders.
//!
//! # What is durable when
//!
//! - A **write** that has returned is visible to every later read; it survives a crash once a
//!   [`flush`](Volume::flush) called after that has returned, or at once with `fua`. One flush covers
//!   all volumes of the pool.
//! - Until then a sector holds, after a crash, its old contents or what was written to it since;
//!   never data of another volume or of a deleted one.
//! - **Verbs** ([`create`](Pool::create), [`snapshot`](Pool::snapshot),
//!   [`clone_volume`](Pool::clone_volume), [`delete`](Pool::delete), …) are durable when they return,
//!   and happen completely or not at all. [`clone_range`](Volume::clone_range),
//!   [`discard`](Volume::discard) and [`write_zeroes`](Volume::write_zeroes) are writes in this sense.
//! - **Verbs of file systems** ([`create_file`](Pool::create_file), [`remove_file`](Pool::remove_file),
//!   [`rename_file`](Pool::rename_file), [`create_folder`](Pool::create_folder), …) do not wait: they are visible when
//!   they return, and durable with the next flush, in the order of the calls. They follow POSIX: a file may be removed
//!   or replaced while it is open. [`delete`](Pool::delete) and [`rename`](Pool::rename) refuse that.
//! - [`Pool::open`] after a crash recovers by itself. [`Pool::close`] is only needed to make the next open quick.
//!
//! All of this depends on the device: a flush that succeeds must have made the data durable.
//!
//! # Errors
//!
//! What a method may fail with is listed with it, by kind. Two groups have names:
//!
//! - *reading*: [`Io`](ErrorKind::Io) if a device request failed, [`Corrupt`](ErrorKind::Corrupt) if metadata does
//!   not match its checksum;
//! - *changing*: these two, [`ReadOnly`](ErrorKind::ReadOnly) in a pool opened for reading,
//!   [`Failed`](ErrorKind::Failed) after a failure of the pool, [`NoSpace`](ErrorKind::NoSpace) for data or metadata.
//!
//! An [`Error`] has a [kind](ErrorKind) with the errno that a client of a disk would see, and a
//! message that says what failed, where, and what to do. A failed read or data write fails only its
//! caller. After a failed flush, journal write or checkpoint the pool acknowledges nothing any more
//! ([`ErrorKind::Failed`]) until it is opened again, because it is unknown which of the data before it
//! is durable. A full pool still reads, overwrites and deletes; writes that need space fail with
//! [`ErrorKind::NoSpace`], at once or after waiting ([`WhenFull`]).
//!
//! # Rules for callers
//!
//! A pool lives on one thread. Futures must be run to their end, not dropped half-way: spawn a task
//! per request. Any number of requests may be under way; writes to the same or neighbouring pages
//! (within 1 MiB and more) reach the device in the order in which their futures were first polled,
//! except those that wait for space. A read of a range that is being written returns old or new data.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![deny(clippy::missing_errors_doc)]
#![deny(clippy::iter_over_hash_type)]

mod catalog;
#[doc(hidden)]
pub mod copier;
mod counters;
pub mod device;
mod error;
mod format;
mod journal;
mod live;
mod map;
mod names;
mod options;
mod ordered;
mod origin;
#[doc(hidden)]
pub mod planted;
mod pool;
mod runtime;
mod space;
mod store;
mod sync;
pub mod testing;
mod types;
mod upkeep;
mod volume;

pub use catalog::{Changes, CreateOptions, ExtensionChanges, ForkOptions, Protection, VolumeInfo};
pub use copier::CopyStats;
pub use counters::{
    Faults, HISTOGRAM_BUCKETS, Histogram, Operation, OperationStatistics, PoolStatistics, Requests, Traffic,
    VolumeStatistics,
};
pub use device::{Buf, Device, SharedCacheStatistics};
pub use error::{Error, ErrorKind, Result};
pub use format::{
    Attributes, BreakPolicy, CloneProperty, CopierSettings, FileKind, GatherPolicy, Inherited, Lease, NoSuchPolicy,
    OriginFull, SnapshotFlags, Throttle, Writes, Zeroes,
};
#[cfg(feature = "planted")]
pub use journal::tear;
pub use journal::{MIN_VOLATILE_BYTES, VolatileLog, VolatileMemory};
pub use names::{
    NAME_MARKS, NoSuchName, escape_name, has_sound_escapes, is_name_character, parse_uuid, unescape_name, uuid_text,
};
pub use origin::{OriginChange, OriginInfo, OriginPlace, OriginStatistics, ProtectOptions, WriteIntent};
pub use pool::{Child, Expired, MAX_HARD_LINKS, Pool};
pub use runtime::{LocalFuture, Runtime};
pub use store::{
    CopierInfo, DiscardPolicy, EarlyGroups, FormatOptions, HostIdentity, LowWater, OpenOptions, PoolEvent, PoolInfo,
    PoolSpace, Recorded, Recovery, SUPERBLOCK_AT, VolumeCopying, WhenFull, recorded,
};
pub use types::{BLOCK_SIZE, MAX_POOL_SIZE, MAX_VOLUME_SIZE, Mode, PAGE_SIZE, VolumeId, VolumeKind};
pub use upkeep::{CheckReport, GatherReport, Repair, Replacement, Usage, replace_pages, set_heartbeat, set_uuid};
pub use volume::{DiffClass, DiffPart, DiffRun, Extent, FlattenReport, Sharing, StatusRun, Volume, WriteFlags};

/// The example of the README compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
