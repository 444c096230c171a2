//! The loop of a run.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use forkdisk::{Buf, CheckReport, Error, Volume};
use rustc_hash::FxHashSet;

use super::op::Op;
use super::trouble::Trouble;
use super::world::{Knowledge, Life, World};
use super::{CrashPoint, PATIENCE_STEPS, Stats, Violation, Watch};
use crate::disk::LyingDevice;
use crate::executor::Step;
use crate::model::{Control, Key, Pending, RecId, Rule, Time};
use crate::rng::{Rng, mix};

/// What an operation in flight does, as far as others depend on it.
pub enum Class {
    /// Reads; unchecked if the volume was rolled back meanwhile.
    Read { vague: bool },
    /// Changes contents.
    Change,
    /// Makes everything durable.
    Flush,
    /// Changes names, sizes or snapshots.
    Control(Pending),
    /// Everything else, by its name.
    Other(&'static str),
}

impl Class {
    /// Whether it is the operation of this name.
    pub fn is(&self, name: &str) -> bool {
        matches!(self, Class::Other(other) if *other == name)
    }

    pub fn is_control(&self) -> bool {
        matches!(self, Class::Control(_))
    }

    pub fn is_rollback(&self) -> bool {
        matches!(self, Class::Control(p) if matches!(p.control, Control::Rollback(..) | Control::RollbackAll(_)))
    }

    /// Whether it depends on which volumes are in a folder.
    pub fn is_of_folder(&self) -> bool {
        matches!(self, Class::Control(p) if p.control.is_of_folder())
    }

    /// Whether it may make a volume smaller.
    fn may_shrink(&self) -> bool {
        self.is_rollback() || matches!(self, Class::Control(p) if matches!(p.control, Control::Resize(..)))
    }
}

/// An operation that starts.
pub struct Start {
    pub class: Class,
    pub start: Time,
    /// Volumes with contents that it reads or changes.
    pub keys: Vec<Key>,
    pub text: String,
    /// Whether it may be refused because the pool is full.
    pub needs_space: bool,
}

impl Start {
    /// Returns one that needs no space.
    pub fn new(class: Class, start: Time, keys: Vec<Key>, text: String) -> Start {
        Start { class, start, keys, text, needs_space: false }
    }

    /// Returns the same as one that needs space.
    pub fn with_need(self, needs_space: bool) -> Start {
        Start { needs_space, ..self }
    }
}

type End<W> = Box<dyn FnOnce(&mut Run<W>, &Ended<W>) -> Result<(), Violation>>;

/// An operation in flight.
pub struct Inflight<W: World> {
    pub class: Class,
    pub start: Time,
    pub since: u64,
    /// Whether a control operation that may make a volume smaller was in flight at the same time.
    pub beside_shrinking: bool,
    /// Volumes with contents that it reads or changes.
    pub keys: Vec<Key>,
    pub text: String,
    /// Whether it may be refused because the pool is full.
    pub needs_space: bool,
    end: Option<End<W>>,
}

/// The outcome of an operation.
#[derive(Default)]
pub struct Outcome {
    pub error: Option<Error>,
    pub buf: Option<Buf>,
    pub report: Option<CheckReport>,
}

impl From<Result<(), Error>> for Outcome {
    fn from(result: Result<(), Error>) -> Outcome {
        Outcome { error: result.err(), ..Outcome::default() }
    }
}

/// An operation that has ended.
pub struct Ended<W: World> {
    pub op: Inflight<W>,
    pub outcome: Outcome,
}

impl<W: World> Ended<W> {
    pub fn is_ok(&self) -> bool {
        self.outcome.error.is_none()
    }
}

/// A run in progress.
pub struct Run<W: World> {
    pub setup: W::Setup,
    pub session: W::Session,
    pub known: W::Known,
    /// What only this world has.
    pub world: W,
    pub inflight: BTreeMap<u64, Inflight<W>>,
    pub trouble: Trouble,
    pub stats: Stats,
    pub rng: Rng,
    pub step: u64,
    pub watch: Option<Watch>,
    pub(super) seen: FxHashSet<u64>,
    pub(super) aim: Option<CrashPoint>,
    done: Rc<RefCell<Vec<(u64, Outcome)>>>,
    next: u64,
    log: Option<Vec<String>>,
}

impl<W: World> Run<W> {
    /// Runs a history. With an aim only that one side crash is tried. Returns the statistics, the violation if
    /// there was one, and the account of what happened if it was requested.
    pub fn history(
        setup: &W::Setup,
        ops: &[Op],
        aim: Option<CrashPoint>,
        account: bool,
    ) -> (Stats, Option<Violation>, Vec<String>) {
        Run::<W>::conduct(setup, aim, account, |run| run.all(ops))
    }

