//! Memory that outlives the server, with the requests of a queue that it had taken and not answered
//! (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`). The front end keeps it and passes it to the next server.
//!
//! The layout of a queue's part is that of the specification for split virtqueues: a header, then a state for each
//! descriptor. Parts begin at multiples of 64 bytes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, VolatileMemory};

use crate::foreign_file::ForeignFile;
use crate::memory::{Refusal, SharedMapping, map};
use crate::passed::{PassedInflight, duplicate};

const ALIGN_BYTES: usize = 64;
const HEADER_BYTES: usize = 16;
const STATE_BYTES: usize = 16;
/// Offsets in the header: version, number of descriptors, last descriptor answered, index of the used ring.
const VERSION_OFFSET: usize = 8;
const COUNT_OFFSET: usize = 10;
const LAST_OFFSET: usize = 12;
const USED_OFFSET: usize = 14;
/// Offsets in a state: whether it is in flight, the descriptor answered before, the order in which it was taken.
const FLAG_OFFSET: usize = 0;
const BEFORE_OFFSET: usize = 6;
const ORDER_OFFSET: usize = 8;
const FORMAT_VERSION: u16 = 1;

/// Bytes of the part of one queue.
fn part_bytes(queue_size: u16) -> usize {
    (HEADER_BYTES + STATE_BYTES * usize::from(queue_size)).next_multiple_of(ALIGN_BYTES)
}

/// The memory of all queues of a device.
#[derive(Clone)]
pub struct Inflight {
    mapping: Rc<SharedMapping<MmapRegion>>,
    queue_size: u16,
    queues: u16,
}

impl Inflight {
    /// Creates empty memory for `queues` queues of `queue_size` descriptors; returns it, its file and its length.
    pub fn make(queues: u16, queue_size: u16) -> Result<(Inflight, OwnedFd, u64), Refusal> {
        let failed = |error: rustix::io::Errno| format!("memory for requests in flight: {error}");
        let len = (part_bytes(queue_size) * usize::from(queues)).next_multiple_of(4096) as u64;
        let fd = memfd_create("forkdisk-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        rustix::fs::ftruncate(&fd, len).map_err(failed)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
        let copy =
            fd.as_fd().try_clone_to_owned().map_err(|error| format!("memory for requests in flight: {error}"))?;
        Ok((Inflight::of(File::from(copy).into(), 0, len, queues, queue_size)?, fd, len))
    }

    /// Maps memory that another server made.
    pub fn of(file: ForeignFile, offset: u64, len: u64, queues: u16, queue_size: u16) -> Result<Inflight, Refusal> {
        let needed = part_bytes(queue_size) * usize::from(queues);
        if (len as usize) < needed {
            return Err(format!(
                "{len} bytes for requests in flight, and {queues} queues of {queue_size} need {needed}"
            ));
        }
        Ok(Inflight { mapping: Rc::new(map(file, offset, len)?), queue_size, queues })
    }

    /// Returns the memory for another process.
    pub fn passed(&self) -> io::Result<PassedInflight<OwnedFd>> {
        let memory = &self.mapping.memory;
        let file = memory.file_offset().ok_or(io::ErrorKind::NotFound)?;
        let (offset, len) = (file.start(), memory.len() as u64);
        let (queues, queue_size) = (self.queues, self.queue_size);
        Ok(PassedInflight { file: duplicate(file.file())?, offset, len, queues, queue_size })
    }

    /// Returns the part of queue `index`, if it has one for `size` descriptors.
    pub fn queue(&self, index: usize, size: u16) -> Option<InflightQueue> {
        let fits = index < usize::from(self.queues) && size <= self.queue_size;
        let base = index * part_bytes(self.queue_size);
        fits.then(|| InflightQueue { mapping: self.mapping.clone(), base, size, next: std::cell::Cell::new(1) })
    }
}

/// The part of one queue.
pub struct InflightQueue {
    mapping: Rc<SharedMapping<MmapRegion>>,
    base: usize,
    size: u16,
    /// The next number in the order of taken requests.
    next: std::cell::Cell<u64>,
}

impl InflightQueue {
    fn load<T: vm_memory::ByteValued>(&self, at: usize) -> T {
        let memory = self.mapping.memory.as_volatile_slice();
        memory.read_obj(self.base + at).expect("inside of the mapping")
    }

    fn store<T: vm_memory::ByteValued>(&self, at: usize, value: T) {
        let memory = self.mapping.memory.as_volatile_slice();
        memory.write_obj(value, self.base + at).expect("inside of the mapping");
    }

