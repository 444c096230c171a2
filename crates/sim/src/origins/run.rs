//! One run: operations go in, acknowledgements come back, the model judges them, and at some steps
//! the power is cut beside the run to see what a crash would leave on both disks.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::rc::Rc;

use forkdisk::{Buf, CheckReport, Error, ErrorKind, SnapshotFlags, Volume};
use rustc_hash::FxHashSet;

use super::recover::{Session, make, protection, recover};
use super::trouble::Trouble;
use super::{Kind, ORIGIN, Op, Setup};
use crate::disk::{Crash, SimDisk};
use crate::executor::Step;
use crate::history::{Aim, PATIENCE, Stats, Violation, judge};
use crate::model::{Control, Key, Listing, Model, Pending, RecId, Rule, Time, What};
use crate::pattern::SECTOR;
use crate::rng::{Rng, mix};

/// Bytes of the pool volume beside the origin.
pub const VOLUME: u64 = 96 * 4096;

/// What is known of the pool: the model, and what it does not say.
#[derive(Clone)]
pub struct Known {
    /// What every volume may hold.
    pub model: Model,
    /// Control operations that may or may not have happened.
    pub pending: Vec<Pending>,
    /// The origin.
    pub origin: Key,
    /// The snapshot of the origin that a clone, or a snapshot of one, shows through to.
    rests: BTreeMap<Key, Key>,
    /// Clones that may or may not show through any more.
    flattening: BTreeSet<Key>,
    /// Snapshots that may be deleted when the pool is full, unless the policy never was that.
    droppable: BTreeSet<String>,
    may_drop: bool,
    /// Snapshots of the origin that can be written.
    writable: BTreeSet<String>,
}

impl Known {
    fn new(setup: &Setup) -> Known {
        let mut model = Model::new();
        for (name, size) in [(ORIGIN, setup.origin), ("vol", VOLUME)] {
            let pending = model.begin(Control::Create(name.into(), size));
            model.apply(&pending);
        }
        let origin = model.volumes().next().map_or(0, |(key, _)| key);
        let (rests, flattening, droppable, writable) = Default::default();
        Known { model, pending: Vec::new(), origin, rests, flattening, droppable, may_drop: true, writable }
    }

    /// A control operation has happened.
    pub fn apply(&mut self, pending: &Pending) {
        self.model.apply(pending);
        for (source, copy) in pending.news() {
            let of_origin = self.model.get(source).is_some_and(|v| v.of == Some(self.origin));
            let base = if of_origin { Some(source) } else { self.rests.get(&source).copied() };
            if let Some(base) = base.filter(|_| source != self.origin) {
                self.rests.insert(copy, base);
            }
        }
        self.rests.retain(|key, _| self.model.get(*key).is_some());
    }

    /// Snapshots that are gone because the pool was full.
    pub fn dropped(&mut self, found: &Listing) -> Result<(), Violation> {
        let gone: Vec<Key> = self
            .model
            .volumes()
            .map(|(key, _)| key)
            .filter(|&key| self.is_droppable(key) && !found.contains_key(&self.model.name(key)))
            .collect();
        for key in gone {
            if self.rests.values().any(|&base| base == key) {
                let what = format!("{} was dropped although a clone needs it", self.model.name(key));
                return Err(Violation::new("P5", what));
            }
            let pending = self.model.begin(Control::Delete(vec![key]));
            self.apply(&pending);
        }
        Ok(())
    }

    pub fn is_droppable(&self, key: Key) -> bool {
        self.may_drop && self.droppable.contains(&self.model.name(key))
    }

    /// A clone shows through to nothing any more.
    fn flattened(&mut self, key: Key) {
        self.rests.remove(&key);
        self.flattening.remove(&key);
    }

    /// After a crash the pool says which of the clones that were being flattened it is true of.
    pub fn settle_flattened(&mut self, rests_on: impl Fn(&str) -> bool) {
        for key in std::mem::take(&mut self.flattening) {
            if self.model.get(key).is_some() && !rests_on(&self.model.name(key)) {
                self.flattened(key);
            }
        }
    }

    /// Whether nothing shows through to it.
    fn is_free(&self, key: Key) -> bool {
        !self.rests.values().any(|&base| base == key)
    }

