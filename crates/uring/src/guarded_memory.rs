//! Memory shared with a process that may take it away: shortening the file under a mapping turns an access into
//! SIGBUS. A handler replaces the mapping by zeroes and marks it as lost, so that the access ends and is noticed.

use std::any::Any;
use std::io;
use std::rc::Rc;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use forkdisk::Buf;
use forkdisk::device::BufMemory;

use crate::sys;

/// Most ranges that are guarded at a time.
const RANGE_COUNT: usize = 65_536;

const PAGE_BYTES: usize = 4096;

/// A guarded range. Free if `len` is 0.
struct Range {
    taken: AtomicBool,
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

static RANGES: [Range; RANGE_COUNT] = [const {
    Range {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; RANGE_COUNT];

/// Action of SIGBUS before this module installed its own. Never freed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Guards a mapping while it lives. It has to be dropped before the memory is unmapped.
pub struct MemoryGuard {
    index: usize,
}

impl MemoryGuard {
    /// Guards `len` bytes from `start`, a whole mapping of shared memory.
    ///
    /// # Errors
    /// The handler cannot be installed, or there are too many guarded ranges.
    pub fn new(start: *mut u8, len: usize) -> io::Result<MemoryGuard> {
        install()?;
        let free = RANGES.iter().position(|range| !range.taken.swap(true, Ordering::AcqRel));
        let index = free.ok_or_else(|| io::Error::other(format!("{RANGE_COUNT} ranges are guarded already")))?;
        let range = &RANGES[index];
        range.lost.store(false, Ordering::Release);
        range.start.store(start.expose_provenance(), Ordering::Release);
        range.len.store(len, Ordering::Release);
        Ok(MemoryGuard { index })
    }

    /// Returns whether an access found the memory gone. From then on it reads as zeroes and is not shared any more.
    pub fn is_lost(&self) -> bool {
        RANGES[self.index].lost.load(Ordering::Acquire)
    }
}

impl MemoryGuard {
    /// Returns a buffer in `len` bytes of the guarded memory from `at` on, whole pages; `None` if they are not.
    /// `mapping` keeps the memory mapped, and this guard, until the buffer is dropped.
    pub fn buffer(&self, at: usize, len: usize, mapping: Rc<dyn Any>) -> Option<Buf> {
        let range = &RANGES[self.index];
        let (start, size) = (range.start.load(Ordering::Acquire), range.len.load(Ordering::Acquire));
        let is_inside = at.checked_add(len).is_some_and(|end| end <= size);
        let first = start.wrapping_add(at);
        if !is_inside || len == 0 || !(first | len).is_multiple_of(PAGE_BYTES) {
            return None;
        }
        let at = std::ptr::with_exposed_provenance_mut(first);
        Some(Buf::shared(Box::new(Part { at, len, range: self.index, _mapping: mapping })))
    }
}

/// A part of guarded memory.
struct Part {
    at: *mut u8,
    len: usize,
    /// Index of the guarded range.
    range: usize,
    _mapping: Rc<dyn Any>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: a part of a mapping that this object keeps. Other processes may change it at any time: its bytes are
        // passed to the kernel, copied and filled, and nothing depends on reading a byte twice.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl AsMut<[u8]> for Part {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl BufMemory for Part {
    fn is_lost(&self) -> bool {
        RANGES[self.range].lost.load(Ordering::Acquire)
    }
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        let range = &RANGES[self.index];
        range.len.store(0, Ordering::Release);
        range.taken.store(false, Ordering::Release);
    }
}

fn install() -> io::Result<()> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| match sys::set_fault_handler(libc::SIGBUS, handle) {
        Ok(before) => BEFORE.store(Box::into_raw(Box::new(before)), Ordering::Release),
        Err(error) => result = Err(error),
    });
    result
}

/// Runs in the faulting thread. Only system calls and atomic accesses are allowed here.
extern "C" fn handle(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo for a handler with SA_SIGINFO.
    let at = unsafe { (*info).si_addr() } as usize;
    for range in &RANGES {
        let (start, len) = (range.start.load(Ordering::Acquire), range.len.load(Ordering::Acquire));
        if at.wrapping_sub(start) < len {
            range.lost.store(true, Ordering::Release);
            // Where memory may not be promised beyond what there is, the page alone has to do.
            let page = at / PAGE_BYTES * PAGE_BYTES;
            if sys::replace_by_zeroes(start, len) || sys::replace_by_zeroes(page, PAGE_BYTES) {
                return;
            }
        }
    }
    // Not ours: the earlier action handles the fault, which repeats when this returns.
    sys::restore_action(libc::SIGBUS, BEFORE.load(Ordering::Acquire));
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn memory_that_is_taken_away_reads_as_zeroes_and_is_marked() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file =
            std::fs::File::options().read(true).write(true).create(true).truncate(true).open(dir.path().join("m"));
        let file = file.unwrap();
        file.set_len(3 * 4096).unwrap();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let map = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), 3 * 4096, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(map, libc::MAP_FAILED);
        let guard = MemoryGuard::new(map.cast(), 3 * 4096).unwrap();
        let last = map.cast::<u8>().wrapping_add(2 * 4096 + 5);
        // SAFETY: within the mapping.
        unsafe { last.write_volatile(7) };
        assert!(!guard.is_lost());
        file.set_len(4096).unwrap();
        // SAFETY: as before; the handler replaces the memory.
        assert_eq!(unsafe { last.read_volatile() }, 0);
        assert!(guard.is_lost());
        drop(guard);
        // SAFETY: mapped above, and no pointer into it is used any more.
        unsafe { libc::munmap(map, 3 * 4096) };
    }

    #[test]
    fn a_range_is_free_again_when_its_guard_is_dropped() {
        let mut byte = 0u8;
        let taken = || RANGES.iter().filter(|range| range.taken.load(Ordering::Acquire)).count();
        let before = taken();
        for _ in 0..1000 {
            drop(MemoryGuard::new(&raw mut byte, 1).unwrap());
        }
        assert!(taken() <= before + 1);
    }
}