    fn state(head: u16) -> usize {
        HEADER_BYTES + STATE_BYTES * usize::from(head)
    }

    /// Prepares the part for a queue that starts, with the index of its used ring; returns the requests that were
    /// taken and not answered, in the order in which they were taken, or `None` if no server has used the part.
    pub fn resume(&self, used: u16) -> Option<Vec<u16>> {
        if self.load::<u16>(VERSION_OFFSET) != FORMAT_VERSION || self.load::<u16>(COUNT_OFFSET) != self.size {
            for head in 0..self.size {
                self.store(InflightQueue::state(head) + FLAG_OFFSET, 0u8);
            }
            self.store(COUNT_OFFSET, self.size);
            self.store(VERSION_OFFSET, FORMAT_VERSION);
            self.store(USED_OFFSET, used);
            return None;
        }
        // The last answer reached the ring, and the server ended before it noted that.
        if self.load::<u16>(USED_OFFSET) != used {
            let last = self.load::<u16>(LAST_OFFSET);
            if last < self.size {
                self.store(InflightQueue::state(last) + FLAG_OFFSET, 0u8);
            }
            self.store(USED_OFFSET, used);
        }
        let taken = (0..self.size).filter(|&head| self.load::<u8>(InflightQueue::state(head) + FLAG_OFFSET) == 1);
        let mut taken: Vec<(u64, u16)> =
            taken.map(|head| (self.load::<u64>(InflightQueue::state(head) + ORDER_OFFSET), head)).collect();
        taken.sort_unstable();
        self.next.set(taken.last().map_or(1, |&(order, _)| order.wrapping_add(1)));
        Some(taken.into_iter().map(|(_, head)| head).collect())
    }

    /// Notes that request `head` is taken, before anything else is done with it.
    pub fn take(&self, head: u16) {
        let at = InflightQueue::state(head);
        self.store(at + ORDER_OFFSET, self.next.replace(self.next.get().wrapping_add(1)));
        fence(Ordering::Release);
        self.store(at + FLAG_OFFSET, 1u8);
    }

    /// Notes that the answer of request `head` is about to be added to the used ring.
    pub fn answering(&self, head: u16) {
        let last: u16 = self.load(LAST_OFFSET);
        self.store(InflightQueue::state(head) + BEFORE_OFFSET, last);
        self.store(LAST_OFFSET, head);
        fence(Ordering::Release);
    }

    /// Notes that the used ring, with index `used` now, has the answer of request `head`.
    pub fn answered(&self, head: u16, used: u16) {
        fence(Ordering::Release);
        self.store(InflightQueue::state(head) + FLAG_OFFSET, 0u8);
        fence(Ordering::Release);
        self.store(USED_OFFSET, used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (InflightQueue, Inflight) {
        let (all, _, _) = Inflight::make(2, 8).unwrap();
        (all.queue(1, 8).unwrap(), all)
    }

    #[test]
    fn requests_without_an_answer_come_back_in_order() {
        let (queue, all) = pair();
        assert_eq!(queue.resume(0), None);
        for head in [5, 2, 7] {
            queue.take(head);
        }
        queue.answering(2);
        queue.answered(2, 1);
        drop(queue);
        assert_eq!(all.queue(1, 8).unwrap().resume(1), Some(vec![5, 7]));
        assert_eq!(all.queue(0, 8).unwrap().resume(0), None, "the other queue");
    }

    #[test]
    fn an_answer_that_reached_the_ring_counts_at_every_point_of_a_kill() {
        for stop in 0..3 {
            let (queue, all) = pair();
            queue.resume(10);
            queue.take(3);
            queue.take(4);
            queue.answering(3);
            // The used ring goes from 10 to 11 here, if the server was not killed before.
            let used = if stop == 0 { 10 } else { 11 };
            if stop == 2 {
                queue.answered(3, used);
            }
            let expected = if stop == 0 { vec![3, 4] } else { vec![4] };
            assert_eq!(all.queue(1, 8).unwrap().resume(used), Some(expected), "stop {stop}");
        }
    }

    #[test]
    fn memory_that_is_too_small_or_of_other_queues_is_not_used() {
        let (all, fd, len) = Inflight::make(1, 8).unwrap();
        assert!(all.queue(1, 8).is_none() && all.queue(0, 16).is_none());
        assert!(Inflight::of(File::from(fd).into(), 0, len, 64, 1024).is_err());
    }
}
