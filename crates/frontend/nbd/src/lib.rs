//! An NBD server for forkdisk pools.
//!
//! Two halves that know nothing of each other's concerns: [`codec`] turns bytes into messages and
//! messages into bytes and does no I/O; [`server`] owns sockets, tasks and limits, and asks an
//! [`Exports`] for the disks that it serves. [`forkdisk::Pool`] is one.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod codec;
pub mod memory;
pub mod server;
pub mod tls;
mod uri;

pub use codec::ExportInfo;
pub use server::{ClientInfo, Export, Exports, Security, Server, ServerHandle, ServerOptions, ServerStatistics};
pub use uri::nbd_uri;
