//! Reading a file in order after its rounds, next to a new one: the modelled time of the device,
//! with and without gathering.

use anyhow::Result;
use forkdisk::GatherPolicy;
use forkdisk::testing::Recording;

use super::modes::Mode;
use super::rounds::{Place, Plan, Round, run_looking};
use super::{Bed, figures, label, plan};
use crate::model::{Label, Trace};
use crate::rows::Row;
use crate::runner::Context;

/// The mode that scatters most: every round breaks what it writes.
const MODE: Mode = Mode::RandomDescribed;
const ROUNDS: usize = 20;
/// Reads of 1 MiB in flight.
pub const DEPTH: usize = 8;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let case = "read-after-20-rounds";
    let (mut rows, _) = measured(context, case, GatherPolicy::USUAL, false)?;
    for policy in [GatherPolicy::Off, GatherPolicy::Idle] {
        let (others, rounds) = measured(context, &format!("{case}/gathering-{policy}"), policy, false)?;
        rows.extend(others);
        // Cost of clone, removal and writes with this policy.
        rows.extend(figures::rows(&format!("random-described-gathering-{policy}"), "", "forkdisk", &rounds));
    }
    Ok(rows)
}

/// Measures without gathering by policy, with one explicit gathering after the last round.
pub fn run_gathered(context: &Context<'_>) -> Result<Vec<Row>> {
    Ok(measured(context, "read-after-gathering", GatherPolicy::Off, true)?.0)
}

fn measured(context: &Context<'_>, case: &str, policy: GatherPolicy, ask: bool) -> Result<(Vec<Row>, Vec<Round>)> {
    let plan = Plan { rounds: context.options.rounds.unwrap_or(ROUNDS), ..plan(context, MODE) };
    let bed = Bed::gathering(context, plan.pool_size(), policy)?;
    let mut recordings = Vec::new();
    let look = |name: &str| {
        if ask && !recordings.is_empty() {
            bed.gather(name)?;
            bed.settle()?;
        }
        recordings.push(bed.read(name, plan.size)?);
        bed.settle()
    };
    let rounds = run_looking(&bed, &plan, look)?;
    bed.end()?;
    Ok((rows(case, "forkdisk", plan.size, recordings), rounds))
}

/// Compares reading a file of `size` bytes when new and when aged: modelled time of the first ÷ that of the last.
pub fn rows(case: &str, target: &str, size: u64, recordings: Vec<Recording>) -> Vec<Row> {
    let ops = (size >> 20) as usize;
    let mut traces = recordings.into_iter().map(|recording| Trace::of(recording, ops, DEPTH));
    let (Some(fresh), Some(aged)) = (traces.next(), traces.next()) else { return Vec::new() };
    let label = Label { target, ..label(case) };
    let mut rows = label.ratios(&fresh, &aged);
    let per_mib = |trace: &Trace| trace.recording.transfers() as f64 / ops as f64;
    rows.push(label.row("requests_per_mib", "count", per_mib(&aged)));
    rows.push(label.row("fresh_requests_per_mib", "count", per_mib(&fresh)));
    rows
}
