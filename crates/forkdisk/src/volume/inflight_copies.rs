//! Running copies of one volume, and writes that join them: a write to a chunk that is being copied is merged
//! into the copy instead of waiting and writing a second time. That is possible until the affected part was
//! submitted, and while no earlier write waits for it.

use std::ops::Range;
use std::rc::Rc;

use crate::copier::ProvidedBytes;
use crate::device::{Buf, Device};
use crate::live::{CopyPart, InflightBreak};
use crate::planted::correct;
use crate::sync::QueuedWrite;

use super::Volume;

impl<D: Device> Volume<D> {
    /// Merges `buf` into a running copy if one accepts it. `Err` returns the buffer and its place in the
    /// write queue: it has to be written normally, also after a copy that failed.
    pub(super) async fn join_copy(
        &self,
        offset: u64,
        buf: Buf,
        pages: &Range<u64>,
    ) -> Result<Buf, (Buf, QueuedWrite<Buf>)> {
        let range = offset..offset + buf.len() as u64;
        let found = self.joinable_copy(&range, pages);
        let queued = self.live.write_queue.enter(pages.clone());
        let Some(joined) = found else { return Err((buf, queued)) };
        joined.queued_ids.borrow_mut().push(queued.id());
        joined.joined.set(range.end);
        let bytes = Rc::new(buf);
        let parts = joined.parts_of(&range).expect("found with it");
        for part in &parts {
            let (from, to) = (part.range.start.max(range.start), part.range.end.min(range.end));
            let place = (from - offset) as usize..(to - offset) as usize;
            let given = ProvidedBytes { at: from - part.range.start, range: place, bytes: bytes.clone() };
            correct!(part.ticket.give(given), Bug::JoinedWriteLost => true);
        }
        let mut submitted = true;
        for part in &parts {
            submitted &= part.ticket.wait_submitted().await;
        }
        // Keeps its place in the queue in case it has to be written normally.
        let queued = (!submitted).then_some(queued);
        let outcome = joined.outcome().await;
        let buf = Rc::try_unwrap(bytes).unwrap_or_else(|shared| Buf::copy_of(&shared));
        match outcome {
            Ok(()) => Ok(buf),
            Err(_) => Err((buf, queued.unwrap_or_else(|| self.live.write_queue.enter(pages.clone())))),
        }
    }

    fn joinable_copy(&self, range: &Range<u64>, pages: &Range<u64>) -> Option<Rc<InflightBreak>> {
        let running = self.live.breaks.borrow();
        if running.is_empty() {
            return None;
        }
        if self.live.locks.is_awaited(pages) {
            return None;
        }
        let takes = |part: &&CopyPart| {
            let at = range.start.max(part.range.start) - part.range.start;
            correct!(part.ticket.takes(at), Bug::JoinedWriteTooLate => true)
        };
        let joins = |b: &&Rc<InflightBreak>| {
            let in_order =
                b.joined.get() <= range.start && self.live.write_queue.is_behind_only(pages, &b.queued_ids.borrow());
            in_order && b.parts_of(range).is_some_and(|parts| parts.iter().all(takes))
        };
        running.iter().find(joins).cloned()
    }
}
