//! Simulated disk, reference model, history generator and crash explorer for forkdisk.
//!
//! Runs the real engine on a [`disk::SimDisk`] under a deterministic [`executor::Executor`], cuts the power
//! (or kills the process) anywhere, recovers, and compares every byte with a reference model. Everything
//! follows from a seed; a failure is replayed by one line.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod disk;
mod driver;
pub mod executor;
pub mod explore;
pub mod history;
pub mod model;
pub mod origins;
pub mod pattern;
pub mod planted;
pub mod rng;
