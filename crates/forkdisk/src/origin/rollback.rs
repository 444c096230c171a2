//! Rollback of an origin: a durable state with a cursor. As soon as it is recorded, the origin reads as the
//! snapshot; the differences are written in the background, chunk by chunk.
//!
//! A chunk is *rolled back* once its valid contents are on the device: every chunk before the cursor is, and
//! so are the listed ones (`ExceptionKey::back`), which were written in the meantime. Any other chunk is read
//! from the snapshot. The order is: exceptions of newer snapshots durable → chunk written → origin flushed →
//! record durable → the write of a client. After a crash before the record the same work is repeated with the
//! same result: the snapshot neither changes nor is deleted meanwhile.
//!
//! Invariant: a chunk that is being rolled back is locked exclusively in `chunk_locks` until its record is
//! durable, so the next holder of the lock sees nothing that a crash could take back. The holder of the lock
//! has no plan.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use smallvec::smallvec;

use crate::catalog::{Catalog, Rollback, exceptions, refuse_during_rollback, rollback};
use crate::device::{Buf, Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::ordered::CHUNKS_PER_LIST;
use crate::format::{NO_VOLUME, OriginFull, OriginRecord, Record, VolumeState};
use crate::planted::correct;
use crate::space::Need;
use crate::store::{EditError, Store, no_space_error};
use crate::sync::{Event, LockMode, RangeLocks};
use crate::types::{PAGE_BYTES, VolumeId};

use super::plan::SpaceWait;
use super::{Origin, Origins};

/// Most bytes rolled back at once; a write to the same chunks may wait for that long.
const BATCH_BYTES: u64 = 1 << 20;
/// Pause before a failed step is retried.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The task that rolls an origin back.
#[derive(Default)]
pub(super) struct RollbackTask {
    running: Cell<bool>,
    /// Ends the task after its current step.
    stop: Cell<bool>,
    changed: Event,
    /// The record of the end is not durable yet: after a crash the rollback continues.
    pub(super) ending: Cell<bool>,
    /// Why the last step failed.
    error: RefCell<Option<Error>>,
    /// The last step failed because the pool is full.
    out_of_space: Cell<bool>,
    /// Chunks being rolled back, by chunk.
    chunk_locks: Rc<RangeLocks>,
}

impl<D: Device> Origin<D> {
    fn rollback(&self, store: &Store<D>) -> Option<Rollback> {
        store.meta.borrow().rollback(self.id)
    }

    /// Like [`read`](Self::read), with the valid contents: during a rollback, chunks that are not rolled back
    /// are read from the snapshot.
    pub async fn read_current(&self, store: &Store<D>, offset: u64, mut buf: Buf) -> (Result<()>, Buf) {
        if correct!(self.rollback(store).is_none(), Bug::RollbackNotShown => true) {
            return self.read(offset, buf).await;
        }
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let chunks = self.chunks(at, end);
            // Finds nothing once the rollback has ended.
            let found = store
                .retry_no_alloc(|meta| {
                    let rollback = meta.rollback(self.id);
                    Ok((rollback, rollback::is_rolled_back(meta, self.id, chunks.start, chunks.end)?))
                })
                .await;
            let (rollback, (back, n)) = match found {
                Ok(found) => found,
                Err(e) => return (Err(e), buf),
            };
            let stop = ((chunks.start + n) * self.chunk).min(end);
            let part = match rollback.filter(|_| !back) {
                None => self.read(at, self.device.buffer((stop - at) as usize)).await,
                Some(rollback) => read_snapshot(self, store, rollback, at, stop).await,
            };
            match part {
                (Ok(()), part) => buf[(at - offset) as usize..(stop - offset) as usize].copy_from_slice(&part),
                // The rollback ended during the read, and the snapshot was deleted: the origin has the
                // contents.
                (Err(e), _) if e.kind() == ErrorKind::NotFound && has_ended(self, store, rollback) => continue,
                (Err(e), _) => return (Err(e), buf),
            }
            at = stop;
        }
        (Ok(()), buf)
    }

    /// Before a write from `offset` to `end`: rolls the affected chunks back except for what is overwritten,
    /// and records that durably.
    pub(super) async fn roll_back_before_write(&self, store: &Rc<Store<D>>, offset: u64, end: u64) -> Result<()> {
        let chunks = self.chunks(offset, end);
        let mut patience = SpaceWait::default();
        loop {
            self.rollback_ended().await;
            if self.rollback(store).is_none() {
                return Ok(());
            }
            let alone = self.rollback_task.chunk_locks.lock(chunks.clone(), LockMode::Exclusive).await;
            let noted = match roll_back_chunks(self, store, chunks.clone()).await {
                Ok(()) => note_back(self, store, chunks.clone()).await,
                Err(ended) => Err(ended),
            };
            match noted {
                Ok(()) => return Ok(()),
                Err(EditError::Error(e)) => return Err(e),
                Err(EditError::NoSpace) => {
                    drop(alone);
                    self.wait_for_space(store, &mut patience).await?;
                }
            }
        }
    }

    /// Waits while the end of a rollback is not durable.
    pub async fn rollback_ended(&self) {
        while self.rollback_task.ending.get() {
            self.rollback_task.changed.wait().await;
        }
    }

    /// Starts the background task of a rollback.
    pub(super) fn start_rollback_task(self: &Rc<Self>, store: &Rc<Store<D>>) {
        let idle = self.rollback(store).is_none() || store.options.read_only;
        if idle || self.rollback_task.running.replace(true) {
            return;
        }
        self.rollback_task.stop.set(false);
        // The layers above last as long as the task: they free the space of snapshots that it drops.
        let (origin, store, above) = (self.clone(), store.clone(), store.hooks.get());
        let runtime = store.runtime.clone();
        runtime.spawn(Box::pin(async move {
            roll(&origin, &store).await;
            drop((store, above));
            origin.rollback_task.running.set(false);
            origin.rollback_task.changed.notify();
        }));
    }

    /// Stops the background task and waits for its end.
    pub(super) async fn stop_rolling(&self) {
        self.rollback_task.stop.set(true);
        while self.rollback_task.running.get() {
            self.rollback_task.changed.wait().await;
        }
    }
}

