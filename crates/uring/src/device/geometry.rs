//! Type, length and alignment of a file or block device.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use forkdisk::device::Array;

use crate::sys;

/// Largest block size that the engine supports, in bytes.
const MAX_BLOCK_BYTES: usize = 4096;
const MIN_BLOCK_BYTES: usize = 512;
/// Least number of stripes in flight to an array, however little memory it has.
const FEWEST_STRIPES: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Block,
}

/// Returns `None` for what cannot be a device: a folder, a pipe, a terminal.
pub(super) fn kind(meta: &Metadata) -> Option<Kind> {
    let kind = meta.file_type();
    if kind.is_file() {
        Some(Kind::File)
    } else if kind.is_block_device() {
        Some(Kind::Block)
    } else {
        None
    }
}

pub(super) fn len(file: &File, kind: Kind) -> io::Result<u64> {
    match kind {
        Kind::File => Ok(file.metadata()?.len()),
        Kind::Block => sys::block_device_len(file.as_fd()),
    }
}

/// Returns the block size for requests through the page cache.
pub(super) fn buffered_block(fd: BorrowedFd<'_>, kind: Kind) -> io::Result<usize> {
    match kind {
        Kind::File => Ok(MIN_BLOCK_BYTES),
        Kind::Block => Ok(sys::sector_size(fd)?.clamp(MIN_BLOCK_BYTES, MAX_BLOCK_BYTES)),
    }
}

/// Returns the block size for direct I/O; `None` if the file does not support it, or only in larger
/// units than the engine uses.
pub(super) fn direct_block(fd: BorrowedFd<'_>, kind: Kind) -> io::Result<Option<usize>> {
    let said = match (sys::direct_align(fd), kind) {
        (Some(align), _) if align.offset == 0 => return Ok(None),
        (Some(align), _) => align.offset.max(align.memory) as usize,
        (None, Kind::Block) => sys::sector_size(fd)?,
        // An older kernel does not report it: whole pages suit every file system.
        (None, Kind::File) => MAX_BLOCK_BYTES,
    };
    let block = said.max(MIN_BLOCK_BYTES);
    Ok((block <= MAX_BLOCK_BYTES && block.is_power_of_two()).then_some(block))
}

/// Returns the stripe of a block device that is an array with parity, from its optimal request
/// size. A partition reports none, since its stripes begin elsewhere.
pub(super) fn array(file: &File, kind: Kind) -> Option<Array> {
    if kind != Kind::Block {
        return None;
    }
    let number = file.metadata().ok()?.rdev();
    let (major, minor) = (libc::major(number), libc::minor(number));
    let attribute = |name: &str| -> Option<u64> {
        std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{name}")).ok()?.trim().parse().ok()
    };
    let (stripe, chunk) = (attribute("queue/optimal_io_size")?, attribute("queue/minimum_io_size")?);
    // A disk that only prefers large requests has no chunks that form a stripe.
    let has_stripes = chunk > 4096 && stripe > chunk && stripe.is_multiple_of(chunk);
    has_stripes.then(|| {
        // The kernel's md has memory for this many rows of pages; half of it is for requests that are completing.
        let held = attribute("md/stripe_cache_size").map(|rows| rows * 4096 * (stripe / chunk) / 2);
        Array { stripe, in_flight: held.map_or(u64::MAX, |held| held.max(FEWEST_STRIPES * stripe)) }
    })
}

pub(super) fn set_file_len(fd: BorrowedFd<'_>, len: u64) -> io::Result<()> {
    File::from(fd.try_clone_to_owned()?).set_len(len)
}
