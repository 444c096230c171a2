//! How volumes are copied: chunks, break policies, throttles, the settings of the copier.

use forkdisk::{BreakPolicy, CopierSettings, CreateOptions, Throttle};

use super::target::with;
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile;
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};
use crate::model::Key;
use crate::rng::{Rng, mix};

/// Changes how much space first writes reserve.
pub static SET_CHUNK: Operation<Volumes> = Operation {
    name: "set-chunk",
    weight: |profile| match profile {
        Large | Copies => 3,
        Mixed | Calm => 2,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| set_chunk(run, op, key)),
};

/// Changes what a first write to a shared chunk does, or the throttle of copies of the volume.
pub static SET_COPYING: Operation<Volumes> = Operation {
    name: "set-copying",
    weight: |profile| match profile {
        Gathering => 8,
        Copies => 6,
        Quotas | Bounds => 2,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| set_copying(run, op, key)),
};

/// Changes the settings of the copier of the pool.
pub static SET_COPIER: Operation<Volumes> = Operation {
    name: "set-copier",
    weight: |profile| match profile {
        Copies | Gathering => 4,
        _ => 0,
    },
    launch: set_copier,
};

/// Returns a chunk size: any valid one, the default most often.
fn chunk(draw: u64) -> u64 {
    let mut rng = Rng::new(draw);
    if rng.one_in(2) { 64 << 10 } else { 4096 << rng.below(15) }
}

/// Returns a chunk size that suits copies of a small volume: 16 KiB to 2 MiB.
fn copied_chunk(draw: u64) -> u64 {
    16 << 10 << Rng::new(draw).below(8)
}

/// Returns the options of a new volume. `copies`: most break sharing by copying.
pub fn options(size: u64, name: &str, copies: bool) -> CreateOptions {
    let draw = size ^ name.len() as u64;
    let plain = CreateOptions::new(size, 1).with_chunk(chunk(draw));
    if !copies || mix(&[draw]).is_multiple_of(4) {
        return plain;
    }
    plain.with_chunk(copied_chunk(draw)).with_break_policy(BreakPolicy::Copy)
}

/// Returns a throttle, none most often; slow ones let a sub-job pass every few virtual seconds.
fn throttle(rng: &mut Rng) -> Throttle {
    match rng.below(4) {
        0 => Throttle { percent: *rng.pick(&[1, 20, 50, 99]), bytes_per_second: 0 },
        1 => Throttle { percent: *rng.pick(&[10, 100]), bytes_per_second: 1024 << rng.below(16) },
        _ => Throttle::NONE,
    }
}

fn set_chunk(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
    let copies = run.setup.profile == Profile::Copies;
    let chunk = if copies { copied_chunk(op.draws[1]) } else { chunk(op.draws[1]) };
    let text = format!("set the chunk of {name} to {chunk} bytes");
    run.submit_upkeep("set chunk", vec![key], text, async move { pool.set_chunk(&name, chunk).await.into() });
    Ok(())
}

/// Sets the policy or the throttle of one volume.
fn set_copying(run: &mut Run, op: &Op, key: Key) -> Result<(), Violation> {
    let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
    let mut rng = Rng::new(op.draws[1]);
    if rng.one_in(2) {
        let policy = *rng.pick(&[BreakPolicy::Copy, BreakPolicy::Copy, BreakPolicy::Split]);
        let text = format!("set the break policy of {name} to {policy:?}");
        run.submit_upkeep(
            "set break",
            vec![key],
            text,
            async move { pool.set_break_policy(&name, policy).await.into() },
        );
    } else {
        let throttle = throttle(&mut rng);
        let text = format!("set the throttle of {name} to {throttle:?}");
        run.submit_upkeep(
            "set throttle",
            vec![key],
            text,
            async move { pool.set_throttle(&name, throttle).await.into() },
        );
    }
    Ok(())
}

/// Sets the copier's settings: few buffers more often than many.
fn set_copier(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut rng = Rng::new(op.draws[1]);
    let subjob_size = (64 << 10) * (1 + rng.below(4) as u32);
    let least = 5 * u64::from(subjob_size);
    let settings = CopierSettings::default()
        .with_subjob_size(subjob_size)
        .with_split_count(1 + rng.below(8) as u32)
        .with_buffers(if rng.one_in(3) { 8 << 20 } else { least + rng.below(2) * (64 << 10) })
        .with_throttle(throttle(&mut rng))
        .with_offload(rng.one_in(2));
    let pool = run.session.pool.clone();
    let text = format!("set the copier to {settings:?}");
    run.submit_upkeep("set copier", Vec::new(), text, async move { pool.set_copier(settings).await.into() });
    Ok(())
}
