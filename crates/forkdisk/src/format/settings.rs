//! Stored settings of the pool and its volumes for copying: plain values with their bounds.

use std::fmt;
use std::str::FromStr;

use super::cursor::{Append, Reader};

/// Smallest and largest sub-job, in bytes.
pub const SUBJOB_SIZES: std::ops::RangeInclusive<u32> = 64 << 10..=1 << 20;
/// Most sub-jobs of one job in flight.
pub const MAX_SPLIT_COUNT: u32 = 64;
/// Most bytes of buffers.
pub const MAX_BUFFER_BYTES: u64 = 1 << 30;
/// Number of copy classes; each has a reserve of one sub-job.
pub const COPIER_USERS: u64 = 5;

/// What a first write to a shared chunk does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BreakPolicy {
    /// Only what is written gets new pages; the rest of the chunk stays shared.
    #[default]
    Split,
    /// The whole chunk is copied to a new contiguous place before the write is acknowledged.
    Copy,
}

/// When scattered pages of a volume are gathered without a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GatherPolicy {
    /// Never.
    #[default]
    Off,
    /// While the pool is idle, at any cost.
    Idle,
    /// While the pool is idle, at little cost: where all of a MiB is mapped, pages move to the block in which
    /// most of them lie, at most two for each seam that goes away, in volumes where more than one page in 256
    /// is a seam.
    Auto,
    /// While more than this percentage of its pages (1 to 99) are seams.
    Above(u8),
}

impl GatherPolicy {
    /// Default of the program and its mounts, so that clones do not age. The default of the library is
    /// [`Off`](Self::Off): it moves nothing by itself.
    pub const USUAL: GatherPolicy = GatherPolicy::Auto;

    /// Whether its number is within its bounds.
    pub fn is_valid(self) -> bool {
        !matches!(self, GatherPolicy::Above(percent) if !(1..=99).contains(&percent))
    }

    /// The byte on disk: 0, 254, 255, or the percentage.
    pub(super) fn encoded(self) -> u8 {
        match self {
            GatherPolicy::Off => 0,
            GatherPolicy::Auto => 254,
            GatherPolicy::Idle => 255,
            GatherPolicy::Above(percent) => percent,
        }
    }

    pub(super) fn decoded(byte: u8) -> Option<GatherPolicy> {
        match byte {
            0 => Some(GatherPolicy::Off),
            254 => Some(GatherPolicy::Auto),
            255 => Some(GatherPolicy::Idle),
            1..=99 => Some(GatherPolicy::Above(byte)),
            _ => None,
        }
    }
}

impl fmt::Display for GatherPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GatherPolicy::Off => f.write_str("off"),
            GatherPolicy::Auto => f.write_str("auto"),
            GatherPolicy::Idle => f.write_str("idle"),
            GatherPolicy::Above(percent) => write!(f, "{percent}%"),
        }
    }
}

/// Text that names no gather policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoSuchPolicy(String);

impl fmt::Display for NoSuchPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no policy of gathering '{}': off, auto, idle and 1% to 99% are", self.0)
    }
}

impl std::error::Error for NoSuchPolicy {}

impl FromStr for GatherPolicy {
    type Err = NoSuchPolicy;

    fn from_str(text: &str) -> Result<GatherPolicy, NoSuchPolicy> {
        let percent = || text.strip_suffix('%').and_then(|number| number.parse().ok());
        let policy = match text {
            "off" => Some(GatherPolicy::Off),
            "auto" => Some(GatherPolicy::Auto),
            "idle" => Some(GatherPolicy::Idle),
            _ => percent().map(GatherPolicy::Above),
        };
        policy.filter(|policy| policy.is_valid()).ok_or_else(|| NoSuchPolicy(text.to_string()))
    }
}

/// Limits of a copier; both hold at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle {
    /// Percent of the time in which anything may be in flight: 1 to 100 (no limit).
    pub percent: u8,
    /// Bytes copied per second, a multiple of 1024; 0: no limit.
    pub bytes_per_second: u64,
}

impl Throttle {
    /// No limit.
    pub const NONE: Throttle = Throttle { percent: 100, bytes_per_second: 0 };

    /// Whether both limits are within their bounds.
    pub fn is_valid(&self) -> bool {
        let rate = self.bytes_per_second;
        (1..=100).contains(&self.percent) && rate.is_multiple_of(1024) && rate / 1024 <= u64::from(u32::MAX)
    }

    /// Whether it has no limit.
    pub fn is_none(&self) -> bool {
        *self == Throttle::NONE
    }

    /// Encodes the limits: percent (0: none) and KiB per second (0: none).
    pub(super) fn encoded(&self) -> (u8, u32) {
        (if self.percent == 100 { 0 } else { self.percent }, (self.bytes_per_second / 1024) as u32)
    }

    pub(super) fn decoded(percent: u8, kib: u32) -> Option<Throttle> {
        let percent = if percent == 0 { 100 } else { percent };
        let throttle = Throttle { percent, bytes_per_second: u64::from(kib) * 1024 };
        throttle.is_valid().then_some(throttle)
    }
}

impl Default for Throttle {
    fn default() -> Throttle {
        Throttle::NONE
    }
}

/// Settings of a pool's copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopierSettings {
    /// Most bytes copied by one pair of requests: a multiple of 64 KiB from 64 KiB to 1 MiB.
    pub subjob_size: u32,
    /// Most sub-jobs of one job in flight: 1 to 64.
    pub split_count: u32,
    /// Bytes of buffers: at least five sub-jobs, at most 1 GiB.
    pub buffers: u64,
    /// Limits of all copies of the pool together.
    pub throttle: Throttle,
    /// Whether the device is asked to clone ranges instead of reading and writing them.
    pub offload: bool,
}

