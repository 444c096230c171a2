//! Operations that create or delete volumes, and background work of the engine.

use std::collections::BTreeSet;
use std::future::Future;

use forkdisk::{ErrorKind, SnapshotFlags};

use super::{Run, entrance};
use crate::disk::{Crash, Medium, SimDisk};
use crate::driver::{Class, Instant, Life, Outcome, PATIENCE_STEPS, Start, Violation, judge};
use crate::model::{Control, Key, Rule, Volume};
use crate::origins::recover::{protection, recover};
use crate::origins::{Kind, ORIGIN, Op};
use crate::rng::Rng;

/// What makes a clone independent of its backing.
pub(super) const FLATTEN: &str = "flatten";

/// Distance between the numbers of operations, for the writes that one operation makes.
const IDS_PER_OPERATION: u32 = 1_000_000;

impl Run {
    /// Runs control operations one at a time.
    pub(in crate::origins) fn control(
        &mut self,
        control: Control,
        keys: Vec<Key>,
        text: String,
        future: impl Future<Output = Outcome> + 'static,
    ) {
        let pending = self.known.model.begin(control);
        self.submit_control((pending, true), keys, text, future);
    }

    pub(in crate::origins) fn wait_for_controls(&mut self) -> Result<bool, Violation> {
        self.wait(|o| o.class.is_control())?;
        Ok(self.known.pending.is_empty())
    }

    pub(in crate::origins) fn is_crowded(&self) -> bool {
        self.known.model.volumes().count() >= self.setup.crowd + 2
    }

