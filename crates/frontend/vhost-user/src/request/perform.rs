//! Carrying out a request on its disk, and the status that the guest gets.

use std::future::{Future, poll_fn};
use std::task::Poll;

use forkdisk::{Buf, Error, ErrorKind, Operation, Result, WriteFlags};
use smallvec::SmallVec;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vm_memory::GuestMemoryMmap;

use super::chain::{OutsideMemory, copy_in, copy_out};
use super::{Action, Request};
use crate::config::{MAX_RANGES, MAX_REQUEST_BYTES, SECTOR_BYTES};
use crate::disk::{Disk, Disks, SERIAL_BYTES};
use crate::memory::Memory;

/// Bytes of data that are moved at a time.
pub const PIECE_BYTES: usize = 1 << 20;
const RANGE_BYTES: usize = 16;

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Value for the status byte.
    pub status: u8,
    /// Bytes of data that were written to the guest's memory.
    pub written: u32,
}

const OK_CODE: u8 = VIRTIO_BLK_S_OK as u8;
const IO_ERROR_CODE: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPPORTED_CODE: u8 = VIRTIO_BLK_S_UNSUPP as u8;

/// Status of a request that was not carried out completely.
struct Refused(u8);

impl From<Error> for Refused {
    fn from(error: Error) -> Refused {
        Refused(if error.kind() == ErrorKind::Unsupported { UNSUPPORTED_CODE } else { IO_ERROR_CODE })
    }
}

impl From<OutsideMemory> for Refused {
    fn from(_: OutsideMemory) -> Refused {
        Refused(IO_ERROR_CODE)
    }
}

type Performed<T> = std::result::Result<T, Refused>;

/// Carries out `request`. With `writethrough` what it writes is durable when this returns.
pub async fn perform<X: Disks>(
    disks: &X,
    disk: &X::Disk,
    memory: &Memory,
    request: &Request,
    writethrough: bool,
) -> Outcome {
    let operation = match request.action {
        Action::Read | Action::Serial | Action::Unknown => Operation::Read,
        Action::Write => Operation::Write,
        Action::Flush => Operation::Flush,
        Action::Discard => Operation::Discard,
        Action::WriteZeroes => Operation::Zero,
    };
    let done = match request.action {
        Action::Read => read(disks, disk, memory, request).await,
        Action::Write => write(disks, disk, memory, request, writethrough).await,
        Action::Flush => disk.flush().await.map(|()| 0).map_err(Refused::from),
        Action::Serial => serial(disk, memory.map(), request),
        Action::Discard | Action::WriteZeroes => ranges(disk, memory, request, writethrough).await,
        Action::Unknown => Err(Refused(UNSUPPORTED_CODE)),
    };
    if !matches!(request.action, Action::Serial | Action::Unknown) {
        disk.took(operation, request.started.elapsed());
    }
    match done {
        Ok(written) => Outcome { status: OK_CODE, written },
        Err(Refused(status)) => Outcome { status, written: 0 },
    }
}

/// Returns the offset in bytes of a range that lies on the disk.
fn offset_of<D: Disk>(disk: &D, sector: u64, len: u64) -> Performed<u64> {
    let offset = sector.checked_mul(SECTOR_BYTES);
    let ends_inside = |offset: &u64| offset.checked_add(len).is_some_and(|end| end <= disk.size());
    offset.filter(ends_inside).filter(|_| len.is_multiple_of(SECTOR_BYTES)).ok_or(Refused(IO_ERROR_CODE))
}

/// Returns the offset in bytes of the data of a request.
fn data_offset<D: Disk>(disk: &D, request: &Request) -> Performed<u64> {
    if request.len > MAX_REQUEST_BYTES {
        return Err(Refused(IO_ERROR_CODE));
    }
    offset_of(disk, request.sector, request.len)
}

/// Returns the pieces in which `len` bytes are moved: start and length.
fn pieces(len: u64) -> impl Iterator<Item = (u64, usize)> {
    let step = PIECE_BYTES as u64;
    (0..len.div_ceil(step)).map(move |n| (n * step, (len - n * step).min(step) as usize))
}

async fn read<X: Disks>(disks: &X, disk: &X::Disk, memory: &Memory, request: &Request) -> Performed<u32> {
    let offset = data_offset(disk, request)?;
    if let Some(buffers) = memory.buffers(request.data.iter().map(|piece| (piece.address, piece.len))) {
        each_at(offset, buffers, |at, buf, _| async move { disk.read(at, buf).await.0 }).await?;
        return if memory.is_lost() { Err(Refused(IO_ERROR_CODE)) } else { Ok(request.len as u32) };
    }
    for (at, len) in pieces(request.len) {
        let (result, buf) = disk.read(offset + at, disks.buffer(len)).await;
        result?;
        copy_out(memory.map(), &request.data, at, &buf)?;
        if memory.is_lost() {
            return Err(Refused(IO_ERROR_CODE));
        }
    }
    Ok(request.len as u32)
}