/// How long a rollback has made no progress for lack of space.
#[derive(Default)]
struct SpaceStall(Option<(u64, Duration)>);

impl SpaceStall {
    /// Whether the caller, which waits for a rollback without space, goes on waiting.
    fn keeps_waiting(&mut self, patience: Duration, rollback: Rollback, now: Duration) -> bool {
        let (cursor, since) = self.0.filter(|&(cursor, _)| cursor == rollback.cursor).unwrap_or((rollback.cursor, now));
        self.0 = Some((cursor, since));
        now.saturating_sub(since) < patience
    }
}

/// Splits a range into batches.
fn pieces(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = range.end;
    (range.start..end).step_by(BATCH_BYTES as usize).map(move |at| at..(at + BATCH_BYTES).min(end))
}

impl<D: Device> Origins<D> {
    /// Rolls an origin back to its snapshot; all snapshots stay. On return that is durable and visible; the
    /// differences are written in the background, also after a crash, and until then the device alone does
    /// not have the contents of the origin.
    pub async fn roll_back(&self, volume: &str, snapshot: &str) -> Result<()> {
        let store = &self.store;
        let name = format!("{volume}@{snapshot}");
        let find = |meta: &Catalog| -> Result<(VolumeId, VolumeId)> {
            let (target, from) = (meta.directory.find(volume)?, meta.directory.find(&name)?);
            for (entry, name) in [(target, volume), (from, &name)] {
                // Readers of a snapshot are not in the way.
                if entry.record.state == VolumeState::Origin || entry.record.flags.writable {
                    store.refuse_in_use(entry.record.id, name)?;
                }
            }
            refuse_during_rollback(meta, target.record.id)?;
            Ok((target.record.id, from.record.id))
        };
        let (id, _) = find(&store.meta.borrow())?;
        let origin = self.attached(id)?;
        origin.check_alive()?;
        origin.mark_dirty(store).await?;
        store
            .verb(|meta| {
                let (origin, snapshot) = find(meta)?;
                Ok((Record::RollbackProgress { origin, snapshot, cursor: 0 }, ()))
            })
            .await?;
        origin.start_rollback_task(store);
        Ok(())
    }

    /// Waits for the end of the origin's rollback, if one is running. `progress` gets the bytes done and the
    /// total; if it returns false, the wait ends. Fails when a step fails; for lack of space only after the
    /// wait of the origin's policy, while the rollback goes on. Does not wait for another rollback that
    /// begins then.
    ///
    /// # Errors
    /// `NotFound` if there is no such origin, `Busy` if its device is not open or the pool is being closed;
    /// the error of a step that failed; and those of [changing](crate#errors).
    pub async fn wait_rollback(&self, name: &str, mut progress: impl FnMut(u64, u64) -> bool) -> Result<()> {
        let store = &self.store;
        let id = store.meta.borrow().directory.find(name)?.record.id;
        let origin = self.attached(id)?;
        origin.rollback_task.error.take();
        let snapshot = origin.rollback(store).map(|rollback| rollback.snapshot);
        let mut hunger = SpaceStall::default();
        while let Some(rollback) = origin.rollback(store).filter(|rollback| Some(rollback.snapshot) == snapshot) {
            if !progress((rollback.cursor * origin.chunk).min(origin.size), origin.size) {
                return Ok(());
            }
            if let Some(error) = origin.rollback_task.error.take()
                && !(origin.rollback_task.out_of_space.get()
                    && hunger.keeps_waiting(patience(&origin, store), rollback, store.runtime.now()))
            {
                return Err(error);
            }
            origin.check_alive()?;
            store.check_writable()?;
            if origin.rollback_task.stop.get() || store.closing.get() || store.closed.get() {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("{name:?} is being closed; its rollback goes on when it is opened again"),
                ));
            }
            // Not yet if another rollback was requested just when this one ended.
            origin.start_rollback_task(store);
            origin.rollback_task.changed.wait().await;
        }
        let _ = progress(origin.size, origin.size);
        Ok(())
    }
}

