//! Memory of large I/O buffers, in huge pages where the kernel has some. A direct read or write costs the kernel time
//! for each page that is not contiguous in memory with the one before it; the device then gets as many segments.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::{Rc, Weak};

use forkdisk::device::{BUF_ALIGN_BYTES, BufMemory, MemorySource};

/// A huge page of x86-64, and of arm64 with pages of 4 KiB.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Smallest piece. Below it, a buffer has too few pages to gain anything.
const MIN_PIECE_BYTES: usize = 64 << 10;

/// Memory for buffers of one ring, divided into pieces. The size of a piece is a power of two.
#[derive(Default)]
pub(crate) struct HugePages {
    /// The mappings that are divided. They live as long as their pieces.
    shared: RefCell<Vec<Weak<Mapping>>>,
}

impl HugePages {
    fn piece(&self, len: usize) -> io::Result<Piece> {
        if len > HUGE_PAGE_BYTES {
            let len = len.next_multiple_of(BUF_ALIGN_BYTES);
            return Ok(Piece::of(&Rc::new(Mapping::new(len, len)?)).expect("a new mapping has a free piece"));
        }
        let bytes = len.next_power_of_two().max(MIN_PIECE_BYTES);
        let mut shared = self.shared.borrow_mut();
        shared.retain(|mapping| mapping.strong_count() > 0);
        let fitting = shared.iter().filter_map(Weak::upgrade).filter(|mapping| mapping.piece_bytes == bytes);
        if let Some(piece) = fitting.filter_map(|mapping| Piece::of(&mapping)).next() {
            return Ok(piece);
        }
        let mapping = Rc::new(Mapping::new(HUGE_PAGE_BYTES, bytes)?);
        shared.push(Rc::downgrade(&mapping));
        Ok(Piece::of(&mapping).expect("a new mapping has a free piece"))
    }
}

impl MemorySource for HugePages {
    fn memory(&self, len: usize) -> Option<Box<dyn BufMemory>> {
        if len < MIN_PIECE_BYTES {
            return None;
        }
        Some(Box::new(self.piece(len).ok()?))
    }
}

/// A mapping that begins at a huge page. Its memory exists once it is touched.
struct Mapping {
    start: *mut u8,
    len: usize,
    piece_bytes: usize,
    /// A bit for each piece that is in use.
    used: Cell<u32>,
}

impl Mapping {
    fn new(len: usize, piece_bytes: usize) -> io::Result<Mapping> {
        assert!(len / piece_bytes <= 32 && len.is_multiple_of(piece_bytes), "at most 32 whole pieces");
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let mapped_len = len + HUGE_PAGE_BYTES;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), mapped_len, protection, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapped = mapped.cast::<u8>();
        let before = mapped.align_offset(HUGE_PAGE_BYTES);
        let start = mapped.wrapping_add(before);
        // SAFETY: both ranges are parts of the mapping made above that nothing refers to, and so is what is advised.
        unsafe {
            if before > 0 {
                libc::munmap(mapped.cast(), before);
            }
            libc::munmap(start.wrapping_add(len).cast(), mapped_len - before - len);
            // A kernel without huge pages refuses: the memory is as good as any other then.
            libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE);
        }
        Ok(Mapping { start, len, piece_bytes, used: Cell::new(0) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by this object, and no piece is left.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// A part of a mapping, used by one buffer.
struct Piece {
    mapping: Rc<Mapping>,
    index: u32,
}

impl Piece {
    /// Takes a free piece, if there is one.
    fn of(mapping: &Rc<Mapping>) -> Option<Piece> {
        let index = mapping.used.get().trailing_ones();
        if index as usize >= mapping.len / mapping.piece_bytes {
            return None;
        }
        mapping.used.set(mapping.used.get() | 1 << index);
        Some(Piece { mapping: mapping.clone(), index })
    }

    fn start(&self) -> *mut u8 {
        self.mapping.start.wrapping_add(self.index as usize * self.mapping.piece_bytes)
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: a part of a mapping that this object keeps, and that no other piece overlaps.
        unsafe { std::slice::from_raw_parts(self.start(), self.mapping.piece_bytes) }
    }
}

impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.mapping.piece_bytes) }
    }
}

impl BufMemory for Piece {}

impl Drop for Piece {
    fn drop(&mut self) {
        self.mapping.used.set(self.mapping.used.get() & !(1 << self.index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mappings(pages: &HugePages) -> usize {
        pages.shared.borrow().iter().filter(|mapping| mapping.strong_count() > 0).count()
    }

    #[test]
    fn pieces_of_one_size_share_a_huge_page() {
        let pages = HugePages::default();
        let mut halves: Vec<Piece> = (0..2).map(|_| pages.piece(1 << 20).unwrap()).collect();
        assert_eq!((mappings(&pages), halves[0].start().align_offset(HUGE_PAGE_BYTES)), (1, 0));
        assert_eq!(halves[1].start(), halves[0].start().wrapping_add(1 << 20));
        halves[0].as_mut().fill(1);
        halves[1].as_mut().fill(2);
        assert!(halves[0].as_ref().iter().all(|&byte| byte == 1), "no piece overlaps another one");
        let (third, first) = (pages.piece((1 << 19) + 1).unwrap(), halves[0].start());
        assert_eq!((mappings(&pages), third.as_ref().len()), (2, 1 << 20), "a size is rounded to a power of two");
        drop(halves.remove(0));
        assert_eq!(pages.piece(1 << 20).unwrap().start(), first, "a free piece is used again");
        drop((halves, third));
        assert_eq!(mappings(&pages), 0, "a mapping lives as long as its pieces");
    }

    #[test]
    fn small_pieces_fill_a_huge_page_and_large_ones_have_their_own() {
        let pages = HugePages::default();
        assert!(pages.memory(MIN_PIECE_BYTES - 1).is_none());
        let small: Vec<Piece> = (0..33).map(|_| pages.piece(MIN_PIECE_BYTES).unwrap()).collect();
        assert_eq!(mappings(&pages), 2, "32 of them are a huge page");
        let large = pages.piece(HUGE_PAGE_BYTES + 1).unwrap();
        let expected = (HUGE_PAGE_BYTES + BUF_ALIGN_BYTES, 0);
        assert_eq!((large.as_ref().len(), large.start().align_offset(HUGE_PAGE_BYTES)), expected);
        assert_eq!((large.as_ref()[HUGE_PAGE_BYTES], mappings(&pages)), (0, 2));
        drop(small);
    }

    #[test]
    fn the_buffers_of_a_ring_lie_in_huge_pages() {
        let pool = forkdisk::device::BufPool::with_source(&[(4096, 2), (1 << 20, 4)], Rc::new(HugePages::default()));
        let at = |buf: &forkdisk::Buf| buf.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let pooled: Vec<forkdisk::Buf> = (0..4).map(|_| pool.take(1 << 20)).collect();
        assert_eq!(pooled.iter().filter(|buf| at(buf) == 0).count(), 2, "two begin a huge page, two follow there");
        let mut other = pool.take(3 << 20);
        assert_eq!((at(&other), other.slot(), other.capacity()), (0, None, 3 << 20));
        other.fill(7);
        let place = other.as_ptr();
        drop(other);
        assert_eq!(pool.take(3 << 20).as_ptr(), place, "kept for reuse");
    }
}
