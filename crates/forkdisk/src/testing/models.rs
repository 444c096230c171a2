//! The time that a recording would have taken on devices of three kinds: computed, not measured.
//!
//! Requests are served in the order in which they arrived. A request occupies one of the device's lanes for
//! its latency and then the one channel for its bytes; a flush waits for everything before it, and everything
//! behind waits for the flush. So every request that a pool adds to its clients' requests costs time: a model
//! errs against the side with more requests.

use std::time::Duration;

use super::recording::{Recording, Request, RequestKind};

/// A kind of device, by the parameters that determine its time.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceModel {
    /// Returns its name in reports.
    pub name: &'static str,
    /// Bytes per second of the channel.
    pub bandwidth: u64,
    /// Latency of every request.
    pub latency: Duration,
    /// Additional latency of a request that does not begin where the last ended, within `near_distance` and
    /// beyond.
    pub near_seek: Duration,
    /// See `near_seek`.
    pub far_seek: Duration,
    /// Bytes from the end of the last request; see `near_seek`.
    pub near_distance: u64,
    /// Requests served in parallel.
    pub lanes: usize,
    /// Time of a flush.
    pub flush: Duration,
    /// Requests per second, and how many bytes count as one.
    pub quota: Option<(u64, u64)>,
}

impl DeviceModel {
    /// A spinning disk: 40 MB/s, 8 ms to another place, 2 ms within 4 MiB.
    pub const SPINDLE: DeviceModel = DeviceModel {
        name: "spindle",
        bandwidth: 40_000_000,
        latency: Duration::ZERO,
        near_seek: Duration::from_millis(2),
        far_seek: Duration::from_millis(8),
        near_distance: 4 << 20,
        lanes: 1,
        flush: Duration::from_millis(8),
        quota: None,
    };

    /// A solid-state disk: 2 GB/s, 60 µs, 32 in parallel.
    pub const SSD: DeviceModel = DeviceModel {
        name: "ssd",
        bandwidth: 2_000_000_000,
        latency: Duration::from_micros(60),
        near_seek: Duration::ZERO,
        far_seek: Duration::ZERO,
        near_distance: 0,
        lanes: 32,
        flush: Duration::from_micros(300),
        quota: None,
    };

    /// A cloud disk: 250 MB/s, 500 µs, 64 in parallel, 3,000 requests of up to 256 KiB a second.
    pub const CLOUD: DeviceModel = DeviceModel {
        name: "cloud",
        bandwidth: 250_000_000,
        latency: Duration::from_micros(500),
        near_seek: Duration::ZERO,
        far_seek: Duration::ZERO,
        near_distance: 0,
        lanes: 64,
        flush: Duration::from_millis(1),
        quota: Some((3000, 256 << 10)),
    };

    /// All operations.
    pub const ALL: [DeviceModel; 3] = [DeviceModel::SPINDLE, DeviceModel::SSD, DeviceModel::CLOUD];

    /// Returns the time the device would take for all of it, if its clients keep at most `depth` requests in
    /// flight. A discard costs nothing.
    pub fn time(&self, recording: &Recording, depth: usize) -> Duration {
        self.time_of_phases([(recording, depth)])
    }

    /// The same for phases of which each begins when the one before has ended, each with its own depth.
    pub fn time_of_phases<'a>(&self, phases: impl IntoIterator<Item = (&'a Recording, usize)>) -> Duration {
        let mut disk = Disk { model: self, lanes: Vec::new(), channel: 0.0, quota: 0.0, head: 0 };
        for (recording, depth) in phases {
            disk.lanes = vec![disk.idle(); self.lanes.min(depth).max(1)];
            recording.requests.iter().for_each(|request| disk.serve(request));
        }
        Duration::from_secs_f64(disk.idle())
    }
}

/// A simulated disk; times in seconds since the beginning.
struct Disk<'a> {
    model: &'a DeviceModel,
    /// When each lane is free.
    lanes: Vec<f64>,
    /// When the channel is free.
    channel: f64,
    /// When the quota allows the next request.
    quota: f64,
    /// Where the last request ended.
    head: u64,
}

