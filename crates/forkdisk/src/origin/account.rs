//! What deleting snapshots of origins would free: the deletion's own decisions, taken without doing
//! anything.

use std::collections::BTreeSet;

use crate::device::Device;
use crate::error::Result;
use crate::format::kept::piece;
use crate::format::{KeptKey, KeptKind, VolumeState};
use crate::map::Stop;
use crate::ordered;
use crate::pool::{Failure, Inner, Meta};
use crate::types::VolumeId;

/// Pairs looked at in one step.
const STEP: usize = 64;

/// How far the kept chunks of one snapshot have been counted.
struct Counted {
    next: KeptKey,
    pages: u64,
}

impl Meta {
    /// Counts on; true when that was the end.
    fn count_freed(
        &mut self,
        id: VolumeId,
        doomed: &BTreeSet<VolumeId>,
        counted: &mut Counted,
    ) -> std::result::Result<bool, Failure> {
        let record = &self.directory.get(id).ok_or(Failure::Gone)?.record;
        let (origin, independent) = (record.parent, record.flags.independent);
        let alive = self.directory.get(origin).is_some_and(|v| v.record.state == VolumeState::Origin);
        let Some((protects, chunk_pages)) = self.protects(origin).filter(|_| alive) else { return Ok(true) };
        let (first, end) = match independent {
            true => (KeptKey::independent(id, 0, 0), KeptKey::independent(VolumeId(id.0 + 1), 0, 0)),
            false => (KeptKey::list(id, 0), KeptKey::list(VolumeId(id.0 + 1), 0)),
        };
        let from = counted.next.max(first);
        let pairs = ordered::scan(&mut self.tables, &protects.kept, from.0, end.0, if independent { STEP } else { 1 });
        let pairs = pairs.map_err(Stop::from)?;
        let older =
            |chain: &crate::pool::Chain| chain.chained.range(..id).rev().find(|id| !doomed.contains(id)).copied();
        let heir = self.directory.chain(origin).and_then(older);
        let mut pages = 0;
        for &(key, value) in &pairs {
            match KeptKey(key).kind() {
                Some(KeptKind::List { first, .. }) => {
                    for chunk in (0..u64::from(u128::BITS)).filter(|&i| value >> i & 1 == 1).map(|i| first + i) {
                        pages += self.freed_of(&protects, chunk_pages, chunk, id, heir)?;
                    }
                }
                _ => pages += piece(value).pages,
            }
        }
        counted.pages += pages;
        counted.next = pairs.last().map_or(end, |&(key, _)| KeptKey(key).next());
        Ok(pairs.is_empty())
    }
}

impl<D: Device> Inner<D> {
    /// Pages kept that deleting all of `doomed` together would free.
    pub async fn kept_freed_by(&self, doomed: &BTreeSet<VolumeId>) -> Result<u64> {
        let mut pages = 0;
        for &id in doomed {
            let mut counted = Counted { next: KeptKey(0), pages: 0 };
            let of_origin = self.meta.borrow().is_origins_snapshot(id);
            while of_origin && !self.look(|meta| meta.count_freed(id, doomed, &mut counted)).await? {}
            pages += counted.pages;
        }
        Ok(pages)
    }
}
