//! The io_uring runtime of forkdisk: a single-threaded executor, files and block devices as a
//! [`forkdisk::Device`], and stream sockets, all on one ring per thread.
//!
//! ```no_run
//! use forkdisk::device::{Device, Segment};
//! use forkdisk_uring::{Config, DeviceOptions, UringDevice, block_on};
//!
//! let first_page = block_on(Config::default(), |rt| async move {
//!     let device = UringDevice::open(&rt, "pool.img", &DeviceOptions::default())?;
//!     let page = Segment { offset: 0, at: 0, len: 4096 };
//!     let (result, buf) = device.read(device.buffer(4096), [page].into_iter().collect()).await;
//!     result.map_err(|e| forkdisk::Error::io("cannot read the first page", e))?;
//!     Ok::<_, forkdisk::Error>(buf.to_vec())
//! });
//! ```
//!
//! This is the only crate of the product with `unsafe` code (the benchmarks have one loop with
//! some, for comparison). Its basis: memory that the kernel may access belongs to the request
//! (`op`) and stays there until the last completion.
#![warn(missing_docs)]
#![deny(clippy::missing_errors_doc)]

mod at_once;
mod claimed_device;
mod clone_calls;
mod config;
mod device;
mod driver;
mod eventfd;
mod executor;
mod fixed_memory;
mod freeze;
mod fuse_command;
mod fuse_queues;
mod guarded_memory;
mod handle;
mod helper;
mod huge_pages;
mod inherited;
mod kernel;
mod loop_device;
mod net;
mod op;
mod request_memory;
mod ring;
mod setup;
mod shared_memory;
mod signal;
mod sys;
mod timer;
mod turnstile;
mod ublk;
mod waiting;
mod watch;

pub use claimed_device::ClaimedDevice;
pub use clone_calls::{CloneAnswer, CloneCall, CloneCalls, CloneSource, pass_clone_calls};
pub use config::Config;
pub use device::{DeviceOptions, UringDevice, block_device_user, lock_image};
pub use eventfd::{EventFd, Kicks};
pub use executor::{JoinHandle, Rt, block_on};
pub use freeze::{freeze, thaw};
pub use fuse_queues::{FusePlace, FuseQueues, FuseRequest, FuseSizes};
pub use guarded_memory::MemoryGuard;
pub use inherited::{Inherited, exec_with, inherited};
pub use loop_device::{abandon_loop, attach_loop, detach_loop, resize_loop};
pub use net::{
    Accept, ByteStream, PassedListener, Piece, SocketAccess, Stream, TcpListener, UnixListener, is_interrupted,
};
pub use request_memory::{RequestMemory, RequestSizes};
pub use shared_memory::SharedMemory;
pub use signal::Signals;
pub use sys::PeerCred;
pub use timer::{Elapsed, Sleep};
pub use turnstile::{Closed, Pass, Turnstile};
pub use ublk::{UblkDevice, UblkOperation, UblkRequest, ublk_forget, ublk_is_left, ublk_missing, ublk_resize};
pub use waiting::{Changes, Event, WakeCell};
pub use watch::Watched;