    /// A life of the engine has ended.
    pub fn open_again(&mut self) {
        self.pending.clear();
    }
}

/// What an operation in flight is about.
pub(super) enum Doing {
    Read { key: Key, offset: u64 },
    Change { rec: RecId, fua: bool },
    Flush(Key),
    Flatten(Key),
    Control(Pending),
    Upkeep,
}

pub(super) struct Inflight {
    pub doing: Doing,
    pub start: Time,
    since: u64,
    pub keys: Vec<Key>,
    pub text: String,
}

#[derive(Default)]
struct Outcome {
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
    setup: &'a Setup,
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
    seen: FxHashSet<u64>,
    aim: Option<Aim>,
    log: Option<Vec<String>>,
}

/// Runs a history. With an aim only that one side crash is tried. Returns the numbers, the violation if
/// there was one, and the account of what happened if it was asked for.
pub fn run_history(
    setup: &Setup,
    ops: &[Op],
    aim: Option<Aim>,
    account: bool,
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
        seen: FxHashSet::default(),
        aim,
        log: account.then(Vec::new),
    };
    let result = run.all(ops);
    run.stats.faults += run.session.faults_hit();
    run.stats.steps = run.step;
    let mut log = run.log.take().unwrap_or_default();
    if let Err(violation) = &result {
        log.push(format!("step {}: {violation}", run.step));
        log.extend(run.inflight.values().map(|i| format!("  in flight since step {}: {}", i.since, i.text)));
    }
    (run.stats, result.err(), log)
}

