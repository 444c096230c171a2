//! A part of a disk as a separate device: an origin and its pool on one disk.

use std::future::Future;
use std::io;

use anyhow::{Result, ensure};
use forkdisk::device::{IoResult, Segments};
use forkdisk::{Buf, Device};

/// Bytes `start..start + len` of a disk. Clones are the same part.
#[derive(Clone)]
pub struct Part<D> {
    disk: D,
    start: u64,
    len: u64,
}

impl<D: Device> Part<D> {
    /// Creates a part that lies within the disk, aligned to pages.
    pub fn new(disk: D, start: u64, len: u64) -> Result<Part<D>> {
        let inside = start.checked_add(len).is_some_and(|end| end <= disk.len());
        ensure!(inside && start.is_multiple_of(4096), "a part of {len} bytes at {start} of {}", disk.len());
        Ok(Part { disk, start, len })
    }

    /// Creates a part that is the whole disk.
    pub fn all(disk: D) -> Part<D> {
        Part { start: 0, len: disk.len(), disk }
    }

    fn moved(&self, mut segments: Segments) -> Segments {
        for segment in &mut segments {
            assert!(segment.offset + segment.len as u64 <= self.len, "a request beyond the end of the part");
            segment.offset += self.start;
        }
        segments
    }
}

impl<D: Device> Device for Part<D> {
    forkdisk::forward_device! { disk: block_size buffer flush }
    forkdisk::plain_device! { cork stripe allocate can_clone clone_range zero_range }

    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.disk.read(buf, self.moved(segments))
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        self.disk.write(buf, self.moved(segments), fua)
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.disk.discard(self.start + offset, len)
    }

    fn set_len(&self, _len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
}

#[cfg(test)]
mod tests {
    use forkdisk::device::Segment;
    use forkdisk::testing::MemoryDevice;
    use forkdisk_uring::{Config, block_on};

    use super::*;

    #[test]
    fn a_part_is_where_it_should_be_and_ends_there() {
        block_on(Config::default(), |_| async move {
            let disk = MemoryDevice::new(1 << 20);
            assert!(Part::new(disk.clone(), 4096, 1 << 20).is_err() && Part::new(disk.clone(), 100, 4096).is_err());
            let part = Part::new(disk.clone(), 65536, 8192).unwrap();
            let at = |offset, len| [Segment { offset, at: 0, len }].into_iter().collect();
            part.write(Buf::copy_of(&[7; 4096]), at(4096, 4096), false).await.0.unwrap();
            let (result, all) = disk.read(Buf::zeroed(1 << 20), at(0, 1 << 20)).await;
            result.unwrap();
            assert!(all.iter().enumerate().all(|(i, &b)| b == if (69632..73728).contains(&i) { 7 } else { 0 }));
            assert_eq!(part.len(), 8192);
        })
        .unwrap();
    }
}
