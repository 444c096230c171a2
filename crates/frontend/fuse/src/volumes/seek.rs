//! `SEEK_DATA` and `SEEK_HOLE`, with page granularity.

use forkdisk::{Device, Volume};

use super::{Failed, Outcome, Volumes};
use crate::codec::Reply;

impl<D: Device> Volumes<D> {
    pub(super) async fn seek(&self, handle: u64, offset: u64, whence: u32) -> Outcome {
        let file = self.file(handle)?;
        let volume = &file.volume;
        // Data that is only in the kernel's cache would look like a hole.
        self.settle(volume).await?;
        let size = volume.size();
        let wanted = match whence as i32 {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return Err(Failed(libc::EINVAL)),
        };
        if offset >= size {
            return Err(Failed(libc::ENXIO));
        }
        match first(volume, offset, wanted).await? {
            Some(found) => Ok(Reply::Position(found)),
            // The end of a file counts as a hole.
            None if !wanted => Ok(Reply::Position(size)),
            None => Err(Failed(libc::ENXIO)),
        }
    }
}

/// Runs of the map examined at a time.
const MAX_LOOKUPS: usize = 1024;

/// Returns the first offset from `offset` on that is data (`data`) or a hole.
async fn first<D: Device>(volume: &Volume<D>, offset: u64, data: bool) -> Outcome<Option<u64>> {
    let mut at = offset;
    loop {
        let left = volume.size().saturating_sub(at);
        if left == 0 {
            return Ok(None);
        }
        for run in volume.allocation(at, left, MAX_LOOKUPS).await? {
            if run.value == data {
                return Ok(Some(at));
            }
            at += run.len;
        }
    }
}
