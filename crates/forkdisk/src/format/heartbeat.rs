//! The heartbeat page: which of the hosts that share a pool's storage has the pool open.

use crate::types::{PAGE_SIZE, PageAddr};

use super::checksum::{Seed, page_checksum};
use super::cursor::{Append, Reader};

/// The last page of block 0, which neither the superblocks nor the log of counts use.
pub const HEARTBEAT_PAGE: PageAddr = PageAddr(255);
/// Longest host name that is stored, in bytes.
pub const MAX_HOST_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"fkdbeat1";
const SEED_LEVEL: u8 = 0xf1;
const CHECKED_BYTES: usize = PAGE_SIZE - 4;

/// The contents of the page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// A random number of the open that wrote it.
    pub open: [u8; 16],
    /// The boot ID of the host at that time.
    pub boot: [u8; 16],
    /// Ascends with every beat of an open.
    pub sequence: u64,
    /// Milliseconds between two beats.
    pub interval: u32,
    /// Whether the pool is open; otherwise it was closed.
    pub active: bool,
    /// The name of the host.
    pub host: String,
}

impl Heartbeat {
    /// Writes the page of the pool whose checksums contain `uuid`.
    pub fn encode(&self, uuid: [u8; 16], page: &mut [u8]) {
        let mut out = Vec::with_capacity(PAGE_SIZE);
        out.extend(MAGIC);
        out.extend(self.open);
        out.extend(self.boot);
        Append::u64(&mut out, self.sequence);
        Append::u32(&mut out, self.interval);
        Append::u32(&mut out, u32::from(self.active));
        out.text(&self.host);
        page[..PAGE_SIZE].fill(0);
        page[..out.len()].copy_from_slice(&out);
        let sum = page_checksum(&seed(uuid), &page[..CHECKED_BYTES]);
        page[CHECKED_BYTES..PAGE_SIZE].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads the page; `None` if none was written, or not completely.
    pub fn decode(uuid: [u8; 16], page: &[u8]) -> Option<Heartbeat> {
        let mut r = Reader(&page[..CHECKED_BYTES]);
        (r.array() == Some(MAGIC)).then_some(())?;
        let sum = u32::from_le_bytes(page[CHECKED_BYTES..PAGE_SIZE].try_into().ok()?);
        (page_checksum(&seed(uuid), &page[..CHECKED_BYTES]) == sum).then_some(())?;
        let (open, boot, sequence, interval) = (r.array()?, r.array()?, r.u64()?, r.u32()?);
        let active = r.u32().filter(|&active| active < 2)? == 1;
        Some(Heartbeat { open, boot, sequence, interval, active, host: r.text(MAX_HOST_BYTES)? })
    }
}

fn seed(uuid: [u8; 16]) -> Seed {
    Seed { pool: uuid, page: HEARTBEAT_PAGE, level: SEED_LEVEL, birth: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::count_log_page;

    #[test]
    fn a_heartbeat_survives_the_trip_and_no_bit_of_it_may_flip() {
        let host = "h".repeat(MAX_HOST_BYTES);
        let beat = Heartbeat { open: [1; 16], boot: [2; 16], sequence: 3, interval: 1000, active: true, host };
        let mut page = vec![7; PAGE_SIZE];
        beat.encode([9; 16], &mut page);
        assert_eq!(Heartbeat::decode([9; 16], &page), Some(beat));
        assert_eq!(Heartbeat::decode([8; 16], &page), None, "another pool's");
        for bit in 0..PAGE_SIZE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Heartbeat::decode([9; 16], &page), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Heartbeat::decode([9; 16], &[0; PAGE_SIZE]), None);
    }

    #[test]
    fn the_page_is_not_the_log_of_counts() {
        assert!((0..252).all(|i| count_log_page(i) != HEARTBEAT_PAGE));
    }
}
