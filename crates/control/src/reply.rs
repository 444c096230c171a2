//! Results as JSON objects. Sizes are bytes, times seconds since 1970.

use std::ops::Deref;

use forkdisk::{CheckReport, CopierInfo, DiffClass, DiffRun, Extent, PAGE_SIZE, VolumeCopying, VolumeInfo};
use serde::{Deserialize, Serialize};

/// A volume or snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VolumeRecord {
    /// Its properties.
    #[serde(flatten)]
    pub info: VolumeInfo,
    /// Why space that a verb freed is not available yet: the file system under the pool is full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
}

impl Forked {
    /// Creates the record.
    pub fn new(info: &VolumeInfo, place: Place) -> Forked {
        Forked { info: info.clone(), uri: place.uri, paths: place.paths }
    }
}

impl From<&VolumeInfo> for VolumeRecord {
    fn from(info: &VolumeInfo) -> VolumeRecord {
        VolumeRecord { info: info.clone(), waits: None }
    }
}

impl Deref for VolumeRecord {
    type Target = VolumeInfo;

    fn deref(&self) -> &VolumeInfo {
        &self.info
    }
}

/// Where clients find a volume or snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its address for NBD clients.
    pub uri: Option<String>,
    /// Its files on mounts.
    pub paths: Vec<String>,
}

/// A volume that a fork made, and where clients find it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Forked {
    /// Its properties.
    #[serde(flatten)]
    pub info: VolumeInfo,
    /// Its address for NBD clients; `null` if the pool is not served.
    pub uri: Option<String>,
    /// Its files on the mounts of the daemon.
    pub paths: Vec<String>,
}

/// Result of gathering a volume's scattered pages. In bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gathering {
    /// The volume or snapshot.
    pub name: String,
    /// Bytes mapped.
    pub referenced: u64,
    /// Of them, scattered bytes before.
    pub before: u64,
    /// Scattered bytes now.
    pub after: u64,
    /// Bytes that were moved.
    pub moved: u64,
    /// MiB of the volume that are still scattered, because of sharing, constant writes or a lack of space.
    pub left: u64,
    /// Whether it ended early because the file system under the pool had no space to move more.
    pub host_full: bool,
}

/// Result of making a clone independent. In bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flattening {
    /// The clone.
    pub name: String,
    /// Bytes mapped now.
    pub referenced: u64,
    /// Bytes that were copied.
    pub copied: u64,
}

/// A pool's copier, or how one volume is copied. Figures are since the pool was opened, times in microseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CopierRecord {
    /// The volume; `null` for the pool.
    pub volume: Option<String>,
    /// For a volume: its break policy.
    #[serde(rename = "break")]
    pub break_policy: Option<String>,
    /// Most bytes copied by one pair of requests.
    pub subjob_size: u32,
    /// Most sub-jobs of one job in flight.
    pub split_count: u32,
    /// Bytes of buffers.
    pub buffers: u64,
    /// Of them, bytes in use.
    pub buffers_in_use: u64,
    /// Whether the host's file system is asked to clone copied ranges.
    pub offload: bool,
    /// Percent of the time in which copies may be in flight; 100: no limit.
    pub percent: u8,
    /// Bytes copied per second; 0: no limit.
    pub bytes_per_second: u64,
    /// Jobs that have not started yet.
    pub queued: u64,
    /// Sub-jobs in flight.
    pub in_flight: u64,
    /// Jobs that ended, with any result.
    pub jobs: u64,
    /// Of them, those that failed to read or write.
    pub failed: u64,
    /// Of them, those that were cancelled.
    pub cancelled: u64,
    /// Jobs merged into a request of the job before.
    pub merged: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Bytes that the host's file system cloned or zeroed instead of reads and writes.
    pub bytes_offloaded: u64,
    /// Bytes of clients' writes that were written together with a copy.
    pub bytes_given: u64,
    /// How often a job waited for a buffer.
    pub buffer_waits: u64,
    /// Total time of these waits.
    pub buffer_wait: u64,
    /// How often a throttle delayed a job.
    pub throttle_waits: u64,
    /// Total time that jobs waited for their first sub-job.
    pub wait: u64,
    /// Total time that jobs took.
    pub latency: u64,
    /// Longest time that one job took.
    pub longest: u64,
}

