//! Slots for messages in memory that outlives the process: a file without a name, mapped shared. A message that was
//! received and not freed is found there by the next process.
//!
//! The first four bytes of a message are its length, as the kernel writes it. They are zeroed before a message is
//! received and when it is freed: a kill at any time leaves a slot empty or with a whole message. The pages are there
//! before a message is received ([`RequestMemory::populate`]): the kernel gives up a copy to missing pages when the
//! process is killed meanwhile.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{MmapOptions, MmapRaw};

/// Distance between the heads of two slots, and the most bytes of a head.
const HEAD_STRIDE_BYTES: usize = 128;
const PAGE_BYTES: usize = 4096;

/// Number and sizes of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestSizes {
    /// Number of slots.
    pub count: usize,
    /// Bytes of the first part of a message: at least 4, at most 128.
    pub head: usize,
    /// Most bytes of the rest: whole pages.
    pub body: usize,
}

impl RequestSizes {
    /// Sizes of `count` slots.
    ///
    /// # Panics
    /// They are out of bounds.
    pub fn new(count: usize, head: usize, body: usize) -> RequestSizes {
        assert!((4..=HEAD_STRIDE_BYTES).contains(&head) && body.is_multiple_of(PAGE_BYTES), "sizes of slots");
        RequestSizes { count, head, body }
    }

    fn heads(&self) -> usize {
        (self.count * HEAD_STRIDE_BYTES).next_multiple_of(PAGE_BYTES)
    }

    fn bytes(&self) -> usize {
        self.heads() + self.count * self.body
    }
}

/// The slots. Memory is allocated when it is used.
pub struct RequestMemory {
    map: MmapRaw,
    file: File,
    sizes: RequestSizes,
}

impl RequestMemory {
    /// Makes empty slots.
    ///
    /// # Errors
    /// There is no free descriptor or no room in the address space.
    pub fn new(sizes: RequestSizes) -> io::Result<RequestMemory> {
        const FLAGS: libc::c_uint = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a call with a constant name.
        let made = unsafe { libc::memfd_create(c"forkdisk-requests".as_ptr(), FLAGS) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nothing else has.
        let file = unsafe { File::from_raw_fd(made) };
        file.set_len(sizes.bytes() as u64)?;
        // SAFETY: a call on an open descriptor.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) } < 0 {
            return Err(io::Error::last_os_error());
        }
        RequestMemory::map(file, sizes)
    }

