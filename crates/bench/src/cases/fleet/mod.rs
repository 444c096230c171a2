//! Branches and fleets of volumes: many clones of one image, forks at a given rate, resets, deep descents, beside qcow2
//! overlays and the clones of XFS and btrfs on the same disk.

mod bed;
mod branches;
mod delete;
mod depth;
mod fork;
mod fsync;
pub mod instructions;
mod open_loop;
mod pgbench;
mod reset;
mod storm;

pub use branches::run as run_branches;
pub use delete::run as run_delete;
pub use depth::run as run_depth;
pub use fork::run as run_fork;
pub use fsync::run as run_fsync;
pub use open_loop::run as run_open_loop;
pub use pgbench::run as run_pgbench;
pub use reset::run as run_reset;
pub use storm::run as run_storm;

use crate::rows::{Row, Samples};

const OURS: &str = "forkdisk";
const QCOW2: &str = "qcow2-overlay";
const PAGE: usize = 4096;

fn row(case: &str, target: &str, metric: &str, unit: &str, samples: &Samples) -> Row {
    Row::new("fleet", case, target, metric, unit, samples)
}

/// Returns rows with the percentiles 50 and 99 of `seconds`, in microseconds.
fn percentiles(case: &str, target: &str, what: &str, seconds: &Samples) -> Vec<Row> {
    let at = |percent: f64| seconds.percentile(percent).map_or(Samples::default(), |value| Samples::one(value * 1e6));
    [(50.0, "p50"), (99.0, "p99")]
        .map(|(percent, name)| row(case, target, &format!("{what}_{name}"), "us", &at(percent)))
        .into()
}

/// Returns `a` ÷ `b`, round by round; nothing if a round of one of them is missing.
fn ratios(a: &[f64], b: &[f64]) -> Samples {
    if a.len() == b.len() { a.iter().zip(b).map(|(a, b)| a / b).collect() } else { Samples::default() }
}
