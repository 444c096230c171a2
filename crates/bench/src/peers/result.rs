//! Result lines of a scenario.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use forkdisk::testing::Recording;

use super::trace::Seen;

/// One measurement of a scenario.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Parameters of the measurement, as the scenario prints them: `bs=64 what=break`.
    pub(super) keys: BTreeMap<String, String>,
    /// Payload bytes.
    pub bytes: u64,
    /// Seconds in the guest.
    pub seconds: f64,
    /// Seconds of the host's CPU for the whole guest, including its disks.
    pub cpu: f64,
    /// Requests that reached the disks.
    pub seen: Seen,
}

impl Measured {
    /// Parses a line such as `R w2-thin bs=64 what=break rep=1 bytes=4096 sec=0.1 MBps=2.0 | …`.
    pub fn parse(line: &str, cpu: f64) -> Result<Measured> {
        let told = line.split('|').next().unwrap_or_default();
        let keys: BTreeMap<String, String> =
            told.split_whitespace().filter_map(|w| w.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect();
        let get = |key: &str| keys.get(key).with_context(|| format!("no {key} in the guest's line {line:?}"));
        let (bytes, seconds) = (get("bytes")?.parse()?, get("sec")?.parse()?);
        Ok(Measured { keys, bytes, seconds, cpu, seen: Seen::default() })
    }

    /// Returns whether it was measured with these parameters.
    pub fn is(&self, keys: &[(&str, &str)]) -> bool {
        keys.iter().all(|&(key, value)| self.keys.get(key).is_some_and(|v| v == value))
    }

    /// Returns what the first disk received until the client's work was done.
    pub fn disk(&self) -> Recording {
        self.seen.disks.first().cloned().unwrap_or_default()
    }

    /// Returns the same plus everything after that.
    pub fn disk_in_all(&self) -> Recording {
        let all = self.seen.disks.iter().take(1).chain(self.seen.later.iter().take(1));
        Recording { requests: all.flat_map(|r| r.requests.iter().copied()).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_apart() {
        let line = "R w2 bs=64 what=break rep=1 bytes=4096 sec=0.5000 MBps=0.01 | nbd0:r=1/0.0M,w=2/0.1M,f=0";
        let measured = Measured::parse(line, 0.25).unwrap();
        assert_eq!((measured.bytes, measured.seconds, measured.cpu), (4096, 0.5, 0.25));
        assert!(measured.is(&[("bs", "64"), ("what", "break")]) && !measured.is(&[("bs", "65")]));
        assert!(!measured.is(&[("f", "0")]));
        assert!(Measured::parse("R w2 bytes=1", 0.0).is_err());
    }
}
