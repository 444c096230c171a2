//! The other side, for tests and benchmarks: a front end with the memory of a guest, and the driver in it. Calls block
//! the thread, so it runs on another one than the server.

mod load;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::split::Descriptor;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use load::{Events, Request};

/// Bytes of the memory in which each queue has its rings and headers.
const RINGS_BYTES: u64 = 1 << 20;
/// Descriptors of a request: header, data, status.
const PART_COUNT: u16 = 3;
const HEADERS_OFFSET: u64 = 256 << 10;
const AVAILABLE_OFFSET: u64 = 64 << 10;
const USED_OFFSET: u64 = 128 << 10;
/// Interval at which an event descriptor is read.
const LOOK: Duration = Duration::from_micros(20);
/// Distance of headers; the status follows the header.
const HEADER_BYTES: u64 = 32;

/// An error of the front end or of the guest.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// A guest with a virtio disk.
pub struct Guest {
    /// The protocol.
    pub frontend: Frontend,
    /// The memory, by addresses of the guest.
    pub memory: GuestMemoryMmap,
    /// The file of the memory.
    pub file: File,
    /// Memory of requests in flight, which outlives the server; `None` if the server has none.
    pub inflight: Option<(VhostUserInflight, File)>,
    /// The virtqueues.
    pub queues: Vec<DriverQueue>,
    /// Features that both sides use.
    pub features: u64,
    size: u16,
}

/// The driver's side of one virtqueue. A slot is a place for one request with its data.
pub struct DriverQueue {
    memory: GuestMemoryMmap,
    rings: u64,
    data: u64,
    slot_bytes: u64,
    size: u16,
    available: u16,
    seen: u16,
    has_event_idx: bool,
    /// Rung when there are requests.
    pub kick: EventFd,
    /// Rung when there are answers.
    pub call: EventFd,
    /// Rung when the queue is broken.
    pub fault: EventFd,
}

/// Memory that was added to a guest.
pub struct ExtraMemory {
    /// Its file.
    pub file: File,
    address: u64,
    len: u64,
}

impl ExtraMemory {
    fn info(&self) -> VhostUserMemoryRegionInfo {
        // Nothing in this process has this address; only the server translates it.
        let user = 1 << 60 | self.address;
        region_info(self.address, self.len, user, &self.file)
    }
}

/// Describes memory: its address for the guest, its length, its address in the front end, its file.
fn region_info(guest_phys_addr: u64, memory_size: u64, userspace_addr: u64, file: &File) -> VhostUserMemoryRegionInfo {
    let mmap_handle = file.as_raw_fd();
    VhostUserMemoryRegionInfo { guest_phys_addr, memory_size, userspace_addr, mmap_offset: 0, mmap_handle }
}

/// A finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Its slot.
    pub slot: u16,
    /// Status byte.
    pub status: u8,
    /// Bytes that the device wrote, with the status.
    pub written: u32,
}