impl CopierRecord {
    /// Builds the record of a copier, or of one volume that it copies.
    pub(crate) fn of(copier: &CopierInfo, volume: Option<(String, VolumeCopying)>) -> CopierRecord {
        let (settings, of) = (&copier.settings, volume.as_ref().map(|(_, copying)| copying));
        let throttle = of.map_or(settings.throttle, |copying| copying.throttle);
        let stats = of.map_or(copier.stats, |copying| copying.stats);
        let micros = |time: std::time::Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        CopierRecord {
            break_policy: of.map(|copying| copying.break_policy.to_string()),
            volume: volume.map(|(name, _)| name),
            subjob_size: settings.subjob_size,
            split_count: settings.split_count,
            buffers: settings.buffers,
            buffers_in_use: copier.buffers_in_use,
            offload: settings.offload,
            percent: throttle.percent,
            bytes_per_second: throttle.bytes_per_second,
            queued: stats.queued,
            in_flight: stats.in_flight,
            jobs: stats.jobs,
            failed: stats.failed,
            cancelled: stats.cancelled,
            merged: stats.merged,
            bytes_read: stats.bytes_read,
            bytes_written: stats.bytes_written,
            bytes_offloaded: stats.bytes_offloaded,
            bytes_given: stats.bytes_given,
            buffer_waits: stats.buffer_waits,
            buffer_wait: micros(stats.buffer_wait),
            throttle_waits: stats.throttle_waits,
            wait: micros(stats.wait),
            latency: micros(stats.latency),
            longest: micros(stats.longest),
        }
    }
}

/// A volume or snapshot as a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Device {
    /// Path of the device.
    pub device: String,
}

/// A door that shows another volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switched {
    /// The export, socket or device.
    pub door: String,
    /// The volume or snapshot that it has shown.
    pub from: String,
    /// That which it shows now.
    pub to: String,
    /// Number of clients that have it open.
    pub clients: usize,
}

/// Reply of a verb that returns no data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {}

/// Bytes that volumes hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Usage {
    /// One entry for each, by name.
    pub volumes: Vec<DuRecord>,
    /// Bytes that deleting all of them together would free.
    pub frees: u64,
}

/// Bytes that one volume or snapshot holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DuRecord {
    /// `volume` or `volume@snapshot`.
    pub name: String,
    /// Bytes mapped.
    pub referenced: u64,
    /// Of them, scattered bytes: not behind those before them in their MiB of the volume.
    pub scattered: u64,
    /// Bytes that deleting it alone would free.
    pub exclusive: u64,
}

/// A range in which the right side differs from the left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Start in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// `different` (both have data), `left_only` or `right_only`.
    pub class: String,
}

impl Change {
    /// Returns the change that `run` describes; `None` if both sides are the same.
    pub(crate) fn of(run: &DiffRun) -> Option<Change> {
        let class = match run.class {
            DiffClass::Same => return None,
            DiffClass::Different => "different",
            DiffClass::LeftOnly => "left_only",
            DiffClass::RightOnly => "right_only",
        };
        Some(Change { offset: run.offset, length: run.len, class: class.to_string() })
    }

    /// Returns whether the right side has data in this range.
    pub fn exists(&self) -> bool {
        self.class != "left_only"
    }
}

/// A part of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Diff {
    /// In rising order.
    pub changes: Vec<Change>,
    /// Start of the next part; `null` after the last.
    pub next: Option<u64>,
}

/// A run of a volume with the same properties throughout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Start in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Whether it holds data; a hole reads as zeroes.
    pub data: bool,
    /// Whether other volumes refer to it, too.
    pub shared: bool,
    /// Where the data lies in the pool (0 for a hole).
    pub physical: u64,
}

impl From<&Extent> for Piece {
    fn from(extent: &Extent) -> Piece {
        let Extent { offset, len, data, physical, shared, .. } = *extent;
        Piece { offset, length: len, data, shared, physical }
    }
}

/// A part of a volume's map.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PieceMap {
    /// In order, without gaps.
    pub pieces: Vec<Piece>,
    /// Start of the next part; `null` after the last.
    pub next: Option<u64>,
}

/// What was deleted, or would be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Deletion {
    /// Whether this only shows what would be deleted.
    pub dry_run: bool,
    /// Every volume and snapshot, by name.
    pub deleted: Vec<String>,
    /// Bytes freed; `null` if the request did not ask to count them.
    pub frees: Option<u64>,
    /// Why their space is not available yet, if it is not. They are deleted in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Check {
    /// `clean`, `leaks` or `corrupt`.
    pub status: String,
    /// Descriptions of damage, with places.
    pub damage: Vec<String>,
    /// Bytes counted as used to which nothing refers.
    pub leaked: u64,
    /// Referenced pages.
    pub pages: u64,
    /// Volumes and snapshots checked.
    pub volumes: u64,
}

impl From<CheckReport> for Check {
    fn from(found: CheckReport) -> Check {
        let status = match (found.damage.is_empty(), found.leaked) {
            (false, _) => "corrupt",
            (true, 0) => "clean",
            (true, _) => "leaks",
        };
        Check {
            status: status.to_string(),
            damage: found.damage,
            leaked: found.leaked * PAGE_SIZE as u64,
            pages: found.pages,
            volumes: found.volumes,
        }
    }
}

