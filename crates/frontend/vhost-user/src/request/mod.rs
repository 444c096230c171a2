//! A request of a guest: its header, its data, the byte for its status.

mod chain;
mod perform;

use std::time::Instant;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};

pub use chain::{Malformed, Pieces};
pub use perform::{Outcome, PIECE_BYTES, perform};

use chain::{Chain, bytes_of, copy_in, skip_front, take_last_byte, walk};

const HEADER_BYTES: u32 = 16;

/// What a guest requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Read,
    Write,
    Flush,
    Serial,
    Discard,
    WriteZeroes,
    Unknown,
}

/// A decoded request.
#[derive(Debug)]
pub struct Request {
    /// Index of its first descriptor.
    pub head: u16,
    pub action: Action,
    /// Offset on the disk in sectors.
    pub sector: u64,
    /// The data that it reads or writes.
    pub data: Pieces,
    /// Length of the data in bytes.
    pub len: u64,
    /// Address of the byte for the status.
    pub status: GuestAddress,
    /// When it was taken from its queue.
    pub started: Instant,
}

impl Request {
    /// Decodes the request that begins with descriptor `head` of the table at `table` with `size` entries.
    pub fn decode(memory: &GuestMemoryMmap, table: GuestAddress, size: u16, head: u16) -> Result<Request, Malformed> {
        let Chain { mut readable, mut writable } = walk(memory, table, size, head)?;
        let mut header = [0; HEADER_BYTES as usize];
        copy_in(memory, &readable, 0, &mut header).map_err(|_| Malformed::NoHeader)?;
        skip_front(&mut readable, HEADER_BYTES);
        let status = take_last_byte(&mut writable).ok_or(Malformed::NoStatus)?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let action = match u32::from_le_bytes([a, b, c, d]) {
            VIRTIO_BLK_T_IN => Action::Read,
            VIRTIO_BLK_T_OUT => Action::Write,
            VIRTIO_BLK_T_FLUSH => Action::Flush,
            VIRTIO_BLK_T_GET_ID => Action::Serial,
            VIRTIO_BLK_T_DISCARD => Action::Discard,
            VIRTIO_BLK_T_WRITE_ZEROES => Action::WriteZeroes,
            _ => Action::Unknown,
        };
        let data = if matches!(action, Action::Read | Action::Serial) { writable } else { readable };
        let (sector, len, started) = (u64::from_le_bytes(sector), bytes_of(&data), Instant::now());
        Ok(Request { head, action, sector, data, len, status, started })
    }
}
