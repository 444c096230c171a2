//! Histories with two disks: an origin that is protected in place, and the pool with the exceptions of its
//! snapshots, with pool volumes and clones beside them.
//!
//! A crash cuts the power of both disks at one instant, each under a separate mask: what survives on one is
//! independent of the other.

mod known;
mod op;
mod ops;
mod recover;
mod run;
mod small;
mod trouble;

pub use crate::driver::Op;
pub use op::{Focus, Setup};
pub use run::run_history;
pub use small::{Small, Together, makes_sense, run_small};

use crate::rng::Rng;

/// Name of the origin in every history.
pub const ORIGIN: &str = "org";

/// Returns the masks of the pool's and the origin's disk for one mask of a replay.
fn masks(mask: u64) -> (u64, u64) {
    let mut rng = Rng::new(mask);
    let mut one = || match rng.below(6) {
        0 => 0,
        1 => 1,
        2 => 4 + rng.below(1 << 12),
        _ => rng.next() >> 16,
    };
    (one(), one())
}
