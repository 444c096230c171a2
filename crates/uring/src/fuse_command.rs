//! Memory of the entries of FUSE's queues, and the commands that lend it to the kernel.

use std::cell::Cell;
use std::rc::Rc;

use forkdisk::Buf;
use forkdisk::device::{BUF_ALIGN_BYTES, BufMemory, BufPool};
use io_uring::opcode;
use io_uring::squeue::Entry128;

use crate::fixed_memory::FixedMemory;
use crate::handle::Handle;
use crate::huge_pages::HUGE_PAGE_BYTES;

const REGISTER_CODE: u32 = 1;
const COMMIT_AND_FETCH_CODE: u32 = 2;

/// Length of the area for the header of a request or a reply, and of the one for an operation's own fields.
pub(crate) const AREA_BYTES: usize = 128;
/// Length of a request's header.
pub(crate) const HEADER_BYTES: usize = 40;
/// Offset in the third area of the request's id, and of the payload's length.
pub(crate) const ID_AT_BYTES: usize = 2 * AREA_BYTES + 8;
pub(crate) const LENGTH_AT_BYTES: usize = ID_AT_BYTES + 8;
const HEADERS_BYTES: usize = 2 * AREA_BYTES + 32;
/// Bytes of payload that stay mapped in every entry.
pub(crate) const SMALL_BYTES: usize = 64 << 10;
/// Distance between the areas of two entries.
const HEADERS_STRIDE_BYTES: usize = 512;

/// Memory of one entry, lent to the kernel while it has no request: the areas, as the kernel's
/// `fuse_uring_req_header`, and the payload.
pub(crate) struct EntryMemory {
    headers: *mut u8,
    /// Has one buffer, which returns to it from anywhere.
    payload: Rc<BufPool>,
    at: *mut u8,
    len: usize,
    /// Bytes from this payload to the next.
    stride: usize,
    /// They are huge pages.
    is_huge: bool,
    /// Bytes at the start of the payload that may be mapped.
    touched: Cell<usize>,
    /// The mapping that all of this lies in.
    _memory: Rc<FixedMemory>,
}

/// The payload as memory of a buffer. There is one such object for each entry.
struct Payload {
    at: *mut u8,
    len: usize,
    _memory: Rc<FixedMemory>,
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: a part of the mapping, which this object keeps, that only this object refers to. The buffer is taken
        // only while the entry has a request, so the kernel does not access it.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl AsMut<[u8]> for Payload {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl BufMemory for Payload {}

/// Where the entries lie in a mapping: the areas of all of them, then the payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Number of entries.
    pub count: usize,
    /// Bytes of a payload, whole pages.
    pub payload: usize,
    /// Distance between two payloads, whole pages. If it is whole huge pages, each payload begins one.
    pub stride: usize,
}

impl Layout {
    fn is_huge(self) -> bool {
        self.stride.is_multiple_of(HUGE_PAGE_BYTES)
    }

    fn payload_at(self, index: usize) -> usize {
        let unit = if self.is_huge() { HUGE_PAGE_BYTES } else { BUF_ALIGN_BYTES };
        (self.count * HEADERS_STRIDE_BYTES).next_multiple_of(unit) + index * self.stride
    }

    /// Returns how much memory there is.
    pub(crate) fn memory(self) -> usize {
        self.payload_at(self.count)
    }
}

impl EntryMemory {
    /// Returns an entry.
    pub(crate) fn new(memory: &Rc<FixedMemory>, index: usize, layout: Layout) -> EntryMemory {
        let headers = memory.at(index * HEADERS_STRIDE_BYTES, HEADERS_BYTES);
        let Layout { payload: len, stride, .. } = layout;
        let at = memory.at(layout.payload_at(index), stride);
        let payload = BufPool::of(Box::new(Payload { at, len, _memory: memory.clone() }));
        let is_huge = layout.is_huge();
        EntryMemory { headers, payload, at, len, stride, is_huge, touched: Cell::new(0), _memory: memory.clone() }
    }

    /// Records that the first `len` bytes of the payload are used. Returns whether that makes it a large entry.
    pub(crate) fn touch(&self, len: usize) -> bool {
        let before = self.touched.replace(self.touched.get().max(len));
        before <= SMALL_BYTES && len > SMALL_BYTES
    }

    /// Moves the payload into huge pages, so that the kernel and the device need not handle each small page of a large
    /// request. It takes a few milliseconds. Where there are none, and before Linux 6.1, the memory stays as it is.
    pub(crate) fn collapse(&self) {
        if self.is_huge {
            // SAFETY: a part of the mapping; the entry has a request, and the contents stay the same.
            unsafe { libc::madvise(self.at.cast(), self.stride, libc::MADV_COLLAPSE) };
        }
    }

    /// Gives memory back that `len` bytes of the payload do not need. Returns whether it was a large entry.
    pub(crate) fn shrink(&self, len: usize) -> bool {
        if self.touched.get() <= SMALL_BYTES || len > SMALL_BYTES {
            return false;
        }
        self.touched.set(SMALL_BYTES);
        // SAFETY: whole pages of the mapping; the entry has a request, and its buffer was returned.
        let removed =
            unsafe { libc::madvise(self.at.add(SMALL_BYTES).cast(), self.stride - SMALL_BYTES, libc::MADV_REMOVE) };
        debug_assert_eq!(removed, 0);
        true
    }

    /// Takes the buffer; `None` if it has not been returned.
    pub(crate) fn take(&self) -> Option<Buf> {
        Some(self.payload.take(self.len)).filter(|buf| self.is_own(buf))
    }

