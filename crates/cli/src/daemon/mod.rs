//! A served pool: the data server, the control server, and the start and end of both.
//!
//! Everything runs on the one thread that owns the pool. The end, however requested: no new requests are
//! accepted, requests in flight end, the pool is flushed and closed, then the request to end is answered.

mod activation;
pub mod descriptors;
pub mod detach;
pub mod devices;
mod exports;
mod host;
mod io_error_log;
mod mounts;
mod notify;
mod pid_file;
pub mod reserves;
mod run;
mod socket_dir;
pub mod space;
mod vhost_disks;
mod vhost_sockets;

pub use run::{Ready, Settings, VhostUser, run};
