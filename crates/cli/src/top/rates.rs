//! Rates computed from two readings of the counters.

use forkdisk::Histogram;
use forkdisk_monitor::{CopyFigures, Distribution, OperationRecord, Operations, Statistics};

use crate::size::human as size;

/// Activity of one volume, or of all together.
#[derive(Debug, Default, PartialEq)]
pub struct Row {
    /// The volume's name.
    pub name: String,
    /// Operations per second.
    pub reads: f64,
    /// See `reads`.
    pub writes: f64,
    /// Flushes, discards and writes of zeroes per second.
    pub others: f64,
    /// Bytes per second.
    pub read_bytes: f64,
    /// See `read_bytes`.
    pub written_bytes: f64,
    /// Latencies that 50 % and 99 % of the operations did not exceed, in microseconds and rounded
    /// to a power of two; 0 if there were no operations.
    pub read_latency: [f64; 2],
    /// See `read_latency`.
    pub write_latency: [f64; 2],
    /// Operations in flight.
    pub in_flight: u64,
    /// Bytes copied per second to break sharing.
    pub copied_bytes: f64,
    /// Bytes mapped.
    pub referenced: u64,
    /// How often it is open.
    pub in_use: u64,
}

/// A complete view.
#[derive(Debug)]
pub struct View {
    /// Lines about the pool.
    pub head: Vec<String>,
    /// All volumes together.
    pub total: Row,
    /// Open volumes and snapshots, the busiest first.
    pub rows: Vec<Row>,
}

impl View {
    /// Computes the view of the `seconds` seconds from `old` to `new`.
    pub fn between(old: &Statistics, new: &Statistics, seconds: f64) -> View {
        let was = |name: &str| old.volumes.iter().find(|v| v.name == name).and_then(|v| v.activity.as_ref());
        let nothing = Operations::default();
        let mut rows: Vec<Row> = Vec::new();
        for volume in &new.volumes {
            let Some(activity) = &volume.activity else { continue };
            let before = was(&volume.name).map_or(&nothing, |a| &a.operations);
            let row = Row::between(&volume.name, before, &activity.operations, seconds);
            if volume.in_use > 0 || row.load() > 0.0 {
                let copied = |copier: Option<CopyFigures>| copier.unwrap_or_default().written;
                let old = old.volumes.iter().find(|v| v.name == volume.name).and_then(|v| v.copier);
                let copied_bytes = copied(volume.copier).saturating_sub(copied(old)) as f64 / seconds;
                rows.push(Row { referenced: volume.referenced, in_use: volume.in_use, copied_bytes, ..row });
            }
        }
        rows.sort_by(|a, b| b.load().total_cmp(&a.load()).then_with(|| a.name.cmp(&b.name)));
        let (before, after) = (&old.activity.volumes.operations, &new.activity.volumes.operations);
        let total = Row {
            referenced: new.pool.used,
            in_use: new.server.map_or(0, |s| s.connections),
            copied_bytes: new.copier.all.written.saturating_sub(old.copier.all.written) as f64 / seconds,
            ..Row::between("all", before, after, seconds)
        };
        View { head: head(old, new, seconds), total, rows }
    }
}

impl Row {
    fn between(name: &str, old: &Operations, new: &Operations, seconds: f64) -> Row {
        let rate = |of: fn(&OperationRecord) -> u64, old: &OperationRecord, new: &OperationRecord| {
            of(new).saturating_sub(of(old)) as f64 / seconds
        };
        let (operations, bytes) = (|o: &OperationRecord| o.operations, |o: &OperationRecord| o.bytes);
        let others = [(&old.flush, &new.flush), (&old.discard, &new.discard), (&old.zero, &new.zero)];
        Row {
            name: name.to_owned(),
            reads: rate(operations, &old.read, &new.read),
            writes: rate(operations, &old.write, &new.write),
            others: others.iter().map(|(old, new)| rate(operations, old, new)).sum(),
            read_bytes: rate(bytes, &old.read, &new.read),
            written_bytes: rate(bytes, &old.write, &new.write),
            read_latency: latency(&old.read.latency, &new.read.latency),
            write_latency: latency(&old.write.latency, &new.write.latency),
            in_flight: new.all().iter().map(|(_, o)| o.in_flight).sum(),
            ..Row::default()
        }
    }

    /// Returns the measure by which rows are sorted.
    fn load(&self) -> f64 {
        self.reads + self.writes + self.others + (self.read_bytes + self.written_bytes) / 4096.0
    }

    /// Returns the cells of a table, in the order of [`COLUMNS`].
    pub fn cells(&self) -> [String; 12] {
        let count = |rate: f64| if rate < 10.0 && rate > 0.0 { format!("{rate:.1}") } else { format!("{rate:.0}") };
        let bytes = |rate: f64| size(rate as u64);
        let time = |micros: f64| match micros {
            0.0 => "-".to_owned(),
            m if m < 1_000.0 => format!("{m:.0}us"),
            m if m < 1_000_000.0 => format!("{:.1}ms", m / 1e3),
            m => format!("{:.1}s", m / 1e6),
        };
        let both = |latency: [f64; 2]| match latency {
            [0.0, 0.0] => "-".to_owned(),
            [p50, p99] => format!("{}/{}", time(p50), time(p99)),
        };
        [
            self.name.clone(),
            count(self.reads),
            bytes(self.read_bytes),
            both(self.read_latency),
            count(self.writes),
            bytes(self.written_bytes),
            both(self.write_latency),
            count(self.others),
            bytes(self.copied_bytes),
            self.in_flight.to_string(),
            self.in_use.to_string(),
            size(self.referenced),
        ]
    }
}

