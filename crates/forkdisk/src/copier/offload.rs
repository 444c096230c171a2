//! Copying without reading and writing: the device is asked to clone a sub-job's source and to zero its
//! holes; only pages that contain provided bytes are written on top of that.
//!
//! Everything happens when the sub-job is admitted to write. The clones have ended before the first write on
//! top is submitted: a device orders nothing by itself. Bytes that are provided meanwhile are written, too. A
//! page that was provided in part is completed from the source first. If the device cannot clone, the sub-job
//! reads and writes everything as it does without offload.

use std::io;
use std::ops::Range;
use std::pin::Pin;

use crate::device::Device;
use crate::planted::correct;
use crate::types::PAGE_BYTES;

use super::job::{CopySource, Place};
use super::queue::Part;
use super::subjob::SubJob;

/// A request to clone a range, or to zero it.
struct OffloadRequest<D> {
    from: Option<Place<D>>,
    to: Place<D>,
    len: u64,
}

impl<D: Device> OffloadRequest<D> {
    fn submit(&self) -> Pin<Box<dyn Future<Output = io::Result<()>>>> {
        let to = &self.to;
        match &self.from {
            Some(from) => Box::pin(to.device.clone_range(&from.device, from.offset, to.offset, self.len)),
            None => Box::pin(to.device.zero_range(to.offset, self.len)),
        }
    }

    /// Whether `next` continues where this one ends.
    fn takes(&self, next: &OffloadRequest<D>) -> bool {
        let source = match (&self.from, &next.from) {
            (Some(a), Some(b)) => b.follows(a, self.len),
            (None, None) => true,
            _ => false,
        };
        source && next.to.follows(&self.to, self.len)
    }
}

impl<D> SubJob<D> {
    /// Returns the ranges of the buffer that the source has to fill before any write and that have not been
    /// filled.
    pub(super) fn missing(&self) -> Vec<Range<usize>> {
        let mut out: Vec<Range<usize>> = Vec::new();
        for (start, part) in self.placed() {
            for page in torn_pages(part) {
                let place = in_buffer(&page, start, part);
                if !self.filled.contains(&place) && !out.contains(&place) {
                    correct!(out.push(place), Bug::TornPageNotCompleted => ());
                }
            }
        }
        out
    }

    /// Returns the ranges of the buffer that are written for a part.
    pub(super) fn written(&self, part: usize) -> Vec<Range<usize>> {
        let Some((start, part)) = self.placed().nth(part) else { return Vec::new() };
        given_pages(part).iter().map(|r| in_buffer(r, start, part)).collect()
    }
}

impl<D: Device> SubJob<D> {
    /// Whether there is something to clone or to zero, and all devices may be able to.
    pub fn can_offload(&self) -> bool {
        let mut any = false;
        for part in &self.parts {
            for piece in part.job.pieces(part.at, part.len) {
                let able = |to: &Place<D>| match &piece.from {
                    CopySource::Device(from) => to.device.can_clone(&from.device),
                    CopySource::Zeroes => to.device.can_clone(&to.device),
                    CopySource::Given => true,
                };
                if !part.job.destinations.iter().all(able) {
                    return false;
                }
                any |= !matches!(piece.from, CopySource::Given);
            }
        }
        any
    }

    /// Clones everything that can be cloned, then completes the pages that were provided in part; or, if the
    /// device cannot, reads everything. Nothing is in flight afterwards.
    pub(super) async fn offload(&mut self) {
        if self.offload_all().await.is_err() {
            self.offloads = false;
        }
        // Bytes provided during a read may make more pages need completion.
        while let Some(reading) = self.start_reading() {
            self.finish(reading, false).await;
            if !self.offloads {
                break;
            }
        }
    }

    /// Clones for all parts. If that fails, tries each part separately to find out which one failed.
    async fn offload_all(&mut self) -> Result<(), Unsupported> {
        let parts = self.alive();
        let Err(error) = self.offload_parts(&parts).await? else { return Ok(()) };
        if let [part] = parts[..] {
            self.fail(part, error, true);
            return Ok(());
        }
        for part in parts {
            if let Err(error) = self.offload_parts(&[part]).await? {
                self.fail(part, error, true);
            }
        }
        Ok(())
    }