impl Disk<'_> {
    fn idle(&self) -> f64 {
        self.lanes.iter().copied().fold(self.channel, f64::max)
    }

    fn serve(&mut self, request: &Request) {
        match request.kind {
            RequestKind::Flush => {
                let end = self.idle() + self.model.flush.as_secs_f64();
                self.lanes.fill(end);
            }
            RequestKind::Discard | RequestKind::Clone | RequestKind::Zero => {}
            RequestKind::Read | RequestKind::WriteData | RequestKind::WriteMetadata => self.transfer(request),
        }
    }

    fn transfer(&mut self, request: &Request) {
        let lane = (0..self.lanes.len()).min_by(|&a, &b| self.lanes[a].total_cmp(&self.lanes[b])).unwrap_or(0);
        let mut start = self.lanes[lane];
        if let Some((per_second, unit)) = self.model.quota {
            start = start.max(self.quota);
            self.quota = start + request.len.div_ceil(unit) as f64 / per_second as f64;
        }
        let ready = start + self.model.latency.as_secs_f64() + self.seek(request.offset).as_secs_f64();
        let end = ready.max(self.channel) + request.len as f64 / self.model.bandwidth as f64;
        (self.lanes[lane], self.channel, self.head) = (end, end, request.offset + request.len);
    }

    fn seek(&self, to: u64) -> Duration {
        match self.head.abs_diff(to) {
            0 => Duration::ZERO,
            distance if distance <= self.model.near_distance => self.model.near_seek,
            _ => self.model.far_seek,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(requests: &[(RequestKind, u64, u64)]) -> Recording {
        let request = |&(kind, offset, len): &(RequestKind, u64, u64)| Request { kind, offset, len };
        Recording { requests: requests.iter().map(request).collect() }
    }

    fn millis(model: &DeviceModel, requests: &[(RequestKind, u64, u64)], depth: usize) -> f64 {
        model.time(&recording(requests), depth).as_secs_f64() * 1e3
    }

    #[track_caller]
    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-3, "{a} is not {b}");
    }

    const W: RequestKind = RequestKind::WriteData;
    const FLUSH: (RequestKind, u64, u64) = (RequestKind::Flush, 0, 0);

    #[test]
    fn a_spindle_pays_for_distance_and_bytes() {
        let spindle = DeviceModel::SPINDLE;
        close(millis(&spindle, &[(W, 0, 400_000), (W, 400_000, 400_000)], 32), 20.0);
        close(millis(&spindle, &[(W, 0, 400_000), (W, 500_000, 400_000)], 32), 22.0);
        close(millis(&spindle, &[(W, 1 << 30, 400_000), FLUSH], 32), 26.0);
    }

    #[test]
    fn an_ssd_serves_side_by_side_as_deep_as_its_client() {
        let ssd = DeviceModel::SSD;
        let four = [(W, 0, 2000), (W, 1 << 30, 2000), (W, 0, 2000), (W, 1 << 30, 2000)];
        close(millis(&ssd, &four, 1), 4.0 * 0.061);
        close(millis(&ssd, &four, 32), 0.060 + 4.0 * 0.001);
        close(millis(&ssd, &[four[0], FLUSH, four[1]], 32), 2.0 * 0.061 + 0.3);
    }

    #[test]
    fn a_phase_begins_when_the_one_before_has_ended_and_where_it_left_the_head() {
        let (one, two) = (recording(&[(W, 0, 400_000)]), recording(&[(W, 400_000, 400_000)]));
        let millis = |model: &DeviceModel, depths: [usize; 2]| {
            model.time_of_phases([(&one, depths[0]), (&two, depths[1])]).as_secs_f64() * 1e3
        };
        close(millis(&DeviceModel::SPINDLE, [8, 1]), 20.0);
        close(millis(&DeviceModel::SSD, [8, 1]), 2.0 * 0.26);
        close(millis(&DeviceModel::SSD, [1, 8]), 2.0 * 0.26);
    }

    #[test]
    fn a_cloud_disk_counts_requests_by_their_size() {
        let cloud = DeviceModel::CLOUD;
        let small: Vec<_> = (0..3001).map(|i| (W, i * 4096, 4096)).collect();
        close(millis(&cloud, &small, 64), 1000.0 + 0.5 + 4096.0 / 250_000.0);
        let large: Vec<_> = (0..301).map(|i| (W, i << 20, 1 << 20)).collect();
        let bytes = 301.0 * (1 << 20) as f64 / 250_000.0;
        close(millis(&cloud, &large, 64), bytes + 0.5);
        close(millis(&cloud, &[(RequestKind::Discard, 0, 1 << 30)], 64), 0.0);
    }
}
