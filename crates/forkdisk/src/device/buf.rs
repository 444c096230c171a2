//! Segments of requests, and I/O buffers: page-aligned, owned by the operation that uses them, recycled through a pool.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::rc::{Rc, Weak};

use memmap2::MmapMut;
use smallvec::SmallVec;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// One contiguous piece of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Offset on the device, in bytes; a multiple of [`Device::block_size`](super::Device::block_size).
    pub offset: u64,
    /// Offset in the buffer, in bytes; a multiple of [`Device::block_size`](super::Device::block_size).
    pub at: usize,
    /// Length in bytes; a multiple of [`Device::block_size`](super::Device::block_size), not 0.
    pub len: usize,
}

/// The pieces of one request, in the order in which they are submitted.
pub type Segments = SmallVec<[Segment; 2]>;

/// A request's outcome together with its buffer.
pub type IoResult = (io::Result<()>, Buf);

/// Adds a segment; extends the last segment if it is contiguous with it.
pub(crate) fn add_segment(segments: &mut Segments, offset: u64, at: usize, len: usize) {
    match segments.last_mut() {
        Some(s) if s.offset + s.len as u64 == offset && s.at + s.len == at => s.len += len,
        _ => segments.push(Segment { offset, at, len }),
    }
}

/// Alignment of every buffer in memory, and its allocation unit, in bytes.
pub const BUF_ALIGN_BYTES: usize = 4096;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Frame([u8; BUF_ALIGN_BYTES]);

/// From this length on, memory outside of a pool comes from the system as zero pages that exist only once
/// they are touched: a client that announces much and sends nothing costs nothing.
const LAZY_ALLOC_BYTES: usize = 1 << 20;

/// Memory that a caller provides for a buffer: whole frames, aligned as they are, always at the same address.
pub trait BufMemory: AsRef<[u8]> + AsMut<[u8]> {
    /// Returns whether an access found that the memory was taken away; its contents are undefined since then.
    fn is_lost(&self) -> bool {
        false
    }
}

/// Provides memory for buffers of a [`BufPool`].
pub trait MemorySource {
    /// Returns at least `len` bytes, or `None` where ordinary memory suits them.
    fn memory(&self, len: usize) -> Option<Box<dyn BufMemory>>;
}

/// Memory that exists once it is touched.
enum Mapped {
    Own(MmapMut),
    Provided(Box<dyn BufMemory>),
    Shared(Box<dyn BufMemory>),
}

impl Mapped {
    fn bytes(&self) -> &[u8] {
        match self {
            Mapped::Own(map) => map,
            Mapped::Provided(memory) | Mapped::Shared(memory) => (**memory).as_ref(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Mapped::Own(map) => map,
            Mapped::Provided(memory) | Mapped::Shared(memory) => (**memory).as_mut(),
        }
    }
}

/// Memory of a buffer: whole frames. Two words, because a buffer is part of every task that reads or writes.
enum Memory {
    Frames(Box<[Frame]>),
    Lazy(Box<Mapped>),
}

const _: () = assert!(size_of::<Memory>() == 2 * size_of::<usize>());

impl Memory {
    /// Allocates zeroes, `len` bytes rounded up to frames.
    fn zeroed(len: usize) -> Memory {
        let frames = len.div_ceil(BUF_ALIGN_BYTES);
        if len >= LAZY_ALLOC_BYTES
            && let Ok(map) = MmapMut::map_anon(frames * BUF_ALIGN_BYTES)
        {
            return Memory::Lazy(Box::new(Mapped::Own(map)));
        }
        Memory::Frames(<[Frame]>::new_box_zeroed_with_elems(frames).expect("memory for an I/O buffer"))
    }

    /// Returns memory of `source` for `len` bytes, or allocates some.
    fn from(source: Option<&dyn MemorySource>, len: usize) -> Memory {
        match source.and_then(|source| source.memory(len)) {
            Some(memory) => Memory::Lazy(Box::new(Mapped::Provided(memory))),
            None => Memory::zeroed(len),
        }
    }

