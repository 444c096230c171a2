//! The text format of Prometheus, version 0.0.4.
//!
//! Written one family after the other, so that the sender can let other tasks run in
//! between. Names are in base units. All metrics are in docs/metrics.md; a test compares the two.

use std::fmt::{Display, Write};

use forkdisk::{Histogram, Mode, uuid_text};

use crate::copier::CopyFigures;
use crate::record::{Distribution, OperationRecord, RequestsRecord, Statistics, VolumeActivity, VolumeFigures};

/// Content type for HTTP.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Powers of two (nanoseconds) of the latency buckets: 4 µs to 17 s, each four times the previous one.
const LATENCY_BOUNDS: std::ops::RangeInclusive<usize> = 12..=34;
const LATENCY_STEP_BUCKETS: usize = 2;
/// Powers of two of the buckets for group sizes.
const GROUP_BOUNDS: std::ops::RangeInclusive<usize> = 0..=10;
const NANOSECONDS: f64 = 1e9;

/// Appends one family to the text.
pub type Family = Box<dyn Fn(&Statistics, &mut String)>;

/// Returns the complete text.
pub fn render(statistics: &Statistics) -> String {
    let mut out = String::new();
    families().iter().for_each(|family| family(statistics, &mut out));
    out
}

/// Returns all families, in the order in which they are written.
pub fn families() -> Vec<Family> {
    let mut all: Vec<Family> = vec![Box::new(info), Box::new(mode)];
    pool_gauges(&mut all);
    device(&mut all);
    origins(&mut all);
    activity(&mut all);
    operations(&mut all, "pool", |s| vec![(String::new(), &s.activity.volumes)]);
    operations(&mut all, "volume", |s| {
        s.volumes.iter().filter_map(|v| Some((volume_label(v), v.activity.as_ref()?))).collect()
    });
    volume_gauges(&mut all);
    copier(&mut all);
    server(&mut all);
    process(&mut all);
    all
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

fn sample(out: &mut String, name: &str, labels: &str, value: impl Display) {
    let _ = match labels {
        "" => writeln!(out, "{name} {value}"),
        labels => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}

fn volume_label(volume: &VolumeFigures) -> String {
    // Names consist of letters, digits, spaces and "._-+=~#:,/@", which need no escapes.
    format!("volume=\"{}\"", volume.name)
}

fn info(s: &Statistics, out: &mut String) {
    let name = "forkdisk_pool_info";
    head(out, name, "gauge", "Identity of the pool, always 1.");
    let labels = format!("uuid=\"{}\",version=\"{}\"", uuid_text(&s.pool.uuid), env!("CARGO_PKG_VERSION"));
    sample(out, name, &labels, 1);
}

fn mode(s: &Statistics, out: &mut String) {
    let name = "forkdisk_pool_mode";
    head(out, name, "gauge", "1 for the mode the pool is in, 0 for the others.");
    for mode in Mode::ALL {
        sample(out, name, &format!("mode=\"{mode}\""), u8::from(s.pool.mode == *mode));
    }
}

type Value = fn(&Statistics) -> u64;

/// Adds a family with one sample and no labels.
fn single(all: &mut Vec<Family>, kind: &'static str, name: &'static str, help: &'static str, value: Value) {
    all.push(Box::new(move |s, out| {
        head(out, name, kind, help);
        sample(out, name, "", value(s));
    }));
}

fn pool_gauges(all: &mut Vec<Family>) {
    let list: [(&str, &str, Value); 16] = [
        ("forkdisk_pool_size_bytes", "Length of the pool.", |s| s.pool.size),
        ("forkdisk_pool_used_bytes", "Space in use.", |s| s.pool.used),
        ("forkdisk_pool_free_bytes", "Space that new writes can use.", |s| s.pool.free),
        ("forkdisk_pool_freeing_bytes", "Released space that is free after the next checkpoint.", |s| s.pool.freeing),
        ("forkdisk_pool_low_water_bytes", "Free space below which the pool is low.", |s| s.pool.low_water),
        ("forkdisk_pool_low", "1 while the pool is low.", |s| u64::from(s.pool.low)),
        ("forkdisk_pool_metadata_bytes", "Superblock, counts and journal, part of the used space.", |s| {
            s.pool.metadata
        }),
        ("forkdisk_pool_dirty_bytes", "Changed metadata that is not yet in a checkpoint.", |s| s.pool.dirty),
        ("forkdisk_journal_size_bytes", "Length of the journal.", |s| s.pool.journal_size),
        ("forkdisk_journal_used_bytes", "Part of the journal that a replay would read.", |s| s.pool.journal_used),
        ("forkdisk_pool_volumes", "Number of volumes.", |s| s.pool.volumes),
        ("forkdisk_pool_snapshots", "Number of snapshots.", |s| s.pool.snapshots),
        ("forkdisk_pool_referenced_bytes", "Bytes that volumes have mapped, each volume counted separately.", |s| {
            s.pool.referenced
        }),
        ("forkdisk_pool_scattered_bytes", "Mapped bytes that do not follow the bytes before them in the pool.", |s| {
            s.pool.scattered
        }),
        ("forkdisk_cache_bytes", "Map tables in memory.", |s| s.activity.cache_bytes),
        ("forkdisk_shared_cache_bytes", "Shared data in memory.", |s| s.activity.shared_cache.bytes),
    ];
    list.into_iter().for_each(|(name, help, value)| single(all, "gauge", name, help, value));
}

fn device(all: &mut Vec<Family>) {
    fn traffic(s: &Statistics) -> [(&'static str, RequestsRecord); 5] {
        let a = &s.activity;
        [
            ("kind=\"data\",direction=\"read\"", a.data_read),
            ("kind=\"data\",direction=\"write\"", a.data_write),
            ("kind=\"metadata\",direction=\"read\"", a.metadata_read),
            ("kind=\"metadata\",direction=\"write\"", a.metadata_write),
            ("kind=\"journal\",direction=\"write\"", a.journal_write),
        ]
    }
    all.push(Box::new(|s, out| {
        let name = "forkdisk_device_requests_total";
        head(out, name, "counter", "Reads and writes of the pool's device.");
        traffic(s).iter().for_each(|(labels, r)| sample(out, name, labels, r.count));
    }));
    all.push(Box::new(|s, out| {
        let name = "forkdisk_device_bytes_total";
        head(out, name, "counter", "Bytes read from and written to the pool's device.");
        traffic(s).iter().for_each(|(labels, r)| sample(out, name, labels, r.bytes));
    }));
    let list: [(&str, &str, Value); 3] = [
        ("forkdisk_device_flushes_total", "Flushes of the pool's device.", |s| s.activity.flushes),
        ("forkdisk_device_discards_total", "Discards of the pool's device.", |s| s.activity.discard.count),
        ("forkdisk_device_discarded_bytes_total", "Bytes discarded on the device.", |s| s.activity.discard.bytes),
    ];
    list.into_iter().for_each(|(name, help, value)| single(all, "counter", name, help, value));
}

/// Adds the families for the devices of origins.
fn origins(all: &mut Vec<Family>) {
    type Figure = fn(&RequestsRecord) -> u64;
    let list: [(&str, &str, Figure); 2] = [
        ("forkdisk_origin_device_requests_total", "Reads and writes of an origin's own device.", |r| r.count),
        ("forkdisk_origin_device_bytes_total", "Bytes read from and written to an origin's own device.", |r| r.bytes),
    ];
    for (name, help, value) in list {
        all.push(Box::new(move |s, out| {
            head(out, name, "counter", help);
            for origin in &s.origins {
                for (direction, requests) in [("read", &origin.read), ("write", &origin.write)] {
                    let labels = format!("volume=\"{}\",direction=\"{direction}\"", origin.name);
                    sample(out, name, &labels, value(requests));
                }
            }
        }));
    }
    all.push(Box::new(|s, out| {
        let name = "forkdisk_origin_device_flushes_total";
        head(out, name, "counter", "Flushes of an origin's own device.");
        s.origins.iter().for_each(|o| sample(out, name, &format!("volume=\"{}\"", o.name), o.flushes));
    }));
}

fn activity(all: &mut Vec<Family>) {
    let list: [(&str, &str, Value); 12] = [
        ("forkdisk_journal_records_total", "Records appended to the journal.", |s| s.activity.records),
        ("forkdisk_checkpoints_total", "Checkpoints that have ended.", |s| s.activity.checkpoints),
        ("forkdisk_cache_hits_total", "Lookups that found their map table in memory.", |s| s.activity.cache_hits),
        ("forkdisk_cache_misses_total", "Map tables and count pages that were read.", |s| s.activity.cache_misses),
        ("forkdisk_shared_cache_hits_total", "Shared pages found in memory.", |s| s.activity.shared_cache.hits),
        ("forkdisk_shared_cache_misses_total", "Shared pages read from the device.", |s| {
            s.activity.shared_cache.misses
        }),
        ("forkdisk_shared_cache_joined_total", "Shared pages taken from a read of another request.", |s| {
            s.activity.shared_cache.joined
        }),
        ("forkdisk_shared_cache_evictions_total", "Shared pages that made room for others.", |s| {
            s.activity.shared_cache.evictions
        }),
        ("forkdisk_reaped_volumes_total", "Deleted volumes whose space was released entirely.", |s| s.activity.reaped),
        ("forkdisk_dropped_snapshots_total", "Snapshots deleted because the pool was full.", |s| s.activity.dropped),
        ("forkdisk_freed_bytes_total", "Space that checkpoints made free.", |s| s.activity.freed_bytes),
        ("forkdisk_gathered_bytes_total", "Data gathered with the rest of its volume.", |s| s.activity.gathered_bytes),
    ];
    list.into_iter().for_each(|(name, help, value)| single(all, "counter", name, help, value));
    let help = "Free space that is not discarded on the device yet.";
    single(all, "gauge", "forkdisk_retained_bytes", help, |s| s.activity.retained_bytes);
    let help = "1 while the space of deleted volumes is being released.";
    single(all, "gauge", "forkdisk_reaping", help, |s| u64::from(s.activity.reaping));
    all.push(Box::new(|s, out| {
        let name = "forkdisk_commit_group_size";
        head(out, name, "histogram", "Number of callers that waited for a commit of the journal.");
        histogram(out, name, "", &s.activity.commit_group, GROUP_BOUNDS, 1, 1.0);
    }));
}

type Rows = fn(&Statistics) -> Vec<(String, &VolumeActivity)>;

/// Adds the families of operations and faults, for the whole pool or for each volume.
fn operations(all: &mut Vec<Family>, of: &'static str, rows: Rows) {
    for (i, kind) in ["read", "write", "flush", "discard", "zero"].into_iter().enumerate() {
        let mut family = |what: &str, metric: &'static str, help: String, value: fn(&OperationRecord) -> u64| {
            let name = format!("forkdisk_{of}_{kind}_{what}");
            all.push(Box::new(move |s: &Statistics, out: &mut String| {
                head(out, &name, metric, &help);
                rows(s).iter().for_each(|(labels, a)| sample(out, &name, labels, value(a.operations.all()[i].1)));
            }) as Family);
        };
        let help = format!("Completed operations of the kind {kind}.");
        family("operations_total", "counter", help, |o| o.operations);
        if kind != "flush" {
            let help = format!("Bytes of successful operations of the kind {kind}.");
            family("bytes_total", "counter", help, |o| o.bytes);
        }
        family("errors_total", "counter", format!("Failed operations of the kind {kind}."), |o| o.errors);
        family("in_flight", "gauge", format!("Operations of the kind {kind} in flight."), |o| o.in_flight);
        let name = format!("forkdisk_{of}_{kind}_duration_seconds");
        all.push(Box::new(move |s, out| {
            head(out, &name, "histogram", "Time from the admission of a request until its reply was ready.");
            for (labels, a) in rows(s) {
                let latency = &a.operations.all()[i].1.latency;
                histogram(out, &name, &labels, latency, LATENCY_BOUNDS, LATENCY_STEP_BUCKETS, NANOSECONDS);
            }
        }));
    }
    faults(all, of, rows);
}

fn faults(all: &mut Vec<Family>, of: &'static str, rows: Rows) {
    type Figure = fn(&VolumeActivity) -> u64;
    let list: [(&str, &str, Figure); 4] = [
        ("provisions_total", "First writes to unmapped pages.", |a| a.provision.count),
        ("provisioned_bytes_total", "Bytes of new pages that were unmapped.", |a| a.provision.bytes),
        ("breaks_total", "First writes to pages that were shared.", |a| a.breaks.count),
        ("broken_bytes_total", "Bytes of new pages in place of shared ones.", |a| a.breaks.bytes),
    ];
    for (what, help, value) in list {
        let name = format!("forkdisk_{of}_{what}");
        all.push(Box::new(move |s, out| {
            head(out, &name, "counter", help);
            rows(s).iter().for_each(|(labels, a)| sample(out, &name, labels, value(a)));
        }));
    }
}

/// Adds the gauges of volumes and of snapshots that were opened; all snapshots could be thousands.
fn volume_gauges(all: &mut Vec<Family>) {
    type Figure = fn(&VolumeFigures) -> u64;
    let list: [(&str, &str, Figure); 4] = [
        ("forkdisk_volume_size_bytes", "Length of the volume.", |v| v.size),
        ("forkdisk_volume_referenced_bytes", "Bytes that the volume has mapped, shared or not.", |v| v.referenced),
        (
            "forkdisk_volume_scattered_bytes",
            "Mapped bytes that do not follow the bytes before them in the pool.",
            |v| v.scattered,
        ),
        ("forkdisk_volume_open_handles", "Number of open handles of the volume.", |v| v.in_use),
    ];
    for (name, help, value) in list {
        all.push(Box::new(move |s, out| {
            head(out, name, "gauge", help);
            let shown = s.volumes.iter().filter(|v| !v.snapshot || v.activity.is_some());
            shown.for_each(|v| sample(out, name, &volume_label(v), value(v)));
        }));
    }
    type Bound = fn(&VolumeFigures) -> Option<u64>;
    let bounds: [(&str, &str, Bound); 4] = [
        ("forkdisk_volume_quota_bytes", "Most bytes that the volume may have mapped, if it has a quota.", |v| v.quota),
        (
            "forkdisk_volume_diverge_bytes",
            "Most bytes of new pages that the bound of the volume allows, if it has one.",
            |v| v.diverge,
        ),
        ("forkdisk_volume_reserve_bytes", "Bytes of new pages that are reserved for the volume, if any are.", |v| {
            v.reserve
        }),
        (
            "forkdisk_volume_diverged_bytes",
            "Bytes of new pages that the bounds of the volume count, if it has any.",
            |v| v.diverged,
        ),
    ];
    for (name, help, value) in bounds {
        all.push(Box::new(move |s, out| {
            head(out, name, "gauge", help);
            let bounded = s.volumes.iter().filter_map(|v| Some((v, value(v)?)));
            bounded.for_each(|(v, bytes)| sample(out, name, &volume_label(v), bytes));
        }));
    }
}

/// Adds the families of copies, for the whole pool and for each volume that was opened.
fn copier(all: &mut Vec<Family>) {
    type Figure = fn(&CopyFigures) -> f64;
    let list: [(&str, &str, &str, Figure); 17] = [
        ("queued_jobs", "gauge", "Copies that have not started yet.", |c| c.queued as f64),
        ("in_flight_subjobs", "gauge", "Parts of copies in flight.", |c| c.in_flight as f64),
        ("jobs_total", "counter", "Copies that have ended, successful or not.", |c| c.jobs as f64),
        ("failed_jobs_total", "counter", "Copies that failed to read or write.", |c| c.failed as f64),
        ("cancelled_jobs_total", "counter", "Copies that were cancelled.", |c| c.cancelled as f64),
        ("merged_jobs_total", "counter", "Copies that share a write with the previous one.", |c| c.merged as f64),
        ("read_bytes_total", "counter", "Bytes that copies read.", |c| c.read as f64),
        ("written_bytes_total", "counter", "Bytes that copies wrote.", |c| c.written as f64),
        ("offloaded_bytes_total", "counter", "Bytes that the host copied by itself.", |c| c.offloaded as f64),
        ("given_bytes_total", "counter", "Bytes of clients' writes that copies included.", |c| c.given as f64),
        ("buffer_waits_total", "counter", "Waits of copies for a buffer.", |c| c.buffer_waits as f64),
        ("buffer_wait_seconds_total", "counter", "Time that copies waited for buffers.", |c| {
            c.buffer_wait as f64 / NANOSECONDS
        }),
        ("throttle_waits_total", "counter", "Waits of copies for a throttle.", |c| c.throttle_waits as f64),
        ("wait_seconds_total", "counter", "Time that copies waited to start.", |c| c.wait as f64 / NANOSECONDS),
        ("duration_seconds_total", "counter", "Time that copies took, waiting included.", |c| {
            c.latency as f64 / NANOSECONDS
        }),
        ("throttle_ratio", "gauge", "Share of the time in which copies may be in flight.", |c| {
            f64::from(c.throttle_percent) / 100.0
        }),
        ("throttle_bytes_per_second", "gauge", "Limit of copied bytes per second; 0: no limit.", |c| {
            c.throttle_rate as f64
        }),
    ];
    for (what, kind, help, value) in list {
        let name = format!("forkdisk_copier_{what}");
        all.push(Box::new(move |s, out| {
            head(out, &name, kind, help);
            sample(out, &name, "", value(&s.copier.all));
        }));
        let name = format!("forkdisk_volume_copier_{what}");
        all.push(Box::new(move |s, out| {
            head(out, &name, kind, help);
            let copied = s.volumes.iter().filter_map(|v| Some((v, v.copier.as_ref()?)));
            copied.for_each(|(v, c)| sample(out, &name, &volume_label(v), value(c)));
        }));
    }
    single(all, "gauge", "forkdisk_copier_buffer_bytes", "Buffers of copies.", |s| s.copier.buffers);
    let help = "Buffers of copies in use.";
    single(all, "gauge", "forkdisk_copier_buffer_used_bytes", help, |s| s.copier.buffers_used);
}

fn server(all: &mut Vec<Family>) {
    type Field = fn(&crate::record::ServerRecord) -> u64;
    let list: [(&str, &str, &str, Field); 11] = [
        ("connections", "gauge", "Connected clients.", |s| s.connections),
        ("accepted_connections_total", "counter", "Accepted connections.", |s| s.accepted),
        ("refused_connections_total", "counter", "Connections closed because there were too many.", |s| s.refused),
        ("crowded_exports_total", "counter", "Clients refused because their export had too many connections.", |s| {
            s.crowded
        }),
        ("failed_handshakes_total", "counter", "Connections that failed before transmission.", |s| s.failed_handshakes),
        ("encrypted_connections_total", "counter", "Connections that used an export under TLS.", |s| s.encrypted),
        ("broken_connections_total", "counter", "Connections ended by a protocol violation.", |s| s.broken),
        ("stalled_connections_total", "counter", "Clients disconnected for holding memory without progress.", |s| {
            s.stalled
        }),
        ("refused_requests_total", "counter", "Invalid requests.", |s| s.refused_requests),
        ("shared_memory_bytes", "gauge", "Memory for requests that connections share.", |s| s.shared_memory),
        ("shared_memory_used_bytes", "gauge", "Shared memory in use.", |s| s.shared_memory_used),
    ];
    for (what, kind, help, value) in list {
        let name = format!("forkdisk_nbd_{what}");
        all.push(Box::new(move |s, out| {
            if let Some(server) = &s.server {
                head(out, &name, kind, help);
                sample(out, &name, "", value(server));
            }
        }));
    }
}

fn process(all: &mut Vec<Family>) {
    all.push(Box::new(|s, out| {
        let p = &s.process;
        let mut one = |name: &str, kind: &str, help: &str, value: f64| {
            head(out, name, kind, help);
            sample(out, name, "", value);
        };
        one("process_cpu_seconds_total", "counter", "Processor time used.", p.cpu_ms as f64 / 1000.0);
        one("process_resident_memory_bytes", "gauge", "Memory in use.", p.resident_bytes as f64);
        one("process_open_fds", "gauge", "Open file descriptors.", p.open_files as f64);
        one(
            "process_start_time_seconds",
            "gauge",
            "Start time of the process since 1970, in seconds.",
            p.started_ms as f64 / 1000.0,
        );
    }));
}

fn histogram(
    out: &mut String,
    name: &str,
    labels: &str,
    distribution: &Distribution,
    bounds: std::ops::RangeInclusive<usize>,
    step: usize,
    per_unit: f64,
) {
    let separator = if labels.is_empty() { "" } else { "," };
    let mut seen = 0;
    let mut next = 0;
    for bound in bounds.step_by(step) {
        seen += distribution.buckets.iter().skip(next).take(bound + 1 - next).sum::<u64>();
        next = bound + 1;
        let le = Histogram::bound(bound) as f64 / per_unit;
        let _ = writeln!(out, "{name}_bucket{{{labels}{separator}le=\"{le}\"}} {seen}");
    }
    let _ = writeln!(out, "{name}_bucket{{{labels}{separator}le=\"+Inf\"}} {}", distribution.count);
    sample(out, &format!("{name}_sum"), labels, distribution.sum as f64 / per_unit);
    sample(out, &format!("{name}_count"), labels, distribution.count);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn sample_statistics() -> Statistics {
        let mut latency = Histogram { sum: 5_000 + 3_000_000, ..Histogram::default() };
        latency.buckets[13] = 1;
        latency.buckets[22] = 1;
        let mut activity = VolumeActivity::default();
        activity.operations.read.operations = 2;
        activity.operations.read.latency = (&latency).into();
        let volume = |name: &str, snapshot, activity: Option<VolumeActivity>| VolumeFigures {
            name: name.to_owned(),
            snapshot,
            size: 1 << 30,
            copier: activity.as_ref().map(|_| CopyFigures { jobs: 3, buffer_wait: 1_500_000, ..Default::default() }),
            activity,
            ..VolumeFigures::default()
        };
        let volumes = vec![volume("a", false, Some(activity)), volume("a@s", true, None), volume("b/c", false, None)];
        let mut statistics = Statistics { volumes, server: Some(Default::default()), ..Statistics::default() };
        statistics.pool.mode = Mode::ReadWrite;
        statistics
    }

    /// Returns every sample by its name and labels; fails on text that is not in the format.
    fn parse(text: &str) -> BTreeMap<String, f64> {
        let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
        let mut samples = BTreeMap::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a kind");
                assert_eq!(kinds.insert(name, kind), None, "{name} is there twice");
            } else if !line.starts_with("# HELP ") {
                let (key, value) = line.rsplit_once(' ').expect("a value");
                let name = key.split('{').next().expect("a name");
                let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
                let is_known = kinds.contains_key(name) || family.is_some_and(|f| kinds[f] == "histogram");
                assert!(is_known, "{name} has no type");
                let old = samples.insert(key.to_owned(), value.parse().expect("a number"));
                assert_eq!(old, None, "{key} is there twice");
            }
        }
        samples
    }

    #[test]
    fn latencies_are_cumulative_buckets_in_seconds() {
        let samples = parse(&render(&sample_statistics()));
        let bucket =
            |le: &str| samples[&format!("forkdisk_volume_read_duration_seconds_bucket{{volume=\"a\",le=\"{le}\"}}")];
        assert_eq!(
            [bucket("0.000004096"), bucket("0.000016384"), bucket("0.004194304"), bucket("+Inf")],
            [0.0, 1.0, 2.0, 2.0]
        );
        assert_eq!(samples["forkdisk_volume_read_duration_seconds_sum{volume=\"a\"}"], 0.003005);
        assert_eq!(samples["forkdisk_volume_read_operations_total{volume=\"a\"}"], 2.0);
        assert_eq!(samples["forkdisk_volume_copier_jobs_total{volume=\"a\"}"], 3.0);
        assert_eq!(samples["forkdisk_volume_copier_buffer_wait_seconds_total{volume=\"a\"}"], 0.0015);
    }

    #[test]
    fn volumes_are_always_shown_and_snapshots_when_they_were_opened() {
        let samples = parse(&render(&sample_statistics()));
        assert_eq!(samples["forkdisk_volume_size_bytes{volume=\"b/c\"}"], f64::from(1 << 30));
        assert!(!samples.contains_key("forkdisk_volume_size_bytes{volume=\"a@s\"}"));
        assert_eq!(samples["forkdisk_pool_mode{mode=\"rw\"}"], 1.0);
        assert_eq!(samples["forkdisk_pool_mode{mode=\"failed\"}"], 0.0);
    }

    #[test]
    fn the_document_lists_every_metric_and_no_other() {
        let text = render(&sample_statistics());
        let there: BTreeSet<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let document = include_str!("../docs/metrics.md");
        let listed: BTreeSet<&str> = document
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|word| word.starts_with("forkdisk_") || word.starts_with("process_"))
            .map(|word| word.split('{').next().expect("a name"))
            .collect();
        assert_eq!(there, listed);
    }
}