    pub(in crate::origins) fn snapshot(&mut self, op: &Op) -> Result<(), Violation> {
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
        let flags = SnapshotFlags::NONE
            .with_independent(independent)
            .with_droppable(op.draws[2].is_multiple_of(3))
            .with_writable(writable);
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

    pub(in crate::origins) fn clone_one(&mut self, op: &Op) -> Result<(), Violation> {
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

    /// Waits until `key` is not being flattened; returns whether it exists and its backing is known.
    pub(in crate::origins) fn is_certain(&mut self, key: Key) -> Result<bool, Violation> {
        self.wait(move |o| o.class.is(FLATTEN) && o.keys.contains(&key))?;
        Ok(self.known.model.get(key).is_some() && !self.known.flattening.contains(&key))
    }

    /// Flattens a clone; its reads and writes continue meanwhile.
    pub(in crate::origins) fn flatten(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.wait_for_controls()? {
            return Ok(());
        }
        let rests = self.known.rests.clone();
        let Some(key) = self.any(op.draws[0], |key, v| v.of.is_none() && rests.contains_key(&key)) else {
            return Ok(());
        };
        self.wait(|o| matches!(o.class, Class::Other(_)))?;
        if !self.known.rests.contains_key(&key) || self.known.flattening.contains(&key) {
            return Ok(());
        }
        self.known.flattening.insert(key);
        let (pool, name) = (self.session.pool.clone(), self.known.model.name(key));
        let text = format!("flatten {name}");
        let start = Start::new(Class::Other(FLATTEN), self.known.model.tick(), vec![key], text).with_need(true);
        let future = async move { pool.flatten(&name, |_, _| true).await.map(drop).into() };
        self.submit(start, future, move |run, ended| {
            if ended.is_ok() {
                run.known.flattened(key);
            } else if !run.session.has_failed() {
                // In a failed pool only the next open tells.
                run.known.flattening.remove(&key);
            }
            Ok(())
        });
        Ok(())
    }

    /// Deletes a volume that is the backing of none, together with its snapshots. Returns whether something
    /// is being deleted.
    pub(in crate::origins) fn delete(&mut self, op: &Op) -> Result<bool, Violation> {
        if !self.wait_for_controls()? {
            return Ok(false);
        }
        let (origin, known) = (self.known.origin, &self.known);
        let rolling = self.rolling();
        let held = |key| rolling.as_deref() == Some(&known.model.name(key));
        let wanted = |key, v: &Volume| key != origin && v.name != "vol" && known.is_free(key) && !held(key);
        let of_origin = |key, v: &Volume| v.of == Some(origin) && wanted(key, v);
        let key = match op.kind {
            Kind::DeleteOldest => self.any(0, of_origin),
            Kind::DeleteAndCut => self.any(op.draws[0], of_origin),
            _ => self.any(op.draws[0], wanted),
        };
        let Some(key) = key else { return Ok(false) };
        let mut keys = vec![key];
        keys.extend(self.known.model.volumes().filter(|(_, v)| v.of == Some(key)).map(|(k, _)| k));
        let doomed = keys.clone();
        self.wait(move |o| o.keys.iter().any(|key| doomed.contains(key)))?;
        let names: Vec<String> = keys.iter().map(|&key| self.known.model.name(key)).collect();
        if self.known.model.get(key).is_none() {
            return Ok(false);
        }
        let (pool, text) = (self.session.pool.clone(), format!("delete {names:?}"));
        self.control(Control::Delete(keys.clone()), keys, text, async move {
            let all: Vec<&str> = names.iter().map(|name| &name[..]).collect();
            pool.delete(&all).await.into()
        });
        Ok(true)
    }

    /// The next life finds exceptions that are not relabelled, and no table in memory.
    pub(in crate::origins) fn delete_and_cut(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.delete(op)? {
            return Ok(());
        }
        self.wait_for_controls()?;
        for _ in 0..op.draws[1] % 24 {
            self.step()?;
        }
        let crash = if op.draws[2].is_multiple_of(2) { Crash::Kill } else { Crash::Power };
        self.cut(crash, op.draws[3])
    }

    /// Makes a pair that is alone in its leaf be relabelled while the leaf before is not in memory.
    pub(in crate::origins) fn thin(&mut self, op: &Op) -> Result<(), Violation> {
        let chunks = self.setup.origin / self.setup.chunk;
        let mut rng = Rng::new(op.draws[0]);
        self.rolled_back()?;
        for _ in 0..self.known.model.volumes().count() {
            self.delete_and_settle(op)?;
        }
        for i in 1..=4 {
            // Of the origin, and neither droppable nor writable.
            let draws = [rng.next(), 1, 1, 1];
            self.snapshot(&Op { kind: Kind::Snapshot, number: op.number + i * IDS_PER_OPERATION, draws, ..*op })?;
            self.wait_for_controls()?;
            let few = match i {
                1 => 0,
                2 => rng.below(2),
                3 => 1 + rng.below(2),
                _ => 1 + rng.below(chunks / 80),
            };
            let mut places: BTreeSet<u64> = (0..few).map(|_| rng.below(chunks)).collect();
            // Inserting in ascending order leaves half a leaf behind; the other half fills it. The last
            // leaves stay full: nothing is merged with them.
            let (from, passes) = if i == 1 { (0, 1 + rng.below(4).min(1)) } else { (chunks - chunks / 4, 1) };
            if i <= 2 {
                places.extend(from..chunks);
            }
            for pass in 0..passes {
                let number = op.number + i * IDS_PER_OPERATION;
                self.touch(number, places.iter().copied().filter(|at| at % passes == pass).collect())?;
            }
        }
        self.delete_and_settle(op)?;
        // Pages that a replay changes would be in memory.
        if !rng.one_in(8) {
            self.upkeep("checkpoint", |pool| async move { pool.checkpoint().await.into() })?;
            self.drain()?;
        }
        let draws = [1 + rng.below(2), rng.next(), rng.next(), rng.next()];
        self.delete_and_cut(&Op { draws, ..*op })
    }

    /// Deletes the oldest snapshot of the origin, and all of its exceptions.
    fn delete_and_settle(&mut self, op: &Op) -> Result<(), Violation> {
        if self.delete(&Op { kind: Kind::DeleteOldest, ..*op })? {
            self.wait_for_controls()?;
            self.upkeep("settle", |pool| async move { pool.wait_freed().await.into() })?;
            self.drain()?;
        }
        Ok(())
    }

    /// Of several running flushes of one disk for the same changes, one fails.
    pub(in crate::origins) fn strike(&mut self, op: &Op) -> Result<(), Violation> {
        let mut rng = Rng::new(op.draws[3]);
        if !self.wait_for_controls()? || self.trouble.armed.is_some() {
            return Ok(());
        }
        if self.is_crowded() {
            self.delete(&Op { kind: Kind::DeleteOldest, ..*op })?;
            self.wait_for_controls()?;
        }
        self.arm_flush(usize::from(!rng.one_in(4)), 1 + rng.below(4));
        let mut all = vec![Kind::Snapshot, Kind::Checkpoint];
        all.extend([Kind::Flush, Kind::Flush].into_iter().filter(|_| rng.one_in(3)));
        if rng.one_in(4) {
            rng.shuffle(&mut all);
        }
        for kind in all {
            let op = Op { kind, draws: std::array::from_fn(|_| rng.next()), ..*op };
            match kind {
                Kind::Snapshot if rng.one_in(4) => self.snapshot(&Op { kind: Kind::Group, ..op })?,
                Kind::Snapshot => self.snapshot(&op)?,
                Kind::Flush => self.flush(&op)?,
                _ => self.upkeep("checkpoint", |pool| async move { pool.checkpoint().await.into() })?,
            }
            let reach = *rng.pick(&[1, 8, 40, 80]);
            for _ in 0..rng.below(reach) {
                self.step()?;
            }
        }
        Ok(())
    }

    /// Returns the snapshot that the origin is being rolled back to.
    pub(in crate::origins) fn rolling(&self) -> Option<String> {
        self.session.pool.origins().pop().and_then(|origin| origin.rolling)
    }

    /// Starts a rollback: everything else waits for the acknowledgement, but not for the background work.
    pub(in crate::origins) fn roll_back(&mut self, op: &Op) -> Result<(), Violation> {
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

    /// Waits for the end of a rollback, unless there is no space for what it overwrites, or requests fail.
    pub(in crate::origins) fn rolled_back(&mut self) -> Result<(), Violation> {
        if !self.is_quiet()? || self.rolling().is_none() {
            return Ok(());
        }
        self.say(|| "waits until the rollback has ended".into());
        let pool = self.session.pool.clone();
        match self.session.exec.run(PATIENCE_STEPS, async move { pool.wait_rollback(ORIGIN, |_, _| true).await })? {
            Err(e) if e.kind() != ErrorKind::NoSpace => {
                Err(Violation::new("P6", format!("a rollback does not end: {e}")))
            }
            _ => Ok(()),
        }
    }

    pub(in crate::origins) fn upkeep<F: Future<Output = Outcome> + 'static>(
        &mut self,
        what: &str,
        f: impl FnOnce(forkdisk::Pool<SimDisk>) -> F,
    ) -> Result<(), Violation> {
        let start = Start::new(Class::Other("upkeep"), self.known.model.tick(), Vec::new(), what.into());
        let future = f(self.session.pool.clone());
        self.submit(start, future, |run, ended| match run.session.faults_hit() {
            0 => ended.outcome.report.iter().try_for_each(judge),
            // A check reports unreadable data as damage and leaks.
            _ => Ok(()),
        });
        Ok(())
    }

    pub(in crate::origins) fn set(&mut self, op: &Op) -> Result<(), Violation> {
        let (ahead, full) = self.setup.policy(op.draws[0]);
        self.upkeep("set", |pool| async move { pool.set_origin(ORIGIN, ahead, full).await.into() })
    }

    /// Whether nothing is in flight and no fault is armed.
    pub(in crate::origins) fn is_quiet(&mut self) -> Result<bool, Violation> {
        self.drain()?;
        self.sync()?;
        Ok(self.session.faults_hit() == 0 && self.trouble.armed.is_none() && self.known.pending.is_empty())
    }

    /// Closes cleanly: the origin is an ordinary disk that holds what was written, and nothing is lost.
    pub(in crate::origins) fn reopen(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.is_quiet()? {
            return Ok(());
        }
        self.say(|| "closes and opens again".into());
        let rolling = self.rolling().is_some();
        let pool = self.session.pool.clone();
        let closed = self.session.exec.run(PATIENCE_STEPS, async move {
            pool.detach_origin(ORIGIN, || 0).await?;
            pool.close().await
        })?;
        closed.map_err(|e| Violation::new("P6", format!("a clean stop fails: {e}")))?;
        let frozen = self.session.freeze(Crash::Power);
        let media = frozen.crash(frozen.drawn(op.draws[0]));
        if !rolling {
            self.compare_disk(&media[1])?;
        }
        let mut known = self.known.clone();
        let now = known.model.tick();
        known.model.flushed(None, now);
        let (session, known) = recover(&self.setup, (media, None), &known, entrance(op.draws[1]), &mut self.stats)?;
        self.begin_life(session, known);
        Ok(())
    }

    pub(in crate::origins) fn compare_disk(&mut self, medium: &Medium) -> Result<(), Violation> {
        let mut bytes = vec![0; self.setup.origin as usize];
        medium.image().read(0, &mut bytes);
        let (origin, now) = (self.known.origin, self.known.model.tick());
        Ok(self.known.model.check(origin, 0, &bytes, Rule::Since(now))?)
    }

    /// Makes the origin an ordinary disk for a while.
    pub(in crate::origins) fn unprotect(&mut self, op: &Op) -> Result<(), Violation> {
        if !self.is_quiet()? || !self.known.rests.is_empty() || self.rolling().is_some() {
            return Ok(());
        }
        self.say(|| "unprotects the origin and protects it again".into());
        let (pool, disk) = (self.session.pool.clone(), self.session.disks[1].clone());
        let options = protection(&self.setup, op.draws[0]);
        let done = self.session.exec.run(PATIENCE_STEPS, async move {
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
