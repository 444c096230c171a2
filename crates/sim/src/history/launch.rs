//! Resolves operations and starts them.

mod controls;

use forkdisk::{Error, ErrorKind};

use super::Violation;
use super::op::{Kind, Op, Profile};
use super::place::{self, Place};
use super::run::{AllowedFailure, Inflight, Run, Volumes};
use super::verb::Verb;
use crate::disk::{Crash, SimDisk};
use crate::driver::{Class, Ended, Outcome, PATIENCE_STEPS, Start, judge};
use crate::model::{Control, Key, Pending, RecId, Volume, What};
use crate::pattern::SECTOR;
use crate::rng::Rng;

const PAGE: u64 = 4096;

fn is_control(op: &Inflight, key: Key) -> bool {
    op.class.is_control() && op.keys.contains(&key)
}

/// Control operations that data operations may run beside.
fn is_gentle(pending: &Pending) -> bool {
    matches!(
        pending.control,
        Control::Snapshot(_) | Control::Clone(..) | Control::CloneAll(..) | Control::Set(..) | Control::Rollback(..)
    )
}

impl Run {
    /// Starts an operation, or does nothing if there is nothing that it can work on.
    pub(super) fn launch(&mut self, op: &Op) -> Result<(), Violation> {
        match op.kind {
            Kind::Read => self.with(op, |run, key| run.read(op, key)),
            Kind::Write => self.with(op, |run, key| {
                let place = place::range(op, run.size(key));
                run.write(op, key, place, AllowedFailure::Nothing)
            }),
            Kind::Append => self.with(op, |run, key| run.append(op, key)),
            Kind::Ragged => self.with(op, |run, key| run.ragged(op, key)),
            Kind::InPlace => self.in_place(op),
            Kind::Flush => self.with(op, |run, key| run.flush(Some(key))),
            Kind::FlushPool => self.flush(None),
            Kind::Discard | Kind::Zero => self.with(op, |run, key| run.zero(op, key)),
            Kind::CloneRange => self.with(op, |run, key| run.clone_range(op, key)),
            Kind::Fill => self.with(op, |run, key| run.fill(op, key)),
            Kind::SetChunk => self.with(op, |run, key| run.set_chunk(op, key)),
            Kind::SetCopying => self.with(op, |run, key| run.set_copying(op, key)),
            Kind::SetCopier => self.set_copier(op),
            Kind::Gather => self.gather(op),
            Kind::Heir => self.clone(op),
            Kind::SetGather => self.with(op, |run, key| run.set_gather(op, key)),
            Kind::SetQuota => self.with(op, |run, key| run.set_quota(op, key)),
            Kind::Burst => self.with(op, |run, key| run.burst(op, key)),
            Kind::Overlap => self.with(op, |run, key| run.overlap(op, key)),
            Kind::Audit => self.audit(op),
            Kind::Names => self.names(op),
            Kind::Unnamed => self.unnamed(op),
            Kind::Grow => self.grow(op),
            Kind::Checkpoint | Kind::Check | Kind::Settle => {
                self.upkeep(op.kind);
                Ok(())
            }
            Kind::Reopen => self.reopen(),
            Kind::Cut => self.cut(Crash::Power, op.draws[0]),
            Kind::Kill => self.cut(Crash::Kill, op.draws[0]),
            Kind::Fault => {
                self.arm(op);
                Ok(())
            }
            _ => match self.choose_control(op) {
                Some(control) => self.control(control),
                None => Ok(()),
            },
        }
    }

    pub(super) fn size(&self, key: Key) -> u64 {
        self.known.model.get(key).map_or(0, |v| v.size)
    }

    /// Calls `f` with a volume of the operation's choice, when no control operation blocks it. Creates a
    /// volume if there is none.
    pub(super) fn with(
        &mut self,
        op: &Op,
        f: impl FnOnce(&mut Self, Key) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let mut keys = place::volumes(&self.known.model);
        if op.kind == Kind::Read && op.draws[0].is_multiple_of(3) {
            keys.extend(place::snapshots(&self.known.model, None));
        }
        let Some(key) = place::choose(&keys, op.draws[0]) else {
            return match self.choose_control(&Op { kind: Kind::Create, ..*op }) {
                Some(create) => self.control(create),
                None => Ok(()),
            };
        };
        self.unhindered(key, f)
    }

    /// Calls `f` with a volume once no control operation blocks it, if it still exists.
    pub(super) fn unhindered(
        &mut self,
        key: Key,
        f: impl FnOnce(&mut Self, Key) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let family = self.family(key);
        self.wait(|o| match &o.class {
            Class::Control(p) => !is_gentle(p) && o.keys.contains(&family),
            _ => false,
        })?;
        if self.known.model.get(key).is_none() || self.is_unsure(family) {
            return Ok(());
        }
        f(self, key)
    }

