//! The copy engine: moves ranges from device to device, in order, with bounded memory, within its throttles.
//! It knows devices, never volumes.
//!
//! A [`Job`] has a source, up to [`MAX_DESTINATIONS`] destinations, and the [`Client`] it is done for. It is
//! cut into *sub-jobs*: one buffer, one read, one write each; with `offload` on, where devices can clone,
//! only provided bytes are written. Jobs that continue one another share a sub-job. Small jobs for an origin are read
//! from random places and written side by side: while several sub-jobs are in flight, they wait for each other (at most
//! until one of these ends) and are written by one request. Guarantees:
//!
//! - **Order.** Sub-jobs of one client start in the order in which its jobs were submitted. One that gets no
//!   buffer keeps its place, and all behind it wait. Writes of jobs that lie *near* each other are submitted
//!   in that order, too, and such jobs end in that order.
//! - **Progress.** Every [`CopyClass`] has buffers reserved for one sub-job. A sub-job waits only for
//!   sub-jobs that started before it, and those have their buffers. A [`WriteGate`] holds no write back while
//!   any job waits to be started.
//! - **All or nothing, reported exactly.** A job that could not read, could not write, or was cancelled ends
//!   with that error; what it has written then is of no use. An error ends its own job only, also where jobs
//!   were merged into one request.
//!
//! The copier publishes nothing: what a copied range means is up to the caller.

mod buffers;
mod client;
mod engine;
mod job;
mod offload;
mod pace;
mod queue;
mod subjob;
mod throttle;

#[cfg(test)]
mod tests;

pub use client::Client;
pub use client::{CopyStats, Moved};
pub use engine::Copier;
pub use job::{CopyError, CopySource, DataChecksums, Job, JobGroup, JobHandle, Piece, Place, ProvidedBytes};
pub use job::{GateHold, WriteGate};

use crate::format::COPIER_USERS;

/// Most destinations of one job.
pub const MAX_DESTINATIONS: usize = 8;

/// What copies are made for. Each class has a separate queue and reserve of buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyClass {
    /// First writes to shared chunks.
    Break,
    /// Gathering of scattered blocks.
    Gather,
    /// Copy out of old contents of a protected device.
    Origin,
    /// Imported and exported data, and ranges copied between volumes.
    Transfer,
    /// Making a clone independent.
    Flatten,
}

/// Number of classes.
pub(crate) const CLASSES_COUNT: usize = COPIER_USERS as usize;
const _: () = assert!(CopyClass::Flatten as usize + 1 == CLASSES_COUNT);