impl Check {
    /// Creates the report of damage that prevented the pool from being checked.
    pub fn of_damage(what: String) -> Check {
        let mut report = CheckReport::default();
        report.damage.push(what);
        report.into()
    }
}

/// A daemon and its clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Process id.
    pub pid: u32,
    /// Version of the program.
    pub version: String,
    /// The pool's path.
    pub pool: String,
    /// The pool's identity.
    pub uuid: String,
    /// The open file or block device, which distinguishes it from a copy with the same identity.
    pub file: String,
    /// Path of the data socket; `null` if a service manager passed it.
    pub socket: Option<String>,
    /// Clients of the data socket that have chosen an export.
    pub clients: Vec<ClientRecord>,
    /// Directories where the pool is mounted.
    #[serde(default)]
    pub mounts: Vec<String>,
    /// Whether it was started for attached devices and ends when the last of them is detached.
    #[serde(default)]
    pub until_detached: bool,
}

/// What an upgrade did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgraded {
    /// Process id of the new program.
    pub pid: u32,
    /// Version of the new program.
    pub version: String,
    /// How long no request was carried out, in milliseconds.
    pub pause_ms: u64,
    /// Clients of exports and disks, and control connections, that were continued.
    pub connections: usize,
    /// Clients that were disconnected.
    pub disconnected: usize,
    /// Mounts that were continued.
    pub mounts: usize,
    /// Block devices of the ublk driver that are continued.
    pub devices: usize,
}

/// A client of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRecord {
    /// The volume or snapshot.
    pub export: String,
    /// Description of the client, as far as known.
    pub peer: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a record and writes it again: names, order and form of the fields are those of the protocol.
    #[track_caller]
    fn assert_same_bytes<T: Serialize + for<'a> Deserialize<'a>>(parts: &[&str]) {
        let text = parts.concat();
        let record: T = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
    }

    #[test]
    fn records_of_volumes_have_the_same_bytes_as_ever() {
        assert_same_bytes::<VolumeRecord>(&[
            r#"{"id":7,"name":"vm1","type":"volume","size":1048576,"referenced":8192,"scattered":4096,"chunk":65536,"#,
            r#""break":"split","gather":"20%","quota":null,"diverge":8192,"reserve":16384,"diverged":4096,"#,
            r#""origin":"base@clean","origin_id":5,"depends_on":null,"#,
            r#""created":1795261446,"created_by":"cli:uid=0","last_used":5,"expires":6,"lease":"connection","#,
            r#""labels":{"a":"b"},"writes":"compare","zeroes":"holes","flags":[],"protection":null}"#,
        ]);
        assert_same_bytes::<VolumeRecord>(&[
            r#"{"id":8,"name":"db","type":"origin","size":1048576,"referenced":0,"scattered":0,"chunk":65536,"#,
            r#""break":"copy","gather":"auto","quota":4096,"diverge":null,"reserve":null,"diverged":0,"#,
            r#""origin":"/dev/sdb","origin_id":null,"depends_on":"db@a","#,
            r#""created":1,"created_by":null,"last_used":null,"expires":null,"lease":null,"labels":{},"#,
            r#""writes":"all","zeroes":"written","flags":["droppable","writable"],"protection":{"copy_ahead":8388608,"#,
            r#""when_full":"wait:60","clean":true,"rolling":"db@a"},"waits":"the host is full"}"#,
        ]);
    }

    #[test]
    fn records_of_pools_have_the_same_bytes_as_ever() {
        assert_same_bytes::<forkdisk::PoolInfo>(&[
            r#"{"uuid":"00112233-4455-6677-8899-aabbccddeeff","created":1795261446,"mode":"out-of-data-space","#,
            r#""size":1,"used":2,"free":3,"freeing":4,"low_water":5,"low":true,"metadata":6,"volumes":7,"origins":8,"#,
            r#""snapshots":9,"kept":10,"referenced":11,"scattered":12,"dirty":13,"journal_size":14,"#,
            r#""journal_used":15,"generation":16,"clean":false}"#,
        ]);
    }

    #[test]
    fn damage_outranks_leaks() {
        let found = |damage: &[&str], leaked| {
            let mut report = CheckReport::default();
            report.damage = damage.iter().map(|text| text.to_string()).collect();
            report.leaked = leaked;
            Check::from(report).status
        };
        assert_eq!(found(&[], 0), "clean");
        assert_eq!(found(&[], 1), "leaks");
        assert_eq!(found(&["page 5"], 1), "corrupt");
    }
}
