//! Rollback of an origin: a durable state with a cursor. From the moment it is recorded the origin
//! shows what the snapshot shows; what differs is brought back behind that, chunk by chunk.
//!
//! A chunk is *back* once its contents on the origin are what counts: everything before the cursor is,
//! and so is what is listed (`KeptKey::back`), because somebody wrote there first. Any other chunk is
//! read as the snapshot shows it. The order is: what newer snapshots need is kept → the chunk is
//! brought back → the origin is flushed → the record that says so is durable → somebody else's write.
//! A crash anywhere before the record does the same work again, with the same outcome: the snapshot
//! neither changes nor goes meanwhile.
//!
//! Invariant: who brings chunks back holds them alone in `merging` until the record is durable; so who
//! gets to hold them sees nothing that a crash could take back. Who holds them holds no plan.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use smallvec::smallvec;

use crate::device::{Buf, Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::kept::LISTED;
use crate::format::{NO_VOLUME, OriginFull, Protects, Record, VolumeState};
use crate::map::Stop;
use crate::planted::{Bug, planted};
use crate::pool::{Ended, Failure, Inner, Meta, Pool, no_space, refuse_in_use};
use crate::sync::{Event, Hold, RangeLocks};
use crate::types::{PAGE_SIZE, VirtualPage, VolumeId};

use super::full::Patience;
use super::{Origin, Source, View};

const PAGE: u64 = PAGE_SIZE as u64;
/// Most bytes brought back at once: as long as that takes somebody who writes there may have to wait.
const BATCH: u64 = 1 << 20;
/// Pages of the pool that noting chunks may take.
const ROOM: u64 = 16;
/// Runs looked at before others have their turn.
const LOOKS: usize = 256;
/// Pause before what has failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// A rollback under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rolling {
    /// The snapshot that is brought back.
    pub snapshot: VolumeId,
    /// Whose copies count for it.
    pub view: View,
    /// Chunks before this one are back.
    pub cursor: u64,
}

/// The task that brings an origin's chunks back.
#[derive(Default)]
pub(super) struct Roller {
    running: Cell<bool>,
    /// It is to end after the step that it is in.
    stop: Cell<bool>,
    changed: Event,
    /// The record that it has ended is not durable yet: after a crash it goes on.
    ending: Cell<bool>,
    /// Why the last step came to nothing.
    error: RefCell<Option<Error>>,
    /// That was because the pool is full.
    starved: Cell<bool>,
    /// Chunks that are being brought back, by chunk.
    merging: Rc<RangeLocks>,
}

impl Meta {
    /// The rollback of an origin that is under way.
    pub fn rolling(&self, origin: VolumeId) -> Option<Rolling> {
        let record = &self.directory.get(origin)?.record;
        let snapshot = record.protects?.rolling;
        let (_, view) = self.view_of(snapshot)?;
        Some(Rolling { snapshot, view, cursor: record.cursor })
    }

    /// Whether `chunk` is back, and for how many from there on, at most up to `end`, that is so.
    pub fn is_back(&mut self, origin: VolumeId, chunk: u64, end: u64) -> std::result::Result<(bool, u64), Failure> {
        let Some(rolling) = self.rolling(origin) else { return Ok((true, end - chunk)) };
        if chunk < rolling.cursor {
            return Ok((true, rolling.cursor.min(end) - chunk));
        }
        let (protects, _) = self.protects(origin).ok_or(Failure::Gone)?;
        // What the snapshot ends before stays as it is: the origin has become longer since.
        let chunk_size = self.directory.get(origin).ok_or(Failure::Gone)?.record.chunk;
        let shown = self.shown_by(rolling.snapshot).ok_or(Failure::Gone)?.div_ceil(chunk_size);
        if chunk >= shown {
            return Ok((true, end - chunk));
        }
        let end = end.min(shown);
        let bits = self.listed(&protects.kept, chunk)?;
        let is = |chunk: u64| bits >> (chunk % LISTED) & 1 == 1;
        let end = end.min((chunk / LISTED + 1) * LISTED);
        Ok((is(chunk), (chunk..end).take_while(|&c| is(c) == is(chunk)).count() as u64))
    }

