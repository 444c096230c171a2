//! Random histories of client operations, run against the engine and the model at once.

mod audit;
mod copying;
mod fault;
mod finish;
mod gather;
mod known;
mod launch;
mod names;
mod op;
mod place;
mod pool_image;
mod quota;
mod recover;
mod run;
mod shadow;
mod small;
mod succession;
mod verb;
mod weights;

pub use crate::driver::{CrashPoint, PATIENCE_STEPS, Stats, Violation, judge};
pub use op::{Kind, Op, Profile, Setup};
pub use pool_image::{Contents, PoolImage, page_of, read_all};
pub use recover::{Session, lasting_options, new_memory, open_options};
pub use run::run_history;
pub use small::{Small, run_small};
