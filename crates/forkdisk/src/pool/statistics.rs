//! Figures since the pool was opened.

use crate::catalog::VolumeInfo;
use crate::copier::CopyClass;
use crate::counters::{PoolStatistics, Requests, VolumeStatistics};
use crate::device::Device;
use crate::format::{VolumeRecord, VolumeState};
use crate::types::PAGE_SIZE;

use super::Pool;

impl<D: Device> Pool<D> {
    /// Figures of the pool.
    pub fn statistics(&self) -> PoolStatistics {
        let (store, meta) = (&self.store, self.store.meta.borrow());
        let counted = self.store.counters.read();
        let mut data = counted.data;
        // Copies of origins.
        let kept = self.store.copier.stats_of(CopyClass::Origin);
        data.write.merge(&Requests { count: kept.writes, bytes: kept.bytes_written });
        PoolStatistics {
            data,
            volumes: store.live.borrow().statistics(),
            records: meta.journal.appended(),
            cache_hits: meta.tables.hits(),
            cache_bytes: (meta.tables.len() * PAGE_SIZE) as u64,
            shared_cache: store.device.statistics(),
            retained_bytes: meta.space.retained().pages() * PAGE_SIZE as u64,
            reaping: self.store.reaping.get(),
            ..counted
        }
    }

    /// All volumes and snapshots sorted by name, each with its figures; `None` if it was not opened for I/O.
    pub fn volume_statistics(&self) -> Vec<(VolumeInfo, Option<VolumeStatistics>)> {
        let meta = self.store.meta.borrow();
        let live = self.store.live.borrow();
        let figures = |record: &VolumeRecord| {
            let used = live.activity(record.id).filter(|activity| activity.opened.get());
            used.map(|activity| activity.counters.read())
        };
        let seen = meta
            .directory
            .iter()
            .filter(|v| !matches!(v.record.state, VolumeState::Dead | VolumeState::HardLink) && !v.pending);
        let mut all: Vec<_> = seen.map(|v| (self.store.info_of(&meta, &v.record), figures(&v.record))).collect();
        all.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
        all
    }
}
