//! Reading an origin and volumes that have it as backing: own pages first, then exceptions, then the origin.

use smallvec::smallvec;

use crate::device::{Buf, Device, Segment, Segments};
use crate::error::{Error, Result};
use crate::map::{Stop, lookup};
use crate::planted::{Bug, planted};
use crate::pool::{Failure, Inner, Meta};
use crate::sync::LockMode;
use crate::types::{PAGE_BYTES, PageAddr, VirtualPage, VolumeId};
use crate::volume::push;

use super::Origin;
use super::exceptions::{ExceptionView, exception_run};

/// Source of a page of a volume that has an origin as backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSource {
    /// A page of its own, in the pool.
    Own(PageAddr),
    /// An exception, in the pool.
    Exception(PageAddr),
    /// The same page of the origin.
    Origin,
    /// Zeroes, beyond the end of the backing.
    Zero,
}

impl Meta {
    /// Source of page `at` of `id`, whose backing is `origin`, and of those behind it (at most `max`). The
    /// backing ends at page `end`.
    pub fn source_of(
        &mut self,
        id: VolumeId,
        (origin, view, end): (VolumeId, ExceptionView, u64),
        at: VirtualPage,
        max: u64,
    ) -> std::result::Result<(PageSource, u64), Failure> {
        let record = &self.directory.get(id).ok_or(Failure::Gone)?.record;
        let own = lookup(&mut self.tables, record, at, max).map_err(Stop::from)?;
        if let Some((page, _)) = own.data {
            return Ok((PageSource::Own(page), own.len));
        }
        if at.0 >= end {
            return Ok((PageSource::Zero, own.len));
        }
        let (protects, chunk_pages) = self.protects(origin).ok_or(Failure::Gone)?;
        let max = own.len.min(end - at.0);
        let run =
            exception_run(&mut self.tables, &protects.exceptions, chunk_pages, view, at, max).map_err(Stop::from)?;
        Ok((run.at.map_or(PageSource::Origin, PageSource::Exception), run.len))
    }
}

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
        inner: &Inner<D>,
        id: VolumeId,
        (view, size): (ExceptionView, u64),
        offset: u64,
        mut buf: Buf,
    ) -> (Result<()>, Buf) {
        let end = offset + buf.len() as u64;
        // Nothing is written under a read that goes to the origin.
        let chunks = if planted(Bug::OriginReaderNotHeld) { 0..0 } else { self.chunks(offset, end) };
        let _held = self.locks.lock(chunks, LockMode::Shared).await;
        let _plan = inner.generations.enter();
        // Results stay when a table has to be loaded: a large range may need more than the cache holds.
        let (mut parts, mut at) = (ReadParts::default(), offset);
        let found = inner
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
        inner.counters.data_reads.add(&parts.pool);
        self.counters.reads.add(&parts.origin);
        // Parts of two devices: those of the origin are read into a buffer of their own.
        let aside = (!parts.origin.is_empty()).then(|| self.device.buffer(buf.len()));
        let other = aside.map(|aside| self.device.read(aside, parts.origin.clone()));
        let (mut result, mut buf) = self.fetch(&inner.device, buf, parts.pool).await;
        if let Some(other) = other {
            let (outcome, aside) = other.await;
            parts.origin.iter().for_each(|s| buf[s.at..s.at + s.len].copy_from_slice(&aside[s.at..s.at + s.len]));
            result = result.and(outcome);
        }
        (result.map_err(failed), buf)
    }

    async fn fetch(&self, device: &D, buf: Buf, segments: Segments) -> (std::io::Result<()>, Buf) {
        if segments.is_empty() { (Ok(()), buf) } else { device.read(buf, segments).await }
    }
}

impl ReadParts {
    /// Adds bytes `from..to` of the volume at `at` of the buffer; the backing has `size` bytes.
    fn add(&mut self, source: PageSource, from: u64, to: u64, at: usize, size: u64) {
        let len = (to - from) as usize;
        match source {
            PageSource::Own(page) | PageSource::Exception(page) => {
                push(&mut self.pool, page.offset() + from % PAGE_BYTES, at, len)
            }
            PageSource::Zero => self.zero.push((at, len)),
            PageSource::Origin => {
                let there = (size.max(from).min(to) - from) as usize;
                if there > 0 {
                    push(&mut self.origin, from, at, there);
                }
                self.zero.push((at + there, len - there));
            }
        }
    }
}
