//! The stamp of an origin, by which its device is recognised, also after a crash.

use super::cursor::{Append, Reader};

/// Number of zones of an origin, each with a hash.
pub const ZONES: usize = 32;
/// Bytes of the hashes and of the bits of zones.
pub(super) const ZONE_BYTES: usize = ZONES * 2 + 4;

/// The identity that an origin's device reported, and hashes of a sample of each of its zones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// The device's own identity, such as `wwn:naa.5000c500a1b2c3d4`; empty if it has none.
    pub device: String,
    /// Hash of the sample of each zone; 0 if the device is too small for the zone.
    pub hashes: [u16; ZONES],
    /// Zones whose sample may have been written since, one bit each.
    pub written: u32,
}

impl Stamp {
    /// Encodes the hashes and bits.
    pub(super) fn zones_to_bytes(&self) -> [u8; ZONE_BYTES] {
        let mut out = Vec::with_capacity(ZONE_BYTES);
        self.hashes.iter().for_each(|hash| out.extend(hash.to_le_bytes()));
        Append::u32(&mut out, self.written);
        out.try_into().expect("of this length")
    }

    /// Decodes what [`zones_to_bytes`](Self::zones_to_bytes) wrote.
    pub(super) fn zones_from_bytes(r: &mut Reader<'_>) -> Option<([u16; ZONES], u32)> {
        let bytes: [u8; ZONES * 2] = r.array()?;
        let mut hashes = [0; ZONES];
        for (hash, two) in hashes.iter_mut().zip(bytes.chunks_exact(2)) {
            *hash = u16::from_le_bytes([two[0], two[1]]);
        }
        Some((hashes, r.u32()?))
    }
}
