//! Writes of a volume that does not store everything that is written: bytes that are there already are dropped page by
//! page, and pages of zeroes become holes.
//!
//! - Only holes and pages to which others refer, or did, are compared: others are overwritten in place.
//! - What is there is read under an exclusive lock, so that no write in place is in flight. The comparison could see
//!   the data of one before it has ended. A flush would not cover that, although it covers the write that is dropped.
//! - The lock is released before anything is written. A write that comes between is concurrent with this one. After a
//!   live rollback that comes between, all of it is written again, as if it had begun behind that.

use std::ops::Range;

use crate::device::{Buf, Device, Segments, add_segment};
use crate::error::{Error, Result};
use crate::format::{Writes, Zeroes};
use crate::planted::correct;
use crate::store::{EditError, Retry};
use crate::sync::LockMode;
use crate::types::{PAGE_BYTES, PAGE_SIZE};

use super::Volume;
use super::read::ReadPlan;

/// What is done with a part of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// The bytes are there already.
    Drop,
    /// The pages become holes.
    Hole,
    /// It is written.
    Write,
}

/// A part of the client's buffer, and what is done with it.
type Part = (Effect, Range<usize>);

/// Divides a write at `offset` at page boundaries, and joins what has the same effect.
fn parts_of(offset: u64, len: usize, effect: impl Fn(Range<usize>) -> Effect) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut at = 0;
    while at < len {
        let within = (offset + at as u64) % PAGE_BYTES;
        let end = (at + PAGE_SIZE - within as usize).min(len);
        let effect = effect(at..end);
        match parts.last_mut() {
            Some((last, range)) if *last == effect => range.end = end,
            _ => parts.push((effect, at..end)),
        }
        at = end;
    }
    parts
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|&word| u128::from_ne_bytes(word) == 0) && rest.iter().all(|&byte| byte == 0)
}

#[cfg(feature = "planted")]
fn first_if_dropped(mut parts: Vec<Part>) -> Vec<Part> {
    if parts.first().is_some_and(|(effect, _)| *effect == Effect::Drop) {
        parts.truncate(1);
    }
    parts
}

/// What lies where a write goes.
struct Replaced {
    /// Offset of the write in `bytes`, which begin with a page.
    lead: usize,
    /// Contents of what is shared.
    bytes: Buf,
    /// Parts of `bytes` that are holes, in ascending order.
    holes: Vec<(usize, usize)>,
    /// Parts to which other volumes or snapshots refer.
    shared: Vec<(usize, usize)>,
}

impl Replaced {
    /// Whether a part of the write, within a page, has the bytes that are there.
    fn has(&self, part: &Range<usize>, new: &[u8]) -> bool {
        let (from, to) = (self.lead + part.start, self.lead + part.end);
        let is_in = |parts: &[(usize, usize)]| parts.iter().any(|&(at, len)| at <= from && to <= at + len);
        if is_in(&self.holes) {
            return is_zero(new);
        }
        let old = &self.bytes[from..to];
        let seen = correct!(old.len(), Bug::ComparesFirstSector => old.len().min(512));
        is_in(&self.shared) && old[..seen] == new[..seen]
    }
}

/// The segments, as far as they lie in these parts of the buffer; both in ascending order.
fn within(segments: &Segments, parts: &[(usize, usize)]) -> Segments {
    let mut cut = Segments::new();
    for segment in segments {
        let end = segment.at + segment.len;
        for &(at, len) in parts.iter().skip_while(|&&(at, len)| at + len <= segment.at).take_while(|&&(at, _)| at < end)
        {
            let (from, to) = (at.max(segment.at), (at + len).min(end));
            add_segment(&mut cut, segment.offset + (from - segment.at) as u64, from, to - from);
        }
    }
    cut
}

impl<D: Device> Volume<D> {
    /// Writes what the policy of the volume does not drop. The volume has no backing.
    pub(super) async fn write_by_policy(&self, offset: u64, buf: Buf, more: bool) -> (Result<()>, Buf) {
        let (policy, rollbacks) = (self.live.writes.get(), self.live.rollbacks.get());
        // Of what a client may change meanwhile, one state is compared and written.
        let buf = match self.own_copy(buf) {
            Ok(buf) => buf,
            Err((e, buf)) => return (Err(e), buf),
        };
        let is_whole = |part: &Range<usize>| part.len() == PAGE_SIZE;
        let is_hole =
            |part: &Range<usize>| policy.zeroes == Zeroes::Holes && is_whole(part) && is_zero(&buf[part.clone()]);
        let by_zeroes = |part: Range<usize>| if is_hole(&part) { Effect::Hole } else { Effect::Write };
        let mut parts = parts_of(offset, buf.len(), by_zeroes);
        if policy.writes == Writes::Compare {
            let old = match self.read_replaced(offset, buf.len()).await {
                Ok(old) => old,
                Err(e) => return (Err(e), buf),
            };
            let compared = |part: Range<usize>| match old.has(&part, &buf[part.clone()]) {
                true => Effect::Drop,
                false => by_zeroes(part),
            };
            let differing = parts_of(offset, buf.len(), compared);
            parts = correct!(differing, Bug::DropsWholeWrite => first_if_dropped(differing));
        }
        if let [(Effect::Write, _)] = &parts[..] {
            return self.write_stored(offset, buf, more).await;
        }
        let result = self.write_parts(offset, &buf, &parts, more).await;
        if result.is_ok() && self.live.rollbacks.get() != rollbacks {
            // What was dropped, or came first, may be gone, and the rest not.
            return Box::pin(self.write_by_policy(offset, buf, more)).await;
        }
        (result, buf)
    }

