//! The memory of a guest, as the front end shares it: mapped regions and the translation of addresses.
//!
//! The front end may shorten a file that is mapped here. Accesses then find zeroes, and the memory counts as
//! lost (`forkdisk_uring::MemoryGuard`).

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use forkdisk::Buf;
use forkdisk_uring::MemoryGuard;
use rustix::fs::{fcntl_get_seals, fstatfs};
use smallvec::SmallVec;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::mmap::MmapRegion;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use crate::foreign_file::ForeignFile;
use crate::passed::{PassedRegion, duplicate};

/// Most regions of a guest.
pub const MAX_REGIONS: usize = 32;
/// Most regions that are mapped, with those that were removed under requests in flight.
const MAX_LIVE_REGIONS: usize = 2 * MAX_REGIONS;
/// Most bytes that are mapped for a guest.
const MAX_MAPPED_BYTES: u64 = 4 << 40;
const PAGE_BYTES: u64 = 4096;
/// Bytes in one piece from which they are transferred to and from the guest's memory without a copy: the copy of less
/// costs less than a request in memory that is not registered with the ring.
const MIN_PART_BYTES: u64 = 16 << 10;

/// Why memory is refused.
pub type Refusal = String;

/// A mapping of a file of the front end that may be taken away. The guard is dropped before the memory is unmapped.
pub struct SharedMapping<T> {
    guard: MemoryGuard,
    /// The mapping.
    pub memory: T,
}

impl<T> SharedMapping<T> {
    /// Returns whether an access found it gone.
    pub fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }
}

/// Maps `len` bytes of `file` from `offset`.
pub fn map(file: ForeignFile, offset: u64, len: u64) -> Result<SharedMapping<MmapRegion>, Refusal> {
    // Asks no file system, unlike all other calls: one of the front end's own might never answer.
    if fcntl_get_seals(&file).is_err() {
        return Err("the memory does not lie in tmpfs or hugetlbfs (memfd, /dev/shm)".to_string());
    }
    let file = file.into_known();
    let looked = |error: std::io::Error| format!("the file of the memory cannot be looked at: {error}");
    let page = fstatfs(&file).map_err(|error| looked(error.into()))?.f_bsize;
    let page = u64::try_from(page).unwrap_or(PAGE_BYTES).max(PAGE_BYTES);
    let found = file.metadata().map_err(looked)?.len();
    let is_whole = offset.is_multiple_of(page) && len.is_multiple_of(page) && len > 0;
    if !is_whole || offset.checked_add(len).is_none_or(|end| end > found) {
        return Err(format!("{len} bytes from {offset} are no pages of {page} bytes in a file of {found} bytes"));
    }
    let size = usize::try_from(len).map_err(|_| format!("{len} bytes cannot be mapped"))?;
    let memory = MmapRegion::from_file(FileOffset::new(file, offset), size)
        .map_err(|error| format!("{len} bytes cannot be mapped: {error}"))?;
    let guard = MemoryGuard::new(memory.as_ptr(), size).map_err(|error| error.to_string())?;
    Ok(SharedMapping { guard, memory })
}

/// What the regions of a session take, those included that only requests in flight still use.
#[derive(Default)]
struct Account {
    regions: Cell<usize>,
    bytes: Cell<u64>,
}

/// A part of an account; given back when it is dropped.
struct Charge {
    account: Rc<Account>,
    bytes: u64,
}

impl Account {
    fn charge(self: &Rc<Self>, bytes: u64) -> Result<Charge, Refusal> {
        let (regions, mapped) = (self.regions.get() + 1, self.bytes.get().saturating_add(bytes));
        if regions > MAX_LIVE_REGIONS || mapped > MAX_MAPPED_BYTES {
            return Err(format!("{regions} regions with {mapped} bytes are more than a guest may have"));
        }
        self.regions.set(regions);
        self.bytes.set(mapped);
        Ok(Charge { account: self.clone(), bytes })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.regions.set(self.account.regions.get() - 1);
        self.account.bytes.set(self.account.bytes.get() - self.bytes);
    }
}