    /// Returns the volume itself, or the one a snapshot belongs to.
    fn family(&self, key: Key) -> Key {
        self.known.model.get(key).and_then(|v| v.of).unwrap_or(key)
    }

    /// Whether a failed control operation leaves it uncertain what this volume is.
    fn is_unsure(&self, family: Key) -> bool {
        self.known.pending.iter().any(|p| self.touched(&p.control).contains(&family))
    }

    pub(super) fn handle(&self, key: Key) -> Result<forkdisk::Volume<SimDisk>, Violation> {
        let name = self.known.model.name(key);
        self.session.pool.volume(&name).map_err(|e| Violation::new("P4", format!("{name} cannot be opened: {e}")))
    }

    fn read(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let draw = op.draws[4].is_multiple_of(8);
        let size = self.size(key);
        let place = if draw { place::ragged(op, size) } else { place::range(op, size) };
        place.map_or(Ok(()), |place| self.look_at(key, place))
    }

    /// Reads a range unless a control operation blocks it or it is deleted.
    pub(super) fn probe(&mut self, key: Key, place: Place) -> Result<(), Violation> {
        let family = self.family(key);
        let busy = self.inflight.values().any(|o| is_control(o, key) || is_control(o, family));
        match place.within(self.size(key)) {
            Some(place) if !busy && !self.is_unsure(family) => self.look_at(key, place),
            _ => Ok(()),
        }
    }

    fn look_at(&mut self, key: Key, place: Place) -> Result<(), Violation> {
        let volume = self.handle(key)?;
        let vague = self.inflight.values().any(|o| is_control(o, key) && o.class.is_rollback());
        self.submit_read(volume, key, (place.offset, place.len), vague);
        Ok(())
    }

    /// Starts a change of contents.
    fn change(
        &mut self,
        (rec, fua, spare): (RecId, bool, AllowedFailure),
        keys: Vec<Key>,
        text: String,
        future: impl Future<Output = Outcome> + 'static,
    ) -> u64 {
        let start = Start::new(Class::Change, self.known.model.now(), keys, text);
        self.submit(start.with_need(spare == AllowedFailure::Nothing), future, move |run, ended| {
            let skipped = spare == AllowedFailure::Discard && run.world.failure.full;
            run.known.model.end(rec, ended.is_ok() && !skipped, fua);
            Ok(())
        })
    }

    pub(super) fn write(
        &mut self,
        op: &Op,
        key: Key,
        place: Option<Place>,
        spare: AllowedFailure,
    ) -> Result<(), Violation> {
        let Some(Place { offset, len }) = place else {
            return Ok(());
        };
        let fua = op.draws[3].is_multiple_of(6) != (self.setup.profile == Profile::Journal);
        let volume = self.handle(key)?;
        let mut buf = self.session.pool.buffer(len as usize);
        self.known.model.bytes(key, offset, op.number, &mut buf);
        let text = format!(
            "write op {} {} {offset}+{len}{} (sectors {}..{})",
            op.number,
            self.known.model.name(key),
            if fua { " fua" } else { "" },
            offset / SECTOR as u64,
            (offset + len).div_ceil(SECTOR as u64)
        );
        let rec = self.known.model.write(key, offset, len, What::Mark(op.number));
        self.known.model.spread();
        let (disk, op) = (self.session.disk.clone(), op.number);
        let id = self.change((rec, fua, spare), vec![key], text, async move {
            disk.order().accept(op, key, offset, len);
            let (result, _) = volume.write(offset, buf, fua).await;
            disk.order().end(op);
            result.into()
        });
        self.world.places.insert(id, Place { offset, len });
        self.world.cursors.insert(key, offset + len);
        Ok(())
    }

    fn append(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let from = self.world.cursors.get(&key).copied().unwrap_or(0);
        let place = place::stretch(op, from, self.size(key));
        self.write(op, key, place, AllowedFailure::Nothing)
    }

    /// The model tracks parts of sectors only while nothing else changes the volume.
    fn ragged(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let quiet = |o: &Inflight| !matches!(o.class, Class::Read { .. } | Class::Flush) && o.keys.contains(&key);
        self.wait(quiet)?;
        let place = place::ragged(op, self.size(key));
        self.write(op, key, place, AllowedFailure::Nothing)?;
        self.wait(quiet)
    }