/// Whether this rollback has ended.
fn has_ended<D: Device>(origin: &Origin<D>, store: &Store<D>, rollback: Option<Rollback>) -> bool {
    let snapshot = |rollback: Option<Rollback>| rollback.map(|rollback| rollback.snapshot);
    snapshot(origin.rollback(store)) != snapshot(rollback)
}

/// Reads the snapshot from `offset` to `end`, in whole pages.
async fn read_snapshot<D: Device>(
    origin: &Origin<D>,
    store: &Store<D>,
    rollback: Rollback,
    offset: u64,
    end: u64,
) -> (Result<()>, Buf) {
    let (start, stop) = (offset / PAGE_BYTES * PAGE_BYTES, end.next_multiple_of(PAGE_BYTES));
    let buf = origin.device.buffer((stop - start) as usize);
    let (result, mut buf) =
        origin.read_through(store, rollback.snapshot, (rollback.view, origin.size), start, buf).await;
    buf.copy_within((offset - start) as usize..(end - start) as usize, 0);
    buf.set_len((end - offset) as usize);
    (result, buf)
}

/// Writes the snapshot's contents of these locked chunks to the origin where they are not rolled back.
async fn roll_back_chunks<D: Device>(
    origin: &Origin<D>,
    store: &Rc<Store<D>>,
    chunks: Range<u64>,
) -> std::result::Result<(), EditError> {
    // A crash that loses the start of the rollback must not leave its writes.
    if is_start_pending(origin, store) {
        store.clone().commit().await.map_err(EditError::Error)?;
    }
    let end = (chunks.end * origin.chunk).min(origin.size);
    let mut at = chunks.start * origin.chunk;
    while at < end {
        let Some(rollback) = origin.rollback(store) else { return Ok(()) };
        let mut parts = Vec::new();
        // Results stay when a table has to be loaded.
        store.retry_on_miss(|meta| rollback::rollback_changes(meta, origin.id, &mut at, end, &mut parts)).await?;
        for part in parts.iter().flat_map(pieces) {
            let (read, buf) = read_snapshot(origin, store, rollback, part.start, part.end).await;
            read.map_err(EditError::Error)?;
            let held = correct!(
                Some(origin.admit(store, part.start, part.end, None).await?),
                Bug::RolledBackWithoutCopy => None
            );
            let segment = Segment { offset: part.start, at: 0, len: buf.len() };
            origin.counters.writes.add(&[segment]);
            let (written, _) = origin.device.write(buf, smallvec![segment], false).await;
            drop(held);
            let failed = |e| EditError::Error(Error::io(format!("bringing back the origin at {}", part.start), e));
            written.map_err(failed)?;
        }
    }
    Ok(())
}

/// Whether a crash now could lose the start of the rollback.
fn is_start_pending<D: Device>(origin: &Origin<D>, store: &Store<D>) -> bool {
    let meta = store.meta.borrow();
    meta.directory.chain(origin.id).is_some_and(|chain| chain.rolled_until > meta.journal.durable_seq())
}

/// Records durably that these chunks are rolled back.
async fn note_back<D: Device>(
    origin: &Origin<D>,
    store: &Rc<Store<D>>,
    chunks: Range<u64>,
) -> std::result::Result<(), EditError> {
    let mut flushed = false;
    let mut at = chunks.start;
    while correct!(at < chunks.end, Bug::BackNotNoted => false) {
        let (back, n) = store.retry_on_miss(|meta| rollback::is_rolled_back(meta, origin.id, at, chunks.end)).await?;
        // One record covers chunks that share a list.
        let n = n.min((at / CHUNKS_PER_LIST + 1) * CHUNKS_PER_LIST - at);
        if !back {
            if !flushed {
                correct!(origin.flush().await.map_err(EditError::Error)?, Bug::BackBeforeFlush => ());
                flushed = true;
            }
            let record = Record::ChunksRolledBack { origin: origin.id, first: at, count: n as u32 };
            store
                .retry_on_miss(|meta| {
                    let _ = meta.reserve(Need::NoteRollback)?;
                    exceptions::note_rolled_back(meta, origin.id, at, n)?;
                    meta.journal.append(&record);
                    Ok(())
                })
                .await?;
        }
        at += n;
    }
    if flushed { store.clone().commit().await.map_err(EditError::Error) } else { Ok(()) }
}

