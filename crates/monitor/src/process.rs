//! Resources that the process uses, from /proc.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Kernel clock ticks per second, the same on every Linux.
const TICKS_PER_SECOND: u64 = 100;

/// Resources of a process. A figure that /proc does not provide is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessRecord {
    /// Process number.
    pub pid: u32,
    /// Start time, in milliseconds since 1970.
    pub started_ms: u64,
    /// Processor time, in milliseconds.
    pub cpu_ms: u64,
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
    /// Open file descriptors.
    pub open_files: u64,
}

impl ProcessRecord {
    /// Reads the figures of this process.
    pub fn of_self() -> ProcessRecord {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
        let open_files = fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64);
        let record = parse(&stat, &uptime, now).unwrap_or_default();
        let resident_bytes = resident(&status).unwrap_or(0);
        ProcessRecord { pid: std::process::id(), open_files, resident_bytes, ..record }
    }
}

/// Parses /proc/self/stat. Fields are counted after the program's name, which may contain any characters.
fn parse(stat: &str, uptime: &str, now: u64) -> Option<ProcessRecord> {
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let up: f64 = uptime.split_ascii_whitespace().next()?.parse().ok()?;
    Some(ProcessRecord {
        started_ms: (now + field(22)? * 1000 / TICKS_PER_SECOND).saturating_sub((up * 1000.0) as u64),
        cpu_ms: (field(14)? + field(15)?) * 1000 / TICKS_PER_SECOND,
        ..ProcessRecord::default()
    })
}

fn resident(status: &str) -> Option<u64> {
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(kib.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_whatever_the_program_is_called() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 9 0 0 0 150 50 0 0 20 0 1 0 1000 99 300 18446744073709551615";
        let record = parse(stat, "110.00 1.0\n", 1_000_000).expect("sound");
        assert_eq!(record.cpu_ms, 2000);
        assert_eq!(resident("VmPeak:\t 9 kB\nVmRSS:\t  300 kB\n"), Some(300 << 10));
        assert_eq!(record.started_ms, 1_000_000 - 110_000 + 10_000);
        assert_eq!(parse("nonsense", "1", 0), None);
    }

    #[test]
    fn this_process_uses_something() {
        let record = ProcessRecord::of_self();
        assert!(
            record.resident_bytes > 0 && record.open_files > 0 && record.started_ms > 1_000_000_000_000,
            "{record:?}"
        );
    }
}