impl Guest {
    /// Connects to a server; `queues` queues of `size` descriptors, and `slot_bytes` of data for each request.
    ///
    /// # Errors
    /// The server refuses a message.
    pub fn connect(path: &Path, queues: u16, size: u16, slot_bytes: u64) -> Result<Guest, Error> {
        let slots = u64::from(size / PART_COUNT);
        let len = u64::from(queues) * (RINGS_BYTES + slots * slot_bytes);
        let fd: OwnedFd = memfd_create("guest", MemfdFlags::CLOEXEC)?;
        let file = File::from(fd);
        file.set_len(len)?;
        let mapped = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), len as usize)?;
        let region = GuestRegionMmap::new(mapped, GuestAddress(0)).ok_or("a region at 0")?;
        let memory = GuestMemoryMmap::from_regions(vec![region])?;
        let queue = |index: u16| -> io::Result<DriverQueue> {
            let rings = u64::from(index) * (RINGS_BYTES + slots * slot_bytes);
            let (kick, call, fault) =
                (EventFd::new(EFD_NONBLOCK)?, EventFd::new(EFD_NONBLOCK)?, EventFd::new(EFD_NONBLOCK)?);
            let (memory, data) = (memory.clone(), rings + RINGS_BYTES);
            let (available, seen, has_event_idx) = Default::default();
            Ok(DriverQueue { memory, rings, data, slot_bytes, size, available, seen, has_event_idx, kick, call, fault })
        };
        let all = (0..queues).map(queue).collect::<io::Result<Vec<_>>>()?;
        let mut frontend = Frontend::connect(path, queues.into())?;
        let (features, protocol) = negotiate(&mut frontend)?;
        let wanted = VhostUserInflight { num_queues: queues, queue_size: size, ..VhostUserInflight::default() };
        let has_inflight = protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD);
        let inflight = has_inflight.then(|| frontend.get_inflight_fd(&wanted)).transpose()?;
        let mut guest = Guest { frontend, memory, file, inflight, queues: all, features, size };
        guest.start(&[])?;
        Ok(guest)
    }

    /// Connects to the next server, which continues where the last one ended.
    ///
    /// # Errors
    /// The server refuses a message.
    pub fn reconnect(&mut self, path: &Path) -> Result<(), Error> {
        self.frontend = Frontend::connect(path, self.queues.len() as u64)?;
        negotiate(&mut self.frontend)?;
        if let Some((inflight, file)) = &self.inflight {
            self.frontend.set_inflight_fd(inflight, file.as_raw_fd())?;
        }
        let bases: Vec<u16> = self.queues.iter().map(DriverQueue::used_index).collect();
        self.start(&bases)
    }

    /// Starts all queues again after they were stopped, with nothing in flight.
    ///
    /// # Errors
    /// The server refuses a message.
    pub fn restart(&mut self) -> Result<(), Error> {
        let bases: Vec<u16> = self.queues.iter().map(DriverQueue::used_index).collect();
        self.start(&bases)
    }

    /// Marks requests of a queue as taken and not answered, in this order, as a server that was killed leaves them.
    ///
    /// # Errors
    /// The memory of requests in flight cannot be written.
    pub fn mark_in_flight(&self, queue: usize, heads: &[u16]) -> Result<(), Error> {
        let (inflight, file) = self.inflight.as_ref().ok_or("the server has no such memory")?;
        let part = (16 + 16 * u64::from(inflight.queue_size)).next_multiple_of(64) * queue as u64;
        for (order, head) in heads.iter().enumerate() {
            let state = part + 16 + 16 * u64::from(*head);
            file.write_all_at(&(1000 + order as u64).to_ne_bytes(), state + 8)?;
            file.write_all_at(&[1], state)?;
        }
        Ok(())
    }

    /// Adds memory at an address of the guest.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn add_memory(&mut self, address: u64, len: u64) -> Result<ExtraMemory, Error> {
        let file = File::from(memfd_create("extra", MemfdFlags::CLOEXEC)?);
        file.set_len(len)?;
        let region = ExtraMemory { file, address, len };
        self.frontend.add_mem_region(&region.info())?;
        Ok(region)
    }

    /// Removes memory.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn remove_memory(&mut self, memory: &ExtraMemory) -> Result<(), Error> {
        Ok(self.frontend.remove_mem_region(&memory.info())?)
    }

    fn start(&mut self, bases: &[u16]) -> Result<(), Error> {
        let address = self.memory.get_host_address_of(GuestAddress(0))?;
        let len = self.file.metadata()?.len();
        let region = region_info(0, len, address, &self.file);
        self.frontend.set_mem_table(&[region])?;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            queue.has_event_idx = self.features >> 29 & 1 == 1;
            self.frontend.set_vring_num(index, self.size)?;
            self.frontend.set_vring_base(index, bases.get(index).copied().unwrap_or(0))?;
            let rings = address + queue.rings;
            let config = VringConfigData {
                queue_max_size: self.size,
                queue_size: self.size,
                flags: 0,
                desc_table_addr: rings,
                used_ring_addr: rings + USED_OFFSET,
                avail_ring_addr: rings + AVAILABLE_OFFSET,
                log_addr: None,
            };
            self.frontend.set_vring_addr(index, &config)?;
            self.frontend.set_vring_call(index, &queue.call)?;
            self.frontend.set_vring_err(index, &queue.fault)?;
            self.frontend.set_vring_kick(index, &queue.kick)?;
            self.frontend.set_vring_enable(index, true)?;
        }
        Ok(())
    }

    /// Reads the configuration space.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn config(&mut self, offset: u32, len: u32) -> Result<Vec<u8>, Error> {
        let (_, bytes) =
            self.frontend.get_config(offset, len, VhostUserConfigFlags::WRITABLE, &vec![0; len as usize])?;
        Ok(bytes)
    }

    /// Returns the length of the disk in bytes.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn capacity(&mut self) -> Result<u64, Error> {
        let bytes = self.config(0, 8)?;
        Ok(u64::from_le_bytes(bytes[..8].try_into()?) * 512)
    }

    /// Carries out one request on queue 0, and returns its status and the data of a read.
    ///
    /// # Errors
    /// There is no answer within ten seconds.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[u8], read: usize) -> Result<(u8, Vec<u8>), Error> {
        let queue = &mut self.queues[0];
        queue.fill(0, data)?;
        let len = data.len().max(read) as u32;
        queue.submit(0, kind, sector, len, read > 0)?;
        queue.notify()?;
        let done = queue.wait(10)?;
        Ok((done.status, queue.data(0, read)?))
    }
}