async fn write<X: Disks>(
    disks: &X,
    disk: &X::Disk,
    memory: &Memory,
    request: &Request,
    writethrough: bool,
) -> Performed<u32> {
    let offset = data_offset(disk, request)?;
    check_writable(disk)?;
    if let Some(buffers) = memory.buffers(request.data.iter().map(|piece| (piece.address, piece.len))) {
        let write = |at, buf, is_last: bool| async move {
            disk.write(at, buf, WriteFlags::from(writethrough).with_more(!is_last)).await.0
        };
        each_at(offset, buffers, write).await?;
        return if memory.is_lost() { Err(Refused(IO_ERROR_CODE)) } else { Ok(0) };
    }
    for (at, len) in pieces(request.len) {
        let mut buf = disks.buffer(len);
        copy_in(memory.map(), &request.data, at, &mut buf)?;
        // Memory that went away reads as zeroes, which the guest did not write.
        if memory.is_lost() {
            return Err(Refused(IO_ERROR_CODE));
        }
        let is_last = at + len as u64 == request.len;
        let flags = WriteFlags::from(writethrough).with_more(!is_last);
        disk.write(offset + at, buf, flags).await.0?;
    }
    Ok(0)
}

/// Calls `transfer` with each buffer, its offset on the disk, and whether it is the last one; all are in flight at the
/// same time. Returns the first error.
async fn each_at<F: Future<Output = Result<()>>>(
    offset: u64,
    buffers: SmallVec<[Buf; 2]>,
    transfer: impl Fn(u64, Buf, bool) -> F,
) -> Result<()> {
    let (mut at, count) = (offset, buffers.len());
    let mut transfers: SmallVec<[_; 1]> = SmallVec::new();
    for (n, buf) in buffers.into_iter().enumerate() {
        let len = buf.len() as u64;
        transfers.push(Box::pin(transfer(at, buf, n + 1 == count)));
        at += len;
    }
    let mut outcome = Ok(());
    poll_fn(|cx| {
        transfers.retain(|transfer| match transfer.as_mut().poll(cx) {
            Poll::Ready(result) => {
                if outcome.is_ok() {
                    outcome = result;
                }
                false
            }
            Poll::Pending => true,
        });
        if transfers.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outcome
}

fn check_writable<D: Disk>(disk: &D) -> Performed<()> {
    if disk.read_only() { Err(Refused(IO_ERROR_CODE)) } else { Ok(()) }
}

fn serial<D: Disk>(disk: &D, memory: &GuestMemoryMmap, request: &Request) -> Performed<u32> {
    let serial = disk.info().serial;
    let len = (request.len as usize).min(SERIAL_BYTES);
    copy_out(memory, &request.data, 0, &serial[..len])?;
    Ok(len as u32)
}

/// Discards ranges, or makes them read as zeroes.
async fn ranges<D: Disk>(disk: &D, memory: &Memory, request: &Request, writethrough: bool) -> Performed<u32> {
    check_writable(disk)?;
    let len = usize::try_from(request.len).map_err(|_| Refused(UNSUPPORTED_CODE))?;
    if len == 0 || !len.is_multiple_of(RANGE_BYTES) || len > RANGE_BYTES * MAX_RANGES as usize {
        return Err(Refused(UNSUPPORTED_CODE));
    }
    let mut bytes = vec![0; len];
    copy_in(memory.map(), &request.data, 0, &mut bytes)?;
    if memory.is_lost() {
        return Err(Refused(IO_ERROR_CODE));
    }
    let allowed = if request.action == Action::WriteZeroes { VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP } else { 0 };
    let mut wanted = Vec::with_capacity(len / RANGE_BYTES);
    for range in bytes.chunks_exact(RANGE_BYTES) {
        let word = |at: usize| u32::from_le_bytes([range[at], range[at + 1], range[at + 2], range[at + 3]]);
        let (sector, len) = (u64::from(word(0)) | u64::from(word(4)) << 32, u64::from(word(8)) * SECTOR_BYTES);
        if word(12) & !allowed != 0 {
            return Err(Refused(UNSUPPORTED_CODE));
        }
        wanted.push((offset_of(disk, sector, len)?, len));
    }
    for (offset, len) in wanted.into_iter().filter(|&(_, len)| len > 0) {
        let done: Result<()> = match request.action {
            Action::WriteZeroes => disk.write_zeroes(offset, len, writethrough).await,
            _ => disk.discard(offset, len, writethrough).await,
        };
        done?;
    }
    Ok(0)
}
