//! Statistics of a served pool, for people and programs.
//!
//! [`statistics`] collects all figures into one record that can be converted to JSON and
//! back; [`prometheus`] writes it in the text format of Prometheus; [`MetricsServer`] serves that
//! over HTTP. This crate has no counters of its own and never changes the pool.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![deny(clippy::missing_errors_doc)]

mod collect;
mod copier;
mod http;
mod process;
pub mod prometheus;
mod record;

pub use collect::{PoolSource, Source, statistics};
pub use copier::{CopierFigures, CopyFigures};
pub use http::{MetricsListener, MetricsServer};
pub use process::ProcessRecord;
pub use record::{
    ActivityRecord, Distribution, OperationRecord, Operations, OriginFigures, RequestsRecord, ServerRecord, Statistics,
    VolumeActivity, VolumeFigures,
};
