//! What the device of an origin is recognised by, also after a crash.

use super::cursor::{Append, Reader};

/// Zones of an origin that have a hash each.
pub const ZONES: usize = 32;
/// Bytes of the hashes and the bits of zones.
pub(super) const ZONE_BYTES: usize = ZONES * 2 + 4;

/// What the device of an origin said of itself, and what a sample of each of its zones held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// The device's own identity, such as `wwn:naa.5000c500a1b2c3d4`; empty where there is none.
    pub device: String,
    /// Hash of the sample of each zone; 0 where the device is too small for the zone.
    pub hashes: [u16; ZONES],
    /// Zones whose sample may have been written since, a bit each.
    pub written: u32,
}

impl Stamp {
    /// The hashes and bits on disk.
    pub(super) fn zones_to_bytes(&self) -> [u8; ZONE_BYTES] {
        let mut out = Vec::with_capacity(ZONE_BYTES);
        self.hashes.iter().for_each(|hash| out.extend(hash.to_le_bytes()));
        Append::u32(&mut out, self.written);
        out.try_into().expect("of this length")
    }

    /// Reads what [`zones_to_bytes`](Self::zones_to_bytes) wrote.
    pub(super) fn zones_from_bytes(r: &mut Reader<'_>) -> Option<([u16; ZONES], u32)> {
        let bytes: [u8; ZONES * 2] = r.array()?;
        let mut hashes = [0; ZONES];
        for (hash, two) in hashes.iter_mut().zip(bytes.chunks_exact(2)) {
            *hash = u16::from_le_bytes([two[0], two[1]]);
        }
        Some((hashes, r.u32()?))
    }
}
