//! Memory that another process can continue to use: a file in memory, mapped at the same address there.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::{Rc, Weak};

/// Where mappings begin: an area in which programs, libraries and heaps do not lie.
const FIRST_ADDRESS: usize = 0x2000_0000_0000;
/// Distance between places that are tried, and their number.
const STRIDE_BYTES: usize = 1 << 32;
const PLACES_COUNT: usize = 256;

/// A mapping. Its memory is mapped page by page, when it is touched.
pub(crate) struct FixedMemory {
    address: usize,
    len: usize,
    file: OwnedFd,
}

thread_local! {
    static ALL: RefCell<Vec<Weak<FixedMemory>>> = const { RefCell::new(Vec::new()) };
}

impl FixedMemory {
    /// Maps `len` new bytes.
    pub(crate) fn new(len: usize) -> io::Result<Rc<FixedMemory>> {
        // SAFETY: a call with a constant name.
        let file = unsafe { libc::memfd_create(c"forkdisk-fuse".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was just made.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        // SAFETY: a call on an open descriptor.
        if unsafe { libc::ftruncate(file.as_raw_fd(), len as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut refused = io::Error::from_raw_os_error(libc::ENOMEM);
        for place in 0..PLACES_COUNT {
            match FixedMemory::map(FIRST_ADDRESS + place * STRIDE_BYTES, len, file.try_clone()?) {
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => refused = error,
                mapped => return mapped,
            }
        }
        Err(refused)
    }

    /// Maps what another process, or this one before, has mapped there.
    pub(crate) fn again(address: usize, len: usize, file: OwnedFd) -> io::Result<Rc<FixedMemory>> {
        let mapped = ALL.with_borrow(|all| {
            all.iter().filter_map(Weak::upgrade).find(|memory| memory.address == address && memory.len == len)
        });
        mapped.map_or_else(|| FixedMemory::map(address, len, file), Ok)
    }

    fn map(address: usize, len: usize, file: OwnedFd) -> io::Result<Rc<FixedMemory>> {
        let file = File::from(file);
        if file.metadata()?.len() != len as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the memory has another length"));
        }
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE);
        let place = std::ptr::without_provenance_mut(address);
        // SAFETY: it replaces no other mapping, and the file is as long.
        let mapped = unsafe { libc::mmap(place, len, access, flags, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = Rc::new(FixedMemory { address: mapped.expose_provenance(), len, file: file.into() });
        if memory.address != address {
            // A kernel without this flag takes the address as a hint.
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        ALL.with_borrow_mut(|all| {
            all.retain(|memory| memory.strong_count() > 0);
            all.push(Rc::downgrade(&memory));
        });
        Ok(memory)
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Returns a pointer to `len` bytes from `at`.
    pub(crate) fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "a part of the mapping");
        std::ptr::with_exposed_provenance_mut(self.address + at)
    }
}

impl Drop for FixedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by this object, and there are no references to it.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.address), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_has_its_place_and_is_found_again() {
        let Ok(first) = FixedMemory::new(1 << 20) else { return };
        let second = FixedMemory::new(1 << 20).unwrap();
        assert_ne!(first.address(), second.address());
        let file = || second.file().try_clone().unwrap();
        let same = FixedMemory::again(second.address(), 1 << 20, file()).unwrap();
        assert!(Rc::ptr_eq(&same, &second));
        let taken = FixedMemory::map(second.address(), 1 << 20, file()).err().unwrap();
        assert_eq!(taken.raw_os_error(), Some(libc::EEXIST));
        let other = FixedMemory::again(second.address(), 1 << 19, file()).err().unwrap();
        assert_eq!(other.kind(), io::ErrorKind::InvalidData, "memory of a program that divides it otherwise");
        let (address, file) = (second.address(), file());
        // SAFETY: nothing else refers to the mapping.
        unsafe { second.at(5000, 1).write(7) };
        drop((same, second));
        let again = FixedMemory::again(address, 1 << 20, file).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { again.at(5000, 1).read() }, 7);
    }
}
