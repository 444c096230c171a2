//! Reading a file in order after its rounds, beside a fresh one: what the device would take for it, with and without
//! gathering.

use anyhow::Result;
use forkdisk::GatherPolicy;
use forkdisk::device::Recording;

use super::modes::Mode;
use super::rounds::{Place, Plan, Round, run_between};
use super::{Bed, figures, label, plan};
use crate::model::{Label, Trace};
use crate::rows::Row;
use crate::runner::Context;

/// The mode that scatters most: every round breaks what it writes.
const MODE: Mode = Mode::RandomDescribed;
const ROUNDS: usize = 20;
/// Reads of 1 MiB at a time.
pub const DEPTH: usize = 8;

/// When pages are brought together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Never,
    /// By policy, between the rounds.
    By(GatherPolicy),
    /// When somebody asks, behind the last round.
    Asked,
}

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (mut rows, _) = measured(context, "read-after-20-rounds", When::Never)?;
    for policy in [GatherPolicy::Auto, GatherPolicy::Idle] {
        let case = format!("read-after-20-rounds/gathering-{policy}");
        let (gathered, rounds) = measured(context, &case, When::By(policy))?;
        rows.extend(gathered);
        // What a clone, a removal and writes cost on a volume that is gathered all the time.
        rows.extend(figures::rows(&format!("random-described-gathered-{policy}"), "", "forkdisk", &rounds));
    }
    Ok(rows)
}

pub fn run_gathered(context: &Context<'_>) -> Result<Vec<Row>> {
    Ok(measured(context, "read-after-gathering", When::Asked)?.0)
}

fn measured(context: &Context<'_>, case: &str, when: When) -> Result<(Vec<Row>, Vec<Round>)> {
    let plan = Plan { rounds: context.options.rounds.unwrap_or(ROUNDS), ..plan(context, MODE) };
    let bed = Bed::new(context, plan.pool_size())?;
    let mut recordings = Vec::new();
    let look = |name: &str| {
        if when == When::Asked && !recordings.is_empty() {
            bed.gather(name)?;
            bed.settle()?;
        }
        recordings.push(bed.read(name, plan.size)?);
        bed.settle()
    };
    let between = |name: &str| match when {
        When::By(policy) => bed.gather_by(name, policy),
        When::Never | When::Asked => Ok(()),
    };
    let rounds = run_between(&bed, &plan, look, between)?;
    bed.end()?;
    Ok((rows(case, "forkdisk", plan.size, recordings), rounds))
}

/// Reading a file of `size` bytes when it was fresh, and when it had aged: modelled time of the first ÷ that of the last.
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
