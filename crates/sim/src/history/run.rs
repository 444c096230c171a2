//! One run: operations are submitted, acknowledgements return, the model judges them, and at some steps the
//! power is cut beside the run to see what a crash would leave.
//!
//! Side crashes never disturb the run itself: what they do follows from the seed and the step.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use forkdisk::{Buf, CheckReport, Error, ErrorKind, FormatOptions, Mode, Pool, VolatileMemory, tear};
use rustc_hash::FxHashSet;

use super::fault::Trouble;
use super::gather::Gathers;
use super::names::Open;
use super::place::Place;
use super::quota::Quota;
use super::recover::{self, Entrance, PATIENCE_STEPS, Session, recover};
use super::small::Watch;
use super::succession::CloneSuccession;
use super::{Op, Setup, Stats, Violation};
use crate::disk::{Crash, Medium, SimDisk};
use crate::executor::{Executor, Step};
use crate::model::{Key, Model, Pending, RecId, Rule, Time};
use crate::rng::{Rng, mix};

/// Where the superblocks lie.
const SUPERBLOCKS: std::ops::Range<u64> = 0..1 << 20;

/// Limit of steps that a pool gets to come to rest.
const REST_STEPS: u32 = 20_000;

/// A single side crash, for replay: at this step, under this mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashPoint {
    /// Executor step of the run.
    pub step: u64,
    /// Number of the mask; `None`: the masks that the run would try itself.
    pub mask: Option<u64>,
}

/// With more bytes free than this no operation waits for space, nor has waited lately.
const AMPLE_BYTES: u64 = 8 << 20;

/// What an operation in flight does.
pub(super) enum OperationState {
    /// Reads this range; unchecked if the volume was rolled back meanwhile.
    Read { key: Key, offset: u64, vague: bool },
    /// Changes contents.
    Change { rec: RecId, fua: bool, spare: AllowedFailure },
    /// Makes everything durable.
    Flush,
    /// Changes names, sizes or snapshots.
    Control(Pending),
    /// Writes a volume without a name.
    Unnamed,
    /// Names a volume without a name.
    Naming,
    /// Waits until changes of names outlive the process.
    Keeping,
    /// Everything else: checkpoint, settle, check, grow.
    Upkeep(&'static str),
}

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

pub(super) struct Inflight {
    pub doing: OperationState,
    pub start: Time,
    pub since: u64,
    /// Whether a control operation that may make a volume smaller was in flight at the same time.
    pub beside_shrinking: bool,
    /// Volumes whose contents it reads or changes.
    pub keys: Vec<Key>,
    pub text: String,
}

/// The outcome of an operation.
#[derive(Default)]
pub(super) struct Outcome {
    pub error: Option<Error>,
    pub buf: Option<Buf>,
    pub report: Option<CheckReport>,
}

impl From<Result<(), Error>> for Outcome {
    fn from(result: Result<(), Error>) -> Outcome {
        Outcome { error: result.err(), ..Outcome::default() }
    }
}

/// A run in progress.
pub struct Run<'a> {
    pub(super) setup: &'a Setup,
    pub(super) session: Session,
    pub(super) model: Model,
    pub(super) inflight: BTreeMap<u64, Inflight>,
    pub(super) trouble: Trouble,
    pub(super) cursors: BTreeMap<Key, u64>,
    pub(super) quotas: BTreeMap<Key, Quota>,
    /// The ranges of the writes in flight.
    pub(super) places: BTreeMap<u64, Place>,
    /// Ranges that are read once more when a write has ended: they must not change any more.
    suspects: Vec<(u64, Key, Place)>,
    pub(super) names: u32,
    /// Volumes without a name.
    pub(super) unnamed: Vec<Open>,
    pub(super) succession: CloneSuccession,
    pub(super) gathers: Rc<Gathers>,
    pub(super) stats: Stats,
    pub(super) rng: Rng,
    done: Rc<RefCell<Vec<(u64, Outcome)>>>,
    next: u64,
    pub(super) step: u64,
    pub(super) watch: Option<Watch>,
    pub(super) seen: FxHashSet<u64>,
    aim: Option<CrashPoint>,
    log: Option<Vec<String>>,
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
    Run::conduct(setup, aim, account, |run| run.all(ops))
}

