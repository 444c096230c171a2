//! A vhost-user-blk server: disks of virtual machines, served from virtqueues in the guest's memory.
//!
//! The messages are those of the crate `vhost`, the rings those of `virtio-queue`, the guest's memory is that of
//! `vm-memory`. Everything runs on the thread that owns the disks. Invariants: no message, descriptor or memory of a
//! front end or guest makes the server panic, block, or use the data of another disk; a request that was started runs
//! to its end; a second session of a disk begins when all requests of the first have ended.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![deny(clippy::missing_errors_doc)]

mod config;
mod disk;
mod foreign_file;
mod memory;
mod options;
mod passed;
mod queue;
mod request;
mod server;
mod session;
#[cfg(feature = "testing")]
pub mod testing;

pub use disk::{Disk, DiskInfo, Disks};
pub use options::ServerOptions;
pub use passed::{PassedInflight, PassedQueue, PassedRegion, PassedSession};
pub use server::{ClientInfo, Server, ServerHandle};
