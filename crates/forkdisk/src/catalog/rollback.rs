//! The state of an origin's rollback: which chunks are rolled back, and which parts of the origin it changes.

use std::ops::Range;

use crate::catalog::exceptions;
use crate::error::{Error, ErrorKind, Result};
use crate::format::ordered::CHUNKS_PER_LIST;
use crate::types::{PAGE_BYTES, VirtualPage, VolumeId};

use super::{Catalog, ExceptionView, Failure, PageSource};

/// Runs looked up before other tasks run.
const LOOKUPS_PER_STEP: usize = 256;

/// A running rollback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollback {
    /// The snapshot that is rolled back to.
    pub snapshot: VolumeId,
    /// Exceptions that belong to it.
    pub view: ExceptionView,
    /// All chunks before this one are rolled back.
    pub cursor: u64,
}

/// Refuses while a rollback of the origin is running.
pub fn refuse_during_rollback(meta: &Catalog, origin: VolumeId) -> Result<()> {
    let Some(rollback) = meta.rollback(origin) else { return Ok(()) };
    let name = |id| meta.directory.get(id).map(|v| meta.directory.full_name(&v.record)).unwrap_or_default();
    let why =
        format!("{:?} is being rolled back to {:?}; wait until that has ended", name(origin), name(rollback.snapshot));
    Err(Error::new(ErrorKind::Busy, why))
}

/// Whether `chunk` is rolled back, and for how many chunks from there on, at most up to `end`, the answer
/// is the same.
pub fn is_rolled_back(
    catalog: &mut Catalog,
    origin: VolumeId,
    chunk: u64,
    end: u64,
) -> std::result::Result<(bool, u64), Failure> {
    let Some(rollback) = catalog.rollback(origin) else { return Ok((true, end - chunk)) };
    if chunk < rollback.cursor {
        return Ok((true, rollback.cursor.min(end) - chunk));
    }
    let (protects, _) = catalog.protects(origin).ok_or(Failure::Gone)?;
    // Beyond the end of the snapshot nothing is rolled back: the origin has grown since.
    let chunk_size = catalog.directory.get(origin).ok_or(Failure::Gone)?.record.chunk;
    let shown = catalog.backing_size(rollback.snapshot).ok_or(Failure::Gone)?.div_ceil(chunk_size);
    if chunk >= shown {
        return Ok((true, end - chunk));
    }
    let end = end.min(shown);
    let bits = exceptions::rolled_back_chunks(catalog, &protects.exceptions, chunk)?;
    let is = |chunk: u64| bits >> (chunk % CHUNKS_PER_LIST) & 1 == 1;
    let end = end.min((chunk / CHUNKS_PER_LIST + 1) * CHUNKS_PER_LIST);
    Ok((is(chunk), (chunk..end).take_while(|&c| is(c) == is(chunk)).count() as u64))
}

/// Parts of an origin, in bytes, that the rollback changes, from byte `at` on, within a bounded number of
/// lookups. Moves `at` to where the next call continues.
pub fn rollback_changes(
    catalog: &mut Catalog,
    origin: VolumeId,
    at: &mut u64,
    end: u64,
    parts: &mut Vec<Range<u64>>,
) -> std::result::Result<(), Failure> {
    let Some(rollback) = catalog.rollback(origin) else {
        *at = end;
        return Ok(());
    };
    let record = &catalog.directory.get(origin).ok_or(Failure::Gone)?.record;
    let (chunk, pages) = (record.chunk, record.size.div_ceil(PAGE_BYTES));
    for _ in 0..LOOKUPS_PER_STEP {
        if *at >= end {
            return Ok(());
        }
        let (back, chunks) = is_rolled_back(catalog, origin, *at / chunk, end.div_ceil(chunk))?;
        let stop = ((*at / chunk + chunks) * chunk).min(end);
        if back {
            *at = stop;
            continue;
        }
        let page = VirtualPage(*at / PAGE_BYTES);
        let through = (origin, rollback.view, pages);
        let (source, n) = catalog.source_of(rollback.snapshot, through, page, stop.div_ceil(PAGE_BYTES) - page.0)?;
        let next = ((page.0 + n) * PAGE_BYTES).min(stop);
        if matches!(source, PageSource::Own(_) | PageSource::Exception(_)) {
            match parts.last_mut().filter(|last| last.end == *at) {
                Some(last) => last.end = next,
                None => parts.push(*at..next),
            }
        }
        *at = next;
    }
    Ok(())
}
