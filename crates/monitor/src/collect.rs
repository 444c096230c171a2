//! Collection of all statistics into one record.

use forkdisk::{Device, Pool, PoolStatistics};
use forkdisk_nbd::ServerHandle;

use crate::copier::{CopierFigures, CopyFigures};
use crate::process::ProcessRecord;
use crate::record::{ActivityRecord, OriginFigures, ServerRecord, Statistics, VolumeFigures};

/// A source of statistics.
pub trait Source: 'static {
    /// Returns the current statistics.
    fn statistics(&self) -> Statistics;
}

/// A pool and the server on it.
pub struct PoolSource<D: Device> {
    /// The pool.
    pub pool: Pool<D>,
    /// Its server, if it has one.
    pub server: Option<ServerHandle>,
}

impl<D: Device> Source for PoolSource<D> {
    fn statistics(&self) -> Statistics {
        statistics(&self.pool, self.server.as_ref().map(|server| (&server.statistics()).into()))
    }
}

/// Collects the statistics of `pool`, with those of its `server`. Takes time in proportion to the
/// number of volumes.
pub fn statistics<D: Device>(pool: &Pool<D>, server: Option<ServerRecord>) -> Statistics {
    let volumes = pool.volume_statistics().into_iter().map(|(info, activity)| (info.name.clone(), info, activity));
    let volumes = volumes.map(|(name, info, activity)| VolumeFigures {
        snapshot: info.is_snapshot(),
        size: info.size,
        referenced: info.referenced,
        scattered: info.scattered,
        quota: (info.quota > 0).then_some(info.quota),
        diverge: (info.diverge > 0).then_some(info.diverge),
        reserve: (info.reserve > 0).then_some(info.reserve),
        diverged: (info.diverge + info.reserve > 0).then_some(info.diverged),
        in_use: info.in_use as u64,
        copier: activity.as_ref().and_then(|_| copying(pool, &name)),
        activity: activity.as_ref().map(Into::into),
        name,
    });
    Statistics {
        pool: pool.info(),
        activity: activity(&pool.statistics()),
        copier: copier(pool),
        origins: pool.origin_statistics().iter().map(Into::into).collect::<Vec<OriginFigures>>(),
        server,
        process: ProcessRecord::of_self(),
        volumes: volumes.collect(),
    }
}

fn copier<D: Device>(pool: &Pool<D>) -> CopierFigures {
    let info = pool.copier();
    let all = CopyFigures::of(&info.stats, info.settings.throttle);
    CopierFigures { all, buffers: info.settings.buffers, buffers_used: info.buffers_in_use }
}

/// Returns the copier's figures for a volume; `None` for a snapshot, for which nothing is copied.
fn copying<D: Device>(pool: &Pool<D>, name: &str) -> Option<CopyFigures> {
    let copying = pool.copying(name).ok()?;
    Some(CopyFigures::of(&copying.stats, copying.throttle))
}

fn activity(s: &PoolStatistics) -> ActivityRecord {
    ActivityRecord {
        volumes: (&s.volumes).into(),
        data_read: (&s.data.read).into(),
        data_write: (&s.data.write).into(),
        metadata_read: (&s.metadata.read).into(),
        metadata_write: (&s.metadata.write).into(),
        journal_write: (&s.journal).into(),
        discard: (&s.discards).into(),
        flushes: s.flushes,
        records: s.records,
        commit_group: (&s.commit_group).into(),
        checkpoints: s.checkpoints,
        cache_hits: s.cache_hits,
        cache_misses: s.cache_misses,
        cache_bytes: s.cache_bytes,
        shared_cache: (&s.shared_cache).into(),
        reaped: s.reaped,
        dropped: s.dropped,
        freed_bytes: s.freed_bytes,
        gathered_bytes: s.gathered_bytes,
        retained_bytes: s.retained_bytes,
        reaping: s.reaping,
    }
}