    /// Parts of an origin, in bytes, that the rollback changes, from byte `at` on: at most so many looks.
    /// Moves `at` on to where the next call goes on.
    fn lost_parts(
        &mut self,
        origin: VolumeId,
        at: &mut u64,
        end: u64,
        parts: &mut Vec<Range<u64>>,
    ) -> std::result::Result<(), Failure> {
        let Some(rolling) = self.rolling(origin) else {
            *at = end;
            return Ok(());
        };
        let record = &self.directory.get(origin).ok_or(Failure::Gone)?.record;
        let (chunk, pages) = (record.chunk, record.size.div_ceil(PAGE));
        for _ in 0..LOOKS {
            if *at >= end {
                return Ok(());
            }
            let (back, chunks) = self.is_back(origin, *at / chunk, end.div_ceil(chunk))?;
            let stop = ((*at / chunk + chunks) * chunk).min(end);
            if back {
                *at = stop;
                continue;
            }
            let page = VirtualPage(*at / PAGE);
            let through = (origin, rolling.view, pages);
            let (source, n) = self.source_of(rolling.snapshot, through, page, stop.div_ceil(PAGE) - page.0)?;
            let next = ((page.0 + n) * PAGE).min(stop);
            if matches!(source, Source::Own(_) | Source::Kept(_)) {
                match parts.last_mut().filter(|last| last.end == *at) {
                    Some(last) => last.end = next,
                    None => parts.push(*at..next),
                }
            }
            *at = next;
        }
        Ok(())
    }
}

impl<D: Device> Origin<D> {
    fn rolling(&self, inner: &Inner<D>) -> Option<Rolling> {
        inner.meta.borrow().rolling(self.id)
    }

