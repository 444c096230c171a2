//! The configuration space and the features of a virtio block device.

use virtio_bindings::bindings::virtio_blk;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::disk::DiskInfo;
use crate::options::ServerOptions;

/// Bytes of a sector, the unit of the protocol.
pub const SECTOR_BYTES: u64 = 512;
/// Most data segments of a request, and most bytes of one. With header and status they fill a queue of 128 descriptors,
/// the usual size.
pub const MAX_SEGMENTS: u32 = 126;
pub const MAX_SEGMENT_BYTES: u32 = 1 << 20;
/// Most bytes of data of a request.
pub const MAX_REQUEST_BYTES: u64 = MAX_SEGMENTS as u64 * MAX_SEGMENT_BYTES as u64;
/// Most ranges of one discard or write of zeroes.
pub const MAX_RANGES: u32 = 64;
/// Most sectors of one range.
const MAX_RANGE_SECTORS: u32 = 1 << 22;
/// Offset of the byte that chooses the mode of the write cache.
pub const WRITEBACK_OFFSET: usize = 32;
/// Bytes of the space. The fields end at byte 60.
const CONFIG_BYTES: usize = 256;
const PAGE_BYTES: u32 = 4096;

/// Feature bit that front ends use for the protocol itself.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const EVENT_IDX_FLAG: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
pub const FLUSH_FLAG: u64 = 1 << virtio_blk::VIRTIO_BLK_F_FLUSH;
pub const CONFIG_WCE_FLAG: u64 = 1 << virtio_blk::VIRTIO_BLK_F_CONFIG_WCE;

/// Returns the features that are offered for a disk.
pub fn features(info: &DiskInfo) -> u64 {
    let mut bits = vec![
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        virtio_blk::VIRTIO_BLK_F_SIZE_MAX,
        virtio_blk::VIRTIO_BLK_F_SEG_MAX,
        virtio_blk::VIRTIO_BLK_F_BLK_SIZE,
        virtio_blk::VIRTIO_BLK_F_FLUSH,
        virtio_blk::VIRTIO_BLK_F_TOPOLOGY,
        virtio_blk::VIRTIO_BLK_F_CONFIG_WCE,
        virtio_blk::VIRTIO_BLK_F_MQ,
    ];
    match info.read_only {
        true => bits.push(virtio_blk::VIRTIO_BLK_F_RO),
        false => bits.extend([virtio_blk::VIRTIO_BLK_F_DISCARD, virtio_blk::VIRTIO_BLK_F_WRITE_ZEROES]),
    }
    bits.into_iter().map(|bit| 1 << bit).sum::<u64>() | PROTOCOL_FEATURES
}

/// Returns the configuration space (`struct virtio_blk_config`), followed by zeroes.
pub fn space(info: &DiskInfo, options: &ServerOptions, writeback: bool) -> [u8; CONFIG_BYTES] {
    let mut space = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    let block = options.block_size;
    put(0, &(info.size / u64::from(block) * u64::from(block) / SECTOR_BYTES).to_le_bytes());
    put(8, &MAX_SEGMENT_BYTES.to_le_bytes());
    put(12, &MAX_SEGMENTS.to_le_bytes());
    put(20, &block.to_le_bytes());
    // Topology: exponent of blocks per page, offset of the first page, least and best size of a request in blocks.
    let per_page = PAGE_BYTES / block;
    put(24, &[per_page.trailing_zeros() as u8, 0]);
    put(26, &(per_page as u16).to_le_bytes());
    put(28, &0u32.to_le_bytes());
    put(WRITEBACK_OFFSET, &[writeback.into()]);
    put(34, &options.max_queues.to_le_bytes());
    put(36, &MAX_RANGE_SECTORS.to_le_bytes());
    put(40, &MAX_RANGES.to_le_bytes());
    put(44, &(PAGE_BYTES / SECTOR_BYTES as u32).to_le_bytes());
    put(48, &MAX_RANGE_SECTORS.to_le_bytes());
    put(52, &MAX_RANGES.to_le_bytes());
    put(56, &[1]);
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(size: u64, read_only: bool) -> DiskInfo {
        DiskInfo { name: "v".to_string(), size, read_only, serial: [0; 20] }
    }

    #[test]
    fn fields_lie_where_the_guests_struct_has_them() {
        let options = ServerOptions::default().with_block_size(4096).with_max_queues(3);
        let space = space(&info((1 << 30) + 4095, false), &options, true);
        let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!((u64::from(word(0)), word(4)), ((1 << 30) / 512, 0), "whole blocks only");
        assert_eq!((word(20), space[24], space[32], space[34], space[56]), (4096, 0, 1, 3, 1));
        assert_eq!(space[26..28], [1, 0]);
        assert_eq!(word(44), 8);
    }

    #[test]
    fn a_disk_for_reading_only_offers_no_discard() {
        let (with, without) = (features(&info(1 << 20, false)), features(&info(1 << 20, true)));
        assert_eq!((with >> 13 & 3, without >> 13 & 3), (3, 0));
        assert_eq!((with >> 5 & 1, without >> 5 & 1), (0, 1));
        assert_eq!(with >> 32 & 1, 1, "VERSION_1");
    }
}
