//! Clone, modify, delete, repeat (W5), through the files of a mounted pool with plain `cp` and
//! `rm`; next to btrfs and XFS on loop devices.

mod figures;
mod modes;
mod passthrough;

pub mod bed;
pub mod fuse;
pub mod peers;
pub mod read;
pub mod rounds;
pub mod size;

use anyhow::Result;

use crate::model::Label;
use crate::rows::Row;
use crate::runner::{Context, Scale};

use bed::Bed;
use modes::Mode;
use rounds::{Plan, run_reading};

/// Default size of the file in bytes.
const SIZE: u64 = 100 << 20;
/// Rounds and writes of long runs.
const LONG: (usize, usize) = (1000, 4000);
/// Number of rounds from which a run is a long one.
const FROM: usize = 100;
/// Suffix of the cases of long runs.
const OF_LONG: &str = "-long";

/// Returns whether a run with this number of rounds has these rows; `None` unless it is a long run
/// and they are a mode's.
pub fn is_in_long_run(case: &str, rounds: Option<usize>) -> Option<bool> {
    let of_mode = case.split_once('/').is_some_and(|(name, _)| Mode::ALL.iter().any(|mode| mode.name() == name));
    let is_long = rounds.is_some_and(|rounds| rounds >= FROM);
    (of_mode && is_long).then(|| case.ends_with(OF_LONG))
}

fn label(case: &str) -> Label<'_> {
    Label { workload: "w5", case, target: "forkdisk" }
}

fn plan(context: &Context<'_>, mode: Mode) -> Plan {
    let writes = context.scale.pick(10_000, 40_000, 40_000);
    let rounds = context.options.rounds.unwrap_or(context.scale.pick(6, 20, 20));
    Plan { mode, size: context.options.size.unwrap_or(SIZE), writes, rounds, cold: false }
}

fn case(context: &Context<'_>, mode: Mode) -> Result<Vec<Row>> {
    let plan = plan(context, mode);
    let name = mode.name();
    if plan.rounds >= FROM {
        return measured(context, &Plan { writes: LONG.1, ..plan }, name, OF_LONG);
    }
    let mut rows = measured(context, &plan, name, "")?;
    if context.scale > Scale::Quick {
        context.say("  with a cold cache");
        let cold = Plan { cold: true, rounds: plan.rounds.min(5), ..plan };
        rows.extend(measured(context, &cold, &format!("{name}-cold"), "")?);
    }
    if context.scale == Scale::Full {
        context.say("  1,000 rounds");
        let (rounds, writes) = LONG;
        rows.extend(measured(context, &Plan { rounds, writes, ..plan }, name, OF_LONG)?);
    }
    if context.options.peers {
        for kind in peers::KINDS {
            context.say(&format!("  {}", kind.name));
            match peers::measure(context, kind, &plan) {
                Ok((theirs, reads)) => {
                    rows.extend(peers::beside(name, kind, &theirs, &rows));
                    rows.extend(read::rows(&format!("{name}/read"), kind.name, plan.size, reads));
                }
                Err(error) => context.say(&format!("  {} cannot be measured here: {error:#}", kind.name)),
            }
        }
    }
    Ok(rows)
}

/// Measures all rounds on a mounted pool.
fn measured(context: &Context<'_>, plan: &Plan, name: &str, suffix: &str) -> Result<Vec<Row>> {
    let bed = Bed::new(context, plan.pool_size())?;
    let (rounds, reads) = run_reading(&bed, plan)?;
    let mut rows = figures::rows(name, suffix, "forkdisk", &rounds);
    rows.extend(figures::space(name, suffix, &rounds));
    rows.extend(read::rows(&format!("{name}/read{suffix}"), "forkdisk", plan.size, reads));
    bed.end()?;
    Ok(rows)
}

macro_rules! cases {
    ($($function:ident $mode:ident),*) => {
        $(pub fn $function(context: &Context<'_>) -> Result<Vec<Row>> {
            case(context, Mode::$mode)
        })*
    };
}

cases! {
    random_coded RandomCoded,
    random_described RandomDescribed,
    incremental_coded IncrementalCoded,
    incremental_described IncrementalDescribed,
    fixed_described FixedDescribed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_of_a_mode_has_rows_of_its_own_and_no_others() {
        let long = |case| is_in_long_run(case, Some(FROM));
        assert_eq!((long("fixed-described/sync-long"), long("fixed-described/sync")), (Some(true), Some(false)));
        assert_eq!((long("size/clone"), long("read-after-gathering")), (None, None));
        assert_eq!(is_in_long_run("fixed-described/sync-long", Some(FROM - 1)), None);
        assert_eq!(is_in_long_run("fixed-described/sync", None), None);
    }
}