impl Run<'_> {
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
        self.drain()?;
        self.sync()?;
        self.cut(Crash::Power, mix(&[self.setup.seed, 37]))
    }

    pub fn say(&mut self, text: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("step {}: {}", self.step, text()));
        }
    }

    /// Takes note of snapshots that were dropped because the pool was full.
    fn sync(&mut self) -> Result<(), Violation> {
        // A failed pool may show what it never made durable, and so may one that is about to drop one: for
        // a write, or for a rollback that goes on by itself.
        let busy = |o: &Inflight| matches!(o.doing, Doing::Control(_) | Doing::Change { .. });
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
            Kind::Delete => self.delete(op),
            Kind::Rollback => self.roll_back(op),
            Kind::RolledBack => self.rolled_back(),
            Kind::Checkpoint => self.upkeep("checkpoint", |pool| async move { pool.checkpoint().await.into() }),
            Kind::Settle => self.upkeep("settle", |pool| async move { pool.settle().await.into() }),
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
        }
    }

    fn submit(
        &mut self,
        doing: Doing,
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

    fn step(&mut self) -> Result<Step, Violation> {
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
        if let Some(op) = self.inflight.values().find(|op| self.step - op.since > PATIENCE) {
            return Err(Violation::new("hang", format!("{} has not ended after {PATIENCE} steps", op.text)));
        }
        self.side_crash()?;
        Ok(ran)
    }

    fn wait(&mut self, matches: impl Fn(&Inflight) -> bool) -> Result<(), Violation> {
        while self.inflight.values().any(&matches) {
            self.step()?;
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Violation> {
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
            Doing::Read { key, offset } => {
                if let (true, Some(buf)) = (ok, &outcome.buf) {
                    self.known.model.check(*key, *offset, buf, Rule::Since(op.start))?;
                }
            }
            Doing::Change { rec, fua } => self.known.model.end(*rec, ok, *fua),
            Doing::Flush(key) if ok => {
                let own = *key == self.known.origin;
                let keys: Vec<Key> = self.known.model.volumes().map(|(k, _)| k).collect();
                for key in keys.into_iter().filter(|&k| (k == self.known.origin) == own) {
                    self.known.model.flushed(Some(key), op.start);
                }
            }
            Doing::Control(pending) if ok => self.known.apply(pending),
            Doing::Control(pending) => {
                // In a failed pool only the next opening tells.
                if self.pool_failed() {
                    self.known.pending.push(pending.clone());
                }
            }
            Doing::Flush(_) => {}
            Doing::Flatten(key) if ok => self.known.flattened(*key),
            // In a failed pool only the next opening tells.
            Doing::Flatten(key) if !self.pool_failed() => drop(self.known.flattening.remove(key)),
            Doing::Flatten(_) => {}
            // What could not be read is damage and leaks to a check.
            Doing::Upkeep if self.session.faults_hit() == 0 => outcome.report.iter().try_for_each(judge)?,
            Doing::Upkeep => {}
        }
        let now = self.known.model.now();
        let oldest = self.inflight.values().map(|op| op.start).min().unwrap_or(now);
        self.known.model.set_horizon(oldest);
        Ok(())
    }

    /// Cuts the power of both disks beside the run if this is a step for it.
    fn side_crash(&mut self) -> Result<(), Violation> {
        let draw = mix(&[self.setup.seed, 38, self.step]);
        let drawn = || (0..self.setup.masks).map(|i| mix(&[draw, i]) >> 16).collect();
        let masks: Vec<u64> = match self.aim {
            Some(aim) if aim.step == self.step => aim.mask.map_or_else(drawn, |mask| vec![mask]),
            None if self.setup.cut_every > 0 && draw.is_multiple_of(self.setup.cut_every) => drawn(),
            _ => return Ok(()),
        };
        let kind = if mix(&[draw]).is_multiple_of(8) { Crash::Kill } else { Crash::Power };
        let instant = self.session.freeze(kind);
        let known = self.in_doubt();
        self.stats.cuts += 1;
        for mask in masks {
            self.stats.crash_states += 1;
            let key = mix(&[instant.fingerprint(mask), self.known.model.acks()]);
            if !self.seen.insert(key) && self.aim.is_none() {
                continue;
            }
            self.stats.distinct += 1;
            self.say(|| format!("side crash ({kind:?}, mask {mask})"));
            recover(self.setup, instant.crash(mask), &known, mix(&[draw, mask]), &mut self.stats)
                .map_err(|v| v.at(self.step, mask))?;
        }
        Ok(())
    }

    /// What is known if everything in flight may or may not have happened.
    fn in_doubt(&self) -> Known {
        let mut known = self.known.clone();
        known.pending.extend(self.inflight.values().filter_map(|op| match &op.doing {
            Doing::Control(pending) => Some(pending.clone()),
            _ => None,
        }));
        known.pending.sort_by_key(|p| p.start);
        known
    }

    /// Cuts the power, or kills the process, and goes on with what is left.
    pub fn cut(&mut self, crash: Crash, mask: u64) -> Result<(), Violation> {
        self.say(|| format!("{crash:?} is cut, mask {mask}"));
        let instant = self.session.freeze(crash);
        let known = self.in_doubt();
        self.stats.faults += self.session.faults_hit();
        self.stats.cuts += 1;
        self.stats.crash_states += 1;
        self.stats.distinct += 1;
        self.session.exec.halt();
        let (session, known) =
            recover(self.setup, instant.crash(mask), &known, mix(&[self.setup.seed, 39, self.step]), &mut self.stats)?;
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

    /// Waits until nobody deletes `key`; whether it is still there.
    fn is_there(&mut self, key: Key) -> Result<bool, Violation> {
        self.wait(|o| matches!(&o.doing, Doing::Control(p) if matches!(p.control, Control::Delete(_))))?;
        Ok(self.known.model.get(key).is_some() && self.known.pending.is_empty())
    }

    fn any(&self, draw: u64, wanted: impl Fn(Key, &crate::model::Volume) -> bool) -> Option<Key> {
        let keys: Vec<Key> = self.known.model.volumes().filter(|(k, v)| wanted(*k, v)).map(|(k, _)| k).collect();
        (!keys.is_empty()).then(|| keys[(draw % keys.len() as u64) as usize])
    }

    /// A place in whole sectors, mostly near the beginning.
    fn place(draws: [u64; 2], size: u64, ragged: bool) -> (u64, u64) {
        let mut rng = Rng::new(mix(&draws));
        let reach = (size / 4096).min(*rng.pick(&[4, 32, 1 << 20])).max(1);
        let page = rng.below(reach) * 4096;
        let (offset, len) = match rng.below(8) {
            _ if ragged => (page + rng.below(4096), *rng.pick(&[1, 100, 511, 700, 5000])),
            0..=3 => (page, 4096),
            4 => (page, 4096 * (1 + rng.below(8))),
            5 => (page, 4096 * (1 + rng.below(80))),
            _ => (page + rng.below(8) * SECTOR as u64, SECTOR as u64 * (1 + rng.below(12))),
        };
        let offset = offset.min(size - SECTOR as u64);
        (offset, len.min(size - offset))
    }

    fn read(&mut self, op: &Op) -> Result<(), Violation> {
        let Some(key) = self.any(op.draws[0], |_, _| true) else { return Ok(()) };
        self.look_at(op, key, op.draws[3].is_multiple_of(8))
    }

    /// Reads a snapshot and at once overwrites what it shows in the origin, so that one may overtake the
    /// other.
    fn chase(&mut self, op: &Op) -> Result<(), Violation> {
        let origin = self.known.origin;
        let Some(key) = self.any(op.draws[0], |_, v| v.of == Some(origin)) else { return Ok(()) };
        for _ in 0..1 + op.draws[3] % 3 {
            self.look_at(op, key, false)?;
        }
        self.write(&Op { draws: [1, op.draws[1], op.draws[2], op.draws[3]], ..*op })
    }

    fn look_at(&mut self, op: &Op, key: Key, ragged: bool) -> Result<(), Violation> {
        if !self.is_there(key)? {
            return Ok(());
        }
        let size = self.known.model.get(key).map_or(0, |v| v.size);
        let (offset, len) = Run::place([op.draws[1], op.draws[2]], size, ragged);
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        let buf = self.session.pool.buffer(len as usize);
        let text = format!("read {} {offset}+{len}", self.known.model.name(key));
        let start = self.known.model.tick();
        self.submit(Doing::Read { key, offset }, start, vec![key], text, async move {
            let (result, buf) = volume.read(offset, buf).await;
            Outcome { buf: Some(buf), ..result.into() }
        });
        Ok(())
    }

    /// Mostly of the origin; else of a volume or clone.
    fn target(&mut self, op: &Op) -> Result<Option<Key>, Violation> {
        let origin = self.known.origin;
        let key = match op.kind == Kind::Append || !op.draws[0].is_multiple_of(4) {
            true => Some(origin),
            false => {
                let known = &self.known;
                let writable = |key| known.writable.contains(&known.model.name(key));
                self.any(op.draws[0] / 4, |key, v| key != origin && (v.of.is_none() || writable(key)))
            }
        };
        let Some(key) = key else { return Ok(None) };
        // A snapshot that is being brought back is not to be written.
        if self.rolling().is_some_and(|name| name == self.known.model.name(key)) {
            return Ok(None);
        }
        Ok(self.is_there(key)?.then_some(key))
    }

    fn write(&mut self, op: &Op) -> Result<(), Violation> {
        let Some(key) = self.target(op)? else { return Ok(()) };
        let size = self.known.model.get(key).map_or(0, |v| v.size);
        let ragged = op.kind == Kind::Ragged;
        let (mut offset, mut len) = Run::place([op.draws[1], op.draws[2]], size, ragged);
        if op.kind == Kind::Append {
            let cursor = self.cursor.next_multiple_of(SECTOR as u64);
            offset = if cursor < size { cursor } else { 0 };
            len = (4096 * (1 + op.draws[1] % 8)).min(size - offset);
        }
        // The model keeps track of parts of sectors only while nothing else changes the volume.
        let quiet =
            move |o: &Inflight| matches!(o.doing, Doing::Change { .. } | Doing::Control(_)) && o.keys.contains(&key);
        if ragged {
            self.wait(quiet)?;
        }
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        let fua = op.draws[3].is_multiple_of(8);
        let name = self.known.model.name(key);
        let text = format!("{:?} op {} {name} {offset}+{len}{}", op.kind, op.number, if fua { " fua" } else { "" });
        let zero = op.kind == Kind::Zero;
        let what = if zero { What::Zero } else { What::Mark(op.number) };
        let mut buf = self.session.pool.buffer(len as usize);
        self.known.model.bytes(key, offset, op.number, &mut buf);
        let rec = self.known.model.write(key, offset, len, what);
        let start = self.known.model.now();
        self.submit(Doing::Change { rec, fua }, start, vec![key], text, async move {
            match zero {
                true => volume.write_zeroes(offset, len, fua).await.into(),
                false => volume.write(offset, buf, fua).await.0.into(),
            }
        });
        if key == self.known.origin {
            self.cursor = offset + len;
        }
        if ragged { self.wait(quiet) } else { Ok(()) }
    }

    /// What lies in an origin, or shows through to it, is left alone.
    fn discard(&mut self, op: &Op) -> Result<(), Violation> {
        let (rests, flattening) = (self.known.rests.clone(), self.known.flattening.clone());
        let origin = self.known.origin;
        let rests = |key| rests.contains_key(&key) && !flattening.contains(&key);
        let wanted = |key, v: &crate::model::Volume| key == origin || v.of.is_none() && rests(key);
        let Some(key) = self.any(op.draws[0], wanted) else { return Ok(()) };
        if !self.is_there(key)? {
            return Ok(());
        }
        let size = self.known.model.get(key).map_or(0, |v| v.size);
        let (offset, len) = Run::place([op.draws[1], op.draws[2]], size, false);
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        let text = format!("discard {} {offset}+{len}", self.known.model.name(key));
        let start = self.known.model.tick();
        self.submit(Doing::Upkeep, start, vec![key], text, async move { volume.discard(offset, len).await.into() });
        Ok(())
    }

    fn flush(&mut self, op: &Op) -> Result<(), Violation> {
        let Some(key) = self.target(op)? else { return Ok(()) };
        let Some(volume) = self.handle(key)? else { return Ok(()) };
        let text = format!("flush {}", self.known.model.name(key));
        let start = self.known.model.tick();
        self.submit(Doing::Flush(key), start, vec![key], text, async move { volume.flush().await.into() });
        Ok(())
    }

    /// Control operations come one after the other.
    fn control(
        &mut self,
        control: Control,
        keys: Vec<Key>,
        text: String,
        future: impl Future<Output = Outcome> + 'static,
    ) {
        let pending = self.known.model.begin(control);
        let start = pending.start;
        self.submit(Doing::Control(pending), start, keys, text, future);
    }

    fn wait_for_controls(&mut self) -> Result<bool, Violation> {
        self.wait(|o| matches!(o.doing, Doing::Control(_)))?;
        Ok(self.known.pending.is_empty())
    }

    fn is_crowded(&self) -> bool {
        self.known.model.volumes().count() >= self.setup.crowd + 2
    }

    fn snapshot(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.wait_for_controls()? || self.is_crowded() {
            return Ok(());
        }
        let origin = self.known.origin;
        let other = self.any(op.draws[0], |key, v| v.of.is_none() && key != origin);
        let independent = op.kind == Kind::Independent;
        let sources: Vec<Key> = match (op.kind, other) {
            (Kind::Group, Some(other)) => vec![origin, other],
            (Kind::Snapshot, Some(other)) if op.draws[1].is_multiple_of(8) => vec![other],
            _ => vec![origin],
        };
        if sources.contains(&origin) && self.rolling().is_some() {
            return Ok(());
        }
        let writable = sources == [origin] && op.draws[3].is_multiple_of(3);
        let flags = SnapshotFlags { independent, droppable: op.draws[2].is_multiple_of(3), writable };
        for &key in &sources {
            if !self.is_certain(key)? {
                return Ok(());
            }
        }
        let short = format!("s{}", op.number);
        let names: Vec<String> = sources.iter().map(|&key| self.known.model.name(key)).collect();
        if flags.droppable {
            self.known.droppable.extend(names.iter().map(|name| format!("{name}@{short}")));
        }
        if writable {
            self.known.writable.insert(format!("{ORIGIN}@{short}"));
        }
        let text = format!("snapshot {names:?}@{short} {flags:?}");
        let (pool, part) = (self.session.pool.clone(), short.clone());
        let control = Control::Snapshot(sources.iter().map(|&key| (key, short.clone())).collect());
        self.control(control, sources, text, async move {
            let all: Vec<(&str, &str)> = names.iter().map(|name| (&name[..], &part[..])).collect();
            pool.snapshot_with(&all, flags, 1).await.map(drop).into()
        });
        Ok(())
    }

    fn clone_one(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.wait_for_controls()? || self.is_crowded() {
            return Ok(());
        }
        let origin = self.known.origin;
        let Some(key) = self.any(op.draws[0], |key, _| key != origin) else { return Ok(()) };
        if !self.is_certain(key)? {
            return Ok(());
        }
        let (source, name) = (self.known.model.name(key), format!("c{}", op.number));
        let text = format!("clone {source} {name}");
        let (pool, control) = (self.session.pool.clone(), Control::Clone(key, name.clone()));
        self.control(
            control,
            vec![key],
            text,
            async move { pool.clone_volume(&source, &name, 1).await.map(drop).into() },
        );
        Ok(())
    }

    /// Waits until nobody flattens `key`; whether it is there and known what it shows through to.
    fn is_certain(&mut self, key: Key) -> Result<bool, Violation> {
        self.wait(move |o| matches!(o.doing, Doing::Flatten(k) if k == key))?;
        Ok(self.known.model.get(key).is_some() && !self.known.flattening.contains(&key))
    }

    /// Reads and writes of the clone go on meanwhile.
    fn flatten(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.wait_for_controls()? {
            return Ok(());
        }
        let rests = self.known.rests.clone();
        let Some(key) = self.any(op.draws[0], |key, v| v.of.is_none() && rests.contains_key(&key)) else {
            return Ok(());
        };
        self.wait(|o| matches!(o.doing, Doing::Flatten(_) | Doing::Upkeep))?;
        if !self.known.rests.contains_key(&key) || self.known.flattening.contains(&key) {
            return Ok(());
        }
        self.known.flattening.insert(key);
        let (pool, name) = (self.session.pool.clone(), self.known.model.name(key));
        let start = self.known.model.tick();
        self.submit(Doing::Flatten(key), start, vec![key], format!("flatten {name}"), async move {
            pool.flatten(&name, |_, _| true).await.map(drop).into()
        });
        Ok(())
    }

    /// Of what nothing shows through to; what has snapshots goes with them.
    fn delete(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.wait_for_controls()? {
            return Ok(());
        }
        let (origin, known) = (self.known.origin, &self.known);
        let rolling = self.rolling();
        let held = |key| rolling.as_deref() == Some(&known.model.name(key));
        let wanted =
            |key, v: &crate::model::Volume| key != origin && v.name != "vol" && known.is_free(key) && !held(key);
        let Some(key) = self.any(op.draws[0], wanted) else { return Ok(()) };
        let mut keys = vec![key];
        keys.extend(self.known.model.volumes().filter(|(_, v)| v.of == Some(key)).map(|(k, _)| k));
        let doomed = keys.clone();
        self.wait(move |o| o.keys.iter().any(|key| doomed.contains(key)))?;
        let names: Vec<String> = keys.iter().map(|&key| self.known.model.name(key)).collect();
        if self.known.model.get(key).is_none() {
            return Ok(());
        }
        let (pool, text) = (self.session.pool.clone(), format!("delete {names:?}"));
        self.control(Control::Delete(keys.clone()), keys, text, async move {
            let all: Vec<&str> = names.iter().map(|name| &name[..]).collect();
            pool.delete(&all).await.into()
        });
        Ok(())
    }

    /// The snapshot that the origin is being rolled back to.
    fn rolling(&self) -> Option<String> {
        self.session.pool.origins().pop().and_then(|origin| origin.rolling)
    }

    /// Everything else waits for the acknowledgement, but not for what goes on behind it.
    fn roll_back(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.wait_for_controls()? || self.rolling().is_some() {
            return Ok(());
        }
        let origin = self.known.origin;
        let Some(key) = self.any(op.draws[0], |_, v| v.of == Some(origin)) else { return Ok(()) };
        self.wait(move |o| o.keys.contains(&origin) || o.keys.contains(&key))?;
        if !self.is_there(key)? {
            return Ok(());
        }
        let name = self.known.model.name(key);
        let Some((_, snapshot)) = name.split_once('@').map(|(a, b)| (a.to_string(), b.to_string())) else {
            return Ok(());
        };
        let (pool, text) = (self.session.pool.clone(), format!("roll back to {name}"));
        self.control(Control::Rollback(origin, key), vec![origin, key], text, async move {
            pool.rollback(ORIGIN, &snapshot).await.into()
        });
        self.wait_for_controls().map(drop)
    }

    /// Unless there is no room for what it overwrites, or requests fail.
    fn rolled_back(&mut self) -> Result<(), Violation> {
        if !self.is_quiet()? || self.rolling().is_none() {
            return Ok(());
        }
        self.say(|| "waits until the rollback has ended".into());
        let pool = self.session.pool.clone();
        match self.session.exec.run(PATIENCE, async move { pool.rolled_back(ORIGIN, |_, _| true).await })? {
            Err(e) if e.kind() != ErrorKind::NoSpace => {
                Err(Violation::new("P6", format!("a rollback does not end: {e}")))
            }
            _ => Ok(()),
        }
    }

    fn upkeep<F: Future<Output = Outcome> + 'static>(
        &mut self,
        what: &str,
        f: impl FnOnce(forkdisk::Pool<SimDisk>) -> F,
    ) -> Result<(), Violation> {
        let start = self.known.model.tick();
        let future = f(self.session.pool.clone());
        self.submit(Doing::Upkeep, start, Vec::new(), what.into(), future);
        Ok(())
    }

    fn set(&mut self, op: &Op) -> Result<(), Violation> {
        let (ahead, full) = Setup::policy(op.draws[0]);
        self.upkeep("set", |pool| async move { pool.set_origin(ORIGIN, ahead, full).await.into() })
    }

    /// Nothing is in flight and nothing is wrong.
    fn is_quiet(&mut self) -> Result<bool, Violation> {
        self.drain()?;
        self.sync()?;
        Ok(self.session.faults_hit() == 0 && self.trouble.armed.is_none() && self.known.pending.is_empty())
    }

    /// Closes cleanly: the origin is an ordinary disk that holds what was written, and nothing is lost.
    fn reopen(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.is_quiet()? {
            return Ok(());
        }
        self.say(|| "closes and opens again".into());
        let rolling = self.rolling().is_some();
        let pool = self.session.pool.clone();
        let closed = self.session.exec.run(PATIENCE, async move {
            pool.detach_origin(ORIGIN, || 0).await?;
            pool.close().await
        })?;
        closed.map_err(|e| Violation::new("P6", format!("a clean stop fails: {e}")))?;
        let media = self.session.freeze(Crash::Power).crash(op.draws[0]);
        if !rolling {
            self.compare_disk(&media[1])?;
        }
        let mut known = self.known.clone();
        let now = known.model.tick();
        known.model.flushed(None, now);
        let (session, known) = recover(self.setup, media, &known, op.draws[1], &mut self.stats)?;
        self.begin_life(session, known);
        Ok(())
    }

    fn compare_disk(&mut self, medium: &crate::disk::Medium) -> Result<(), Violation> {
        let mut bytes = vec![0; self.setup.origin as usize];
        medium.image().read(0, &mut bytes);
        let (origin, now) = (self.known.origin, self.known.model.tick());
        Ok(self.known.model.check(origin, 0, &bytes, Rule::Since(now))?)
    }

    /// The origin is an ordinary disk for a while.
    fn unprotect(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.is_quiet()? || !self.known.rests.is_empty() || self.rolling().is_some() {
            return Ok(());
        }
        self.say(|| "unprotects the origin and protects it again".into());
        let (pool, disk) = (self.session.pool.clone(), self.session.disks[1].clone());
        let options = protection(self.setup, op.draws[0]);
        let done = self.session.exec.run(PATIENCE, async move {
            pool.unprotect(ORIGIN, true).await?;
            pool.protect(ORIGIN, disk, &options).await
        })?;
        done.map_err(|e| Violation::new("P6", format!("an origin cannot be unprotected and protected again: {e}")))?;
        let origin = self.known.origin;
        let keys = self.known.model.volumes().filter(|(_, v)| v.of == Some(origin)).map(|(k, _)| k).collect();
        let pending = self.known.model.begin(Control::Delete(keys));
        self.known.apply(&pending);
        let now = self.known.model.tick();
        self.known.model.flushed(Some(origin), now);
        self.compare_disk(&self.session.disks[1].freeze(Crash::Kill).crash(1))
    }
}
