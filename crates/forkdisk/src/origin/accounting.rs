//! Space that deleting snapshots of origins would free: makes the decisions of the deletion without carrying
//! them out.

use std::collections::BTreeSet;

use crate::catalog::{Catalog, Failure, exceptions};
use crate::device::Device;
use crate::error::Result;
use crate::format::ordered::piece;
use crate::format::{ExceptionKey, ExceptionKind, VolumeState};
use crate::map::Stop;
use crate::ordered;
use crate::types::VolumeId;

use super::Origins;

/// Pairs looked up in one step.
const PAIRS_PER_STEP: usize = 64;

/// Progress of counting the exceptions of one snapshot.
struct CountCursor {
    next: ExceptionKey,
    /// Chunks counted of the list at `next`.
    of_list: u32,
    pages: u64,
}

impl<D: Device> Origins<D> {
    /// Exceptions, in pages, that deleting all of `doomed` together would free.
    pub async fn exceptions_freed_by(&self, doomed: &BTreeSet<VolumeId>) -> Result<u64> {
        let mut pages = 0;
        for &id in doomed {
            let mut counted = CountCursor { next: ExceptionKey(0), of_list: 0, pages: 0 };
            let of_origin = self.store.meta.borrow().is_origin_snapshot(id);
            while of_origin && !self.store.retry_no_alloc(|meta| count_freed(meta, id, doomed, &mut counted)).await? {}
            pages += counted.pages;
        }
        Ok(pages)
    }
}

/// Counts on; true at the end.
fn count_freed(
    catalog: &mut Catalog,
    id: VolumeId,
    doomed: &BTreeSet<VolumeId>,
    counted: &mut CountCursor,
) -> std::result::Result<bool, Failure> {
    let record = &catalog.directory.get(id).ok_or(Failure::Gone)?.record;
    let (origin, independent) = (record.parent, record.flags.independent);
    let alive = catalog.directory.get(origin).is_some_and(|v| v.record.state == VolumeState::Origin);
    let Some((protects, chunk_pages)) = catalog.protects(origin).filter(|_| alive) else { return Ok(true) };
    let (first, end) = match independent {
        true => (ExceptionKey::independent(id, 0, 0), ExceptionKey::independent(VolumeId(id.0 + 1), 0, 0)),
        false => (ExceptionKey::list(id, 0), ExceptionKey::list(VolumeId(id.0 + 1), 0)),
    };
    let from = counted.next.max(first);
    let pairs = ordered::scan(
        &mut catalog.tables,
        &protects.exceptions,
        from.0,
        end.0,
        if independent { PAIRS_PER_STEP } else { 1 },
    );
    let pairs = pairs.map_err(Stop::from)?;
    let older =
        |chain: &crate::catalog::Chain| chain.chained.range(..id).rev().find(|id| !doomed.contains(id)).copied();
    let heir = catalog.directory.chain(origin).and_then(older);
    for &(key, value) in &pairs {
        match ExceptionKey(key).kind() {
            Some(ExceptionKind::List { first, .. }) => {
                // One chunk at a time: all of them may need more pages than the cache holds.
                while counted.of_list < u128::BITS {
                    if value >> counted.of_list & 1 == 1 {
                        let chunk = first + u64::from(counted.of_list);
                        counted.pages += exceptions::freed_of(catalog, &protects, chunk_pages, chunk, id, heir)?;
                    }
                    counted.of_list += 1;
                }
                counted.of_list = 0;
            }
            _ => counted.pages += piece(value).pages,
        }
    }
    counted.next = pairs.last().map_or(end, |&(key, _)| ExceptionKey(key).next());
    Ok(pairs.is_empty())
}