/// Returns the features of the device and of the protocol that both sides use.
fn negotiate(frontend: &mut Frontend) -> Result<(u64, VhostUserProtocolFeatures), Error> {
    frontend.set_owner()?;
    let features = frontend.get_features()?;
    frontend.set_features(features)?;
    let protocol = frontend.get_protocol_features()?;
    let ours = protocol
        & (VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD);
    frontend.set_protocol_features(ours)?;
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    Ok((features, ours))
}

/// The address of the memory in this process.
trait HostAddress {
    fn get_host_address_of(&self, address: GuestAddress) -> Result<u64, Error>;
}

impl HostAddress for GuestMemoryMmap {
    fn get_host_address_of(&self, address: GuestAddress) -> Result<u64, Error> {
        use vm_memory::GuestMemoryBackend;
        Ok(self.get_host_address(address)? as u64)
    }
}

impl DriverQueue {
    /// Returns how many requests can be under way.
    pub fn slots(&self) -> u16 {
        self.size / PART_COUNT
    }

    fn put<T: vm_memory::ByteValued>(&self, at: u64, value: T) -> Result<(), Error> {
        Ok(self.memory.write_obj(value, GuestAddress(self.rings + at))?)
    }

    fn get<T: vm_memory::ByteValued>(&self, at: u64) -> Result<T, Error> {
        Ok(self.memory.read_obj(GuestAddress(self.rings + at))?)
    }

    /// Address of the data of a slot, for the guest.
    pub fn data_address(&self, slot: u16) -> u64 {
        self.data + u64::from(slot) * self.slot_bytes
    }

    /// Fills the data of a slot.
    ///
    /// # Errors
    /// It is too long.
    pub fn fill(&self, slot: u16, data: &[u8]) -> Result<(), Error> {
        Ok(self.memory.write_slice(data, GuestAddress(self.data_address(slot)))?)
    }

