//! The record of all counters. Sizes are bytes, times nanoseconds unless their name
//! says otherwise. Counters start at 0 when the pool is opened.

use forkdisk::{
    Histogram, Operation, OperationStatistics, OriginStatistics, PoolInfo, Requests, SharedCacheStatistics,
    VolumeStatistics,
};
use forkdisk_nbd::ServerStatistics;
use serde::{Deserialize, Serialize};

use crate::copier::{CopierFigures, CopyFigures};
use crate::process::ProcessRecord;

/// Statistics of a pool and its server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Statistics {
    /// State and space; in JSON without `created`, `origins`, `kept` and `clean`.
    #[serde(with = "figures")]
    pub pool: PoolInfo,
    /// Counters of activity.
    pub activity: ActivityRecord,
    /// Copies that broke sharing.
    pub copier: CopierFigures,
    /// The open devices of origins, by name.
    pub origins: Vec<OriginFigures>,
    /// The NBD server, if there is one.
    pub server: Option<ServerRecord>,
    /// The process.
    pub process: ProcessRecord,
    /// All volumes and snapshots, by name.
    pub volumes: Vec<VolumeFigures>,
}

/// The fields of a pool's properties that statistics show, in their order.
mod figures {
    use forkdisk::{PoolInfo, uuid_text};
    use serde::ser::SerializeStruct;
    use serde::{Deserialize, Deserializer, Serializer};

    macro_rules! shown {
        ($($field:ident)*) => {
            const SHOWN_COUNT: usize = [$(stringify!($field)),*].len();

            pub fn serialize<S: Serializer>(pool: &PoolInfo, serializer: S) -> Result<S::Ok, S::Error> {
                let mut record = serializer.serialize_struct("PoolInfo", 1 + SHOWN_COUNT)?;
                record.serialize_field("uuid", &uuid_text(&pool.uuid))?;
                $(record.serialize_field(stringify!($field), &pool.$field)?;)*
                record.end()
            }
        };
    }

    shown! {
        mode size used free freeing low_water low metadata dirty journal_size journal_used volumes snapshots
        referenced scattered generation
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PoolInfo, D::Error> {
        PoolInfo::deserialize(deserializer)
    }
}

/// Requests and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestsRecord {
    /// Number of requests.
    pub count: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// The shared cache; all but `bytes` are counts of pages of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SharedCacheRecord {
    /// Data in it.
    pub bytes: u64,
    /// Pages found in it.
    pub hits: u64,
    /// Shared pages read from the device.
    pub misses: u64,
    /// Pages that came from a read of another request.
    pub joined: u64,
    /// Pages that made room for others.
    pub evictions: u64,
}

impl From<&SharedCacheStatistics> for SharedCacheRecord {
    fn from(s: &SharedCacheStatistics) -> SharedCacheRecord {
        let SharedCacheStatistics { bytes, hits, misses, joined, evictions, .. } = *s;
        SharedCacheRecord { bytes, hits, misses, joined, evictions }
    }
}

/// A distribution over powers of two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Distribution {
    /// Number of values.
    pub count: u64,
    /// Their sum.
    pub sum: u64,
    /// Percentiles 50, 90, 99 and 99.9, rounded to a power of two.
    pub p50: u64,
    /// See `p50`.
    pub p90: u64,
    /// See `p50`.
    pub p99: u64,
    /// See `p50`.
    pub p999: u64,
    /// Number of values that are at most 2^i and more than 2^(i-1), for each i from 0; trailing
    /// zeroes are left out.
    pub buckets: Vec<u64>,
}

/// Operations of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperationRecord {
    /// Completed operations, successful or not.
    pub operations: u64,
    /// Bytes of successful operations.
    pub bytes: u64,
    /// Failed operations.
    pub errors: u64,
    /// Operations in flight.
    pub in_flight: u64,
    /// Nanoseconds from admission to reply.
    pub latency: Distribution,
}

/// Operations by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Operations {
    /// Reads.
    pub read: OperationRecord,
    /// Writes.
    pub write: OperationRecord,
    /// Flushes.
    pub flush: OperationRecord,
    /// Discards.
    pub discard: OperationRecord,
    /// Writes of zeroes.
    pub zero: OperationRecord,
}

