//! Reading an origin and volumes that have it as backing: own pages first, then exceptions, then the origin.

use smallvec::smallvec;

use crate::catalog::{ExceptionView, PageSource};
use crate::device::{Buf, CachedDevice, Device, Segment, Segments, add_segment};
use crate::error::{Error, Result};
use crate::planted::correct;
use crate::store::Store;
use crate::sync::LockMode;
use crate::types::{PAGE_BYTES, VirtualPage, VolumeId};

use super::Origin;

/// Parts of a read by source.
#[derive(Default)]
struct ReadParts {
    pool: Segments,
    origin: Segments,
    zero: Vec<(usize, usize)>,
}

impl<D: Device> Origin<D> {
    /// Fills `buf`, whole blocks of the device, from the origin's device.
    pub async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let segment = Segment { offset, at: 0, len: buf.len() };
        self.counters.reads.add(&[segment]);
        let (result, buf) = self.device.read(buf, smallvec![segment]).await;
        (result.map_err(|e| Error::io(format!("reading the origin at {offset}"), e)), buf)
    }

    /// Fills `buf` from `offset` of volume `id`, whose backing is the first `size` bytes of this origin. Both
    /// are whole blocks of both devices.
    pub async fn read_through(
        &self,
        store: &Store<D>,
        id: VolumeId,
        (view, size): (ExceptionView, u64),
        offset: u64,
        mut buf: Buf,
    ) -> (Result<()>, Buf) {
        let end = offset + buf.len() as u64;
        // Nothing is written under a read that goes to the origin.
        let chunks = correct!(self.chunks(offset, end), Bug::OriginReaderNotHeld => 0..0);
        let _held = self.locks.lock(chunks, LockMode::Shared).await;
        let _plan = store.generations.enter();
        // Results stay when a table has to be loaded: a large range may need more than the cache holds.
        let (mut parts, mut at) = (ReadParts::default(), offset);
        let found = store
            .retry_no_alloc(|meta| {
                while at < end {
                    let page = VirtualPage(at / PAGE_BYTES);
                    let through = (self.id, view, size.div_ceil(PAGE_BYTES));
                    let (source, n) = meta.source_of(id, through, page, end.div_ceil(PAGE_BYTES) - page.0)?;
                    let stop = ((page.0 + n) * PAGE_BYTES).min(end);
                    parts.add(source, at, stop, (at - offset) as usize, size);
                    at = stop;
                }
                Ok(())
            })
            .await;
        if let Err(e) = found {
            return (Err(e), buf);
        }
        parts.zero.iter().for_each(|&(at, len)| buf[at..at + len].fill(0));
        let failed = |e| Error::io(format!("reading through to the origin at {offset}"), e);
        if parts.pool.is_empty() {
            self.counters.reads.add(&parts.origin);
            let (result, buf) = self.fetch(&self.device, buf, parts.origin).await;
            return (result.map_err(failed), buf);
        }
        store.counters.data_reads.add(&parts.pool);
        self.counters.reads.add(&parts.origin);
        // Parts of two devices: those of the origin are read into a buffer of their own.
        let aside = (!parts.origin.is_empty()).then(|| self.device.buffer(buf.len()));
        let other = aside.map(|aside| self.device.read(aside, parts.origin.clone()));
        let (mut result, mut buf) = self.fetch(&store.device, buf, parts.pool).await;
        if let Some(other) = other {
            let (outcome, aside) = other.await;
            parts.origin.iter().for_each(|s| buf[s.at..s.at + s.len].copy_from_slice(&aside[s.at..s.at + s.len]));
            result = result.and(outcome);
        }
        (result.map_err(failed), buf)
    }

    async fn fetch(&self, device: &CachedDevice<D>, buf: Buf, segments: Segments) -> (std::io::Result<()>, Buf) {
        if segments.is_empty() { (Ok(()), buf) } else { device.read(buf, segments).await }
    }
}

impl ReadParts {
    /// Adds bytes `from..to` of the volume at `at` of the buffer; the backing has `size` bytes.
    fn add(&mut self, source: PageSource, from: u64, to: u64, at: usize, size: u64) {
        let len = (to - from) as usize;
        match source {
            PageSource::Own(page) | PageSource::Exception(page) => {
                add_segment(&mut self.pool, page.offset() + from % PAGE_BYTES, at, len)
            }
            PageSource::Zero => self.zero.push((at, len)),
            PageSource::Origin => {
                let there = (size.max(from).min(to) - from) as usize;
                if there > 0 {
                    add_segment(&mut self.origin, from, at, there);
                }
                self.zero.push((at + there, len - there));
            }
        }
    }
}