/// One region: its address for the guest, and its address in the front end.
struct Region {
    guest: u64,
    user: u64,
    len: u64,
    mapping: SharedMapping<Arc<GuestRegionMmap>>,
    _charge: Charge,
}

impl Region {
    /// Returns whether `len` bytes from the guest's address `at` lie in it.
    fn holds(&self, at: u64, len: u64) -> bool {
        at.checked_sub(self.guest).is_some_and(|from| from < self.len && len <= self.len - from)
    }
}

/// The memory of a guest. A request keeps the memory with which it began until it ends.
#[derive(Default)]
pub struct Memory {
    regions: Vec<Rc<Region>>,
    map: GuestMemoryMmap,
    account: Rc<Account>,
}

impl Memory {
    /// Returns this memory and one more region.
    pub fn with(&self, region: &VhostUserMemoryRegion, file: ForeignFile) -> Result<Memory, Refusal> {
        let (guest, user, len, offset) =
            (region.guest_phys_addr, region.user_addr, region.memory_size, region.mmap_offset);
        if self.regions.len() >= MAX_REGIONS {
            return Err(format!("there are {MAX_REGIONS} regions already"));
        }
        if guest.checked_add(len).is_none() || user.checked_add(len).is_none() {
            return Err(format!("a region of {len} bytes ends beyond the last address"));
        }
        let charge = self.account.charge(len)?;
        let SharedMapping { guard, memory } = map(file, offset, len)?;
        let mapped = GuestRegionMmap::new(memory, GuestAddress(guest)).ok_or("a region beyond the last address")?;
        let mapping = SharedMapping { guard, memory: Arc::new(mapped) };
        let mut regions = self.regions.clone();
        regions.push(Rc::new(Region { guest, user, len, mapping, _charge: charge }));
        self.of(regions)
    }

    /// Returns this memory without a region.
    pub fn without(&self, region: &VhostUserMemoryRegion) -> Result<Memory, Refusal> {
        let (guest, user, len) = (region.guest_phys_addr, region.user_addr, region.memory_size);
        let is_it = |r: &Rc<Region>| (r.guest, r.user, r.len) == (guest, user, len);
        let mut regions = self.regions.clone();
        let at =
            regions.iter().position(is_it).ok_or_else(|| format!("there is no region of {len} bytes at {guest:#x}"))?;
        regions.remove(at);
        self.of(regions)
    }

    /// Returns memory of the same guest without any region.
    pub fn emptied(&self) -> Memory {
        Memory { account: self.account.clone(), ..Memory::default() }
    }

    fn of(&self, mut regions: Vec<Rc<Region>>) -> Result<Memory, Refusal> {
        regions.sort_by_key(|region| region.guest);
        if regions.is_empty() {
            return Ok(self.emptied());
        }
        let all = regions.iter().map(|region| region.mapping.memory.clone()).collect();
        let map = GuestMemoryMmap::from_arc_regions(all).map_err(|error| format!("the regions of memory: {error}"))?;
        Ok(Memory { regions, map, account: self.account.clone() })
    }

