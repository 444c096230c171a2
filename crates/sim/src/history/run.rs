//! The world of a history with one disk: a pool with volumes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use forkdisk::{ErrorKind, FormatOptions, Pool, VolatileMemory};

use super::fault::{self, Failure};
use super::finish::finish;
use super::known::Known;
use super::ops::{
    self, bound::Bound, folder_bound::FolderBounds, gather::Gathers, inherit::Inheriting, quota::Quota, read::probe,
    succession::CloneSuccession, unnamed::Open,
};
use super::place::Place;
use super::recover::{self, Session, recover};
use super::{Op, Profile, Setup, Stats, Violation};
use crate::disk::{Crash, Frozen, LyingDevice, Medium, SimDisk};
use crate::driver::{
    self, Common, CrashPoint, Entrance, Instant, Life, Moment, Operation, Outcome, PATIENCE_STEPS, World,
};
use crate::executor::{Executor, Step};
use crate::model::{Key, Model, Pending};
use crate::rng::{Rng, mix};

/// Where the superblocks lie.
const SUPERBLOCKS: Range<u64> = 0..1 << 20;

/// Limit of steps that a pool gets to come to rest.
const REST_STEPS: u32 = 20_000;

/// With more bytes free than this no operation waits for space, nor has waited lately.
const AMPLE_BYTES: u64 = 8 << 20;

/// Errors that an operation must not return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AllowedFailure {
    /// ENOSPC is allowed when the pool is full.
    Nothing,
    /// It needs no space: ENOSPC breaks P9.
    Space,
    /// It needs no space, and may change nothing when the pool is full.
    Discard,
}

pub(super) type Run = driver::Run<Volumes>;
pub(super) type Inflight = driver::Inflight<Volumes>;

/// The state of a run that a pool with volumes has.
#[derive(Default)]
pub struct Volumes {
    pub(super) failure: Failure,
    pub(super) cursors: BTreeMap<Key, u64>,
    /// Recent writes of volumes that can be repeated: numbers of their contents, and ranges.
    pub(super) recent: BTreeMap<Key, Vec<(u32, Place)>>,
    pub(super) quotas: BTreeMap<Key, Quota>,
    pub(super) bounds: BTreeMap<Key, Bound>,
    pub(super) folders: FolderBounds,
    pub(super) inherited: Inheriting,
    /// The ranges of the writes in flight.
    pub(super) places: BTreeMap<u64, Place>,
    /// Ranges that are read once more when a write has ended: they must not change any more.
    suspects: Vec<(u64, Key, Place)>,
    pub(super) names: u32,
    /// Volumes without a name.
    pub(super) unnamed: Vec<Open>,
    pub(super) succession: CloneSuccession,
    pub(super) gathers: Rc<Gathers>,
    /// The clock that lifetimes go by.
    pub(super) seconds: u64,
    /// Memory left by a process, of a pool that was opened elsewhere since.
    stale: Option<VolatileMemory>,
    /// Whether an operation ended in the last step.
    acknowledged: bool,
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

impl Instant for Frozen {
    type Media = Medium;
    type Mask = u64;

    fn drawn(&self, mask: u64) -> u64 {
        mask
    }

    fn masks(&self) -> u64 {
        Frozen::masks(self)
    }

    fn nth(&self, n: u64) -> u64 {
        n
    }

    fn crash(&self, mask: u64) -> Medium {
        Frozen::crash(self, mask)
    }

    fn fingerprint(&self, mask: u64) -> u64 {
        Frozen::fingerprint(self, mask)
    }

    fn describe(&self, mask: u64) -> String {
        Frozen::describe(self, mask)
    }
}

impl Life for Session {
    type Instant = Frozen;

    fn exec(&self) -> &Executor {
        &self.exec
    }

    fn pool(&self) -> &Pool<LyingDevice> {
        &self.pool
    }

    fn disks(&self) -> &[SimDisk] {
        std::slice::from_ref(&self.disk)
    }

    fn memory(&self) -> Option<&VolatileMemory> {
        self.memory.as_ref()
    }

    fn freeze(&self, crash: Crash) -> Frozen {
        self.disk.freeze(crash)
    }
}

impl World for Volumes {
    type Setup = Setup;
    type Session = Session;
    type Known = Known;
    type Focus = Profile;

    const RUN_SEED: u64 = 6;
    const CRASHES_SEED: u64 = 7;
    const PATIENCE_COUNT: u32 = 3;
    const WATCHED_DRAWN_MASKS: u64 = 16;