impl<'a> Run<'a> {
    /// Creates a pool, runs `f`, and reports.
    pub(super) fn conduct(
        setup: &Setup,
        aim: Option<CrashPoint>,
        account: bool,
        f: impl FnOnce(&mut Run<'_>) -> Result<(), Violation>,
    ) -> (Stats, Option<Violation>, Vec<String>) {
        let mut run = match Run::new(setup, aim, account) {
            Ok(run) => run,
            Err(violation) => return (Stats::default(), Some(violation), Vec::new()),
        };
        let result = f(&mut run);
        run.stats.faults += run.session.disk.faults_hit();
        run.stats.steps = run.step;
        let mut log = run.log.take().unwrap_or_default();
        if let Err(violation) = &result {
            log.push(format!("step {}: {violation}", run.step));
            log.extend(run.inflight.values().map(|i| format!("  in flight since step {}: {}", i.since, i.text)));
        }
        (run.stats, result.err(), log)
    }

    fn new(setup: &'a Setup, aim: Option<CrashPoint>, account: bool) -> Result<Run<'a>, Violation> {
        let medium = format(setup, setup.pool)?;
        let exec = Executor::new(mix(&[setup.seed, 4]));
        let disk = SimDisk::new(medium, &exec, mix(&[setup.seed, 5]));
        let session = recover::start(setup, exec, disk)?;
        Ok(Run {
            setup,
            session,
            model: Model::new(),
            inflight: BTreeMap::new(),
            trouble: Trouble::default(),
            cursors: BTreeMap::new(),
            quotas: BTreeMap::new(),
            places: BTreeMap::new(),
            suspects: Vec::new(),
            names: 0,
            unnamed: Vec::new(),
            succession: CloneSuccession::default(),
            gathers: Rc::default(),
            stats: Stats::default(),
            rng: Rng::new(mix(&[setup.seed, 6])),
            done: Rc::default(),
            next: 0,
            step: 0,
            watch: None,
            aim,
            seen: FxHashSet::default(),
            log: account.then(Vec::new),
            stale: None,
            acknowledged: true,
        })
    }

    fn all(&mut self, ops: &[Op]) -> Result<(), Violation> {
        for op in ops {
            for _ in 0..op.gap {
                self.step()?;
            }
            while self.inflight.len() >= self.setup.depth {
                self.step()?;
            }
            self.launch(op)?;
            self.watch_trouble()?;
        }
        self.finish()
    }

    pub(super) fn say(&mut self, text: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("step {}: {}", self.step, text()));
        }
    }

    /// Starts an operation; its outcome is processed at the step in which it ends.
    pub(super) fn submit(
        &mut self,
        doing: OperationState,
        start: Time,
        keys: Vec<Key>,
        text: String,
        future: impl Future<Output = Outcome> + 'static,
    ) {
        let id = self.next;
        self.next += 1;
        self.say(|| format!("{id} starts: {text}"));
        let beside_shrinking = self.inflight.values().any(super::launch::may_shrink);
        let op = Inflight { doing, start, since: self.step, beside_shrinking, keys, text };
        if super::launch::may_shrink(&op) {
            self.inflight.values_mut().for_each(|other| other.beside_shrinking = true);
        }
        self.inflight.insert(id, op);
        let done = Rc::clone(&self.done);
        self.session.exec.spawn(Box::pin(async move {
            let outcome = future.await;
            done.borrow_mut().push((id, outcome));
        }));
    }

