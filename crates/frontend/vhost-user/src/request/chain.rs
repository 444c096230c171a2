//! A chain of descriptors: the pieces of the guest's memory that belong to a request.
//!
//! The guest can change a descriptor at any time, so each is read once.

use smallvec::SmallVec;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

/// Most descriptors of a chain.
pub const MAX_DESCRIPTORS: usize = 1024;
const DESCRIPTOR_BYTES: u64 = 16;

/// A piece of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub address: GuestAddress,
    pub len: u32,
}

/// Pieces in order.
pub type Pieces = SmallVec<[Piece; 4]>;

/// The pieces of one request.
#[derive(Debug, Default)]
pub struct Chain {
    /// What the device reads.
    pub readable: Pieces,
    /// What the device writes.
    pub writable: Pieces,
}

/// Why descriptors are no request. The queue is not served any more: the guest's driver is broken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("descriptor {0} does not exist in a table of {1}")]
    NoSuchDescriptor(u32, u32),
    #[error("a table of descriptors lies outside of the memory")]
    TableOutsideMemory,
    #[error("a chain has more than {0} descriptors, or a loop")]
    TooLong(usize),
    #[error("a table of indirect descriptors has {0} bytes")]
    BadTable(u32),
    #[error("an indirect descriptor in a table of indirect descriptors, or with a successor")]
    NestedTable,
    #[error("a chain has 4 GiB or more")]
    TooLarge,
    #[error("a piece that the device reads follows one that it writes")]
    Order,
    #[error("a request without a header, or with one outside of the memory")]
    NoHeader,
    #[error("a request without a byte for its status")]
    NoStatus,
}

/// Reads the chain that begins with descriptor `head` of the table at `table` with `size` entries.
pub fn walk(memory: &GuestMemoryMmap, table: GuestAddress, size: u16, head: u16) -> Result<Chain, Malformed> {
    let (mut table, mut size, mut next) = (table, u32::from(size), u32::from(head));
    let (mut chain, mut count, mut bytes, mut is_indirect) = (Chain::default(), 0, 0u32, false);
    loop {
        if next >= size {
            return Err(Malformed::NoSuchDescriptor(next, size));
        }
        let at = table.checked_add(u64::from(next) * DESCRIPTOR_BYTES).ok_or(Malformed::TableOutsideMemory)?;
        let descriptor: Descriptor = memory.read_obj(at).map_err(|_| Malformed::TableOutsideMemory)?;
        if descriptor.refers_to_indirect_table() {
            if is_indirect || descriptor.has_next() {
                return Err(Malformed::NestedTable);
            }
            let len = descriptor.len();
            if len == 0 || !u64::from(len).is_multiple_of(DESCRIPTOR_BYTES) {
                return Err(Malformed::BadTable(len));
            }
            (table, size, next, is_indirect) = (descriptor.addr(), len / DESCRIPTOR_BYTES as u32, 0, true);
            continue;
        }
        count += 1;
        if count > MAX_DESCRIPTORS {
            return Err(Malformed::TooLong(MAX_DESCRIPTORS));
        }
        bytes = bytes.checked_add(descriptor.len()).ok_or(Malformed::TooLarge)?;
        let piece = Piece { address: descriptor.addr(), len: descriptor.len() };
        if descriptor.is_write_only() {
            chain.writable.push(piece);
        } else if chain.writable.is_empty() {
            chain.readable.push(piece);
        } else {
            return Err(Malformed::Order);
        }
        if !descriptor.has_next() {
            return Ok(chain);
        }
        next = u32::from(descriptor.next());
    }
}