    fn none() -> Memory {
        Memory::Frames(Box::new([]))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Frames(frames) => frames.as_bytes(),
            Memory::Lazy(map) => map.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Frames(frames) => frames.as_mut_bytes(),
            Memory::Lazy(map) => map.bytes_mut(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Memory::Frames(frames) => frames.len() * BUF_ALIGN_BYTES,
            Memory::Lazy(map) => map.bytes().len(),
        }
    }
}

/// A page-aligned byte buffer, fit for direct I/O.
///
/// A buffer from a [`BufPool`] returns to it when it is dropped and keeps its contents: the next user must
/// fill all of it before it passes it on.
pub struct Buf {
    memory: Memory,
    len: usize,
    slot: Option<u16>,
    home: Weak<BufPool>,
}

impl Buf {
    /// Creates a buffer of `len` zero bytes that belongs to no pool.
    pub fn zeroed(len: usize) -> Buf {
        Buf { memory: Memory::zeroed(len), len, slot: None, home: Weak::new() }
    }

    /// Creates a buffer in memory that others may change at any time, such as a guest's. It can be read into, and
    /// written from: what is written are its contents at some moment of the write.
    ///
    /// # Panics
    /// If `memory` is not whole frames of [`BUF_ALIGN_BYTES`].
    pub fn shared(memory: Box<dyn BufMemory>) -> Buf {
        let bytes = (*memory).as_ref();
        let (len, address) = (bytes.len(), bytes.as_ptr().addr());
        assert!((len | address).is_multiple_of(BUF_ALIGN_BYTES), "{len} bytes at {address:#x} are no whole frames");
        Buf { memory: Memory::Lazy(Box::new(Mapped::Shared(memory))), len, slot: None, home: Weak::new() }
    }

    /// Returns whether others may change the contents at any time.
    pub fn is_shared(&self) -> bool {
        matches!(&self.memory, Memory::Lazy(mapped) if matches!(**mapped, Mapped::Shared(_)))
    }

    /// Returns whether an access found that shared memory was taken away.
    pub fn is_lost(&self) -> bool {
        match &self.memory {
            Memory::Lazy(mapped) => matches!(&**mapped, Mapped::Shared(memory) if memory.is_lost()),
            Memory::Frames(_) => false,
        }
    }

    /// Creates a buffer that holds a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Buf {
        let mut buf = Buf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// Returns how many bytes the buffer can hold without another allocation.
    pub fn capacity(&self) -> usize {
        self.memory.len()
    }

    /// Changes the length within the capacity; the bytes stay unchanged.
    ///
    /// # Panics If `len` is larger than [`capacity`](Self::capacity).
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "a buffer of {} bytes cannot hold {len}", self.capacity());
        self.len = len;
    }

    /// Returns the number under which this buffer's memory is registered with the device, if it is.
    pub fn slot(&self) -> Option<u16> {
        self.slot
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory.bytes()[..self.len]
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory.bytes_mut()[..self.len]
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if let Some(pool) = self.home.upgrade() {
            let memory = std::mem::replace(&mut self.memory, Memory::none());
            match self.slot {
                Some(slot) => pool.give_back(slot, memory),
                None => pool.spare.borrow_mut().keep(memory),
            }
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes, slot {:?})", self.len, self.slot)
    }
}

/// A fixed set of buffers in a few sizes, each with a number (its *slot*) under which a device may register
/// its memory once. When a size runs out, [`take`](Self::take) falls back to memory without a slot, so no
/// caller waits for a buffer here; some of that memory is kept for reuse.
pub struct BufPool {
    classes: Vec<Class>,
    spare: RefCell<Spare>,
    source: Option<Rc<dyn MemorySource>>,
}

/// Memory without a slot, kept for reuse. Getting it again from the system costs a page fault for each page.
#[derive(Default)]
struct Spare {
    kept: Vec<Memory>,
    bytes: usize,
}

/// Most bytes of memory without a slot that are kept, and the smallest piece that is kept.
const MAX_SPARE_BYTES: usize = 16 << 20;
const MIN_SPARE_BYTES: usize = 64 << 10;

impl Spare {
    /// Takes a piece for `len` bytes that is not much larger.
    fn take(&mut self, len: usize) -> Option<Memory> {
        let at = self.kept.iter().rposition(|memory| (len..=2 * len).contains(&memory.len()))?;
        let memory = self.kept.swap_remove(at);
        self.bytes -= memory.len();
        Some(memory)
    }