    fn common(setup: &Setup) -> Common {
        Common { seed: setup.seed, depth: setup.depth, lasting: setup.lasting }
    }

    fn make(setup: &Setup) -> Result<(Volumes, Session, Known), Violation> {
        let medium = format(setup, setup.pool)?;
        let exec = Executor::new(mix(&[setup.seed, 4]));
        let disk = SimDisk::new(medium, &exec, mix(&[setup.seed, 5]));
        let session = recover::start(setup, exec, disk)?;
        let volumes = Volumes { acknowledged: true, ..Volumes::default() };
        Ok((volumes, session, Known::of(Model::new())))
    }

    fn operations() -> &'static [&'static Operation<Volumes>] {
        ops::TABLE
    }

    fn drawn_after() -> &'static [(Profile, &'static str, &'static str)] {
        ops::DRAWN_AFTER
    }

    fn finish(run: &mut Run) -> Result<(), Violation> {
        finish(run)
    }

    fn before_step(run: &mut Run) {
        run.session.shadow.iter().for_each(|shadow| shadow.begin());
    }

    fn after_step(run: &mut Run, ran: Step, ended: bool) {
        run.session.shadow.iter().for_each(|shadow| shadow.end());
        run.world.acknowledged = ran == Step::Idle || ended;
        if ran != Step::Idle {
            fault::watch_faults(run);
        }
    }

    fn judge_step(run: &mut Run) -> Result<(), Violation> {
        judge_order(run)
    }

    fn judge(run: &mut Run, op: &Inflight, outcome: &Outcome) -> Result<(), Violation> {
        judge(run, op, outcome)
    }

    fn apply(run: &mut Run, pending: &Pending) -> Result<(), Violation> {
        run.known.model.apply(pending);
        suspect(run, pending)
    }

    fn ended(run: &mut Run, id: u64) -> Result<(), Violation> {
        if run.world.places.remove(&id).is_none() {
            return Ok(());
        }
        let ended = run.world.suspects.extract_if(.., |s| s.0 == id).collect::<Vec<_>>();
        ended.into_iter().try_for_each(|(_, key, place)| probe(run, key, place))
    }

    fn masks(run: &Run, draw: u64) -> Vec<u64> {
        let mut rng = Rng::new(draw);
        (0..run.setup.masks)
            .map(|i| match rng.below(8) {
                0 if i == 0 => 0,
                1 if i == 0 => 1,
                2..=4 => 4 + rng.below(1 << 12),
                _ => rng.next() >> 16,
            })
            .collect()
    }

    /// More often while the superblocks change.
    fn cuts_here(run: &Run, draw: u64) -> bool {
        let every = run.setup.cut_every;
        let every = if run.session.disk.is_writing(&SUPERBLOCKS) { every.min(40) } else { every };
        every > 0 && draw.is_multiple_of(every)
    }

    /// In the middle of the last step, in which nothing was acknowledged.
    fn memory_within_step(run: &Run, draw: u64) -> Option<VolatileMemory> {
        let is_within = !run.world.acknowledged && mix(&[draw, 5]).is_multiple_of(2);
        let shadow = run.session.shadow.as_ref().filter(|_| is_within)?;
        shadow.before().map(VolatileMemory::new)
    }

    fn keep_acknowledged(_session: &Session, known: &mut Known) {
        let model = &mut known.model;
        let now = model.tick();
        let mut names = model.names.clone();
        names.outlive(now);
        model.flushed(None, now);
        model.names = names;
    }

    /// Sometimes the pool is opened elsewhere, and returns to the memory that was left here.
    fn before_cut(run: &mut Run, kind: Crash, draw: u64) -> Result<(Option<VolatileMemory>, bool), Violation> {
        let rests = run.setup.lasting && kind == Crash::Power && draw.is_multiple_of(2);
        let has_rested = rests && rest(run)? && !run.session.has_failed();
        let mut memory = run.memory_after(kind, draw);
        let elsewhere = memory.is_some() && mix(&[draw, 3]).is_multiple_of(4);
        if elsewhere {
            run.world.stale = memory.take();
        }
        let keeps_acknowledged = memory.is_some() || has_rested;
        if !elsewhere && memory.is_none() && mix(&[draw, 4]).is_multiple_of(2) {
            memory = run.world.stale.take();
        }
        Ok((memory, keeps_acknowledged))
    }

    fn entrance(run: &mut Run, moment: Moment, mask: u64) -> Entrance {
        match moment {
            Moment::Beside(draw) => {
                Entrance { seed: mix(&[draw, mask]), cuts: (draw >> 8) as u32 % 3, again: draw >> 16 & 3 == 0 }
            }
            Moment::Watched => {
                let draw = mix(&[run.step, mask]);
                Entrance { seed: draw, cuts: u32::from(draw.is_multiple_of(16)), again: draw >> 8 & 15 == 0 }
            }
            Moment::Cut => Entrance { seed: run.rng.next(), cuts: 1, again: false },
        }
    }

    fn recover(
        setup: &Setup,
        (medium, memory): (Medium, Option<VolatileMemory>),
        known: &Known,
        entrance: Entrance,
        stats: &mut Stats,
    ) -> Result<(Session, Known), Violation> {
        recover(setup, (&medium, memory.as_ref()), known, entrance, stats)
    }

    fn begin_life(&mut self) {
        self.gathers = Rc::default();
        self.places.clear();
        self.suspects.clear();
        self.unnamed.clear();
        self.failure = Failure::default();
    }
}