    /// Runs one executor step and processes what has ended.
    pub(super) fn step(&mut self) -> Result<Step, Violation> {
        let shadow = self.session.shadow.clone();
        shadow.iter().for_each(|shadow| shadow.begin());
        let ran = self.session.exec.step();
        shadow.iter().for_each(|shadow| shadow.end());
        self.acknowledged = ran == Step::Idle || !self.done.borrow().is_empty();
        if ran == Step::Idle {
            return match self.inflight.values().next() {
                None => Ok(ran),
                Some(op) => {
                    Err(Violation::new("hang", format!("{}: {} never ends", self.session.exec.deadlock(), op.text)))
                }
            };
        }
        self.step += 1;
        self.watch_faults();
        let done = std::mem::take(&mut *self.done.borrow_mut());
        for (id, outcome) in done {
            self.take_up(id, outcome)?;
        }
        if let Some(op) = self.inflight.values().find(|op| self.step - op.since > PATIENCE_STEPS) {
            return Err(Violation::new("hang", format!("{} has not ended after {PATIENCE_STEPS} steps", op.text)));
        }
        self.watch_step()?;
        self.judge_order()?;
        self.side_crash()?;
        Ok(ran)
    }

    /// Checks that neighbouring writes reach the disk in the order of acceptance, except those that find no
    /// space.
    fn judge_order(&mut self) -> Result<(), Violation> {
        let ample = self.session.pool.info().unused > AMPLE_BYTES && !self.session.disk.may_lack_room();
        match self.session.disk.order().broken(ample) {
            Some(what) => Err(Violation::new("I5", what)),
            None => Ok(()),
        }
    }

    /// Returns the number of the operation submitted last.
    pub(super) fn last(&self) -> u64 {
        self.next - 1
    }

    /// A snapshot was taken while writes to its volume were in flight: what it shows of them now it must show
    /// when they have ended.
    fn suspect(&mut self, pending: &Pending) -> Result<(), Violation> {
        let news = pending.news();
        let beside = |o: &Inflight| news.iter().any(|(source, _)| o.keys.first() == Some(source));
        let writes: Vec<(u64, Place)> = self
            .places
            .iter()
            .filter(|(id, _)| self.inflight.get(id).is_some_and(beside))
            .map(|(&i, &p)| (i, p))
            .collect();
        for (id, place) in writes {
            let source = self.inflight[&id].keys[0];
            for &(_, key) in news.iter().filter(|(from, _)| *from == source) {
                self.suspects.push((id, key, place));
                self.probe(key, place)?;
            }
        }
        Ok(())
    }

    /// Runs steps until nothing in flight matches.
    pub(super) fn wait(&mut self, matches: impl Fn(&Inflight) -> bool) -> Result<(), Violation> {
        while self.inflight.values().any(&matches) {
            self.step()?;
        }
        Ok(())
    }

    /// Runs steps until nothing is in flight.
    pub(super) fn drain(&mut self) -> Result<(), Violation> {
        self.wait(|_| true)
    }

    fn take_up(&mut self, id: u64, outcome: Outcome) -> Result<(), Violation> {
        let Some(op) = self.inflight.remove(&id) else {
            return Ok(());
        };
        self.stats.operations += 1;
        self.say(|| match &outcome.error {
            None => format!("{id} ends"),
            Some(e) => format!("{id} fails: {e:?}"),
        });
        self.judge_outcome(&op, &outcome)?;
        let ok = outcome.error.is_none();
        match &op.doing {
            OperationState::Read { key, offset, vague } => {
                if let (true, false, Some(buf)) = (ok, *vague, &outcome.buf) {
                    self.model.check(*key, *offset, buf, Rule::Since(op.start))?;
                }
            }
            OperationState::Change { rec, fua, spare } => {
                let skipped = *spare == AllowedFailure::Discard && self.trouble.full;
                self.model.end(*rec, ok && !skipped, *fua);
            }
            // A flush of one volume covers all.
            OperationState::Flush if ok => self.model.flushed(None, op.start),
            OperationState::Control(pending) if ok => {
                self.model.apply(pending);
                self.suspect(pending)?;
            }
            OperationState::Control(pending) => self.not_done(pending),
            OperationState::Naming => self.named(ok),
            OperationState::Keeping if ok => self.model.names.kept(op.start),
            OperationState::Flush | OperationState::Unnamed | OperationState::Keeping => {}
            OperationState::Upkeep(_) => outcome.report.iter().try_for_each(recover::judge)?,
        }
        if self.places.remove(&id).is_some() {
            let ended = self.suspects.extract_if(.., |s| s.0 == id).collect::<Vec<_>>();
            ended.into_iter().try_for_each(|(_, key, place)| self.probe(key, place))?;
        }
        let now = self.model.now();
        // A snapshot that may or may not have been taken shows the contents of that time, however late that
        // is found out.
        let unsure = self.trouble.unsure.iter().map(|p| p.start);
        let oldest = self.inflight.values().map(|op| op.start).chain(unsure).min().unwrap_or(now);
        self.model.set_horizon(oldest);
        Ok(())
    }