impl Operations {
    /// Returns all kinds with their names, in the order of the fields.
    pub fn all(&self) -> [(&'static str, &OperationRecord); 5] {
        [
            ("read", &self.read),
            ("write", &self.write),
            ("flush", &self.flush),
            ("discard", &self.discard),
            ("zero", &self.zero),
        ]
    }
}

/// Activity of a volume, or of all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VolumeActivity {
    /// Operations by kind.
    pub operations: Operations,
    /// First writes where nothing was mapped.
    pub provision: RequestsRecord,
    /// First writes to pages that were shared.
    #[serde(rename = "break")]
    pub breaks: RequestsRecord,
}

/// Activity of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ActivityRecord {
    /// All volumes together, including deleted ones.
    pub volumes: VolumeActivity,
    /// Device reads for data.
    pub data_read: RequestsRecord,
    /// Device writes of data.
    pub data_write: RequestsRecord,
    /// Device reads of metadata.
    pub metadata_read: RequestsRecord,
    /// Device writes of metadata, all by checkpoints.
    pub metadata_write: RequestsRecord,
    /// Device writes of the journal.
    pub journal_write: RequestsRecord,
    /// Device discards.
    pub discard: RequestsRecord,
    /// Device flushes.
    pub flushes: u64,
    /// Journal records.
    pub records: u64,
    /// Number of callers that waited for each commit.
    pub commit_group: Distribution,
    /// Checkpoints.
    pub checkpoints: u64,
    /// Tables found in memory.
    pub cache_hits: u64,
    /// Tables and count pages read.
    pub cache_misses: u64,
    /// Tables in memory.
    pub cache_bytes: u64,
    /// The shared cache.
    #[serde(default)]
    pub shared_cache: SharedCacheRecord,
    /// Deleted volumes whose space was freed completely.
    pub reaped: u64,
    /// Droppable snapshots deleted because the pool was full.
    pub dropped: u64,
    /// Freed space.
    pub freed_bytes: u64,
    /// Bytes gathered with the rest of their volume.
    pub gathered_bytes: u64,
    /// Free space that is not discarded yet.
    #[serde(default)]
    pub retained_bytes: u64,
    /// Whether the space of deleted volumes is being freed.
    pub reaping: bool,
}

/// Counters of the NBD server; see [`ServerStatistics`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "every field is explained where it is counted")]
#[non_exhaustive]
pub struct ServerRecord {
    pub connections: u64,
    pub accepted: u64,
    pub refused: u64,
    pub crowded: u64,
    pub failed_handshakes: u64,
    pub encrypted: u64,
    pub broken: u64,
    pub stalled: u64,
    pub refused_requests: u64,
    pub shared_memory: u64,
    pub shared_memory_used: u64,
}

/// One volume or snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VolumeFigures {
    /// `volume` or `volume@snapshot`.
    pub name: String,
    /// Whether it is a snapshot.
    pub snapshot: bool,
    /// Length.
    pub size: u64,
    /// Bytes mapped.
    pub referenced: u64,
    /// Of that, scattered bytes: not behind those before them in their MiB of the volume.
    pub scattered: u64,
    /// Most bytes that may be mapped; `None` for no limit.
    pub quota: Option<u64>,
    /// Most bytes of new pages that its bound allows; `None` without one.
    pub diverge: Option<u64>,
    /// Bytes of new pages that are reserved; `None` if nothing is.
    pub reserve: Option<u64>,
    /// Bytes of new pages that its bounds count; `None` without a bound.
    pub diverged: Option<u64>,
    /// Open handles.
    pub in_use: u64,
    /// Activity; `None` if it was never opened.
    pub activity: Option<VolumeActivity>,
    /// Copies; `None` for a snapshot, and if it was never opened.
    pub copier: Option<CopyFigures>,
}

/// Activity on an origin's own device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OriginFigures {
    /// The origin.
    pub name: String,
    /// Reads, including those of old contents that are kept for snapshots.
    pub read: RequestsRecord,
    /// Writes.
    pub write: RequestsRecord,
    /// Flushes.
    pub flushes: u64,
}

impl From<&OriginStatistics> for OriginFigures {
    fn from(s: &OriginStatistics) -> OriginFigures {
        let (read, write) = ((&s.device.read).into(), (&s.device.write).into());
        OriginFigures { name: s.name.clone(), read, write, flushes: s.flushes }
    }
}