/// Bytes that writes of any volume can use, as far as it is known.
pub(super) fn spare_bytes(run: &Run) -> u64 {
    let info = run.session.pool.info();
    if run.world.bounds.is_empty() { info.unused } else { info.free }
}

/// Checks that neighbouring writes reach the disk in the order of acceptance, except those that find no
/// space.
fn judge_order(run: &mut Run) -> Result<(), Violation> {
    let ample = spare_bytes(run) > AMPLE_BYTES && !run.session.disk.may_lack_room();
    match run.session.disk.order().broken(ample) {
        Some(what) => Err(Violation::new("I5", what)),
        None => Ok(()),
    }
}

/// A snapshot was taken while writes to its volume were in flight: what it shows of them now it must show
/// when they have ended.
fn suspect(run: &mut Run, pending: &Pending) -> Result<(), Violation> {
    let news = pending.news();
    let beside = |o: &Inflight| news.iter().any(|(source, _)| o.keys.first() == Some(source));
    let writes: Vec<(u64, Place)> = run
        .world
        .places
        .iter()
        .filter(|(id, _)| run.inflight.get(id).is_some_and(beside))
        .map(|(&i, &p)| (i, p))
        .collect();
    for (id, place) in writes {
        let source = run.inflight[&id].keys[0];
        for &(_, key) in news.iter().filter(|(from, _)| *from == source) {
            run.world.suspects.push((id, key, place));
            probe(run, key, place)?;
        }
    }
    Ok(())
}

/// Submits no requests until nothing happens any more; returns false if that takes too long.
fn rest(run: &mut Run) -> Result<bool, Violation> {
    run.drain()?;
    for _ in 0..REST_STEPS {
        if run.step()? == Step::Idle {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Checks the rules for every acknowledgement and refusal.
fn judge(run: &mut Run, op: &Inflight, outcome: &Outcome) -> Result<(), Violation> {
    let Some(error) = &outcome.error else {
        return fault::judge_success(run, op);
    };
    let message = || format!("{}: {error:?}", op.text);
    match error.kind() {
        ErrorKind::NoSpace => fault::judge_full(run, op, message()),
        ErrorKind::Io | ErrorKind::Failed | ErrorKind::Corrupt if run.session.disk.faults_hit() > 0 => {
            fault::note_failure(run, op, message())
        }
        ErrorKind::Io | ErrorKind::Failed | ErrorKind::Corrupt => {
            Err(Violation::new("P6", format!("an error although no request failed: {}", message())))
        }
        // A volume with requests in flight is not rolled back under them.
        ErrorKind::Invalid if op.beside_shrinking => Ok(()),
        ErrorKind::Busy if op.class.is_rollback() || op.text.starts_with("check") => Ok(()),
        _ => Err(Violation::new("P4", format!("refused without a reason: {}", message()))),
    }
}

/// Creates an empty pool of `size` bytes.
///
/// # Errors P6 if that fails.
pub(super) fn format(setup: &Setup, size: u64) -> Result<Medium, Violation> {
    let exec = Executor::new(mix(&[setup.seed, 8]));
    let disk = SimDisk::new(Medium::blank(setup.disk, size), &exec, mix(&[setup.seed, 9]));
    let options = FormatOptions::new(size, setup.uuid, 1).with_journal(Some(setup.journal));
    let device = disk.clone();
    let made = exec.run(PATIENCE_STEPS, async move { Pool::format(&device, &options).await })?;
    let mask = mix(&[setup.seed, 10]);
    let medium = disk.freeze(Crash::Power).crash(mask);
    exec.halt();
    made.map_err(|e| Violation::new("P6", format!("format failed: {e}")))?;
    Ok(medium)
}
