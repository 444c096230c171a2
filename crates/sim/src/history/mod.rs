//! Random histories of client operations, run against the engine and the model at once.

mod fault;
mod finish;
mod known;
mod op;
mod ops;
mod place;
mod pool_image;
mod recover;
mod run;
mod shadow;
mod small;

pub use crate::driver::{CrashPoint, Op, PATIENCE_STEPS, Stats, Violation, judge};
pub use op::{Profile, Setup};
pub use pool_image::{Contents, PoolImage, page_of, read_all};
pub use recover::{Session, discard_policy, lasting_options, new_memory, open_options, shared_cache, unasked_commits};
pub use run::run_history;
pub use small::{Small, run_small};
