//! What a served pool does, for people and programs that watch it.
//!
//! [`statistics`] collects everything there is to know into one record that goes through JSON and
//! back; [`prometheus`] writes it in the text format of Prometheus; [`MetricsServer`] answers HTTP
//! requests for that. This crate counts nothing itself and never changes what it looks at.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

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
    ActivityRecord, Distribution, OperationRecord, Operations, OriginFigures, PoolFigures, RequestsRecord,
    ServerRecord, Statistics, VolumeActivity, VolumeFigures,
};