    /// A control operation was refused. In a failed pool only the next open tells whether it happened.
    fn not_done(&mut self, pending: &Pending) {
        if self.session.pool.info().mode == Mode::Failed {
            self.trouble.unsure.push(pending.clone());
        }
    }

    /// Returns the control operations that may or may not have happened.
    pub(super) fn pending(&self) -> Vec<Pending> {
        let flying = self.inflight.values().filter_map(|op| match &op.doing {
            OperationState::Control(pending) => Some(pending.clone()),
            _ => None,
        });
        let mut all: Vec<Pending> = self.trouble.unsure.iter().cloned().chain(flying).collect();
        all.sort_by_key(|p| p.start);
        all
    }

    /// Cuts the power beside the run if this is a step for it.
    fn side_crash(&mut self) -> Result<(), Violation> {
        let draw = mix(&[self.setup.seed, 7, self.step]);
        let masks = match self.aim {
            Some(aim) if aim.step == self.step => aim.mask.map_or(self.masks(draw), |mask| vec![mask]),
            None if self.setup.cut_every > 0 && draw.is_multiple_of(self.cut_every()) => self.masks(draw),
            _ => return Ok(()),
        };
        let one_in = if self.setup.lasting { 2 } else { 8 };
        let kind = if mix(&[draw]).is_multiple_of(one_in) { Crash::Kill } else { Crash::Power };
        let frozen = self.session.disk.freeze(kind);
        self.model.spread();
        let pending = self.pending();
        let memory = self.memory_after(kind, draw);
        let model = match &memory {
            Some(_) => self.with_all_acknowledged(),
            None => self.model.clone(),
        };
        self.stats.cuts += 1;
        for mask in masks {
            self.stats.crash_states += 1;
            let key = mix(&[frozen.fingerprint(mask), self.model.acks()]);
            if !self.seen.insert(key) && self.aim.is_none() {
                continue;
            }
            self.stats.distinct += 1;
            let text = frozen.describe(mask);
            self.say(|| format!("side crash ({kind:?}, mask {mask}): {text}"));
            let entrance =
                Entrance { seed: mix(&[draw, mask]), cuts: (draw >> 8) as u32 % 3, again: draw >> 16 & 3 == 0 };
            let left = (&frozen.crash(mask), memory.as_ref());
            recover(self.setup, left, &model, &pending, entrance, &mut self.stats)
                .map_err(|v| v.at(self.step, mask))?;
        }
        Ok(())
    }

    /// Returns the average number of steps between side crashes: fewer while the superblocks change.
    fn cut_every(&self) -> u64 {
        let turning = self.session.disk.is_writing(&SUPERBLOCKS);
        if turning { self.setup.cut_every.min(40) } else { self.setup.cut_every }
    }

    /// Returns the masks that a run tries at one of its own side crashes.
    fn masks(&self, draw: u64) -> Vec<u64> {
        let mut rng = Rng::new(draw);
        (0..self.setup.masks)
            .map(|i| match rng.below(8) {
                0 if i == 0 => 0,
                1 if i == 0 => 1,
                2..=4 => 4 + rng.below(1 << 12),
                _ => rng.next() >> 16,
            })
            .collect()
    }