impl Default for CopierSettings {
    fn default() -> CopierSettings {
        let (subjob_size, split_count, buffers) = (512 << 10, 8, 20 << 20);
        CopierSettings { subjob_size, split_count, buffers, throttle: Throttle::NONE, offload: false }
    }
}

/// Bytes of the encoded settings.
const SETTINGS_BYTES: usize = 28;

impl CopierSettings {
    /// Returns the least bytes of buffers that settings with this sub-job size need.
    pub fn least_buffers(&self) -> u64 {
        u64::from(self.subjob_size) * COPIER_USERS
    }

    /// Returns which setting is out of its bounds, if one is.
    pub fn flaw(&self) -> Option<String> {
        if !SUBJOB_SIZES.contains(&self.subjob_size) || !self.subjob_size.is_multiple_of(64 << 10) {
            return Some(format!("bad subjob_size of {} bytes: 64 KiB to 1 MiB, in steps of 64 KiB", self.subjob_size));
        }
        if !(1..=MAX_SPLIT_COUNT).contains(&self.split_count) {
            return Some(format!("bad split_count {}: 1 to {MAX_SPLIT_COUNT}", self.split_count));
        }
        if !(self.least_buffers()..=MAX_BUFFER_BYTES).contains(&self.buffers) {
            let least = self.least_buffers();
            return Some(format!("bad buffers of {} bytes: {least} (five sub-jobs) to 1 GiB", self.buffers));
        }
        (!self.throttle.is_valid()).then(|| "bad throttle: 1% to 100%, and whole KiB per second".to_string())
    }

    /// Appends the encoded settings.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let (percent, kib) = self.throttle.encoded();
        Append::u32(out, self.subjob_size);
        Append::u32(out, self.split_count);
        Append::u64(out, self.buffers);
        Append::u32(out, kib);
        Append::u32(out, u32::from(percent));
        Append::u32(out, u32::from(self.offload));
    }

    /// Decodes settings; all zeroes are those of a pool that never set any.
    pub(super) fn decode(r: &mut Reader<'_>) -> Option<CopierSettings> {
        let bytes = r.bytes(SETTINGS_BYTES)?;
        if bytes.iter().all(|&b| b == 0) {
            return Some(CopierSettings::default());
        }
        let mut r = Reader(bytes);
        let (subjob_size, split_count, buffers, kib) = (r.u32()?, r.u32()?, r.u64()?, r.u32()?);
        let throttle = Throttle::decoded(u8::try_from(r.u32()?).ok()?, kib)?;
        let offload = match r.u32()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let settings = CopierSettings { subjob_size, split_count, buffers, throttle, offload };
        settings.flaw().is_none().then_some(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(settings: CopierSettings) -> Option<CopierSettings> {
        let mut bytes = Vec::new();
        settings.encode(&mut bytes);
        assert_eq!(bytes.len(), SETTINGS_BYTES);
        CopierSettings::decode(&mut Reader(&bytes))
    }

    #[test]
    fn policies_of_gathering_have_names_and_bytes() {
        for (text, byte) in [("off", 0), ("auto", 254), ("idle", 255), ("1%", 1), ("99%", 99)] {
            let policy: GatherPolicy = text.parse().unwrap();
            assert_eq!((policy.to_string().as_str(), policy.encoded()), (text, byte));
            assert_eq!(GatherPolicy::decoded(byte), Some(policy));
        }
        for bad in ["0%", "100%", "20", "on", "", "%", "-1%", "300%"] {
            let refused = bad.parse::<GatherPolicy>().unwrap_err();
            assert!(refused.to_string().contains(&format!("'{bad}'")), "{refused}");
        }
        assert_eq!(GatherPolicy::decoded(100), None);
    }

    #[test]
    fn settings_survive_the_trip_and_zeroes_are_the_defaults() {
        let throttle = Throttle { percent: 7, bytes_per_second: 3 << 20 };
        let odd = CopierSettings { subjob_size: 192 << 10, split_count: 64, buffers: 1 << 30, throttle, offload: true };
        for settings in [odd, CopierSettings::default()] {
            assert_eq!(again(settings), Some(settings));
        }
        assert_eq!(CopierSettings::decode(&mut Reader(&[0; SETTINGS_BYTES])), Some(CopierSettings::default()));
    }

    #[test]
    fn settings_out_of_bounds_are_named_and_not_taken() {
        let good = CopierSettings::default();
        for (bad, name) in [
            (CopierSettings { subjob_size: 32 << 10, ..good }, "subjob_size"),
            (CopierSettings { subjob_size: 2 << 20, ..good }, "subjob_size"),
            (CopierSettings { subjob_size: 96 << 10, ..good }, "subjob_size"),
            (CopierSettings { split_count: 0, ..good }, "split_count"),
            (CopierSettings { split_count: 65, ..good }, "split_count"),
            (CopierSettings { buffers: 5 * (512 << 10) - 1, ..good }, "buffers"),
            (CopierSettings { buffers: (1 << 30) + 1, ..good }, "buffers"),
        ] {
            assert!(bad.flaw().is_some_and(|text| text.contains(name)), "{bad:?}");
            assert_eq!(again(bad), None);
        }
        let bad = CopierSettings { throttle: Throttle { percent: 101, bytes_per_second: 0 }, ..good };
        assert!(bad.flaw().is_some_and(|text| text.contains("throttle")));
    }
}
