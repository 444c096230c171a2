//! A served pool: the data server, the control server, and the start and end of both.
//!
//! Everything runs on the one thread that owns the pool. The end, however requested: no new requests are
//! accepted, requests in flight end, the pool is flushed and closed, then the request to end is answered. An upgrade
//! passes everything on to another process instead (`hand_over`).

mod activation;
pub mod channel;
pub mod descriptors;
pub mod detach;
pub mod devices;
mod doors;
mod earlier;
mod exchange;
mod exports;
pub mod hand_over;
mod host;
mod io_error_log;
pub mod keeper;
mod mounts;
mod notify;
mod outlets;
mod pid_file;
mod process;
pub mod reserves;
mod run;
mod service;
mod socket_dir;
mod sockets;
pub mod space;
mod switch;
mod vhost_disks;
mod vhost_sockets;

pub use hand_over::launch;
pub use run::{Ready, Settings, VhostUser, run};