    /// As [`read`](Self::read), of what counts: as long as a rollback is under way, of chunks that are not
    /// back what the snapshot shows.
    pub async fn read_now(&self, inner: &Inner<D>, offset: u64, mut buf: Buf) -> (Result<()>, Buf) {
        if self.rolling(inner).is_none() || planted(Bug::RollbackNotShown) {
            return self.read(offset, buf).await;
        }
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let chunks = self.chunks(at, end);
            // Nothing is said of it once the rollback has ended.
            let found = inner
                .look(|meta| {
                    let rolling = meta.rolling(self.id);
                    Ok((rolling, meta.is_back(self.id, chunks.start, chunks.end)?))
                })
                .await;
            let (rolling, (back, n)) = match found {
                Ok(found) => found,
                Err(e) => return (Err(e), buf),
            };
            let stop = ((chunks.start + n) * self.chunk).min(end);
            let part = match rolling.filter(|_| !back) {
                None => self.read(at, self.device.buffer((stop - at) as usize)).await,
                Some(rolling) => self.read_snapshot(inner, rolling, at, stop).await,
            };
            match part {
                (Ok(()), part) => buf[(at - offset) as usize..(stop - offset) as usize].copy_from_slice(&part),
                // The rollback ended while this waited, and the snapshot was deleted: now the origin has it.
                (Err(e), _) if e.kind() == ErrorKind::NotFound && self.has_ended(inner, rolling) => continue,
                (Err(e), _) => return (Err(e), buf),
            }
            at = stop;
        }
        (Ok(()), buf)
    }

    /// Whether this rollback is not under way any more.
    fn has_ended(&self, inner: &Inner<D>, rolling: Option<Rolling>) -> bool {
        let snapshot = |rolling: Option<Rolling>| rolling.map(|rolling| rolling.snapshot);
        snapshot(self.rolling(inner)) != snapshot(rolling)
    }

    /// What the snapshot shows from `offset` to `end`; whole pages of it are read.
    async fn read_snapshot(&self, inner: &Inner<D>, rolling: Rolling, offset: u64, end: u64) -> (Result<()>, Buf) {
        let (start, stop) = (offset / PAGE * PAGE, end.next_multiple_of(PAGE));
        let buf = self.device.buffer((stop - start) as usize);
        let (result, mut buf) = self.read_through(inner, rolling.snapshot, (rolling.view, self.size), start, buf).await;
        buf.copy_within((offset - start) as usize..(end - start) as usize, 0);
        buf.set_len((end - offset) as usize);
        (result, buf)
    }

    /// Before somebody writes from `offset` to `end`: what he does not overwrite is back, and it is known,
    /// durably, that these chunks are.
    pub(super) async fn bring_back_first(&self, inner: &Rc<Inner<D>>, offset: u64, end: u64) -> Result<()> {
        let chunks = self.chunks(offset, end);
        let mut patience = Patience::default();
        loop {
            self.rollback_ended().await;
            if self.rolling(inner).is_none() {
                return Ok(());
            }
            let alone = self.roller.merging.lock(chunks.clone(), Hold::Alone).await;
            let noted = match self.bring_back(inner, chunks.clone()).await {
                Ok(()) => self.note_back(inner, chunks.clone()).await,
                Err(ended) => Err(ended),
            };
            match noted {
                Ok(()) => return Ok(()),
                Err(Ended::Error(e)) => return Err(e),
                Err(Ended::NoSpace) => {
                    drop(alone);
                    self.wait_for_space(inner, &mut patience).await?;
                }
            }
        }
    }

    /// Waits while a rollback has ended and that is not durable.
    pub async fn rollback_ended(&self) {
        while self.roller.ending.get() {
            self.roller.changed.wait().await;
        }
    }

    /// Writes what the snapshot has of these chunks to the origin, as far as they are not back; they are
    /// held.
    async fn bring_back(&self, inner: &Rc<Inner<D>>, chunks: Range<u64>) -> std::result::Result<(), Ended> {
        // What is written must not be there after a crash that takes the rollback back.
        if self.is_beginning(inner) {
            inner.clone().commit().await.map_err(Ended::Error)?;
        }
        let end = (chunks.end * self.chunk).min(self.size);
        let mut at = chunks.start * self.chunk;
        while at < end {
            let Some(rolling) = self.rolling(inner) else { return Ok(()) };
            let mut parts = Vec::new();
            // What has been found stays found when a table has to be loaded.
            inner.edit(|meta| meta.lost_parts(self.id, &mut at, end, &mut parts)).await?;
            for part in parts.iter().flat_map(pieces) {
                let (read, buf) = self.read_snapshot(inner, rolling, part.start, part.end).await;
                read.map_err(Ended::Error)?;
                let held = match planted(Bug::RolledBackWithoutCopy) {
                    true => None,
                    false => Some(self.admit(inner, part.start, part.end, None).await?),
                };
                let segment = Segment { offset: part.start, at: 0, len: buf.len() };
                self.counters.writes.add(&[segment]);
                let (written, _) = self.device.write(buf, smallvec![segment], false).await;
                drop(held);
                let failed = |e| Ended::Error(Error::io(format!("bringing back the origin at {}", part.start), e));
                written.map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Whether a crash now could take back that the rollback has begun.
    fn is_beginning(&self, inner: &Inner<D>) -> bool {
        let meta = inner.meta.borrow();
        meta.directory.chain(self.id).is_some_and(|chain| chain.rolled_until > meta.journal.confirmed())
    }

    /// These chunks are back, durably.
    async fn note_back(&self, inner: &Rc<Inner<D>>, chunks: Range<u64>) -> std::result::Result<(), Ended> {
        let mut flushed = planted(Bug::BackBeforeFlush);
        let mut at = chunks.start;
        while at < chunks.end && !planted(Bug::BackNotNoted) {
            let (back, n) = inner.edit(|meta| meta.is_back(self.id, at, chunks.end)).await?;
            // One record speaks of chunks that are listed together.
            let n = n.min((at / LISTED + 1) * LISTED - at);
            if !back {
                if !flushed {
                    self.flush().await.map_err(Ended::Error)?;
                    flushed = true;
                }
                let record = Record::Back { origin: self.id, first: at, count: n as u32 };
                inner
                    .edit(|meta| {
                        if meta.space.available() < meta.checkpoint_pages() + ROOM {
                            return Err(Failure::Stop(Stop::NoSpace));
                        }
                        meta.note_back(self.id, at, n)?;
                        meta.journal.append(&record);
                        Ok(())
                    })
                    .await?;
            }
            at += n;
        }
        if flushed { inner.clone().commit().await.map_err(Ended::Error) } else { Ok(()) }
    }

    /// Brings back what is not yet, in the background.
    pub(super) fn roll_soon(self: &Rc<Self>, inner: &Rc<Inner<D>>) {
        let idle = self.rolling(inner).is_none() || inner.options.read_only;
        if idle || self.roller.running.replace(true) {
            return;
        }
        self.roller.stop.set(false);
        let (origin, inner) = (self.clone(), inner.clone());
        let runtime = inner.runtime.clone();
        runtime.spawn(Box::pin(async move {
            origin.roll(&inner).await;
            drop(inner);
            origin.roller.running.set(false);
            origin.roller.changed.notify();
        }));
    }

    /// The task in the background ends, and has ended when this returns.
    pub(super) async fn stop_rolling(&self) {
        self.roller.stop.set(true);
        while self.roller.running.get() {
            self.roller.changed.wait().await;
        }
    }

    async fn roll(&self, inner: &Rc<Inner<D>>) {
        let mut patience = Patience::default();
        loop {
            let over = self.roller.stop.get() || inner.closing.get() || inner.closed.get();
            if over || self.check_alive().is_err() || inner.check_alive().is_err() {
                return;
            }
            let ended = match self.roll_step(inner).await {
                // The next one may have begun before the record of this one's end was durable.
                Ok(()) if self.rolling(inner).is_some() => continue,
                Ok(()) => return,
                Err(ended) => ended,
            };
            // The origin's own device may be full, too: nothing in the pool helps there.
            let is_full = matches!(ended, Ended::NoSpace);
            let drops =
                inner.meta.borrow().protects(self.id).is_some_and(|(p, _)| p.when_full == OriginFull::DropOldest);
            if is_full && drops && self.wait_for_space(inner, &mut patience).await.is_ok() {
                continue;
            }
            self.roller.starved.set(is_full);
            *self.roller.error.borrow_mut() = Some(match ended {
                Ended::NoSpace => no_space(),
                Ended::Error(e) => e,
            });
            self.roller.changed.notify();
            if is_full && inner.has_pending_space() {
                let _ = inner.clone().checkpoint().await;
            }
            inner.runtime.sleep(RETRY).await;
        }
    }

    /// How long somebody waits for space by the origin's policy.
    fn patience(&self, inner: &Inner<D>) -> Duration {
        match inner.meta.borrow().protects(self.id) {
            Some((Protects { when_full: OriginFull::Wait(seconds), .. }, _)) => Duration::from_secs(seconds.into()),
            _ => Duration::ZERO,
        }
    }

    /// Brings back some chunks behind the cursor, or moves it on over those that need nothing.
    async fn roll_step(&self, inner: &Rc<Inner<D>>) -> std::result::Result<(), Ended> {
        let last = self.size.div_ceil(self.chunk);
        let Some(Rolling { snapshot, cursor, .. }) = self.rolling(inner) else { return Ok(()) };
        let batch = cursor..(cursor + (BATCH / self.chunk).max(1)).min(last);
        let (mut at, mut parts) = (cursor * self.chunk, Vec::new());
        let end = self.size;
        // Nobody lists chunks behind the cursor while it is decided how far it moves.
        let mut alone = self.roller.merging.lock(cursor..last, Hold::Alone).await;
        while parts.is_empty() && at < end {
            inner.edit(|meta| meta.lost_parts(self.id, &mut at, end, &mut parts)).await?;
        }
        let next = parts.first().map_or(last, |part| part.start / self.chunk);
        let mut to = if next > cursor { next } else { batch.end };
        if next == cursor {
            drop(alone);
            alone = self.roller.merging.lock(batch.clone(), Hold::Alone).await;
            self.bring_back(inner, batch).await?;
        }
        // One list goes with each step.
        if let Some(list) = inner.edit(|meta| meta.first_back_list(self.id, to)).await? {
            to = to.min(list + LISTED);
        }
        self.flush().await.map_err(Ended::Error)?;
        let to = if planted(Bug::CursorTooFar) { (to + 1).min(last) } else { to };
        let snapshot = if to == last { NO_VOLUME } else { snapshot };
        let record = Record::Roll { origin: self.id, snapshot, cursor: to };
        self.roller.ending.set(to == last && !planted(Bug::RollbackEndBelieved));
        let moved = inner.edit(|meta| {
            meta.roll(self.id, snapshot, to)?;
            meta.journal.append(&record);
            Ok(())
        });
        let durable = match moved.await {
            Ok(()) => inner.clone().commit().await.map_err(Ended::Error),
            Err(ended) => Err(ended),
        };
        drop(alone);
        self.roller.ending.set(false);
        self.roller.changed.notify();
        durable?;
        inner.checkpoint_soon();
        Ok(())
    }
}

/// How long a rollback has come no further for want of space.
#[derive(Default)]
struct Hunger(Option<(u64, Duration)>);

impl Hunger {
    /// Whether whoever waits for the rollback, which lacks space where it is now, waits on.
    fn bears(&mut self, patience: Duration, rolling: Rolling, now: Duration) -> bool {
        let (cursor, since) = self.0.filter(|&(cursor, _)| cursor == rolling.cursor).unwrap_or((rolling.cursor, now));
        self.0 = Some((cursor, since));
        now.saturating_sub(since) < patience
    }
}

/// A range in pieces of at most one batch.
fn pieces(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = range.end;
    (range.start..end).step_by(BATCH as usize).map(move |at| at..(at + BATCH).min(end))
}

impl<D: Device> Pool<D> {
    /// An origin gets the contents of its snapshot; all snapshots stay. When this returns that is durable
    /// and what is read; what differs is brought back in the background, also after a crash, and until
    /// then the device by itself is not what the origin shows.
    pub(crate) async fn roll_back_origin(&self, volume: &str, snapshot: &str) -> Result<()> {
        let inner = &self.0;
        let name = format!("{volume}@{snapshot}");
        let find = |meta: &Meta| -> Result<(VolumeId, VolumeId)> {
            let (target, from) = (meta.directory.find(volume)?, meta.directory.find(&name)?);
            for (entry, name) in [(target, volume), (from, &name)] {
                // Those who only read a snapshot are not in the way.
                if entry.record.state == VolumeState::Origin || entry.record.flags.writable {
                    refuse_in_use(entry, name)?;
                }
            }
            refuse_rolling(meta, target.record.id)?;
            Ok((target.record.id, from.record.id))
        };
        let (id, _) = find(&inner.meta.borrow())?;
        let origin = inner.attached(id)?;
        origin.check_alive()?;
        origin.mark(inner).await?;
        inner
            .verb(|meta| {
                let (origin, snapshot) = find(meta)?;
                Ok((Record::Roll { origin, snapshot, cursor: 0 }, ()))
            })
            .await?;
        origin.roll_soon(inner);
        Ok(())
    }

    /// Waits until the rollback of an origin, if one is under way, has brought everything back; `progress` is
    /// told how many bytes of how many, and waiting ends when it answers false. Fails when a step does, for want of
    /// space only once it has waited as long as a write would, though the rollback goes on. Another one that begins
    /// when it has ended is not waited for.
    pub async fn rolled_back(&self, name: &str, mut progress: impl FnMut(u64, u64) -> bool) -> Result<()> {
        let inner = &self.0;
        let id = inner.meta.borrow().directory.find(name)?.record.id;
        let origin = inner.attached(id)?;
        origin.roller.error.take();
        let snapshot = origin.rolling(inner).map(|rolling| rolling.snapshot);
        let mut hunger = Hunger::default();
        while let Some(rolling) = origin.rolling(inner).filter(|rolling| Some(rolling.snapshot) == snapshot) {
            if !progress((rolling.cursor * origin.chunk).min(origin.size), origin.size) {
                return Ok(());
            }
            if let Some(error) = origin.roller.error.take()
                && !(origin.roller.starved.get() && hunger.bears(origin.patience(inner), rolling, inner.runtime.now()))
            {
                return Err(error);
            }
            origin.check_alive()?;
            inner.check_writable()?;
            if origin.roller.stop.get() || inner.closing.get() || inner.closed.get() {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("{name:?} is being closed; its rollback goes on when it is opened again"),
                ));
            }
            // Not yet where the same has been asked for again just when it ended.
            origin.roll_soon(inner);
            origin.roller.changed.wait().await;
        }
        let _ = progress(origin.size, origin.size);
        Ok(())
    }
}

/// Refuses while a rollback of the origin is under way.
pub fn refuse_rolling(meta: &Meta, origin: VolumeId) -> Result<()> {
    let Some(rolling) = meta.rolling(origin) else { return Ok(()) };
    let name = |id| meta.directory.get(id).map(|v| meta.directory.full_name(&v.record)).unwrap_or_default();
    let why =
        format!("{:?} is being rolled back to {:?}; wait until that has ended", name(origin), name(rolling.snapshot));
    Err(Error::new(ErrorKind::Busy, why))
}
