//! Many requests on a queue at the least cost for the guest: descriptors stay as they are, requests are made available
//! together, and the device is notified when it asks for it, as the driver of a kernel does.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_T_IN;
use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, VolatileSlice};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::{AVAILABLE_OFFSET, DriverQueue, Error, HEADER_BYTES, HEADERS_OFFSET, PART_COUNT, RINGS_BYTES, USED_OFFSET};

/// Bytes of a sector.
const SECTOR_BYTES: u64 = 512;
/// A request of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its type, as in the virtio specification: 0 reads, 1 writes, 4 flushes.
    pub kind: u32,
    /// Offset in bytes, in whole sectors.
    pub offset: u64,
    /// Bytes of data; 0 for a flush.
    pub len: u32,
}

/// Events of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Requests that were carried out.
    pub requests: u64,
    /// Notifications of the device.
    pub kicks: u64,
    /// Waits for a notification by the device.
    pub waits: u64,
}

/// Type and length of the request that a slot's descriptors describe.
type Described = Option<(u32, u32)>;

impl DriverQueue {
    /// Carries out requests with up to `depth` under way; the next one begins when one has ended.
    ///
    /// # Errors
    /// A request fails, there are fewer slots than `depth`, or no answer comes within `limit`.
    pub fn run(
        &mut self,
        depth: u16,
        mut requests: impl Iterator<Item = Request>,
        limit: Duration,
    ) -> Result<Events, Error> {
        if depth > self.slots() {
            return Err(format!("{depth} requests at a time need more than {} slots", self.slots()).into());
        }
        let memory = self.memory.clone();
        let rings = memory.get_slice(GuestAddress(self.rings), RINGS_BYTES as usize)?;
        let called = Epoll::new()?;
        called.ctl(ControlOperation::Add, self.call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
        let mut slots: Vec<Described> = vec![None; usize::from(depth)];
        let mut free: Vec<u16> = (0..depth).rev().collect();
        let mut events = Events::default();
        loop {
            let before = self.available;
            while let Some(&slot) = free.last() {
                let Some(request) = requests.next() else { break };
                free.pop();
                self.place(&rings, &mut slots[usize::from(slot)], slot, request)?;
                events.requests += 1;
            }
            if self.available != before {
                events.kicks += u64::from(self.publish(&rings, before)?);
            }
            if free.len() == usize::from(depth) {
                return Ok(events);
            }
            while self.collect(&rings, &mut free)? == 0 {
                if self.is_waiting_needed(&rings)? {
                    self.wait_called(&called, limit)?;
                    events.waits += 1;
                }
            }
        }
    }

    /// Writes a request into its slot and into the ring, where the device does not see it yet.
    fn place(
        &mut self,
        rings: &VolatileSlice<'_>,
        described: &mut Described,
        index: u16,
        request: Request,
    ) -> Result<(), Error> {
        let header = HEADERS_OFFSET + u64::from(index) * HEADER_BYTES;
        let first = index * PART_COUNT;
        if *described != Some((request.kind, request.len)) {
            let describe = |index: u16, address: u64, len: u32, flags: u32, next: u16| {
                rings.write_obj(Descriptor::new(address, len, flags as u16, next), usize::from(index) * 16)
            };
            let (next, write) = (VRING_DESC_F_NEXT, VRING_DESC_F_WRITE);
            describe(first, self.rings + header, 16, next, if request.len > 0 { first + 1 } else { first + 2 })?;
            let flags = if request.kind == VIRTIO_BLK_T_IN { next | write } else { next };
            describe(first + 1, self.data_address(index), request.len, flags, first + 2)?;
            describe(first + 2, self.rings + header + 16, 1, write, 0)?;
            rings.write_obj(u64::from(request.kind), header as usize)?;
            *described = Some((request.kind, request.len));
        }
        rings.write_obj(request.offset / SECTOR_BYTES, header as usize + 8)?;
        rings.write_obj(0xffu8, header as usize + 16)?;
        let entry = AVAILABLE_OFFSET + 4 + u64::from(self.available % self.size) * 2;
        rings.write_obj(first, entry as usize)?;
        self.available = self.available.wrapping_add(1);
        Ok(())
    }

    /// Makes the requests since `before` available; returns whether the device had to be notified.
    fn publish(&self, rings: &VolatileSlice<'_>, before: u16) -> Result<bool, Error> {
        rings.store(self.available, AVAILABLE_OFFSET as usize + 2, Ordering::Release)?;
        fence(Ordering::SeqCst);
        let is_asked = if self.has_event_idx {
            let event: u16 = rings.load((USED_OFFSET + 4 + u64::from(self.size) * 8) as usize, Ordering::Acquire)?;
            self.available.wrapping_sub(event).wrapping_sub(1) < self.available.wrapping_sub(before)
        } else {
            let flags: u16 = rings.load(USED_OFFSET as usize, Ordering::Acquire)?;
            u32::from(flags) & VRING_USED_F_NO_NOTIFY == 0
        };
        if is_asked {
            self.kick.write(1)?;
        }
        Ok(is_asked)
    }

    /// Takes all answers that are there; returns their number.
    fn collect(&mut self, rings: &VolatileSlice<'_>, free: &mut Vec<u16>) -> Result<u16, Error> {
        let used: u16 = rings.load(USED_OFFSET as usize + 2, Ordering::Acquire)?;
        let count = used.wrapping_sub(self.seen);
        while self.seen != used {
            let at = USED_OFFSET + 4 + u64::from(self.seen % self.size) * 8;
            let head: u32 = rings.read_obj(at as usize)?;
            let slot = head as u16 / PART_COUNT;
            let status: u8 = rings.read_obj((HEADERS_OFFSET + u64::from(slot) * HEADER_BYTES) as usize + 16)?;
            if status != 0 {
                return Err(format!("a request ended with status {status}").into());
            }
            free.push(slot);
            self.seen = self.seen.wrapping_add(1);
        }
        Ok(count)
    }

    /// Asks for a notification with the next answer; returns false if there is one already.
    fn is_waiting_needed(&self, rings: &VolatileSlice<'_>) -> Result<bool, Error> {
        if self.has_event_idx {
            let event = AVAILABLE_OFFSET + 4 + u64::from(self.size) * 2;
            rings.store(self.seen, event as usize, Ordering::Release)?;
        }
        fence(Ordering::SeqCst);
        Ok(rings.load::<u16>(USED_OFFSET as usize + 2, Ordering::Acquire)? == self.seen)
    }

    fn wait_called(&self, called: &Epoll, limit: Duration) -> Result<(), Error> {
        let mut events = [EpollEvent::default()];
        match called.wait(limit.as_millis() as i32, &mut events) {
            Ok(0) => return Err(format!("no answer within {} s", limit.as_secs()).into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        match self.call.read() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(()),
        }
    }
}
