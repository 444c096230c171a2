//! Reading: mapped pages from the device, zeroes elsewhere.

use crate::catalog::{Catalog, Failure};
use crate::device::{Buf, Device, Segments, add_segment};
use crate::error::{Error, Result};
use crate::map::{Stop, lookup};
use crate::store::Retry;
use crate::types::{PAGE_SIZE, VirtualPage};

use super::Volume;
use super::backing::Backing;

/// Device requests of a read, and parts of the buffer to be zeroed.
pub(super) struct ReadPlan {
    pub segments: Segments,
    pub holes: Vec<(usize, usize)>,
    /// Parts of the buffer for pages to which other volumes or snapshots refer, or did.
    pub shared: Vec<(usize, usize)>,
}

/// Adds a part of the buffer; extends the last part if it is contiguous with it.
fn add_part(parts: &mut Vec<(usize, usize)>, at: usize, len: usize) {
    match parts.last_mut() {
        Some((before, had)) if *before + *had == at => *had += len,
        _ => parts.push((at, len)),
    }
}

impl<D: Device> Volume<D> {
    pub(super) async fn read_range(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        if let Err(e) = self.check_range(offset, buf.len() as u64) {
            return (Err(e), buf);
        }
        if buf.is_empty() {
            return (Ok(()), buf);
        }
        let unit = self.backing_block_size();
        if offset.is_multiple_of(unit as u64) && buf.len().is_multiple_of(unit) {
            return self.read_aligned(offset, buf).await;
        }
        // Boxed: rare, and this future is moved with every read.
        Box::pin(self.read_around(offset, buf)).await
    }

    pub(super) async fn read_range_sparse(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let unit = self.backing_block_size() as u64;
        if buf.is_empty() || !offset.is_multiple_of(unit) || !(buf.len() as u64).is_multiple_of(unit) {
            let (result, buf) = self.read_range(offset, buf).await;
            return (result.map(|()| Vec::new()), buf);
        }
        match self.check_range(offset, buf.len() as u64) {
            Err(e) => (Err(e), buf),
            Ok(()) => self.read_mapped(offset, buf).await,
        }
    }

    /// Reads the whole pages around the range and copies the requested part.
    async fn read_around(&self, offset: u64, mut buf: Buf) -> (Result<()>, Buf) {
        // An origin ends with its last block, not at a page.
        let page = if let Backing::Origin(_) = &self.backing { self.backing_block_size() } else { PAGE_SIZE } as u64;
        let (start, end) = (offset / page * page, (offset + buf.len() as u64).next_multiple_of(page));
        let wide = self.store.device.buffer((end - start) as usize);
        let (result, wide) = self.read_aligned(start, wide).await;
        if result.is_ok() {
            let at = (offset - start) as usize;
            let len = buf.len();
            buf.copy_from_slice(&wide[at..at + len]);
        }
        (result, buf)
    }

    async fn read_aligned(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let (result, mut buf) = self.read_mapped(offset, buf).await;
        let zero = |holes: Vec<(usize, usize)>| holes.iter().for_each(|&(at, len)| buf[at..at + len].fill(0));
        (result.map(zero), buf)
    }

    /// Reads what is mapped; returns the parts of the buffer that are holes.
    async fn read_mapped(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let (result, buf) = match self.visible_backing() {
            Backing::None => return self.read_own(offset, buf).await,
            Backing::Origin(origin) => Box::pin(origin.read_current(&self.store, offset, buf)).await,
            Backing::Snapshot(origin, view, size) => {
                let _reader = self.live.backing.reader();
                Box::pin(origin.read_through(&self.store, self.id, (*view, *size), offset, buf)).await
            }
        };
        (result.map(|()| Vec::new()), buf)
    }

    /// Where the bytes of a range lie.
    pub(super) fn plan_read(
        &self,
        meta: &mut Catalog,
        offset: u64,
        len: u64,
    ) -> std::result::Result<ReadPlan, Failure> {
        let record = meta.directory.of_handle(self.id);
        let (mut at, end) = (offset, offset + len);
        let mut plan = ReadPlan { segments: Segments::new(), holes: Vec::new(), shared: Vec::new() };
        while at < end {
            let page = VirtualPage(at / PAGE_SIZE as u64);
            let pages = (end.div_ceil(PAGE_SIZE as u64)) - page.0;
            let run = lookup(&mut meta.tables, record, page, pages).map_err(|m| Failure::Stop(Stop::Table(m)))?;
            let stop = ((page.0 + run.len) * PAGE_SIZE as u64).min(end);
            let (place, part) = ((at - offset) as usize, (stop - at) as usize);
            match run.data {
                None => add_part(&mut plan.holes, place, part),
                Some((addr, birth)) => {
                    add_segment(&mut plan.segments, addr.offset() + at % PAGE_SIZE as u64, place, part);
                    if birth <= record.shared_at {
                        add_part(&mut plan.shared, place, part);
                    }
                }
            }
            at = stop;
        }
        Ok(plan)
    }

    /// Like [`read_mapped`](Self::read_mapped) for a volume without backing.
    async fn read_own(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let plan = self.store.generations.enter();
        let mut retry = Retry::new(&self.store);
        let ReadPlan { segments, holes, shared } = loop {
            let failure = match self.plan_read(&mut self.store.meta.borrow_mut(), offset, buf.len() as u64) {
                Ok(planned) => break planned,
                Err(failure) => failure,
            };
            if let Err(error) = retry.missed(failure).await {
                return (Err(error.into()), buf);
            }
        };
        drop(retry);
        if segments.is_empty() {
            return (Ok(holes), buf);
        }
        let (result, buf) = if shared.is_empty() {
            self.store.counters.data_reads.add(&segments);
            self.store.device.read(buf, segments).await
        } else {
            let count = |segments: &Segments| self.store.counters.data_reads.add(segments);
            // Boxed: this future is moved with every read.
            Box::pin(self.store.device.read_shared(buf, segments, &shared, count)).await
        };
        drop(plan);
        match result {
            Ok(()) => (Ok(holes), buf),
            Err(e) => (Err(Error::io(format!("reading {} at {offset}", self.shown_name()), e)), buf),
        }
    }
}
