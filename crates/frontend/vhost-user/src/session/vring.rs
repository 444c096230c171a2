//! The state of one virtqueue as the front end sets it up, from its first message to its start and stop.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use forkdisk_uring::{EventFd, Rt};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

use crate::config::EVENT_IDX_FLAG;
use crate::disk::Disks;
use crate::memory::Memory;
use crate::passed::{PassedQueue, duplicate};
use crate::queue::{Device, Inflight, Running, Start};

/// Most descriptors of a queue.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// Addresses of the rings, in the front end's own address space.
#[derive(Clone, Copy, Default)]
pub struct Addresses {
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
}

/// One virtqueue.
pub struct Vring<X: Disks> {
    index: usize,
    size: u16,
    addresses: Addresses,
    base: u16,
    kick: Option<Rc<EventFd>>,
    call: Option<Rc<EventFd>>,
    fault: Option<Rc<EventFd>>,
    is_enabled: bool,
    running: Option<Rc<Running<X>>>,
}

impl<X: Disks> Vring<X> {
    pub fn new(index: usize) -> Vring<X> {
        let (addresses, base, kick, call, fault, is_enabled, running) = Default::default();
        Vring { index, size: 0, addresses, base, kick, call, fault, is_enabled, running }
    }

    fn check_stopped(&self) -> Result<(), String> {
        if self.running.is_some() { Err(format!("queue {} is being served", self.index)) } else { Ok(()) }
    }

    /// Sets the number of descriptors.
    pub fn set_size(&mut self, size: u32) -> Result<(), String> {
        self.check_stopped()?;
        let size = u16::try_from(size).ok().filter(|&size| size.is_power_of_two() && size <= MAX_QUEUE_SIZE);
        self.size = size.ok_or_else(|| format!("the size of a queue is a power of two up to {MAX_QUEUE_SIZE}"))?;
        Ok(())
    }

    /// Sets the index of the next request.
    pub fn set_base(&mut self, base: u32) -> Result<(), String> {
        self.check_stopped()?;
        self.base = u16::try_from(base).map_err(|_| format!("{base} is no index of a ring"))?;
        Ok(())
    }

    /// Sets the addresses of the rings.
    pub fn set_addresses(&mut self, addresses: Addresses, memory: &Memory) -> Result<(), String> {
        if let Some(running) = &self.running {
            running.change(|queue| place(queue, addresses, memory))?;
        }
        self.addresses = addresses;
        Ok(())
    }

    /// Checks that the rings lie in `memory`.
    pub fn check_memory(&self, memory: &Memory) -> Result<(), String> {
        if self.running.is_none() {
            return Ok(());
        }
        let mut queue = Queue::new(MAX_QUEUE_SIZE).map_err(|error| error.to_string())?;
        place(&mut queue, self.addresses, memory)
    }

    /// Translates the addresses again, after the guest's memory has changed.
    pub fn follow_memory(&self, memory: &Memory) -> Result<(), String> {
        let addresses = self.addresses;
        self.running.as_ref().map_or(Ok(()), |running| running.change(|queue| place(queue, addresses, memory)))
    }

    /// Sets the descriptor by which the guest notifies of requests.
    pub fn set_kick(&mut self, kick: EventFd) -> Result<(), String> {
        self.check_stopped()?;
        self.kick = Some(Rc::new(kick));
        Ok(())
    }

    pub fn set_call(&mut self, call: Option<EventFd>) {
        self.call = call.map(Rc::new);
        if let Some(running) = &self.running {
            running.set_call(self.call.clone());
        }
    }

    pub fn set_fault(&mut self, fault: Option<EventFd>) {
        self.fault = fault.map(Rc::new);
        if let Some(running) = &self.running {
            running.set_fault(self.fault.clone());
        }
    }

    pub fn enable(&mut self) {
        self.is_enabled = true;
    }

