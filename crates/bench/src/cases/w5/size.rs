//! Clones of files of different lengths: their cost does not depend on the length.

use anyhow::Result;

use super::modes::Mode;
use super::rounds::{Plan, Round, run};
use super::{Bed, label};
use crate::rows::Row;
use crate::runner::{Context, Scale};

/// Rounds for each size; the first accesses untouched metadata.
const ROUNDS: usize = 4;

pub fn run_all(context: &Context<'_>) -> Result<Vec<Row>> {
    let large: u64 = if context.scale == Scale::Quick { 256 << 20 } else { 1 << 30 };
    let measure = |size: u64| -> Result<Round> {
        let plan = Plan { mode: Mode::FixedDescribed, size, writes: 100, rounds: ROUNDS, cold: false };
        let bed = Bed::new(context, plan.pool_size())?;
        let rounds = run(&bed, &plan)?;
        bed.end()?;
        Ok(rounds[ROUNDS - 1])
    };
    let (small, large) = (measure(16 << 20)?, measure(large)?);
    let label = label("size/clone");
    let ratio = |of: fn(&Round) -> u64| of(&large) as f64 / of(&small) as f64;
    Ok(vec![
        label.row("requests_large_over_small", "ratio", ratio(|r| r.clone.counts.requests)),
        label.row("bytes_large_over_small", "ratio", ratio(|r| r.clone.counts.bytes)),
        label.row("seconds_large_over_small", "ratio", large.clone.wall / small.clone.wall),
    ])
}
