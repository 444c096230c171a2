//! Properties of volumes.

use forkdisk::{BreakPolicy, Changes, CreateOptions, ExtensionChanges, GatherPolicy, Pool, VolumeInfo, Writes, Zeroes};

use super::control::{control, drawn_volume};
use crate::disk::LyingDevice;
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Properties};
use crate::rng::Rng;

/// Sets several properties of a volume, all or none.
pub static SET_ALL: Operation<Volumes> = Operation {
    name: "set-all",
    weight: |profile| match profile {
        Transactions | Folders | Lifetimes | Comparing => 16,
        _ => 0,
    },
    launch: set_all,
};

/// The percentage above which volumes are gathered that are gathered at all.
const GATHERED_PERCENT: u8 = 90;

/// Returns properties, with quotas that no volume reaches.
pub fn drawn_properties(run: &Run, rng: &mut Rng) -> Properties {
    let quota = if rng.one_in(2) { 0 } else { (1 + rng.below(4)) << 30 };
    let drawn = Properties {
        chunk: 4096 << rng.below(8),
        copies: rng.one_in(3),
        quota,
        gathers: rng.one_in(2),
        ..Properties::default()
    };
    match run.setup.profile {
        Comparing => Properties { compares: !rng.one_in(4), makes_holes: rng.one_in(2), ..drawn },
        _ => drawn,
    }
}

fn write_policy(properties: Properties) -> ExtensionChanges {
    let writes = if properties.compares { Writes::Compare } else { Writes::All };
    let zeroes = if properties.makes_holes { Zeroes::Holes } else { Zeroes::Written };
    ExtensionChanges::default().with_writes(writes).with_zeroes(zeroes)
}

fn policies(properties: Properties) -> (BreakPolicy, GatherPolicy) {
    let break_policy = if properties.copies { BreakPolicy::Copy } else { BreakPolicy::Split };
    (break_policy, if properties.gathers { GatherPolicy::Above(GATHERED_PERCENT) } else { GatherPolicy::Off })
}

/// Returns the options of a new volume with these properties.
pub fn options_with(size: u64, properties: Properties) -> CreateOptions {
    let (break_policy, gather) = policies(properties);
    CreateOptions::new(size, 1)
        .with_chunk(properties.chunk)
        .with_quota(properties.quota)
        .with_break_policy(break_policy)
        .with_gather(gather)
        .with_extension(write_policy(properties))
}

/// Returns the properties that the pool shows of a volume.
pub fn properties_of(pool: &Pool<LyingDevice>, info: &VolumeInfo) -> Properties {
    let copying = pool.copying(&info.name).map(|copying| copying.break_policy);
    let (copies, gathers) = (copying.is_ok_and(|policy| policy == BreakPolicy::Copy), info.gather != GatherPolicy::Off);
    let (compares, makes_holes) = (info.writes == Writes::Compare, info.zeroes == Zeroes::Holes);
    Properties { chunk: info.chunk, copies, quota: info.quota, gathers, compares, makes_holes }
}

fn set_all(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let Some(key) = drawn_volume(run, op) else { return Ok(()) };
    let properties = drawn_properties(run, &mut Rng::new(op.draws[1]));
    control(run, Control::Set(key, properties), |run| {
        let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
        (format!("set {name} {properties:?}"), async move {
            let (break_policy, gather) = policies(properties);
            let changes = Changes::default()
                .with_chunk(properties.chunk)
                .with_quota(properties.quota)
                .with_break_policy(break_policy)
                .with_gather(gather)
                .with_extension(write_policy(properties));
            pool.set(&name, &changes).await
        })
    })
}