/// Returns how many bytes `pieces` have together.
pub fn bytes_of(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

/// Removes the first `count` bytes; `pieces` have at least that many.
pub fn skip_front(pieces: &mut Pieces, mut count: u32) {
    while let Some(first) = pieces.first_mut() {
        if first.len > count {
            first.address = GuestAddress(first.address.0.wrapping_add(u64::from(count)));
            first.len -= count;
            return;
        }
        count -= first.len;
        pieces.remove(0);
    }
}

/// Removes the last byte and returns its address; `None` if there is none.
pub fn take_last_byte(pieces: &mut Pieces) -> Option<GuestAddress> {
    loop {
        let last = pieces.last_mut()?;
        if last.len > 0 {
            last.len -= 1;
            return last.address.checked_add(u64::from(last.len));
        }
        pieces.pop();
    }
}

/// A piece is not inside of the guest's memory.
#[derive(Debug, PartialEq, Eq)]
pub struct OutsideMemory;

/// Fills `buf` from the bytes of `pieces` from `at` on.
pub fn copy_in(memory: &GuestMemoryMmap, pieces: &[Piece], at: u64, buf: &mut [u8]) -> Result<(), OutsideMemory> {
    each_part(pieces, at, buf.len(), |range, address| {
        memory.read_slice(&mut buf[range], address).map_err(|_| OutsideMemory)
    })
}

/// Copies `buf` to the bytes of `pieces` from `at` on.
pub fn copy_out(memory: &GuestMemoryMmap, pieces: &[Piece], at: u64, buf: &[u8]) -> Result<(), OutsideMemory> {
    each_part(pieces, at, buf.len(), |range, address| {
        memory.write_slice(&buf[range], address).map_err(|_| OutsideMemory)
    })
}

/// Calls `each` with every range of a buffer of `len` bytes and the address of its bytes in `pieces`, from `at` on.
fn each_part(
    pieces: &[Piece],
    at: u64,
    len: usize,
    mut each: impl FnMut(std::ops::Range<usize>, GuestAddress) -> Result<(), OutsideMemory>,
) -> Result<(), OutsideMemory> {
    let (mut skip, mut done) = (at, 0);
    for piece in pieces {
        let own = u64::from(piece.len);
        if skip >= own {
            skip -= own;
            continue;
        }
        let count = usize::try_from(own - skip).map_or(len - done, |left| left.min(len - done));
        let address = piece.address.checked_add(skip).ok_or(OutsideMemory)?;
        each(done..done + count, address)?;
        (skip, done) = (0, done + count);
        if done == len {
            return Ok(());
        }
    }
    if done == len { Ok(()) } else { Err(OutsideMemory) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    const TABLE: GuestAddress = GuestAddress(0x1000);

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000), (GuestAddress(0x1_0000), 0x1_0000)]).unwrap()
    }

    fn put(memory: &GuestMemoryMmap, table: GuestAddress, index: u64, entry: (u64, u32, u16, u16)) {
        let (addr, len, flags, next) = entry;
        let descriptor = Descriptor::new(addr, len, flags, next);
        memory.write_obj(descriptor, GuestAddress(table.0 + index * DESCRIPTOR_BYTES)).unwrap();
    }

    #[test]
    fn a_chain_is_followed_over_tables() {
        let memory = memory();
        put(&memory, TABLE, 3, (0x4000, 16, NEXT, 1));
        put(&memory, TABLE, 1, (0x8000, 32, INDIRECT, 0));
        put(&memory, GuestAddress(0x8000), 0, (0x5000, 512, WRITE | NEXT, 1));
        put(&memory, GuestAddress(0x8000), 1, (0x6000, 1, WRITE, 0));
        let chain = walk(&memory, TABLE, 8, 3).unwrap();
        assert_eq!(chain.readable[..], [Piece { address: GuestAddress(0x4000), len: 16 }]);
        assert_eq!((chain.writable.len(), bytes_of(&chain.writable)), (2, 513));
    }

    #[test]
    fn a_loop_of_descriptors_is_an_error() {
        let memory = memory();
        put(&memory, TABLE, 0, (0x4000, 16, NEXT, 1));
        put(&memory, TABLE, 1, (0x4000, 16, NEXT, 0));
        assert_eq!(walk(&memory, TABLE, 8, 0).unwrap_err(), Malformed::TooLong(MAX_DESCRIPTORS));
        put(&memory, TABLE, 2, (TABLE.0 + 32, 16, INDIRECT, 0));
        assert_eq!(walk(&memory, TABLE, 8, 2).unwrap_err(), Malformed::NestedTable, "a table that contains itself");
    }

    #[test]
    fn descriptors_that_do_not_exist_are_errors() {
        let memory = memory();
        assert_eq!(walk(&memory, TABLE, 8, 8).unwrap_err(), Malformed::NoSuchDescriptor(8, 8));
        put(&memory, TABLE, 0, (0x4000, 16, NEXT, 9));
        assert_eq!(walk(&memory, TABLE, 8, 0).unwrap_err(), Malformed::NoSuchDescriptor(9, 8));
        for table in [0x2_0000, u64::MAX - 8, 0x1_fff8] {
            put(&memory, TABLE, 1, (table, 64, INDIRECT, 0));
            assert_eq!(walk(&memory, TABLE, 8, 1).unwrap_err(), Malformed::TableOutsideMemory, "{table:#x}");
        }
        for len in [0, 8, 17] {
            put(&memory, TABLE, 1, (0x8000, len, INDIRECT, 0));
            assert_eq!(walk(&memory, TABLE, 8, 1).unwrap_err(), Malformed::BadTable(len));
        }
        put(&memory, TABLE, 1, (0x8000, 16, INDIRECT | NEXT, 2));
        assert_eq!(walk(&memory, TABLE, 8, 1).unwrap_err(), Malformed::NestedTable);
    }

    #[test]
    fn lengths_that_overflow_and_pieces_out_of_order_are_errors() {
        let memory = memory();
        put(&memory, TABLE, 0, (0x4000, u32::MAX, NEXT | WRITE, 1));
        put(&memory, TABLE, 1, (0x4000, 1, WRITE, 0));
        assert_eq!(walk(&memory, TABLE, 8, 0).unwrap_err(), Malformed::TooLarge);
        put(&memory, TABLE, 0, (0x4000, 1, NEXT | WRITE, 1));
        put(&memory, TABLE, 1, (0x4000, 1, 0, 0));
        assert_eq!(walk(&memory, TABLE, 8, 0).unwrap_err(), Malformed::Order);
    }

    #[test]
    fn bytes_are_copied_over_pieces_and_regions() {
        let memory = memory();
        let mut pieces: Pieces = [(0xfffe, 5), (0x5000, 0), (0x6000, 4)]
            .map(|(address, len)| Piece { address: GuestAddress(address), len })
            .into_iter()
            .collect();
        copy_out(&memory, &pieces, 1, b"abcdefgh").unwrap();
        let mut back = [0; 6];
        copy_in(&memory, &pieces, 3, &mut back).unwrap();
        assert_eq!(&back, b"cdefgh");
        assert_eq!(copy_in(&memory, &pieces, 4, &mut back), Err(OutsideMemory), "one byte too few");
        let status = take_last_byte(&mut pieces).unwrap();
        assert_eq!((status, bytes_of(&pieces)), (GuestAddress(0x6003), 8));
        skip_front(&mut pieces, 5);
        assert_eq!((pieces.len(), bytes_of(&pieces)), (1, 3));
        skip_front(&mut pieces, 2);
        assert_eq!(pieces[..], [Piece { address: GuestAddress(0x6002), len: 1 }]);
        for address in [0x1_fffd, u64::MAX - 1] {
            let outside = [Piece { address: GuestAddress(address), len: 6 }];
            assert_eq!(copy_out(&memory, &outside, 0, b"abcdef"), Err(OutsideMemory));
        }
    }
}
