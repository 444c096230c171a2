//! One run: operations are submitted, acknowledgements return, the model judges them, and at some steps the
//! power is cut beside the run to see what a crash would leave on both disks.

mod controls;
mod io;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use forkdisk::{Buf, CheckReport, Error, ErrorKind, VolatileMemory, Volume};
use rustc_hash::FxHashSet;

use super::known::Known;
use super::recover::{CrashedDisks, Session, make, recover};
use super::small::Watch;
use super::trouble::Trouble;
use super::{Kind, Op, Setup};
use crate::disk::{Crash, SimDisk};
use crate::executor::Step;
use crate::history::{CrashPoint, PATIENCE_STEPS, Stats, Violation, judge};
use crate::model::{Control, Key, Pending, RecId, Rule, Time};
use crate::rng::{Rng, mix};

/// Bytes of the pool volume beside the origin.
pub const VOLUME_BYTES: u64 = 96 * 4096;

/// Steps after a deletion for which side crashes are as dense as the setup requires.
const HANDING_ON_STEPS: u64 = 200;

/// What an operation in flight does.
pub(super) enum OperationState {
    Read { key: Key, offset: u64 },
    Change { rec: RecId, fua: bool },
    Flush(Key),
    Flatten(Key),
    Control(Pending),
    Upkeep,
}

pub(super) struct Inflight {
    pub doing: OperationState,
    pub start: Time,
    since: u64,
    pub keys: Vec<Key>,
    pub text: String,
}

#[derive(Default)]
pub(super) struct Outcome {
    error: Option<Error>,
    buf: Option<Buf>,
    report: Option<CheckReport>,
}

impl From<Result<(), Error>> for Outcome {
    fn from(result: Result<(), Error>) -> Outcome {
        Outcome { error: result.err(), ..Outcome::default() }
    }
}

/// A run in progress.
pub(super) struct Run<'a> {
    pub setup: &'a Setup,
    pub session: Session,
    pub known: Known,
    inflight: BTreeMap<u64, Inflight>,
    pub trouble: Trouble,
    done: Rc<RefCell<Vec<(u64, Outcome)>>>,
    next: u64,
    step: u64,
    cursor: u64,
    pub stats: Stats,
    pub rng: Rng,
    /// Step up to which exceptions of a deleted snapshot may still be relabelled.
    handing_on: u64,
    pub watch: Option<Watch>,
    pub seen: FxHashSet<u64>,
    aim: Option<CrashPoint>,
    log: Option<Vec<String>>,
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

