//! forkdisk volumes as files.
//!
//! - [`codec`] is the kernel's FUSE protocol as pure bytes.
//! - [`Session`] mounts a file system, receives requests and sends replies, all on the thread that owns the pool:
//!   no request changes threads. A file system implements [`Handler`].
//! - [`Volumes`] is the file system that shows a pool: every volume a file, every `/` in a name a folder, snapshots
//!   under `.snapshots/VOLUME/NAME`.
//!
//! libfuse is not needed. Without root, `fusermount3` mounts.
#![warn(missing_docs)]
#![deny(clippy::missing_errors_doc)]
#![forbid(unsafe_code)]

pub mod codec;
mod descriptor;
mod mount;
mod notify_worker;
mod off_thread;
mod processors;
mod session;
mod syscall_helper;
mod volumes;

pub use mount::{MountOptions, MountPoint, mount as connect, mounted_at, mounts, unescape, unmount};
pub use notify_worker::NOTIFY;
pub use off_thread::off_thread;
pub use session::{
    Handler, Notifier, OverIoUring, PassedQueues, RequestLog, Session, SessionHandle, unmount_patiently,
};
pub use syscall_helper::{SyscallHelper, carry_out, probe};
pub use volumes::{Exchange, InUse, MountRecord, PassedMount, Volumes, VolumesOptions, Watcher};