    /// Reads what a write would replace instead of overwriting it.
    async fn read_replaced(&self, offset: u64, len: usize) -> Result<Replaced> {
        let (start, end) = (offset / PAGE_BYTES * PAGE_BYTES, (offset + len as u64).next_multiple_of(PAGE_BYTES));
        let pages = start / PAGE_BYTES..end / PAGE_BYTES;
        let _lock = self.live.locks.lock(pages, LockMode::Exclusive).await;
        let _plan = self.store.generations.enter();
        let mut retry = Retry::new(&self.store);
        let ReadPlan { segments, holes, shared } = loop {
            let planned = self.plan_read(&mut self.store.meta.borrow_mut(), start, end - start);
            match planned {
                Ok(planned) => break planned,
                Err(failure) => retry.missed(failure).await?,
            }
        };
        let segments = within(&segments, &shared);
        let mut bytes = self.store.device.buffer((end - start) as usize);
        if !segments.is_empty() {
            let count = |segments: &Segments| self.store.counters.data_reads.add(segments);
            let (result, read) = self.store.device.read_shared(bytes, segments, &shared, count).await;
            result.map_err(|e| Error::io(format!("reading {} at {offset}", self.shown_name()), e))?;
            bytes = read;
        }
        Ok(Replaced { lead: (offset - start) as usize, bytes, holes, shared })
    }

    async fn write_parts(&self, offset: u64, buf: &[u8], parts: &[Part], more: bool) -> Result<()> {
        let last = parts.iter().rposition(|(effect, _)| *effect == Effect::Write);
        for (i, (effect, part)) in parts.iter().enumerate() {
            let at = offset + part.start as u64;
            match effect {
                Effect::Drop => {}
                Effect::Hole => self.write_hole(at, part.len()).await?,
                Effect::Write => {
                    let mut own = self.store.device.buffer(part.len());
                    own.copy_from_slice(&buf[part.clone()]);
                    self.write_stored(at, own, more || Some(i) != last).await.0?;
                }
            }
        }
        Ok(())
    }

    /// Makes whole pages holes; where there is no space for that, writes zeroes.
    async fn write_hole(&self, at: u64, len: usize) -> Result<()> {
        let first = at / PAGE_BYTES;
        let unmapped = correct!(
            self.unmap(first, first + len as u64 / PAGE_BYTES).await,
            Bug::ZeroesNeitherWrittenNorUnmapped => Ok(())
        );
        match unmapped {
            Ok(()) => Ok(()),
            Err(EditError::NoSpace) => self.write_stored(at, Buf::zeroed(len), false).await.0,
            Err(EditError::Error(e)) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Segment;

    #[test]
    fn parts_end_at_pages_and_join_what_has_the_same_effect() {
        let dropped = |part: Range<usize>| if part.start == 100 { Effect::Drop } else { Effect::Write };
        assert_eq!(
            parts_of(3996, 9000, dropped),
            [(Effect::Write, 0..100), (Effect::Drop, 100..4196), (Effect::Write, 4196..9000)]
        );
        assert_eq!(parts_of(4096, 8192, |_| Effect::Hole), [(Effect::Hole, 0..8192)]);
        assert_eq!(parts_of(512, 512, |_| Effect::Write), [(Effect::Write, 0..512)]);
    }

    #[test]
    fn only_what_is_shared_is_read() {
        let segment = |offset, at, len| Segment { offset, at, len };
        let segments: Segments = [segment(1000, 0, 100), segment(5000, 100, 100)].into_iter().collect();
        let cut = within(&segments, &[(10, 20), (90, 50), (180, 100)]);
        assert_eq!(
            cut.to_vec(),
            [segment(1010, 10, 20), segment(1090, 90, 10), segment(5000, 100, 40), segment(5080, 180, 20)]
        );
        assert!(within(&segments, &[(200, 50)]).is_empty());
    }

    #[test]
    fn one_byte_that_is_not_zero_is_found_anywhere() {
        for len in [1, 15, 16, 17, 4096] {
            assert!(is_zero(&vec![0; len]));
            for at in 0..len {
                let mut bytes = vec![0; len];
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "{at} of {len}");
            }
        }
    }
}