    /// Starts the queue if it is complete and enabled.
    pub fn start_if_ready(
        &mut self,
        device: &Rc<Device<X>>,
        features: u64,
        inflight: Option<&Inflight>,
    ) -> Result<(), String> {
        if self.running.is_some() || !self.is_enabled || self.kick.is_none() {
            return Ok(());
        }
        let memory = device.memory.borrow().clone();
        let mut queue = Queue::new(MAX_QUEUE_SIZE).map_err(|error| error.to_string())?;
        queue.try_set_size(self.size).map_err(|_| format!("queue {} has no size", self.index))?;
        place(&mut queue, self.addresses, &memory)?;
        queue.set_next_avail(self.base);
        queue.set_event_idx(features & EVENT_IDX_FLAG != 0);
        queue.set_ready(true);
        if !queue.is_valid(memory.map()) {
            return Err(format!("the rings of queue {} lie outside of the memory", self.index));
        }
        let Some(kick) = self.kick.clone() else { return Ok(()) };
        let (index, call, fault) = (self.index, self.call.clone(), self.fault.clone());
        let inflight = inflight.and_then(|inflight| inflight.queue(index, self.size));
        self.running = Some(Running::start(device, Start { index, queue, kick, call, fault, inflight }));
        Ok(())
    }

    /// Stops the queue after its requests in flight; returns the index of the next request.
    pub async fn stop(&mut self) -> u16 {
        if let Some(running) = self.running.take() {
            self.base = running.stop().await;
        }
        self.kick = None;
        self.base
    }

    /// Stops the queue after its requests in flight. It can be started again where it was.
    pub async fn pause(&mut self) {
        if let Some(running) = self.running.take() {
            self.base = running.stop().await;
        }
    }

    /// Returns a queue that is paused for another process.
    pub fn passed(&self) -> io::Result<PassedQueue<OwnedFd>> {
        let Addresses { descriptors, available, used } = self.addresses;
        let passed = |event: &Option<Rc<EventFd>>| event.as_deref().map(duplicate).transpose();
        Ok(PassedQueue {
            size: self.size,
            addresses: [descriptors, available, used],
            base: self.base,
            is_enabled: self.is_enabled,
            kick: passed(&self.kick)?,
            call: passed(&self.call)?,
            fault: passed(&self.fault)?,
        })
    }

    /// Takes the state of a queue of another process, and does not start it.
    pub fn resume(&mut self, rt: &Rt, passed: PassedQueue<OwnedFd>) -> io::Result<()> {
        let PassedQueue { size, addresses: [descriptors, available, used], base, is_enabled, kick, call, fault } =
            passed;
        let event = |fd: Option<OwnedFd>| fd.map(|fd| EventFd::from_fd(rt, fd).map(Rc::new)).transpose();
        let addresses = Addresses { descriptors, available, used };
        let (kick, call, fault) = (event(kick)?, event(call)?, event(fault)?);
        *self = Vring { index: self.index, size, addresses, base, kick, call, fault, is_enabled, running: None };
        Ok(())
    }

    /// Stops the queue until it is enabled again. The front end keeps what it has set.
    pub async fn disable(&mut self) {
        self.is_enabled = false;
        if let Some(running) = self.running.take() {
            self.base = running.stop().await;
        }
    }

    /// Forgets what the front end has set.
    pub async fn reset(&mut self) {
        self.stop().await;
        *self = Vring::new(self.index);
    }
}

fn place(queue: &mut Queue, addresses: Addresses, memory: &Memory) -> Result<(), String> {
    let translated = |user: u64, what: &str| -> Result<GuestAddress, String> {
        memory.guest_address(user).ok_or_else(|| format!("the {what} at {user:#x} lies outside of the memory"))
    };
    let refused = |error: virtio_queue::Error| error.to_string();
    queue.try_set_desc_table_address(translated(addresses.descriptors, "descriptors")?).map_err(refused)?;
    queue.try_set_avail_ring_address(translated(addresses.available, "ring of requests")?).map_err(refused)?;
    queue.try_set_used_ring_address(translated(addresses.used, "ring of answers")?).map_err(refused)
}
