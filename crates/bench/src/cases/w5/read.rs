//! Reading a file in order after its rounds, beside a fresh one: what the device would take for it.

use anyhow::Result;

use super::modes::Mode;
use super::rounds::{Place, Plan, run_keeping};
use super::{Bed, label, plan};
use crate::model::Trace;
use crate::rows::Row;
use crate::runner::Context;

/// The mode that scatters most: every round breaks what it writes.
const MODE: Mode = Mode::RandomDescribed;
const ROUNDS: usize = 20;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let plan = Plan { rounds: context.options.rounds.unwrap_or(ROUNDS), ..plan(context, MODE) };
    let bed = Bed::new(context, plan.pool_size())?;
    let mut recordings = Vec::new();
    run_keeping(&bed, &plan, |name| {
        recordings.push(bed.read(name, plan.size)?);
        bed.settle()
    })?;
    bed.end()?;
    let ops = (plan.size >> 20) as usize;
    let mut traces = recordings.into_iter().map(|recording| Trace::of(recording, ops, 8));
    let (Some(fresh), Some(aged)) = (traces.next(), traces.next()) else { return Ok(Vec::new()) };
    let label = label("read-after-20-rounds");
    let mut rows = label.ratios(&fresh, &aged);
    let per_mib = |trace: &Trace| trace.recording.transfers() as f64 / ops as f64;
    rows.push(label.row("requests_per_mib", "count", per_mib(&aged)));
    rows.push(label.row("fresh_requests_per_mib", "count", per_mib(&fresh)));
    Ok(rows)
}