    /// Translates an address of the front end to one of the guest.
    pub fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        let region = self.regions.iter().find(|region| user.wrapping_sub(region.user) < region.len)?;
        Some(GuestAddress(region.guest + (user - region.user)))
    }

    /// Returns the regions for another process.
    pub fn passed(&self) -> io::Result<Vec<PassedRegion<OwnedFd>>> {
        let passed = |region: &Rc<Region>| {
            let file = region.mapping.memory.file_offset().ok_or(io::ErrorKind::NotFound)?;
            let &Region { guest, user, len, .. } = &**region;
            Ok(PassedRegion { file: duplicate(file.file())?, offset: file.start(), len, guest, user })
        };
        self.regions.iter().map(passed).collect()
    }

    /// Returns buffers in the memory itself for all of `pieces` (address and length), in their order; `None` if that is
    /// not possible, or no cheaper than a copy. They keep their regions.
    pub fn buffers(&self, pieces: impl Iterator<Item = (GuestAddress, u32)>) -> Option<SmallVec<[Buf; 2]>> {
        let mut parts: SmallVec<[(usize, u64, u64); 4]> = SmallVec::new();
        for (GuestAddress(at), len) in pieces.filter(|&(_, len)| len > 0) {
            let len = u64::from(len);
            match parts.last_mut() {
                Some((region, start, before)) if *start + *before == at && self.regions[*region].holds(at, len) => {
                    *before += len;
                }
                _ => parts.push((self.regions.iter().position(|region| region.holds(at, len))?, at, len)),
            }
        }
        let bytes: u64 = parts.iter().map(|(.., len)| len).sum();
        if bytes < MIN_PART_BYTES * parts.len().max(1) as u64 {
            return None;
        }
        let buffer = |(region, at, len): (usize, u64, u64)| {
            let region = &self.regions[region];
            region.mapping.guard.buffer((at - region.guest) as usize, len as usize, region.clone())
        };
        parts.into_iter().map(buffer).collect()
    }

    /// Returns the memory by addresses of the guest.
    pub fn map(&self) -> &GuestMemoryMmap {
        &self.map
    }

    /// Returns whether an access found a part of it gone.
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::Bytes;

    use super::*;

    fn memfd(len: u64) -> File {
        let fd: OwnedFd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(len).unwrap();
        file
    }

    fn region(guest: u64, len: u64, user: u64, offset: u64) -> VhostUserMemoryRegion {
        VhostUserMemoryRegion::new(guest, len, user, offset)
    }

    #[test]
    fn regions_are_found_by_both_kinds_of_addresses() {
        let file = memfd(3 << 20);
        let memory = Memory::default()
            .with(&region(1 << 32, 1 << 20, 0x7000_0000, 1 << 20), file.try_clone().unwrap().into())
            .unwrap()
            .with(&region(0, 1 << 20, 0x5000_0000, 0), file.try_clone().unwrap().into())
            .unwrap();
        assert_eq!(memory.guest_address(0x7000_0010), Some(GuestAddress((1 << 32) + 16)));
        assert_eq!(memory.guest_address(0x5000_0000 + (1 << 20)), None);
        memory.map().write_obj(7u32, GuestAddress(1 << 32)).unwrap();
        let fewer = memory.without(&region(0, 1 << 20, 0x5000_0000, 0)).unwrap();
        assert_eq!(fewer.map().read_obj::<u32>(GuestAddress(1 << 32)).unwrap(), 7);
        assert!(fewer.map().read_obj::<u32>(GuestAddress(0)).is_err());
        assert!(fewer.without(&region(0, 1 << 20, 0x5000_0000, 0)).is_err());
    }

    #[test]
    fn what_is_no_memory_of_a_guest_is_refused() {
        let file = memfd(1 << 20);
        let with = |r, file: &File| Memory::default().with(&r, file.try_clone().unwrap().into()).err();
        let refused = with(region(0, 2 << 20, 0, 0), &file).unwrap();
        assert!(refused.contains("no pages of 4096 bytes in a file of 1048576 bytes"), "{refused}");
        assert!(with(region(u64::MAX - 4095, 8192, 0, 0), &file).is_some());
        assert!(with(region(0, 4096, u64::MAX, 0), &file).is_some());
        assert!(with(region(0, 4096, 0, u64::MAX - 4095), &file).is_some());
        assert!(with(region(0, 4096, 0, 100), &file).is_some());
        let on_disk =
            File::options().read(true).write(true).open("/proc/self/exe").or_else(|_| File::open("/proc/self/exe"));
        let refused = with(region(0, 4096, 0, 0), &on_disk.unwrap()).unwrap();
        assert!(refused.contains("tmpfs or hugetlbfs"), "{refused}");
        let memory = Memory::default().with(&region(0, 8192, 0, 0), file.try_clone().unwrap().into()).unwrap();
        assert!(memory.with(&region(4096, 4096, 1 << 20, 8192), file.into()).is_err(), "an overlap");
    }

    #[test]
    fn buffers_lie_in_the_memory_itself_where_that_is_cheaper() {
        let file = memfd(1 << 20);
        let memory = Memory::default()
            .with(&region(0, 512 << 10, 0, 0), file.try_clone().unwrap().into())
            .unwrap()
            .with(&region(512 << 10, 512 << 10, 1 << 30, 512 << 10), file.try_clone().unwrap().into())
            .unwrap();
        let lens = |pieces: &[(u64, u32)]| {
            let buffers = memory.buffers(pieces.iter().map(|&(at, len)| (GuestAddress(at), len)))?;
            Some(buffers.iter().map(|buf| buf.len()).collect::<Vec<_>>())
        };
        assert_eq!(lens(&[(4096, 16 << 10), (20 << 10, 4096)]), Some(vec![20 << 10]), "they touch");
        assert_eq!(lens(&[(0, 32 << 10), (0, 0), (128 << 10, 4096)]), Some(vec![32 << 10, 4096]));
        assert_eq!(lens(&[(496 << 10, 16 << 10), (512 << 10, 16 << 10)]), Some(vec![16 << 10; 2]), "two regions");
        assert_eq!(lens(&[(508 << 10, 32 << 10)]), None, "across two regions");
        assert_eq!(lens(&[(0, 4096), (8192, 16 << 10)]), None, "many small pieces");
        assert_eq!(lens(&[(512, 32 << 10)]), None, "not at a page");
        assert_eq!(lens(&[(0, 16 << 10), (32 << 10, 16_896)]), None, "not whole pages");
        assert_eq!(lens(&[(1008 << 10, 32 << 10)]), None, "beyond the end");
        assert_eq!(lens(&[(u64::MAX - 4095, 4096)]), None);
        assert_eq!(lens(&[]), None);
        let mut kept = memory.buffers([(GuestAddress(0), 16 << 10)].into_iter()).unwrap();
        drop(memory);
        kept[0].fill(7);
        let mut found = [0; 16];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, 100).unwrap();
        assert_eq!(found, [7; 16], "it keeps its region");
    }

    #[test]
    fn memory_that_was_taken_away_counts_as_lost() {
        let file = memfd(1 << 20);
        let memory = Memory::default().with(&region(0, 1 << 20, 0, 0), file.try_clone().unwrap().into()).unwrap();
        file.set_len(4096).unwrap();
        assert!(!memory.is_lost());
        assert_eq!(memory.map().read_obj::<u64>(GuestAddress(512 << 10)).unwrap(), 0);
        assert!(memory.is_lost());
    }

    #[test]
    fn a_guest_has_few_regions_and_not_too_much_memory() {
        let file = memfd(1 << 20);
        let mut memory = Memory::default();
        let mut kept = Vec::new();
        let refused = (0..2 * MAX_REGIONS as u64 + 1).find_map(|n| {
            let added = region(n << 20, 4096, n << 20, 0);
            match memory.with(&added, file.try_clone().unwrap().into()) {
                Ok(next) => kept.push(std::mem::replace(&mut memory, next.without(&added).unwrap())),
                Err(refused) => return Some(refused),
            }
            kept.push(memory.with(&added, file.try_clone().unwrap().into()).ok()?);
            None
        });
        assert!(refused.is_some_and(|why| why.contains("more than a guest may have")), "kept by requests in flight");
        drop(kept);
        assert!(memory.with(&region(0, 4096, 0, 0), file.into()).is_ok(), "given back");
        let huge = memfd(5 << 40);
        let refused = Memory::default().with(&region(0, 5 << 40, 0, 0), huge.into()).err().unwrap();
        assert!(refused.contains("more than a guest may have"), "{refused}");
    }
}