    /// Returns whether `buf` is that of this entry.
    pub(crate) fn is_own(&self, buf: &Buf) -> bool {
        buf.as_ptr() == self.at.cast_const()
    }

    pub(crate) fn read<const N: usize>(&self, from: usize) -> [u8; N] {
        assert!(from + N <= HEADERS_BYTES, "a part of the areas");
        // SAFETY: a part of the areas; the entry has a request, so the kernel does not access its memory.
        unsafe { self.headers.add(from).cast::<[u8; N]>().read_unaligned() }
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= HEADERS_BYTES, "a part of the areas");
        // SAFETY: as in `read`.
        unsafe { self.headers.add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }
}

/// A command: the memory that it lends, and what else the kernel reads of it.
pub(crate) struct FuseCommand {
    memory: Rc<EntryMemory>,
    queue: u16,
    task: Task,
}

enum Task {
    /// Registers the entry, which has headers and payload.
    Register(Box<[libc::iovec; 2]>),
    /// Answers the request of this id.
    Answer(u64),
}

impl FuseCommand {
    /// A command for an entry that has no request.
    pub(crate) fn register(memory: Rc<EntryMemory>, queue: u16) -> FuseCommand {
        let part = |at: *mut u8, len| libc::iovec { iov_base: at.cast(), iov_len: len };
        let headers = part(memory.headers, HEADERS_BYTES);
        let parts = Box::new([headers, part(memory.at, memory.len)]);
        FuseCommand { memory, queue, task: Task::Register(parts) }
    }

    /// A command for an entry that holds the answer to request `id`.
    pub(crate) fn answer(memory: Rc<EntryMemory>, queue: u16, id: u64) -> FuseCommand {
        FuseCommand { memory, queue, task: Task::Answer(id) }
    }

    /// Returns the entry for the ring.
    pub(crate) fn entry(&self, file: &Handle) -> Entry128 {
        let (number, id, parts) = match &self.task {
            Task::Register(parts) => (REGISTER_CODE, 0, Some(parts)),
            Task::Answer(id) => (COMMIT_AND_FETCH_CODE, *id, None),
        };
        let mut data = [0; 80];
        data[8..16].copy_from_slice(&id.to_ne_bytes());
        data[16..18].copy_from_slice(&self.queue.to_ne_bytes());
        let command = opcode::UringCmd80::new(file.target(), number).cmd(data);
        let Some(parts) = parts else { return command.build() };
        let mut entry = command.addr(Some(parts.as_ptr() as u64)).build();
        const LEN_AT_BYTES: usize = 24;
        // SAFETY: an entry consists of 128 bytes, laid out as the kernel's `io_uring_sqe`, which has its length here.
        unsafe { (&raw mut entry).cast::<u8>().add(LEN_AT_BYTES).cast::<u32>().write(parts.len() as u32) };
        entry
    }

    /// Keeps the memory forever: the kernel may access it until this process has ended.
    pub(crate) fn leak(&self) {
        std::mem::forget(self.memory.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN_BYTES: usize = 1 << 20;

    #[test]
    fn payloads_begin_huge_pages_or_follow_each_other() {
        let adjoining = Layout { count: 3, payload: LEN_BYTES, stride: LEN_BYTES };
        assert_eq!([0, 1, 3].map(|index| adjoining.payload_at(index)), [4096, 4096 + LEN_BYTES, 4096 + 3 * LEN_BYTES]);
        let huge = Layout { stride: HUGE_PAGE_BYTES, ..adjoining };
        assert_eq!([0, 1, 3].map(|index| huge.payload_at(index)), [1, 2, 4].map(|page| page * HUGE_PAGE_BYTES));
        assert_eq!((adjoining.memory(), huge.memory()), (4096 + 3 * LEN_BYTES, 4 * HUGE_PAGE_BYTES));
    }

    #[test]
    fn an_entry_keeps_its_place_and_has_one_buffer() {
        for stride in [LEN_BYTES, HUGE_PAGE_BYTES] {
            entries_have_one_buffer(Layout { count: 3, payload: LEN_BYTES, stride });
        }
    }

    fn entries_have_one_buffer(layout: Layout) {
        let Ok(mapping) = FixedMemory::new(layout.memory()) else { return };
        let entries: Vec<_> = (0..3).map(|index| EntryMemory::new(&mapping, index, layout)).collect();
        for entry in &entries {
            let mut buf = entry.take().expect("it is there");
            assert!(entry.is_own(&buf) && buf.len() == LEN_BYTES);
            buf.set_len(5);
            assert!(entry.take().is_none());
            drop(buf);
            assert_eq!(entry.take().map(|buf| buf.len()), Some(LEN_BYTES));
            entry.write(ID_AT_BYTES, &7u64.to_ne_bytes());
        }
        let mut buf = entries[1].take().unwrap();
        buf.fill(9);
        drop(buf);
        assert!(!entries[1].touch(SMALL_BYTES) && entries[1].touch(LEN_BYTES) && !entries[1].touch(LEN_BYTES));
        // Whether it succeeds depends on the kernel and its free memory; the contents stay the same.
        entries[1].collapse();
        assert!(!entries[1].shrink(LEN_BYTES) && entries[1].shrink(SMALL_BYTES) && !entries[1].shrink(0));
        let buf = entries[1].take().unwrap();
        assert_eq!((buf[SMALL_BYTES - 1], buf[SMALL_BYTES], buf[LEN_BYTES - 1]), (9, 0, 0));
        assert_eq!(entries[2].read::<8>(ID_AT_BYTES), 7u64.to_ne_bytes());
    }
}
