//! An NBD server for forkdisk pools.
//!
//! Two independent halves: [`codec`] converts bytes to messages and
//! back and does no I/O; [`server`] owns sockets, tasks and limits, and opens disks through an
//! implementation of [`Exports`], such as [`forkdisk::Pool`].
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![deny(clippy::missing_errors_doc)]

pub mod codec;
mod hex;
pub mod memory;
pub mod server;
pub mod tls;
mod uri;

pub use codec::ExportInfo;
pub use server::{
    ClientInfo, Export, Exports, PassedClient, PoolContext, PoolExport, Security, Server, ServerHandle, ServerOptions,
    ServerStatistics,
};
pub use uri::nbd_uri;
