//! The world of a history with two disks: a pool that protects an origin.

use super::known::Known;
use super::op::Focus;
use super::ops::{self, target::rolling};
use super::recover::{CrashedDisks, Session, make, recover};
use super::{Op, Setup, trouble};
use crate::disk::Crash;
use crate::driver::{
    self, Class, Common, CrashPoint, Entrance, Life, Moment, Operation, Outcome, Stats, Violation, World,
};
use crate::model::{Control, Key, Pending, Time};
use crate::rng::mix;

/// Bytes of the pool volume beside the origin.
pub const VOLUME_BYTES: u64 = 96 * 4096;

/// Steps after a deletion for which side crashes are as dense as the setup requires.
const HANDING_ON_STEPS: u64 = 200;

pub(super) type Run = driver::Run<Origins>;
pub(super) type Inflight = driver::Inflight<Origins>;

/// The state of a run that a pool with an origin has.
#[derive(Default)]
pub struct Origins {
    /// The end of the last write of the origin.
    pub(super) cursor: u64,
    /// Step up to which exceptions of a deleted snapshot may still be relabelled.
    handing_on: u64,
    /// Time since when the origin acknowledges nothing any more.
    pub(super) origin_failed: Option<Time>,
}

/// Runs a history. With an aim only that one side crash is tried. Returns the statistics, the violation if
/// there was one, and the account of what happened if it was requested.
pub fn run_history(
    setup: &Setup,
    ops: &[Op],
    aim: Option<CrashPoint>,
    account: bool,
) -> (Stats, Option<Violation>, Vec<String>) {
    Run::history(setup, ops, aim, account)
}

impl World for Origins {
    type Setup = Setup;
    type Session = Session;
    type Known = Known;
    type Focus = Focus;

    const RUN_SEED: u64 = 36;
    const CRASHES_SEED: u64 = 38;
    const PATIENCE_COUNT: u32 = 4;
    const WATCHED_DRAWN_MASKS: u64 = 0;

    fn common(setup: &Setup) -> Common {
        Common { seed: setup.seed, depth: setup.depth, lasting: setup.lasting }
    }

    fn make(setup: &Setup) -> Result<(Origins, Session, Known), Violation> {
        Ok((Origins::default(), make(setup)?, Known::new(setup)))
    }

    fn operations() -> &'static [&'static Operation<Origins>] {
        ops::TABLE
    }

    fn before_launch(run: &mut Run) -> Result<(), Violation> {
        sync(run)
    }

    fn finish(run: &mut Run) -> Result<(), Violation> {
        run.drain()?;
        sync(run)?;
        run.cut(Crash::Power, mix(&[run.setup.seed, 37]))
    }

    fn before_step(run: &mut Run) {
        run.end_of_faults(run.step);
    }

    fn judge(run: &mut Run, op: &Inflight, outcome: &Outcome) -> Result<(), Violation> {
        let vanished = op.keys.iter().any(|&key| run.known.is_droppable(key));
        trouble::judge_outcome(run, op, outcome.error.as_ref(), vanished)
    }

    fn apply(run: &mut Run, pending: &Pending) -> Result<(), Violation> {
        if matches!(pending.control, Control::Delete(_)) {
            run.world.handing_on = run.step + HANDING_ON_STEPS;
        }
        run.known.apply(pending);
        Ok(())
    }

    fn has_failed(run: &Run) -> bool {
        run.session.has_failed() || run.world.origin_failed.is_some()
    }

    fn masks(run: &Run, draw: u64) -> Vec<u64> {
        (0..run.setup.masks).map(|i| mix(&[draw, i]) >> 16).collect()
    }

    /// More often while exceptions are relabelled.
    fn cuts_here(run: &Run, draw: u64) -> bool {
        let of = |every: u64| every > 0 && draw.is_multiple_of(every);
        of(run.setup.cut_every) || run.step < run.world.handing_on && of(run.setup.cut_deletions)
    }

    /// Of the origin, as long as no flush of its disk has failed. After that, a snapshot in flight may survive in
    /// the memory that outlives the process: it shows what the disk still has, and was never acknowledged.
    fn keep_acknowledged(session: &Session, known: &mut Known) {
        let now = known.model.tick();
        let keys: Vec<Key> = known.model.volumes().map(|(k, _)| k).collect();
        let is_sound = session.disks[1].flush_faults_hit() == 0;
        for key in keys.into_iter().filter(|&key| key != known.origin || is_sound) {
            known.model.flushed(Some(key), now);
        }
        if !is_sound {
            let origin = known.origin;
            known.pending.iter_mut().for_each(|pending| pending.damaged = Some(origin));
        }
    }

    fn entrance(run: &mut Run, moment: Moment, mask: u64) -> Entrance {
        let seed = match moment {
            Moment::Beside(draw) => mix(&[draw, mask]),
            Moment::Watched => {
                let draw = mix(&[run.step, mask]);
                // Sometimes recovery is cut, too.
                if draw.is_multiple_of(16) { draw } else { draw / 3 * 3 }
            }
            Moment::Cut => mix(&[run.setup.seed, 39, run.step]),
        };
        entrance(seed)
    }

    fn recover(
        setup: &Setup,
        left: CrashedDisks,
        known: &Known,
        entrance: Entrance,
        stats: &mut Stats,
    ) -> Result<(Session, Known), Violation> {
        recover(setup, left, known, entrance, stats)
    }

    fn begin_life(&mut self) {
        self.origin_failed = None;
    }
}

pub fn entrance(seed: u64) -> Entrance {
    Entrance { seed, cuts: (seed % 3) as u32, again: false }
}

/// Notes the snapshots that were dropped because the pool was full.
pub fn sync(run: &mut Run) -> Result<(), Violation> {
    // A failed pool may show what it never made durable, and so may one that is about to drop a snapshot:
    // for a write, or for a rollback that continues in the background.
    let busy = |o: &Inflight| matches!(o.class, Class::Control(_) | Class::Change);
    let drops = run.inflight.values().any(busy) || rolling(run).is_some();
    if !run.known.may_drop || run.session.has_failed() || drops {
        return Ok(());
    }
    let found = run.session.listing();
    run.known.dropped(&found)
}