impl Run<'_> {
    /// Creates a pool with an origin, runs `f`, and reports.
    pub(super) fn conduct(
        setup: &Setup,
        aim: Option<CrashPoint>,
        account: bool,
        f: impl FnOnce(&mut Run<'_>) -> Result<(), Violation>,
    ) -> (Stats, Option<Violation>, Vec<String>) {
        let session = match make(setup) {
            Ok(session) => session,
            Err(violation) => return (Stats::default(), Some(violation), Vec::new()),
        };
        let mut run = Run {
            setup,
            session,
            known: Known::new(setup),
            inflight: BTreeMap::new(),
            trouble: Trouble::default(),
            done: Rc::default(),
            next: 0,
            step: 0,
            cursor: 0,
            stats: Stats::default(),
            rng: Rng::new(mix(&[setup.seed, 36])),
            handing_on: 0,
            watch: None,
            seen: FxHashSet::default(),
            aim,
            log: account.then(Vec::new),
        };
        let result = f(&mut run);
        run.stats.faults += run.session.faults_hit();
        run.stats.steps = run.step;
        let mut log = run.log.take().unwrap_or_default();
        if let Err(violation) = &result {
            log.push(format!("step {}: {violation}", run.step));
            log.extend(run.inflight.values().map(|i| format!("  in flight since step {}: {}", i.since, i.text)));
        }
        (run.stats, result.err(), log)
    }

    fn all(&mut self, ops: &[Op]) -> Result<(), Violation> {
        for op in ops {
            for _ in 0..op.gap {
                self.step()?;
            }
            while self.inflight.len() >= self.setup.depth {
                self.step()?;
            }
            self.sync()?;
            self.launch(op)?;
            self.watch_trouble()?;
        }
        self.end()
    }

    pub(super) fn end(&mut self) -> Result<(), Violation> {
        self.drain()?;
        self.sync()?;
        self.cut(Crash::Power, mix(&[self.setup.seed, 37]))
    }

    pub fn say(&mut self, text: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("step {}: {}", self.step, text()));
        }
    }

    /// Notes the snapshots that were dropped because the pool was full.
    fn sync(&mut self) -> Result<(), Violation> {
        // A failed pool may show what it never made durable, and so may one that is about to drop a snapshot:
        // for a write, or for a rollback that continues in the background.
        let busy = |o: &Inflight| matches!(o.doing, OperationState::Control(_) | OperationState::Change { .. });
        let drops = self.inflight.values().any(busy) || self.rolling().is_some();
        if !self.known.may_drop || self.pool_failed() || drops {
            return Ok(());
        }
        let found = self.session.listing();
        self.known.dropped(&found)
    }

    fn launch(&mut self, op: &Op) -> Result<(), Violation> {
        match op.kind {
            Kind::Read => self.read(op),
            Kind::Write | Kind::Append | Kind::Ragged | Kind::Zero => self.write(op),
            Kind::Chase => self.chase(op),
            Kind::Discard => self.discard(op),
            Kind::Flush => self.flush(op),
            Kind::Snapshot | Kind::Independent | Kind::Group => self.snapshot(op),
            Kind::Clone => self.clone_one(op),
            Kind::Flatten => self.flatten(op),
            Kind::Delete | Kind::DeleteOldest => self.delete(op).map(drop),
            Kind::DeleteAndCut => self.delete_and_cut(op),
            Kind::Rollback => self.roll_back(op),
            Kind::RolledBack => self.rolled_back(),
            Kind::Checkpoint => self.upkeep("checkpoint", |pool| async move { pool.checkpoint().await.into() }),
            Kind::Settle => self.upkeep("settle", |pool| async move { pool.wait_freed().await.into() }),
            Kind::Check => self.upkeep("check", |pool| async move {
                match pool.check().await {
                    Ok(report) => Outcome { report: Some(report), ..Outcome::default() },
                    Err(e) if e.kind() == ErrorKind::Busy => Outcome::default(),
                    Err(e) => Outcome { error: Some(e), ..Outcome::default() },
                }
            }),
            Kind::Reopen => self.reopen(op),
            Kind::Cut => self.cut(Crash::Power, op.draws[0]),
            Kind::Kill => self.cut(Crash::Kill, op.draws[0]),
            Kind::Fault => {
                self.arm(op);
                Ok(())
            }
            Kind::Set => self.set(op),
            Kind::Unprotect => self.unprotect(op),
            Kind::Sweep => self.sweep(op),
            Kind::Thin => self.thin(op),
            Kind::Strike => self.strike(op),
        }
    }

    fn submit(
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
        self.inflight.insert(id, Inflight { doing, start, since: self.step, keys, text });
        let done = Rc::clone(&self.done);
        self.session.exec.spawn(Box::pin(async move {
            let outcome = future.await;
            done.borrow_mut().push((id, outcome));
        }));
    }

    /// Returns the steps so far.
    pub(super) fn now(&self) -> u64 {
        self.step
    }

    pub(super) fn step(&mut self) -> Result<Step, Violation> {
        self.end_of_faults();
        let ran = self.session.exec.step();
        if ran == Step::Idle {
            return match self.inflight.values().next() {
                None => Ok(ran),
                Some(op) => {
                    Err(Violation::new("hang", format!("{}: {} never ends", self.session.exec.deadlock(), op.text)))
                }
            };
        }
        self.step += 1;
        let done = std::mem::take(&mut *self.done.borrow_mut());
        for (id, outcome) in done {
            self.take_up(id, outcome)?;
        }
        if let Some(op) = self.inflight.values().find(|op| self.step - op.since > PATIENCE_STEPS) {
            return Err(Violation::new("hang", format!("{} has not ended after {PATIENCE_STEPS} steps", op.text)));
        }
        self.watch_step()?;
        self.side_crash()?;
        Ok(ran)
    }

    fn wait(&mut self, matches: impl Fn(&Inflight) -> bool) -> Result<(), Violation> {
        while self.inflight.values().any(&matches) {
            self.step()?;
        }
        Ok(())
    }

    pub(super) fn drain(&mut self) -> Result<(), Violation> {
        self.wait(|_| true)
    }

    fn take_up(&mut self, id: u64, outcome: Outcome) -> Result<(), Violation> {
        let Some(op) = self.inflight.remove(&id) else { return Ok(()) };
        self.stats.operations += 1;
        self.say(|| match &outcome.error {
            None => format!("{id} ends"),
            Some(e) => format!("{id} fails: {e:?}"),
        });
        let vanished = op.keys.iter().any(|&key| self.known.is_droppable(key));
        self.judge_outcome(&op, outcome.error.as_ref(), vanished)?;
        let ok = outcome.error.is_none();
        match &op.doing {
            OperationState::Read { key, offset } => {
                if let (true, Some(buf)) = (ok, &outcome.buf) {
                    self.known.model.check(*key, *offset, buf, Rule::Since(op.start))?;
                }
            }
            OperationState::Change { rec, fua } => self.known.model.end(*rec, ok, *fua),
            OperationState::Flush(key) if ok => {
                let own = *key == self.known.origin;
                let keys: Vec<Key> = self.known.model.volumes().map(|(k, _)| k).collect();
                for key in keys.into_iter().filter(|&k| (k == self.known.origin) == own) {
                    self.known.model.flushed(Some(key), op.start);
                }
            }
            OperationState::Control(pending) if ok => {
                if matches!(pending.control, Control::Delete(_)) {
                    self.handing_on = self.step + HANDING_ON_STEPS;
                }
                self.known.apply(pending);
            }
            OperationState::Control(pending) => {
                // In a failed pool only the next open tells.
                if self.pool_failed() {
                    self.known.pending.push(pending.clone());
                }
            }
            OperationState::Flush(_) => {}
            OperationState::Flatten(key) if ok => self.known.flattened(*key),
            // In a failed pool only the next open tells.
            OperationState::Flatten(key) if !self.pool_failed() => drop(self.known.flattening.remove(key)),
            OperationState::Flatten(_) => {}
            // A check reports unreadable data as damage and leaks.
            OperationState::Upkeep if self.session.faults_hit() == 0 => outcome.report.iter().try_for_each(judge)?,
            OperationState::Upkeep => {}
        }
        let now = self.known.model.now();
        // A snapshot that may or may not have been taken shows the contents of that time, however late that
        // is found out.
        let unsure = self.known.pending.iter().map(|p| p.start);
        let oldest = self.inflight.values().map(|op| op.start).chain(unsure).min().unwrap_or(now);
        self.known.model.set_horizon(oldest);
        Ok(())
    }

    /// Cuts the power of both disks beside the run if this is a step for it.
    fn side_crash(&mut self) -> Result<(), Violation> {
        let draw = mix(&[self.setup.seed, 38, self.step]);
        let drawn = || (0..self.setup.masks).map(|i| mix(&[draw, i]) >> 16).collect();
        let masks: Vec<u64> = match self.aim {
            Some(aim) if aim.step == self.step => aim.mask.map_or_else(drawn, |mask| vec![mask]),
            None if self.cuts_here(draw) => drawn(),
            _ => return Ok(()),
        };
        let one_in = if self.setup.lasting { 2 } else { 8 };
        let kind = if mix(&[draw]).is_multiple_of(one_in) { Crash::Kill } else { Crash::Power };
        let instant = self.session.freeze(kind);
        let memory = self.session.memory_after(kind, draw);
        let known = self.known_after(memory.is_some());
        self.stats.cuts += 1;
        for mask in masks {
            self.stats.crash_states += 1;
            let key = mix(&[instant.fingerprint(mask), self.known.model.acks()]);
            if !self.seen.insert(key) && self.aim.is_none() {
                continue;
            }
            self.stats.distinct += 1;
            self.say(|| format!("side crash ({kind:?}, mask {mask})"));
            let left = CrashedDisks { media: instant.crash(mask), memory: memory.as_ref().map(VolatileMemory::copy) };
            recover(self.setup, left, &known, mix(&[draw, mask]), &mut self.stats)
                .map_err(|v| v.at(self.step, mask))?;
        }
        Ok(())
    }

    fn cuts_here(&self, draw: u64) -> bool {
        let of = |every: u64| every > 0 && draw.is_multiple_of(every);
        of(self.setup.cut_every) || self.step < self.handing_on && of(self.setup.cut_deletions)
    }

    /// Returns what is known if everything in flight may or may not have happened.
    pub(super) fn in_doubt(&self) -> Known {
        let mut known = self.known.clone();
        known.pending.extend(self.inflight.values().filter_map(|op| match &op.doing {
            OperationState::Control(pending) => Some(pending.clone()),
            _ => None,
        }));
        known.pending.sort_by_key(|p| p.start);
        known
    }

    /// The same after a crash that, with memory that outlives the process, loses nothing acknowledged: of the
    /// origin, as long as no flush of its disk has failed.
    fn known_after(&self, lasting: bool) -> Known {
        let mut known = self.in_doubt();
        if !lasting {
            return known;
        }
        let now = known.model.tick();
        let keys: Vec<Key> = known.model.volumes().map(|(k, _)| k).collect();
        let is_sound = self.session.disks[1].flush_faults_hit() == 0;
        for key in keys.into_iter().filter(|&key| key != known.origin || is_sound) {
            known.model.flushed(Some(key), now);
        }
        known
    }

    /// Cuts the power, or kills the process, and continues with what is left.
    pub fn cut(&mut self, crash: Crash, mask: u64) -> Result<(), Violation> {
        let draw = mix(&[mask, self.step]);
        let crash = if self.setup.lasting && draw.is_multiple_of(3) { Crash::Kill } else { crash };
        self.say(|| format!("{crash:?} is cut, mask {mask}"));
        let instant = self.session.freeze(crash);
        let memory = self.session.memory_after(crash, draw);
        let known = self.known_after(memory.is_some());
        self.stats.faults += self.session.faults_hit();
        self.stats.cuts += 1;
        self.stats.crash_states += 1;
        self.stats.distinct += 1;
        self.session.exec.halt();
        let left = CrashedDisks { media: instant.crash(mask), memory };
        let seed = mix(&[self.setup.seed, 39, self.step]);
        let (session, known) = recover(self.setup, left, &known, seed, &mut self.stats)?;
        self.begin_life(session, known);
        Ok(())
    }

    fn begin_life(&mut self, session: Session, known: Known) {
        self.done = Rc::default();
        self.inflight.clear();
        self.trouble = Trouble::default();
        (self.session, self.known) = (session, known);
    }

    fn handle(&self, key: Key) -> Result<Option<Volume<SimDisk>>, Violation> {
        let name = self.known.model.name(key);
        match self.session.pool.volume(&name) {
            Ok(volume) => Ok(Some(volume)),
            Err(e) if e.kind() == ErrorKind::NotFound && self.known.is_droppable(key) => Ok(None),
            Err(e) => Err(Violation::new("P4", format!("{name} cannot be opened: {e}"))),
        }
    }

    /// Waits until `key` is not being deleted; returns whether it still exists.
    fn is_there(&mut self, key: Key) -> Result<bool, Violation> {
        self.wait(|o| matches!(&o.doing, OperationState::Control(p) if matches!(p.control, Control::Delete(_))))?;
        Ok(self.known.model.get(key).is_some() && self.known.pending.is_empty())
    }

    fn any(&self, draw: u64, wanted: impl Fn(Key, &crate::model::Volume) -> bool) -> Option<Key> {
        let keys: Vec<Key> = self.known.model.volumes().filter(|(k, v)| wanted(*k, v)).map(|(k, _)| k).collect();
        (!keys.is_empty()).then(|| keys[(draw % keys.len() as u64) as usize])
    }
}