    /// Overwrites a page that nothing shares, which needs no space.
    fn in_place(&mut self, op: &Op) -> Result<(), Violation> {
        let fits = |run: &Self, key: Key| {
            let pages = run.size(key) / PAGE;
            let from = op.draws[1] % pages.max(1);
            let owned = |page: &u64| run.known.model.is_mapped(key, page * PAGE / SECTOR as u64);
            (from..pages).chain(0..from).take(64).find(owned).map(|page| (key, page * PAGE))
        };
        let keys: Vec<Key> =
            self.known.model.volumes().filter(|(_, v)| v.of.is_none() && !v.shared).map(|(k, _)| k).collect();
        let Some((key, offset)) = keys.into_iter().find_map(|key| fits(self, key)) else {
            return Ok(());
        };
        if self.is_unsure(key) || self.inflight.values().any(|o| o.keys.contains(&key)) {
            return Ok(());
        }
        self.write(op, key, Some(Place { offset, len: PAGE }), AllowedFailure::Space)
    }

    fn fill(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let len = (1 << 20).min(self.size(key));
        for i in 0..8.max(self.size(key) >> 20).min(16) {
            let offset = (i << 20) % self.size(key).max(1);
            let len = len.min(self.size(key) - offset);
            self.write(op, key, Some(Place { offset, len }), AllowedFailure::Nothing)?;
            self.wait(|o| o.keys.contains(&key))?;
            if self.known.model.get(key).is_none() || self.is_unsure(key) {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn flush(&mut self, key: Option<Key>) -> Result<(), Violation> {
        let start = self.known.model.tick();
        let pool = self.session.pool.clone();
        let text = key.map_or("flush the pool".into(), |key| format!("flush {}", self.known.model.name(key)));
        // A flush of one volume covers all.
        let end = |run: &mut Run, ended: &Ended<Volumes>| {
            if ended.is_ok() {
                run.known.model.flushed(None, ended.op.start);
            }
            Ok(())
        };
        let start = Start::new(Class::Flush, start, key.into_iter().collect(), text);
        match key {
            None => self.submit(start, async move { pool.flush().await.into() }, end),
            Some(key) => {
                let volume = self.handle(key)?;
                self.submit(start, async move { volume.flush().await.into() }, end)
            }
        };
        Ok(())
    }

    fn zero(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        match place::range(op, self.size(key)) {
            Some(Place { offset, len }) => {
                let kind = if op.kind == Kind::Zero && op.draws[3].is_multiple_of(6) { Kind::ZeroFua } else { op.kind };
                self.clear(key, kind, offset, len)
            }
            None => Ok(()),
        }
    }

    /// Discards or zeroes a range.
    pub(super) fn clear(&mut self, key: Key, kind: Kind, offset: u64, len: u64) -> Result<(), Violation> {
        let volume = self.handle(key)?;
        let name = self.known.model.name(key);
        if kind == Kind::Discard {
            let end = offset + len;
            // The last page of a volume counts as whole.
            let to = if end == self.size(key) { end } else { end / PAGE * PAGE };
            let from = offset.next_multiple_of(PAGE);
            let rec = self.known.model.write(key, from, to.saturating_sub(from), What::Zero);
            let text = format!("discard {name} {offset}+{len}");
            let future = async move { volume.discard(offset, len).await.into() };
            self.change((rec, false, AllowedFailure::Discard), vec![key], text, future);
        } else {
            let fua = kind == Kind::ZeroFua;
            let rec = self.known.model.write(key, offset, len, What::Zero);
            let text = format!("zero {name} {offset}+{len}{}", if fua { " fua" } else { "" });
            let future = async move { volume.write_zeroes(offset, len, fua).await.into() };
            self.change((rec, fua, AllowedFailure::Nothing), vec![key], text, future);
        }
        Ok(())
    }

    fn clone_range(&mut self, op: &Op, target: Key) -> Result<(), Violation> {
        let mut keys = place::volumes(&self.known.model);
        keys.extend(place::snapshots(&self.known.model, None));
        let Some(source) = place::choose(&keys, op.draws[4]) else {
            return Ok(());
        };
        let family = self.family(source);
        let busy = |o: &Inflight| match &o.class {
            Class::Control(_) => o.keys.contains(&family) || o.keys.contains(&target),
            // Chains of copies in flight are more than the model tracks.
            Class::Change => o.text.starts_with("share") && (o.keys.contains(&source) || o.keys.contains(&target)),
            _ => false,
        };
        self.wait(busy)?;
        if self.known.model.get(source).is_none() || self.known.model.get(target).is_none() || self.is_unsure(family) {
            return Ok(());
        }
        let tables = match self.setup.profile {
            Profile::Ranges => place::tables(op.draws[3], self.size(source), self.size(target)),
            _ => None,
        };
        if let Some((Place { offset, len }, to)) = tables.filter(|_| !op.draws[1].is_multiple_of(4)) {
            let apart = source != target || to + len <= offset || offset + len <= to;
            return if apart { self.share((source, offset), (target, to), len) } else { Ok(()) };
        }
        let Some(from) = place::range(op, self.size(source)) else {
            return Ok(());
        };
        let mut rng = Rng::new(op.draws[3]);
        let unit = if rng.one_in(3) { SECTOR as u64 } else { PAGE };
        let to = rng.below(self.size(target) / unit + 1) * unit + from.offset % unit;
        let len = from.len.min(self.size(target).saturating_sub(to));
        let apart = source != target || to + len <= from.offset || from.offset + len <= to;
        if len == 0 || !apart {
            return Ok(());
        }
        self.share((source, from.offset), (target, to), len)
    }

    /// Shares a range.
    pub(super) fn share(&mut self, source: (Key, u64), target: (Key, u64), len: u64) -> Result<(), Violation> {
        let (s, t) = (self.handle(source.0)?, self.handle(target.0)?);
        let (from, to) = (source.1, target.1);
        let text = format!(
            "share {} {from}+{len} into {} {to}",
            self.known.model.name(source.0),
            self.known.model.name(target.0)
        );
        let rec = self.known.model.clone_range(source, target, len);
        self.change((rec, false, AllowedFailure::Nothing), vec![target.0, source.0], text, async move {
            t.clone_range(&s, from, to, len).await.into()
        });
        Ok(())
    }

    /// A range clone within one volume whose ranges overlap is refused and changes nothing.
    fn overlap(&mut self, op: &Op, key: Key) -> Result<(), Violation> {
        let Some(Place { offset, len }) = place::range(op, self.size(key)).filter(|p| p.len > 1) else {
            return Ok(());
        };
        let volume = self.handle(key)?;
        let to = offset + op.draws[3] % len;
        let len = len.min(self.size(key) - to);
        if to >= offset + len {
            return Ok(());
        }
        let text = format!("share {offset}+{len} of {} into itself at {to}", self.known.model.name(key));
        self.submit_upkeep("overlap", vec![key], text, async move {
            match volume.clone_range(&volume, offset, to, len).await {
                Err(e) if e.kind() == ErrorKind::Invalid => Outcome::default(),
                Err(e) => Err(e).into(),
                Ok(()) => Err(Error::new(ErrorKind::Unsupported, "it was not refused")).into(),
            }
        });
        Ok(())
    }

    fn grow(&mut self, op: &Op) -> Result<(), Violation> {
        if self.inflight.values().any(|o| o.class.is("grow")) {
            return Ok(());
        }
        self.grow_to((1 + op.draws[0] % 6) << 20)
    }

    /// Lengthens the pool, unless it has grown enough.
    pub(super) fn grow_to(&mut self, more: u64) -> Result<(), Violation> {
        let size = self.session.pool.info().size + more;
        if size > self.setup.pool * 3 {
            return Ok(());
        }
        let (pool, text) = (self.session.pool.clone(), format!("grow the pool to {size}"));
        self.submit_upkeep("grow", Vec::new(), text, async move { pool.grow(size).await.into() });
        Ok(())
    }

    pub(super) fn upkeep(&mut self, kind: Kind) {
        let pool = self.session.pool.clone();
        match kind {
            Kind::Checkpoint => {
                let future = async move { pool.checkpoint().await.into() };
                self.submit_upkeep("checkpoint", Vec::new(), "checkpoint".into(), future);
            }
            Kind::Check => self.check(),
            _ => {
                let future = async move { pool.wait_freed().await.into() };
                self.submit_upkeep("settle", Vec::new(), "settle".into(), future);
            }
        }
    }

    fn check(&mut self) {
        let pool = self.session.pool.clone();
        let future = async move {
            match pool.check().await {
                Ok(report) => Outcome { report: Some(report), ..Outcome::default() },
                Err(e) => Err(e).into(),
            }
        };
        let start = Start::new(Class::Other("check"), self.known.model.tick(), Vec::new(), "check".into());
        self.submit(start, future, |_, ended| ended.outcome.report.iter().try_for_each(judge));
    }

    /// Closes cleanly and opens again: everything is there, flushed or not.
    pub(super) fn reopen(&mut self) -> Result<(), Violation> {
        self.drain()?;
        if self.trouble.armed.is_some() || self.trouble.patience.is_some() || self.session.disk.faults_hit() > 0 {
            return Ok(());
        }
        self.say(|| "close and open again".into());
        let pool = self.session.pool.clone();
        let closed = self.session.exec.run(PATIENCE_STEPS, async move { pool.close().await })?;
        closed.map_err(|e| Violation::new("P6", format!("the pool cannot be closed: {e}")))?;
        let start = self.known.model.tick();
        self.known.model.flushed(None, start);
        let mask = self.rng.next();
        self.cut(Crash::Power, mask)
    }
}