async fn roll<D: Device>(origin: &Origin<D>, store: &Rc<Store<D>>) {
    let mut patience = SpaceWait::default();
    loop {
        let over = origin.rollback_task.stop.get() || store.closing.get() || store.closed.get();
        if over || origin.check_alive().is_err() || store.check_alive().is_err() {
            return;
        }
        let ended = match rollback_step(origin, store).await {
            // The next rollback may have begun before the end of this one was durable.
            Ok(()) if origin.rollback(store).is_some() => continue,
            Ok(()) => return,
            Err(ended) => ended,
        };
        // The origin's own device may be full, too: space in the pool does not help there.
        let is_full = matches!(ended, EditError::NoSpace);
        let drops = store.meta.borrow().protects(origin.id).is_some_and(|(p, _)| p.when_full == OriginFull::DropOldest);
        if is_full && drops && origin.wait_for_space(store, &mut patience).await.is_ok() {
            continue;
        }
        origin.rollback_task.out_of_space.set(is_full);
        *origin.rollback_task.error.borrow_mut() = Some(match ended {
            EditError::NoSpace => no_space_error(),
            EditError::Error(e) => e,
        });
        origin.rollback_task.changed.notify();
        if is_full && store.has_pending_space() {
            let _ = store.clone().checkpoint().await;
        }
        store.runtime.sleep(RETRY_AFTER).await;
    }
}

/// How long a write waits for space by the origin's policy.
fn patience<D: Device>(origin: &Origin<D>, store: &Store<D>) -> Duration {
    match store.meta.borrow().protects(origin.id) {
        Some((OriginRecord { when_full: OriginFull::Wait(seconds), .. }, _)) => Duration::from_secs(seconds.into()),
        _ => Duration::ZERO,
    }
}

/// Rolls back some chunks behind the cursor, or advances it over chunks that need nothing.
async fn rollback_step<D: Device>(origin: &Origin<D>, store: &Rc<Store<D>>) -> std::result::Result<(), EditError> {
    let last = origin.size.div_ceil(origin.chunk);
    let Some(Rollback { snapshot, cursor, .. }) = origin.rollback(store) else { return Ok(()) };
    let batch = cursor..(cursor + (BATCH_BYTES / origin.chunk).max(1)).min(last);
    let (mut at, mut parts) = (cursor * origin.chunk, Vec::new());
    let end = origin.size;
    // No chunks behind the cursor are listed while the next cursor is decided.
    let mut alone = origin.rollback_task.chunk_locks.lock(cursor..last, LockMode::Exclusive).await;
    while parts.is_empty() && at < end {
        store.retry_on_miss(|meta| rollback::rollback_changes(meta, origin.id, &mut at, end, &mut parts)).await?;
    }
    let next = parts.first().map_or(last, |part| part.start / origin.chunk);
    let mut to = if next > cursor { next } else { batch.end };
    if next == cursor {
        drop(alone);
        alone = origin.rollback_task.chunk_locks.lock(batch.clone(), LockMode::Exclusive).await;
        roll_back_chunks(origin, store, batch).await?;
    }
    // Each step removes one list.
    if let Some(list) = store.retry_on_miss(|meta| exceptions::first_rolled_back_list(meta, origin.id, to)).await? {
        to = to.min(list + CHUNKS_PER_LIST);
    }
    origin.flush().await.map_err(EditError::Error)?;
    let to = correct!(to, Bug::CursorTooFar => (to + 1).min(last));
    let snapshot = if to == last { NO_VOLUME } else { snapshot };
    let record = Record::RollbackProgress { origin: origin.id, snapshot, cursor: to };
    origin.rollback_task.ending.set(correct!(to == last, Bug::RollbackEndBelieved => false));
    let moved = store.retry_on_miss(|meta| {
        exceptions::advance_rollback(meta, origin.id, snapshot, to)?;
        meta.journal.append(&record);
        Ok(())
    });
    let durable = match moved.await {
        Ok(()) => store.clone().commit().await.map_err(EditError::Error),
        Err(ended) => Err(ended),
    };
    drop(alone);
    origin.rollback_task.ending.set(false);
    origin.rollback_task.changed.notify();
    durable?;
    store.checkpoint_soon();
    Ok(())
}