impl From<&Requests> for RequestsRecord {
    fn from(requests: &Requests) -> RequestsRecord {
        RequestsRecord { count: requests.count, bytes: requests.bytes }
    }
}

impl From<&Histogram> for Distribution {
    fn from(histogram: &Histogram) -> Distribution {
        let used = histogram.buckets.iter().rposition(|&n| n > 0).map_or(0, |last| last + 1);
        let [p50, p90, p99, p999] = [0.5, 0.9, 0.99, 0.999].map(|q| histogram.quantile(q));
        let buckets = histogram.buckets[..used].to_vec();
        Distribution { count: histogram.count(), sum: histogram.sum, p50, p90, p99, p999, buckets }
    }
}

impl Distribution {
    /// Converts it back to the recorded distribution.
    pub fn histogram(&self) -> Histogram {
        let mut histogram = Histogram { sum: self.sum, ..Histogram::default() };
        histogram.buckets.iter_mut().zip(&self.buckets).for_each(|(to, from)| *to = *from);
        histogram
    }
}

impl From<&OperationStatistics> for OperationRecord {
    fn from(o: &OperationStatistics) -> OperationRecord {
        let OperationStatistics { operations, bytes, errors, in_flight, latency, .. } = o;
        let (operations, bytes, errors, in_flight) = (*operations, *bytes, *errors, *in_flight);
        OperationRecord { operations, bytes, errors, in_flight, latency: latency.into() }
    }
}

impl From<&VolumeStatistics> for VolumeActivity {
    fn from(s: &VolumeStatistics) -> VolumeActivity {
        let of = |operation| s.of(operation).into();
        VolumeActivity {
            operations: Operations {
                read: of(Operation::Read),
                write: of(Operation::Write),
                flush: of(Operation::Flush),
                discard: of(Operation::Discard),
                zero: of(Operation::Zero),
            },
            provision: (&s.faults.provision).into(),
            breaks: (&s.faults.r#break).into(),
        }
    }
}

impl From<&ServerStatistics> for ServerRecord {
    fn from(s: &ServerStatistics) -> ServerRecord {
        ServerRecord {
            connections: s.connections,
            accepted: s.accepted,
            refused: s.refused,
            crowded: s.crowded,
            failed_handshakes: s.failed_handshakes,
            encrypted: s.encrypted,
            broken: s.broken,
            stalled: s.stalled,
            refused_requests: s.refused_requests,
            shared_memory: s.shared_memory,
            shared_memory_used: s.shared_memory_used,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_come_back_as_they_were() {
        let mut histogram = Histogram { sum: 12_345, ..Histogram::default() };
        histogram.buckets[3] = 7;
        histogram.buckets[20] = 1;
        let record = Distribution::from(&histogram);
        assert_eq!((record.buckets.len(), record.count, record.p50), (21, 8, 8));
        assert_eq!(record.histogram(), histogram);
    }

    #[test]
    fn the_pool_in_statistics_has_the_same_bytes_as_ever() {
        let text = serde_json::to_string(&Statistics::default()).unwrap();
        let pool = concat!(
            r#"{"pool":{"uuid":"00000000-0000-0000-0000-000000000000","mode":"rw","size":0,"used":0,"free":0,"#,
            r#""freeing":0,"low_water":0,"low":false,"metadata":0,"dirty":0,"journal_size":0,"journal_used":0,"#,
            r#""volumes":0,"snapshots":0,"referenced":0,"scattered":0,"generation":0},"activity":"#,
        );
        assert!(text.starts_with(pool), "{text}");
    }

    #[test]
    fn a_record_goes_through_json_and_back() {
        let activity = VolumeActivity { breaks: RequestsRecord { count: 1, bytes: 4096 }, ..Default::default() };
        let volumes = vec![VolumeFigures { name: "a".to_owned(), activity: Some(activity), ..Default::default() }];
        let record = Statistics { volumes, server: Some(ServerRecord::default()), ..Statistics::default() };
        let text = serde_json::to_string(&record).expect("JSON");
        assert!(text.contains(r#""break":{"count":1,"bytes":4096}"#), "{text}");
        assert_eq!(serde_json::from_str::<Statistics>(&text).expect("the same"), record);
    }
}