    /// Returns the data of a slot.
    ///
    /// # Errors
    /// It is too long.
    pub fn data(&self, slot: u16, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(self.data_address(slot)))?;
        Ok(bytes)
    }

    /// Writes a descriptor of the table.
    ///
    /// # Errors
    /// There is no such descriptor.
    pub fn describe(&self, index: u16, address: u64, len: u32, flags: u32, next: u16) -> Result<(), Error> {
        self.put(u64::from(index) * 16, Descriptor::new(address, len, flags as u16, next))
    }

    /// Writes bytes at an address of the guest.
    ///
    /// # Errors
    /// They are not in its memory.
    pub fn poke(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.memory.write_slice(bytes, GuestAddress(address))?)
    }

    /// Makes a request available: `len` bytes of the slot's data, which the device writes or reads.
    ///
    /// # Errors
    /// There is no such slot.
    pub fn submit(&mut self, slot: u16, kind: u32, sector: u64, len: u32, device_writes: bool) -> Result<(), Error> {
        self.submit_at(slot, kind, sector, (self.data_address(slot), len), device_writes)
    }

    /// As [`submit`](Self::submit), for data at any address.
    ///
    /// # Errors
    /// There is no such slot.
    pub fn submit_at(
        &mut self,
        slot: u16,
        kind: u32,
        sector: u64,
        (address, len): (u64, u32),
        device_writes: bool,
    ) -> Result<(), Error> {
        let header = HEADERS_OFFSET + u64::from(slot) * HEADER_BYTES;
        self.put(header, kind)?;
        self.put(header + 4, 0u32)?;
        self.put(header + 8, sector)?;
        self.put(header + 16, 0xffu8)?;
        let (first, next, write) = (slot * PART_COUNT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE);
        let flags = if device_writes { next | write } else { next };
        self.describe(first, self.rings + header, 16, next, if len > 0 { first + 1 } else { first + 2 })?;
        self.describe(first + 1, address, len, flags, first + 2)?;
        self.describe(first + 2, self.rings + header + 16, 1, write, 0)?;
        self.offer(first)
    }

    /// Adds a chain of descriptors to the ring of requests.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn offer(&mut self, head: u16) -> Result<(), Error> {
        self.put(AVAILABLE_OFFSET + 4 + u64::from(self.available % self.size) * 2, head)?;
        self.available = self.available.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.put(AVAILABLE_OFFSET + 2, self.available)
    }

    /// Sets the index of the ring of requests to any value, as no driver would.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn lie_about_available(&mut self, index: u16) -> Result<(), Error> {
        self.put(AVAILABLE_OFFSET + 2, index)
    }

    /// Notifies the device.
    ///
    /// # Errors
    /// The descriptor is broken.
    pub fn notify(&self) -> Result<(), Error> {
        Ok(self.kick.write(1)?)
    }

    fn used_index(&self) -> u16 {
        fence(Ordering::SeqCst);
        self.get(USED_OFFSET + 2).unwrap_or(0)
    }

    /// Returns the next answer, if there is one.
    ///
    /// # Errors
    /// The ring is not in memory.
    pub fn next_answer(&mut self) -> Result<Option<Completion>, Error> {
        if self.used_index() == self.seen {
            return Ok(None);
        }
        let at = USED_OFFSET + 4 + u64::from(self.seen % self.size) * 8;
        let (head, written): (u32, u32) = (self.get(at)?, self.get(at + 4)?);
        self.seen = self.seen.wrapping_add(1);
        if self.has_event_idx {
            // The device notifies with the answer after the last one that was seen.
            self.put(AVAILABLE_OFFSET + 4 + u64::from(self.size) * 2, self.seen)?;
            fence(Ordering::SeqCst);
        }
        let slot = head as u16 / PART_COUNT;
        let status = self.get(HEADERS_OFFSET + u64::from(slot) * HEADER_BYTES + 16)?;
        Ok(Some(Completion { slot, status, written }))
    }

    /// Waits for the next answer, by the notification of the device.
    ///
    /// # Errors
    /// There is none within `seconds`.
    pub fn wait(&mut self, seconds: u64) -> Result<Completion, Error> {
        loop {
            if let Some(done) = self.next_answer()? {
                return Ok(done);
            }
            if !is_rung(&self.call, seconds)? {
                return Err(format!("no answer within {seconds} s").into());
            }
        }
    }

    /// Waits for the news that the queue is broken; returns whether it came.
    ///
    /// # Errors
    /// The descriptor is broken.
    pub fn is_faulty_within(&self, seconds: u64) -> Result<bool, Error> {
        is_rung(&self.fault, seconds)
    }
}

/// Waits for an event descriptor to be rung, and resets it.
fn is_rung(event: &EventFd, seconds: u64) -> Result<bool, Error> {
    let start = Instant::now();
    loop {
        match event.read() {
            Ok(_) => return Ok(true),
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e.into()),
            Err(_) if start.elapsed() > Duration::from_secs(seconds) => return Ok(false),
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}