    /// Creates a pool, runs `f`, and reports.
    pub fn conduct(
        setup: &W::Setup,
        aim: Option<CrashPoint>,
        account: bool,
        f: impl FnOnce(&mut Run<W>) -> Result<(), Violation>,
    ) -> (Stats, Option<Violation>, Vec<String>) {
        let (world, session, known) = match W::make(setup) {
            Ok(made) => made,
            Err(violation) => return (Stats::default(), Some(violation), Vec::new()),
        };
        let mut run = Run {
            setup: setup.clone(),
            session,
            known,
            world,
            inflight: BTreeMap::new(),
            trouble: Trouble::default(),
            stats: Stats::default(),
            rng: Rng::new(mix(&[W::common(setup).seed, W::RUN_SEED])),
            step: 0,
            watch: None,
            seen: FxHashSet::default(),
            aim,
            done: Rc::default(),
            next: 0,
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
            self.make_way()?;
            W::before_launch(self)?;
            self.launch(op)?;
            self.watch_trouble()?;
        }
        W::finish(self)
    }

    /// Runs steps until another operation may start.
    pub fn make_way(&mut self) -> Result<(), Violation> {
        while self.inflight.len() >= W::common(&self.setup).depth {
            self.step()?;
        }
        Ok(())
    }

    pub fn say(&mut self, text: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("step {}: {}", self.step, text()));
        }
    }

    /// Starts an operation. `end` changes the model by its outcome, at the step in which it ends. Returns its
    /// number.
    pub fn submit(
        &mut self,
        start: Start,
        future: impl Future<Output = Outcome> + 'static,
        end: impl FnOnce(&mut Run<W>, &Ended<W>) -> Result<(), Violation> + 'static,
    ) -> u64 {
        let id = self.next;
        self.next += 1;
        let Start { class, start, keys, text, needs_space } = start;
        self.say(|| format!("{id} starts: {text}"));
        let beside_shrinking = self.inflight.values().any(|other| other.class.may_shrink());
        if class.may_shrink() {
            self.inflight.values_mut().for_each(|other| other.beside_shrinking = true);
        }
        let (since, end) = (self.step, Some(Box::new(end) as End<W>));
        let op = Inflight { class, start, since, beside_shrinking, keys, text, needs_space, end };
        self.inflight.insert(id, op);
        let done = Rc::clone(&self.done);
        self.session.exec().spawn(Box::pin(async move {
            let outcome = future.await;
            done.borrow_mut().push((id, outcome));
        }));
        id
    }

    /// Starts a read of a range; what it returns must be what the model allows.
    pub fn submit_read(&mut self, volume: Volume<LyingDevice>, key: Key, (offset, len): (u64, u64), vague: bool) {
        let buf = self.session.pool().buffer(len as usize);
        let text = format!("read {} {offset}+{len}", self.known.model().name(key));
        let start = Start::new(Class::Read { vague }, self.known.model_mut().tick(), vec![key], text);
        let future = async move {
            let (result, buf) = volume.read(offset, buf).await;
            Outcome { buf: Some(buf), ..result.into() }
        };
        self.submit(start, future, move |run, ended| match (&ended.op.class, &ended.outcome.buf) {
            (Class::Read { vague: false }, Some(buf)) if ended.is_ok() => {
                Ok(run.known.model_mut().check(key, offset, buf, Rule::Since(ended.op.start))?)
            }
            _ => Ok(()),
        });
    }

    /// Starts what is recorded in the model as `rec`.
    pub fn submit_change(
        &mut self,
        (rec, fua): (RecId, bool),
        keys: Vec<Key>,
        text: String,
        future: impl Future<Output = Outcome> + 'static,
    ) -> u64 {
        let start = Start::new(Class::Change, self.known.model().now(), keys, text).with_need(true);
        self.submit(start, future, move |run, ended| {
            run.known.model_mut().end(rec, ended.is_ok(), fua);
            Ok(())
        })
    }

    /// Starts a control operation. If it fails together with the pool, only the next open tells whether it
    /// happened.
    pub fn submit_control(
        &mut self,
        (pending, needs_space): (Pending, bool),
        keys: Vec<Key>,
        text: String,
        future: impl Future<Output = Outcome> + 'static,
    ) {
        let start = pending.start;
        let start = Start::new(Class::Control(pending), start, keys, text).with_need(needs_space);
        self.submit(start, future, |run, ended| match &ended.op.class {
            Class::Control(pending) if ended.is_ok() => W::apply(run, pending),
            Class::Control(pending) if run.session.has_failed() => {
                run.known.pending().push(pending.clone());
                Ok(())
            }
            _ => Ok(()),
        });
    }

    /// Starts what changes nothing in the model.
    pub fn submit_upkeep(
        &mut self,
        name: &'static str,
        keys: Vec<Key>,
        text: String,
        future: impl Future<Output = Outcome> + 'static,
    ) {
        let start = Start::new(Class::Other(name), self.known.model_mut().tick(), keys, text);
        self.submit(start, future, |_, _| Ok(()));
    }

    /// Runs one executor step and processes what has ended.
    pub fn step(&mut self) -> Result<Step, Violation> {
        W::before_step(self);
        let ran = self.session.exec().step();
        let ended = !self.done.borrow().is_empty();
        if ran != Step::Idle {
            self.step += 1;
        }
        W::after_step(self, ran, ended);
        if ran == Step::Idle {
            return match self.inflight.values().next() {
                None => Ok(ran),
                Some(op) => {
                    let what = format!("{}: {} never ends", self.session.exec().deadlock(), op.text);
                    Err(Violation::new("hang", what))
                }
            };
        }
        let done = std::mem::take(&mut *self.done.borrow_mut());
        for (id, outcome) in done {
            self.take_up(id, outcome)?;
        }
        if let Some(op) = self.inflight.values().find(|op| self.step - op.since > PATIENCE_STEPS) {
            return Err(Violation::new("hang", format!("{} has not ended after {PATIENCE_STEPS} steps", op.text)));
        }
        self.watch_step()?;
        W::judge_step(self)?;
        self.side_crash()?;
        Ok(ran)
    }

    /// Runs steps until nothing in flight matches.
    pub fn wait(&mut self, matches: impl Fn(&Inflight<W>) -> bool) -> Result<(), Violation> {
        while self.inflight.values().any(&matches) {
            self.step()?;
        }
        Ok(())
    }

    /// Runs steps until nothing is in flight.
    pub fn drain(&mut self) -> Result<(), Violation> {
        self.wait(|_| true)
    }

    fn take_up(&mut self, id: u64, outcome: Outcome) -> Result<(), Violation> {
        let Some(mut op) = self.inflight.remove(&id) else { return Ok(()) };
        self.stats.operations += 1;
        self.say(|| match &outcome.error {
            None => format!("{id} ends"),
            Some(e) => format!("{id} fails: {e:?}"),
        });
        W::judge(self, &op, &outcome)?;
        let end = op.end.take();
        let ended = Ended { op, outcome };
        end.map_or(Ok(()), |end| end(self, &ended))?;
        W::ended(self, id)?;
        let now = self.known.model().now();
        // A snapshot that may or may not have been taken shows the contents of that time, however late that
        // is found out.
        let unsure = self.known.pending().iter().map(|p| p.start);
        let oldest = self.inflight.values().map(|op| op.start).chain(unsure).min().unwrap_or(now);
        self.known.model_mut().set_horizon(oldest);
        Ok(())
    }

    /// Begins the next life of the engine.
    pub fn begin_life(&mut self, session: W::Session, known: W::Known) {
        self.done = Rc::default();
        self.inflight.clear();
        self.seen.clear();
        self.trouble = Trouble::default();
        self.world.begin_life();
        (self.session, self.known) = (session, known);
    }
}