/// Headings of a row's cells.
pub const COLUMNS: [&str; 12] = [
    "VOLUME",
    "READ/S",
    "READ B/S",
    "P50/P99",
    "WRITE/S",
    "WRITE B/S",
    "P50/P99",
    "OTHER/S",
    "COPY B/S",
    "BUSY",
    "OPEN",
    "USED",
];

fn latency(old: &Distribution, new: &Distribution) -> [f64; 2] {
    let grown: Histogram = new.histogram().since(&old.histogram());
    [0.5, 0.99].map(|q| grown.quantile(q) as f64 / 1e3)
}

fn head(old: &Statistics, new: &Statistics, seconds: f64) -> Vec<String> {
    let (p, a, b) = (&new.pool, &new.activity, &old.activity);
    let (c, d) = (&new.copier, &old.copier);
    let rate = |new: u64, old: u64| new.saturating_sub(old) as f64 / seconds;
    let bytes = |new: u64, old: u64| size(rate(new, old) as u64);
    let percent = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 * 100.0 / all as f64 };
    let looked_up = rate(a.cache_hits, b.cache_hits) + rate(a.cache_misses, b.cache_misses);
    let hit = if looked_up > 0.0 { rate(a.cache_hits, b.cache_hits) * 100.0 / looked_up } else { 100.0 };
    let server = new.server.unwrap_or_default();
    let group = a.commit_group.histogram().since(&b.commit_group.histogram());
    let mean = if group.count() > 0 { group.sum as f64 / group.count() as f64 } else { 0.0 };
    vec![
        format!(
            "pool     {}  used {} of {} ({:.0} %)  free {}  freeing {}  {} volumes  {} snapshots{}",
            p.mode,
            size(p.used),
            size(p.size),
            percent(p.used, p.size),
            size(p.free),
            size(p.freeing),
            p.volumes,
            p.snapshots,
            if a.reaping { "  reaping" } else { "" }
        ),
        format!(
            "device   data {}/s read {}/s written  metadata {}/s read {}/s written  {:.0} flushes/s",
            bytes(a.data_read.bytes, b.data_read.bytes),
            bytes(a.data_write.bytes, b.data_write.bytes),
            bytes(a.metadata_read.bytes, b.metadata_read.bytes),
            bytes(a.metadata_write.bytes, b.metadata_write.bytes),
            rate(a.flushes, b.flushes),
        ),
        format!(
            "journal  {} of {} ({:.0} %)  {}/s written  {:.0} commits/s of {mean:.1}  dirty {}  {} checkpoints",
            size(p.journal_used),
            size(p.journal_size),
            percent(p.journal_used, p.journal_size),
            bytes(a.journal_write.bytes, b.journal_write.bytes),
            group.count() as f64 / seconds,
            size(p.dirty),
            a.checkpoints,
        ),
        format!(
            "faults   {}/s provisioned  {}/s broken  cache {} hit {hit:.0} %",
            bytes(a.volumes.provision.bytes, b.volumes.provision.bytes),
            bytes(a.volumes.breaks.bytes, b.volumes.breaks.bytes),
            size(a.cache_bytes),
        ),
        format!(
            "copier   {}/s read  {}/s written  {:.0} jobs/s  {} queued  {} in flight  buffers {} of {}  waits {:.0}/s  \
             throttled {:.0}/s",
            bytes(c.all.read, d.all.read),
            bytes(c.all.written, d.all.written),
            rate(c.all.jobs, d.all.jobs),
            c.all.queued,
            c.all.in_flight,
            size(c.buffers_used),
            size(c.buffers),
            rate(c.all.buffer_waits, d.all.buffer_waits),
            rate(c.all.throttle_waits, d.all.throttle_waits),
        ),
        format!(
            "server   {} clients  memory {} of {}  process {:.0} % cpu  {} resident",
            server.connections,
            size(server.shared_memory_used),
            size(server.shared_memory),
            rate(new.process.cpu_ms, old.process.cpu_ms) / 10.0,
            size(new.process.resident_bytes),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkdisk_monitor::{VolumeActivity, VolumeFigures};

    fn volume(name: &str, writes: u64, latency_bucket: usize) -> VolumeFigures {
        let mut histogram = Histogram::default();
        histogram.buckets[latency_bucket] = writes;
        let mut activity = VolumeActivity::default();
        let write = &mut activity.operations.write;
        (write.operations, write.bytes, write.latency) = (writes, writes * 4096, (&histogram).into());
        let mut figures = VolumeFigures::default();
        (figures.name, figures.in_use, figures.activity) = (name.to_owned(), 1, Some(activity));
        figures
    }

    fn statistics(volumes: Vec<VolumeFigures>) -> Statistics {
        let mut statistics = Statistics::default();
        statistics.volumes = volumes;
        statistics
    }

    #[test]
    fn rates_are_what_was_added_by_the_second() {
        let old = statistics(vec![volume("a", 100, 14)]);
        let new = statistics(vec![volume("a", 300, 14), volume("b", 1000, 20)]);
        let view = View::between(&old, &new, 2.0);
        let shown: Vec<(&str, f64)> = view.rows.iter().map(|row| (row.name.as_str(), row.writes)).collect();
        assert_eq!(shown, [("b", 500.0), ("a", 100.0)], "the busiest first");
        assert_eq!(view.rows[1].written_bytes, 409_600.0);
        assert_eq!(view.rows[1].write_latency, [16.384, 16.384]);
        assert_eq!(view.rows[1].cells()[6], "16us/16us");
        assert_eq!(view.head.len(), 6);
    }

    #[test]
    fn what_nobody_uses_is_not_shown() {
        let mut idle = volume("a", 10, 14);
        idle.in_use = 0;
        let view = View::between(&statistics(vec![idle.clone()]), &statistics(vec![idle]), 1.0);
        assert!(view.rows.is_empty());
    }
}