    /// Continues with the file of another process.
    ///
    /// # Errors
    /// The file is another one, or there is no room in the address space.
    pub fn again(file: OwnedFd, sizes: RequestSizes) -> io::Result<RequestMemory> {
        let file = File::from(file);
        // SAFETY: a call on an open descriptor.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || file.metadata()?.len() != sizes.bytes() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not the memory of requests of this version"));
        }
        RequestMemory::map(file, sizes)
    }

    fn map(file: File, sizes: RequestSizes) -> io::Result<RequestMemory> {
        // The file is sealed: nothing shortens it while it is mapped.
        let map = MmapOptions::new().len(sizes.bytes()).map_raw(&file)?;
        Ok(RequestMemory { map, file, sizes })
    }

    /// Returns the sizes.
    pub fn sizes(&self) -> RequestSizes {
        self.sizes
    }

    /// Returns the file, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Allocates the head of a slot and the first `body` bytes of the rest.
    ///
    /// # Errors
    /// There is no memory.
    pub fn populate(&self, slot: usize, body: usize) -> io::Result<()> {
        let head = self.head_at(slot) as usize / PAGE_BYTES * PAGE_BYTES;
        self.populate_at(head as *mut u8, PAGE_BYTES)?;
        self.populate_at(self.body_at(slot), body.min(self.sizes.body))
    }

    fn populate_at(&self, at: *mut u8, len: usize) -> io::Result<()> {
        // SAFETY: a part of the mapping; the call changes no contents.
        match unsafe { libc::madvise(at.cast(), len, libc::MADV_POPULATE_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Receives a message into a slot; returns its length.
    ///
    /// # Errors
    /// Those of `readv`; the slot is empty then.
    pub fn receive(&self, slot: usize, from: BorrowedFd<'_>) -> io::Result<usize> {
        self.free(slot);
        let part = |at: *mut u8, len| libc::iovec { iov_base: at.cast(), iov_len: len };
        let parts = [part(self.head_at(slot), self.sizes.head), part(self.body_at(slot), self.sizes.body)];
        // SAFETY: both parts lie in the mapping, and no reference to them exists.
        let received = unsafe { libc::readv(from.as_raw_fd(), parts.as_ptr(), 2) };
        usize::try_from(received).map_err(|_| {
            let error = io::Error::last_os_error();
            self.free(slot);
            error
        })
    }

    /// Returns the length of the message in a slot; 0 if it is empty.
    pub fn len_of(&self, slot: usize) -> usize {
        self.length(slot).load(Ordering::Acquire) as usize
    }

    /// Empties a slot.
    pub fn free(&self, slot: usize) {
        self.length(slot).store(0, Ordering::Release);
    }

    /// Copies the first part of the message in a slot.
    pub fn copy_head(&self, slot: usize, to: &mut [u8]) {
        assert!(to.len() <= self.sizes.head, "a part of the head");
        // SAFETY: a part of the mapping; nothing writes it while the slot has a message.
        unsafe { self.head_at(slot).copy_to(to.as_mut_ptr(), to.len()) };
    }

    /// Copies the beginning of the rest.
    pub fn copy_body(&self, slot: usize, to: &mut [u8]) {
        assert!(to.len() <= self.sizes.body, "a part of the body");
        // SAFETY: as in `copy_head`.
        unsafe { self.body_at(slot).copy_to(to.as_mut_ptr(), to.len()) };
    }

    /// Gives the memory of a slot's rest back, but for its first `keep` bytes, whole pages.
    ///
    /// # Errors
    /// Those of `fallocate`.
    pub fn shrink(&self, slot: usize, keep: usize) -> io::Result<()> {
        let keep = keep.min(self.sizes.body).next_multiple_of(PAGE_BYTES);
        let at = self.sizes.heads() + slot * self.sizes.body + keep;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let len = (self.sizes.body - keep) as libc::off_t;
        // SAFETY: a call on an open descriptor.
        match unsafe { libc::fallocate(self.file.as_raw_fd(), mode, at as libc::off_t, len) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn length(&self, slot: usize) -> &AtomicU32 {
        // SAFETY: in the mapping, which lives as long as `self`, and aligned to the stride of the heads. It is accessed
        // by atomic operations and by the kernel only.
        unsafe { AtomicU32::from_ptr(self.head_at(slot).cast()) }
    }

    fn head_at(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.sizes.count, "a slot");
        self.map.as_mut_ptr().wrapping_add(slot * HEAD_STRIDE_BYTES)
    }

    fn body_at(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.sizes.count, "a slot");
        self.map.as_mut_ptr().wrapping_add(self.sizes.heads() + slot * self.sizes.body)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    const HEAD_BYTES: usize = 80;
    const BODY_BYTES: usize = 1 << 20;

    fn sizes() -> RequestSizes {
        RequestSizes::new(4, HEAD_BYTES, BODY_BYTES)
    }

    fn message(len: usize, fill: u8) -> Vec<u8> {
        let mut message = vec![fill; len];
        message[..4].copy_from_slice(&(len as u32).to_ne_bytes());
        message
    }

    fn blocks(memory: &RequestMemory) -> u64 {
        memory.file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn what_was_received_is_found_by_the_next_process_until_it_is_freed() {
        let memory = RequestMemory::new(sizes()).unwrap();
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        let messages = [(2, message(HEAD_BYTES + 5000, 7)), (0, message(40, 8))];
        for (slot, message) in &messages {
            sender.write_all(message).unwrap();
            assert_eq!(memory.receive(*slot, receiver.as_fd()).unwrap(), message.len());
        }
        let file = memory.file().try_clone_to_owned().unwrap();
        drop(memory);
        let memory = RequestMemory::again(file, sizes()).unwrap();
        let found: Vec<usize> = (0..4).map(|slot| memory.len_of(slot)).collect();
        assert_eq!(found, [40, 0, HEAD_BYTES + 5000, 0]);
        let (mut head, mut body) = ([0; HEAD_BYTES], [0; 5000]);
        memory.copy_head(2, &mut head);
        memory.copy_body(2, &mut body);
        assert!([&head[..], &body[..]].concat() == messages[0].1);
        memory.free(2);
        assert_eq!((memory.len_of(0), memory.len_of(2)), (40, 0));
    }

    #[test]
    fn a_slot_is_empty_when_nothing_is_received() {
        let memory = RequestMemory::new(sizes()).unwrap();
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        sender.write_all(&message(40, 8)).unwrap();
        memory.receive(3, receiver.as_fd()).unwrap();
        receiver.set_nonblocking(true).unwrap();
        assert_eq!(memory.receive(3, receiver.as_fd()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(memory.len_of(3), 0);
    }

    #[test]
    fn memory_is_allocated_when_it_is_used_and_given_back() {
        let memory = RequestMemory::new(sizes()).unwrap();
        assert_eq!(blocks(&memory), 0);
        memory.populate(1, BODY_BYTES).unwrap();
        assert_eq!(blocks(&memory), (PAGE_BYTES + BODY_BYTES) as u64);
        memory.shrink(1, 64 << 10).unwrap();
        assert_eq!(blocks(&memory), (PAGE_BYTES + (64 << 10)) as u64);
    }

    #[test]
    fn another_file_is_refused() {
        let other = RequestMemory::new(RequestSizes::new(5, HEAD_BYTES, BODY_BYTES)).unwrap();
        assert!(RequestMemory::again(other.file().try_clone_to_owned().unwrap(), sizes()).is_err());
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(sizes().bytes() as u64).unwrap();
        assert!(RequestMemory::again(plain.into(), sizes()).is_err());
    }
}