    fn keep(&mut self, memory: Memory) {
        let bytes = memory.len();
        if bytes >= MIN_SPARE_BYTES && self.bytes + bytes <= MAX_SPARE_BYTES {
            self.bytes += bytes;
            self.kept.push(memory);
        }
    }
}

struct Class {
    bytes: usize,
    first_slot: u16,
    free: RefCell<Vec<(u16, Memory)>>,
}

impl BufPool {
    /// Creates a pool of `count` buffers of `bytes` bytes for each `(bytes, count)`, smallest size first.
    pub fn new(sizes: &[(usize, usize)]) -> Rc<BufPool> {
        BufPool::with(sizes, None)
    }

    /// Creates a pool as [`new`](Self::new) does, with memory from `source`.
    pub fn with_source(sizes: &[(usize, usize)], source: Rc<dyn MemorySource>) -> Rc<BufPool> {
        BufPool::with(sizes, Some(source))
    }

    fn with(sizes: &[(usize, usize)], source: Option<Rc<dyn MemorySource>>) -> Rc<BufPool> {
        let mut slot = 0u16;
        let mut classes = Vec::new();
        for &(bytes, count) in sizes {
            assert!(bytes.is_multiple_of(BUF_ALIGN_BYTES), "a pooled buffer is whole pages");
            let first_slot = slot;
            let mut free = Vec::with_capacity(count);
            for _ in 0..count {
                let memory = Memory::from(source.as_deref(), bytes);
                // A buffer has no more than is registered.
                let memory = if memory.len() == bytes { memory } else { Memory::zeroed(bytes) };
                free.push((slot, memory));
                slot = slot.checked_add(1).expect("at most 65,535 pooled buffers");
            }
            free.reverse();
            classes.push(Class { bytes, first_slot, free: RefCell::new(free) });
        }
        assert!(classes.is_sorted_by_key(|c| c.bytes), "sizes in rising order");
        Rc::new(BufPool { classes, spare: RefCell::default(), source })
    }

    /// Creates a pool without slots that hands out `memory` as long as that is not taken. It must be small enough to be
    /// kept (16 MiB).
    pub fn of(memory: Box<dyn BufMemory>) -> Rc<BufPool> {
        let pool = BufPool::new(&[]);
        pool.spare.borrow_mut().keep(Memory::Lazy(Box::new(Mapped::Provided(memory))));
        pool
    }

    /// Returns a buffer of `len` bytes with unspecified contents.
    pub fn take(self: &Rc<Self>, len: usize) -> Buf {
        for class in self.classes.iter().filter(|c| c.bytes >= len) {
            if let Some((slot, memory)) = class.free.borrow_mut().pop() {
                return Buf { memory, len, slot: Some(slot), home: Rc::downgrade(self) };
            }
        }
        let spare = self.spare.borrow_mut().take(len);
        let memory = spare.unwrap_or_else(|| Memory::from(self.source.as_deref(), len));
        Buf { memory, len, slot: None, home: Rc::downgrade(self) }
    }

    /// Returns address and length of every idle pooled buffer, ordered by slot, for registration with a
    /// device. Must be called before the first [`take`](Self::take).
    pub fn memory(&self) -> Vec<(*const u8, usize)> {
        let mut all: Vec<(u16, *const u8, usize)> = Vec::new();
        for class in &self.classes {
            for (slot, memory) in class.free.borrow().iter() {
                all.push((*slot, memory.bytes().as_ptr(), class.bytes));
            }
        }
        all.sort_by_key(|&(slot, ..)| slot);
        all.into_iter().map(|(_, p, n)| (p, n)).collect()
    }

