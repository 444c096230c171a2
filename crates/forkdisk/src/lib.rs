//! `fork()` for disks: snapshots, clones and thin provisioning for block storage, in user space.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod device;
mod draft;
mod error;
pub mod format;
mod runtime;
pub mod types;

pub use device::{Buf, Device};
pub use draft::*;
pub use error::{Error, ErrorKind, Result};
pub use runtime::{LocalFuture, Runtime};
