//! Checksums that detect damage and also a page in the wrong place.

use crate::types::PageAddr;

/// The identity of a metadata page: all of it goes into the checksum.
#[derive(Clone, Copy, Debug)]
pub struct Seed {
    /// The pool's uuid.
    pub pool: [u8; 16],
    /// Where the page lies.
    pub page: PageAddr,
    /// Level of a map table or count page, or a constant for other pages.
    pub level: u8,
    /// Birth epoch of a table; 0 elsewhere.
    pub birth: u64,
}

/// CRC-32C of the page's identity followed by its bytes.
pub fn page_checksum(seed: &Seed, bytes: &[u8]) -> u32 {
    let mut id = [0u8; 33];
    id[..16].copy_from_slice(&seed.pool);
    id[16..24].copy_from_slice(&seed.page.0.to_le_bytes());
    id[24..32].copy_from_slice(&seed.birth.to_le_bytes());
    id[32] = seed.level;
    crc32c::crc32c_append(crc32c::crc32c(&id), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_counts() {
        let seed = Seed { pool: [1; 16], page: PageAddr(9), level: 1, birth: 3 };
        let bytes = [7u8; 4096];
        let sum = page_checksum(&seed, &bytes);
        for other in [
            Seed { pool: [2; 16], ..seed },
            Seed { page: PageAddr(10), ..seed },
            Seed { level: 2, ..seed },
            Seed { birth: 4, ..seed },
        ] {
            assert_ne!(sum, page_checksum(&other, &bytes));
        }
    }
}