    /// Submits all requests for some of the parts and waits for all of them, also when one has failed: none
    /// may reach a place that has another owner by then.
    async fn offload_parts(&mut self, parts: &[usize]) -> Result<io::Result<()>, Unsupported> {
        let bytes = |&part: &usize| self.offload_requests(&[part]).iter().map(|shift| shift.len).sum();
        let moved: Vec<u64> = parts.iter().map(bytes).collect();
        let requests: Vec<_> = self.offload_requests(parts).iter().map(OffloadRequest::submit).collect();
        let (mut result, mut supported) = (Ok(()), true);
        for request in requests {
            match request.await {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => supported = false,
                Err(error) if result.is_ok() => result = Err(error),
                _ => {}
            }
        }
        if result.is_ok() && supported {
            for (&part, bytes) in parts.iter().zip(moved) {
                self.note(part, |moved| moved.offloaded += bytes);
            }
        }
        if supported || result.is_err() { Ok(result) } else { Err(Unsupported) }
    }

    /// Returns what is cloned or zeroed for some of the parts, by destination, in order: everything except
    /// pieces of which every page is written anyway.
    fn offload_requests(&self, parts: &[usize]) -> Vec<OffloadRequest<D>> {
        let mut out: Vec<OffloadRequest<D>> = Vec::new();
        for d in 0..self.parts[0].job.destinations.len() {
            for part in parts.iter().map(|&i| &self.parts[i]) {
                let (mut at, given) = (part.at, given_pages(part));
                for piece in part.job.pieces(part.at, part.len) {
                    let (to, range) = (part.job.destinations[d].after(at), at..at + piece.len);
                    at = range.end;
                    if given.iter().any(|pages| pages.start <= range.start && range.end <= pages.end) {
                        continue;
                    }
                    let shift = match piece.from {
                        CopySource::Device(from) => OffloadRequest { from: Some(from), to, len: piece.len },
                        CopySource::Zeroes => OffloadRequest { from: None, to, len: piece.len },
                        CopySource::Given => continue,
                    };
                    match out.last_mut() {
                        Some(last) if last.takes(&shift) => last.len += shift.len,
                        _ => out.push(shift),
                    }
                }
            }
        }
        out
    }
}

/// The device cannot clone or zero.
struct Unsupported;

/// Returns a range of a part's job as a range of the buffer, where the part starts at `start`.
fn in_buffer<D>(range: &Range<u64>, start: usize, part: &Part<D>) -> Range<usize> {
    let place = |at: u64| start + (at - part.at) as usize;
    place(range.start)..place(range.end)
}

/// Returns the page around byte `at` of a part's job, limited to the part.
fn page_around<D>(at: u64, part: &Part<D>) -> Range<u64> {
    let first = at / PAGE_BYTES * PAGE_BYTES;
    first.max(part.at)..(first + PAGE_BYTES).min(part.at + part.len)
}

/// Returns the pages of a part that were provided in part.
fn torn_pages<D>(part: &Part<D>) -> Vec<Range<u64>> {
    let given = part.job.progress.given_in(part.at..part.at + part.len);
    let mut out = Vec::new();
    for range in given {
        for page in [page_around(range.start, part), page_around(range.end - 1, part)] {
            if page.start < range.start || range.end < page.end {
                out.push(page);
            }
        }
    }
    out
}

/// Returns the pages of a part with provided bytes, as ranges.
fn given_pages<D>(part: &Part<D>) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in part.job.progress.given_in(part.at..part.at + part.len) {
        let (from, to) = (page_around(range.start, part).start, page_around(range.end - 1, part).end);
        match out.last_mut() {
            Some(last) if from <= last.end => last.end = last.end.max(to),
            _ => out.push(from..to),
        }
    }
    out
}
