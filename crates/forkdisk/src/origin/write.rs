//! Writing to an origin: in place, after the exceptions of its snapshots are durable.

use std::rc::Rc;

use smallvec::smallvec;

use crate::device::{Buf, Device, Segment};
use crate::error::{Error, Result};
use crate::format::Record;
use crate::planted::correct;
use crate::store::publish::publish_admitted;
use crate::store::{EditError, Store, commit, no_space_error};
use crate::sync::{LockMode, PlanGuard, RangeGuard};

use super::Origin;
use super::lookahead::Streams;
use super::plan::SpaceWait;

/// Zeroes written at once, in bytes.
const ZERO_BUFFER_BYTES: u64 = 1 << 20;

impl<D: Device> Origin<D> {
    /// Writes `buf`; the range has been checked.
    pub async fn write(&self, store: &Rc<Store<D>>, offset: u64, buf: Buf, fua: bool) -> (Result<()>, Buf) {
        let unit = self.device.block_size() as u64;
        let end = offset + buf.len() as u64;
        let blocks = offset / unit..end.div_ceil(unit);
        if self.is_rolling_back(store)
            && let Err(e) = self.roll_back_before_write(store, offset, end).await
        {
            return (Err(e), buf);
        }
        if offset.is_multiple_of(unit) && end.is_multiple_of(unit) {
            let _edges = self.edges.lock(blocks, LockMode::Shared).await;
            return self.write_blocks(store, offset, buf, fua).await;
        }
        // Completes partial blocks first.
        let _edges = self.edges.lock(blocks.clone(), LockMode::Exclusive).await;
        let start = blocks.start * unit;
        let wide = self.device.buffer((blocks.end * unit - start) as usize);
        let (read, mut wide) = self.read(start, wide).await;
        if let Err(e) = read {
            return (Err(e), buf);
        }
        let at = (offset - start) as usize;
        wide[at..at + buf.len()].copy_from_slice(&buf);
        (self.write_blocks(store, start, wide, fua).await.0, buf)
    }

    /// The range reads as zeroes afterwards.
    pub async fn write_zeroes(&self, store: &Rc<Store<D>>, offset: u64, len: u64, fua: bool) -> Result<()> {
        let mut done = 0;
        while done < len {
            let n = ZERO_BUFFER_BYTES.min(len - done);
            self.write(store, offset + done, Buf::zeroed(n as usize), fua).await.0?;
            done += n;
        }
        Ok(())
    }

    /// Writes whole blocks of the device.
    async fn write_blocks(&self, store: &Rc<Store<D>>, offset: u64, buf: Buf, fua: bool) -> (Result<()>, Buf) {
        self.hot_ranges.borrow_mut().note(offset, buf.len() as u64, self.chunk);
        let waiting = Streams::enter(&self.streams, offset, offset + buf.len() as u64);
        let mut patience = SpaceWait::default();
        let held = match self.admit(store, offset, offset + buf.len() as u64, Some(&mut patience)).await {
            Ok(held) => held,
            Err(EditError::NoSpace) => return (Err(no_space_error()), buf),
            Err(EditError::Error(e)) => return (Err(e), buf),
        };
        drop(waiting);
        let segment = Segment { offset, at: 0, len: buf.len() };
        self.counters.writes.add(&[segment]);
        let (result, buf) = self.device.write(buf, smallvec![segment], fua).await;
        drop(held);
        store.checkpoint_soon();
        (result.map_err(|e| Error::io(format!("writing the origin at {offset}"), e)), buf)
    }

    /// Waits until the range may be written, which holds as long as the returned guard lives. Without
    /// `patience` it does not wait for space.
    pub(super) async fn admit(
        &self,
        store: &Rc<Store<D>>,
        offset: u64,
        end: u64,
        mut patience: Option<&mut SpaceWait>,
    ) -> std::result::Result<(RangeGuard, PlanGuard), EditError> {
        store.check_writable()?;
        self.check_alive()?;
        if !self.marked_dirty.get() {
            self.mark_dirty(store).await?;
        }
        self.note_written(store, offset, end)?;
        let mut came_late = false;
        loop {
            let chunks = self.chunks(offset, end);
            let held = match self.locks.try_lock(chunks.clone(), LockMode::Shared) {
                Some(held) => held,
                // A copy is running there. Other writes wait for it, too, and it may serve them; in one queue
                // they continue in their order.
                None if !std::mem::replace(&mut came_late, true) => {
                    self.copy_out(store, offset, end, patience.as_deref_mut()).await?;
                    continue;
                }
                None => self.locks.lock(chunks, LockMode::Shared).await,
            };
            let plan = store.generations.enter();
            if self.first_missing_exception(store, offset, end).await?.is_none() {
                self.check_alive()?;
                // After a failure of the pool, exceptions may exist in memory only.
                correct!(store.check_alive()?, Bug::OriginIgnoresFailedPool => ());
                let deletion = correct!(self.is_deletion_pending(store), Bug::PendingDeletionBelieved => false);
                let note = correct!(self.is_note_pending(store), Bug::WrittenNotedLate => false);
                if !deletion && !note {
                    return Ok((held, plan));
                }
                drop((plan, held));
                if let Some(nothing) = self.run_small_copy(store, 0) {
                    nothing.end_with_others(&*store.runtime, commit::last_duration(store)).await;
                }
                store.clone().commit().await?;
                continue;
            }
            drop((plan, held));
            let copied = self.copy_out(store, offset, end, patience.as_deref_mut()).await;
            correct!(
                copied?,
                Bug::WrittenWithoutCopy => match copied {
                    Ok(()) => (),
                    Err(_) => return Ok((
                        self.locks.lock(self.chunks(offset, end), LockMode::Shared).await,
                        store.generations.enter(),
                    )),
                }
            );
        }
    }

    /// Whether a crash now could bring back a snapshot for which nothing was copied since its deletion.
    fn is_deletion_pending(&self, store: &Store<D>) -> bool {
        let meta = store.meta.borrow();
        meta.directory.chain(self.id).is_some_and(|chain| chain.deleted_until > meta.journal.durable_seq())
    }

    /// Before a write: records the zones in which it is the first to reach the sample. Durable once the journal is
    /// durable up to `noted_until`.
    fn note_written(&self, store: &Store<D>, offset: u64, end: u64) -> Result<()> {
        let zones = self.sample.reached(offset, end);
        if zones == 0 {
            return Ok(());
        }
        let mut meta = store.meta.borrow_mut();
        publish_admitted(store, &mut meta, &Record::ZonesWritten { id: self.id, zones })?;
        self.sample.note(zones);
        self.noted_until.set(meta.journal.next());
        Ok(())
    }

    /// Whether a crash now could lose such a record.
    fn is_note_pending(&self, store: &Store<D>) -> bool {
        self.noted_until.get() > store.meta.borrow().journal.durable_seq()
    }
}