    fn give_back(&self, slot: u16, memory: Memory) {
        let class = self.classes.iter().rev().find(|c| c.first_slot <= slot).expect("a slot of this pool");
        class.free.borrow_mut().push((slot, memory));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl BufMemory for MmapMut {}

    #[test]
    fn a_buffer_is_aligned_and_zero() {
        let b = Buf::zeroed(10_000);
        assert_eq!(b.len(), 10_000);
        assert_eq!(b.as_ptr() as usize % BUF_ALIGN_BYTES, 0);
        assert!(b.iter().all(|&x| x == 0));
    }

    #[test]
    fn a_large_buffer_takes_no_memory_before_it_is_touched() {
        let resident = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let before = resident();
        let mut large = BufPool::new(&[]).take(1 << 30);
        assert!(resident() < before + (256 << 20), "{} bytes", resident() - before);
        assert_eq!((large.len(), large.capacity(), large.as_ptr() as usize % BUF_ALIGN_BYTES), (1 << 30, 1 << 30, 0));
        large[(1 << 30) - 1] = 7;
        assert_eq!(large[(1 << 30) - 2..], [0, 7]);
        assert_eq!(Buf::zeroed((1 << 20) + 1).capacity(), (1 << 20) + BUF_ALIGN_BYTES, "whole frames");
    }

    #[test]
    fn a_pooled_buffer_returns_to_its_slot() {
        let pool = BufPool::new(&[(4096, 2), (65536, 1)]);
        let a = pool.take(512);
        let b = pool.take(4096);
        assert_eq!((a.slot(), b.slot()), (Some(0), Some(1)));
        let c = pool.take(4096);
        assert_eq!(c.slot(), Some(2), "a larger one serves when the size is used up");
        assert_eq!(pool.take(4096).slot(), None);
        drop(a);
        assert_eq!(pool.take(1).slot(), Some(0));
    }

    #[test]
    fn provided_memory_returns_to_its_pool() {
        let map = MmapMut::map_anon(1 << 20).unwrap();
        let at = map.as_ptr();
        let pool = BufPool::of(Box::new(map));
        let mut buf = pool.take(1 << 20);
        buf.set_len(5);
        buf.copy_from_slice(b"bytes");
        assert_eq!((buf.as_ptr(), buf.capacity()), (at, 1 << 20));
        assert_ne!(pool.take(1 << 20).as_ptr(), at);
        drop(buf);
        let again = pool.take(1 << 20);
        assert_eq!((again.as_ptr(), &again[..5]), (at, &b"bytes"[..]));
    }

    /// Rounds to powers of two.
    struct Rounding;

    impl MemorySource for Rounding {
        fn memory(&self, len: usize) -> Option<Box<dyn BufMemory>> {
            (len > 8192).then(|| Box::new(MmapMut::map_anon(len.next_power_of_two()).unwrap()) as Box<dyn BufMemory>)
        }
    }

    #[test]
    fn memory_of_a_source_is_used_where_it_has_some_and_kept_for_reuse() {
        let pool = BufPool::with_source(&[(8192, 1), (12288, 1), (1 << 16, 1)], Rc::new(Rounding));
        let provided = |buf: &Buf| matches!(buf.memory, Memory::Lazy(_));
        let pooled = [8192, 12288, 1 << 16].map(|len| pool.take(len));
        assert_eq!(
            pooled.each_ref().map(provided),
            [false, false, true],
            "a pooled buffer is not larger than its size"
        );
        assert_eq!(pooled.map(|buf| buf.capacity()), [8192, 12288, 1 << 16]);
        let spare = pool.take(100 << 10);
        let at = spare.as_ptr();
        assert_eq!((spare.capacity(), spare.slot(), provided(&spare)), (128 << 10, None, true));
        drop(spare);
        assert_eq!(pool.take(100 << 10).as_ptr(), at);
        assert!(!provided(&pool.take(4096)));
    }

    #[test]
    fn large_buffers_beyond_the_pool_are_used_again_up_to_a_bound() {
        let pool = BufPool::new(&[(4096, 1)]);
        let first = pool.take(1 << 20);
        let at = first.as_ptr();
        drop(first);
        assert_ne!(pool.take(100 << 10).as_ptr(), at, "much smaller");
        let again = pool.take((1 << 20) - 5);
        assert_eq!((again.as_ptr(), again.len(), again.slot()), (at, (1 << 20) - 5, None));
        let many: Vec<Buf> = (0..40).map(|_| pool.take(1 << 20)).collect();
        drop((again, many));
        assert!(pool.spare.borrow().bytes <= MAX_SPARE_BYTES && pool.spare.borrow().kept.len() >= 16);
        drop((pool.take(4096), pool.take(8192)));
        assert!(pool.spare.borrow().kept.iter().all(|memory| memory.len() >= MIN_SPARE_BYTES));
    }
}
