//! A pool that is served: the data server, the control server, and how both begin and end.
//!
//! Everything runs on the one thread that owns the pool. The end, however it is asked for: no new requests,
//! those in flight end, the pool is flushed and closed, whoever asked is answered.

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

pub use run::{Ready, Settings, run};
