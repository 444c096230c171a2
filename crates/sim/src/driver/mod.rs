//! Runs a history against the engine and the model at once: one loop for all worlds.
//!
//! Operations are submitted, acknowledgements return, and the model judges them. At some steps the power is
//! cut beside the run to see what a crash would leave. Side crashes never disturb the run itself: what they do
//! follows from the seed and the step.
//!
//! A [`World`] is what a history runs in: a pool with volumes, or a pool that protects an origin on a second
//! disk. It owns what only it needs; the driver names none of them.

mod crash;
mod op;
mod report;
mod run;
mod trouble;
mod watch;
mod world;

pub use op::{MAX_WRITES, Op, Operation, operations, weights};
pub use report::{CrashPoint, PATIENCE_STEPS, Stats, Violation, judge};
pub use run::{Class, Ended, Inflight, Outcome, Run, Start};
pub use watch::Watch;
pub use world::{Common, Entrance, Instant, Knowledge, Life, Moment, World};