    /// Cuts the power (or kills the process) of the run itself, recovers and continues.
    pub(super) fn cut(&mut self, kind: Crash, mask: u64) -> Result<(), Violation> {
        let draw = mix(&[mask, self.step]);
        let kind = if self.setup.lasting && draw.is_multiple_of(3) { Crash::Kill } else { kind };
        let has_rested = self.setup.lasting && kind == Crash::Power && draw.is_multiple_of(2) && self.rest()?;
        let has_rested = has_rested && self.session.pool.info().mode != Mode::Failed;
        let mut memory = self.memory_after(kind, draw);
        // Sometimes the pool is opened elsewhere, and returns to the memory that was left here.
        let elsewhere = memory.is_some() && mix(&[draw, 3]).is_multiple_of(4);
        if elsewhere {
            self.stale = memory.take();
        }
        if memory.is_some() || has_rested {
            self.model = self.with_all_acknowledged();
        }
        let is_back = !elsewhere && memory.is_none() && mix(&[draw, 4]).is_multiple_of(2);
        if is_back {
            memory = self.stale.take();
        }
        let frozen = self.session.disk.freeze(kind);
        let text = frozen.describe(mask);
        self.say(|| format!("cut ({kind:?}, mask {mask}): {text}"));
        self.model.spread();
        let pending = self.pending();
        self.stats.faults += self.session.disk.faults_hit();
        self.stats.cuts += 1;
        self.stats.crash_states += 1;
        self.stats.distinct += 1;
        self.session.exec.halt();
        let entrance = Entrance { seed: self.rng.next(), cuts: 1, again: false };
        let left = (&frozen.crash(mask), memory.as_ref());
        let recovered = recover(self.setup, left, &self.model, &pending, entrance, &mut self.stats)?;
        self.forget_session();
        self.session = recovered.session;
        self.model = recovered.model;
        Ok(())
    }

    /// Returns the memory that a crash of this kind leaves, possibly during a write to it. A failed flush
    /// leaves none.
    fn memory_after(&self, kind: Crash, draw: u64) -> Option<VolatileMemory> {
        let memory = self.session.memory.as_ref().filter(|_| kind == Crash::Kill)?;
        if self.session.disk.flush_faults_hit() > 0 {
            return None;
        }
        // In the middle of the last step, in which nothing was acknowledged.
        let before = self.session.shadow.as_ref().filter(|_| !self.acknowledged && mix(&[draw, 5]).is_multiple_of(2));
        if let Some(before) = before.and_then(|shadow| shadow.before()) {
            return Some(VolatileMemory::new(before));
        }
        let memory = memory.copy();
        if mix(&[draw, 2]).is_multiple_of(3) {
            tear(&memory);
        }
        Some(memory)
    }

    /// Returns the model of a crash that loses nothing acknowledged.
    fn with_all_acknowledged(&self) -> Model {
        let mut model = self.model.clone();
        let now = model.tick();
        let mut names = model.names.clone();
        names.outlive(now);
        model.flushed(None, now);
        model.names = names;
        model
    }

    /// Submits no requests until nothing happens any more; returns false if that takes too long.
    fn rest(&mut self) -> Result<bool, Violation> {
        self.drain()?;
        for _ in 0..REST_STEPS {
            if self.step()? == Step::Idle {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Forgets all state of the last life of the engine.
    pub(super) fn forget_session(&mut self) {
        self.done = Rc::default();
        self.gathers = Rc::default();
        self.inflight.clear();
        self.places.clear();
        self.suspects.clear();
        self.unnamed.clear();
        self.seen.clear();
        self.trouble = Trouble::default();
    }

    /// Checks the rules for every acknowledgement and refusal.
    fn judge_outcome(&mut self, op: &Inflight, outcome: &Outcome) -> Result<(), Violation> {
        let Some(error) = &outcome.error else {
            return self.judge_success(op);
        };
        let message = || format!("{}: {error:?}", op.text);
        match error.kind() {
            ErrorKind::NoSpace => self.judge_full(op, message()),
            ErrorKind::Io | ErrorKind::Failed | ErrorKind::Corrupt if self.session.disk.faults_hit() > 0 => {
                self.note_failure(op, message())
            }
            ErrorKind::Io | ErrorKind::Failed | ErrorKind::Corrupt => {
                Err(Violation::new("P6", format!("an error although no request failed: {}", message())))
            }
            // A volume with requests in flight is not rolled back under them.
            ErrorKind::Invalid if op.beside_shrinking => Ok(()),
            ErrorKind::Busy if super::launch::is_rollback(op) || op.text.starts_with("check") => Ok(()),
            _ => Err(Violation::new("P4", format!("refused without a reason: {}", message()))),
        }
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
