//! A virtqueue that is being served: its task takes requests, and a task per request carries it out.
//!
//! Invariants: a queue never has more requests in flight than descriptors; every request that was taken is answered
//! before the queue has stopped; an error of the rings ends this queue and no other.

mod inflight;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use forkdisk_uring::{Changes, EventFd, Rt, Stream, Turnstile, WakeCell};
use virtio_bindings::bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

pub use inflight::{Inflight, InflightQueue};

use crate::disk::{Disk, Disks};
use crate::memory::Memory;
use crate::options::ServerOptions;
use crate::request::{Action, Malformed, Outcome, PIECE_BYTES, Request, perform};

/// Requests that are taken before other tasks run.
const BATCH_COUNT: usize = 64;
/// Least time for which an idle queue is polled, if at all.
const MIN_POLL: Duration = Duration::from_micros(4);

/// What the queues of a device share.
pub struct Device<X: Disks> {
    pub rt: Rt,
    pub disks: X,
    pub disk: Rc<X::Disk>,
    pub options: ServerOptions,
    /// The connection to the front end.
    pub stream: Stream,
    /// The guest's memory as it is now.
    pub memory: RefCell<Rc<Memory>>,
    /// Whether writes are durable when they are answered.
    pub writethrough: Cell<bool>,
    /// Bytes of data that requests in flight hold in buffers.
    pub buffered: Cell<usize>,
    /// Changed when requests have ended.
    pub changes: Changes,
}

/// Rings and descriptors of a queue that starts.
pub struct Start {
    pub index: usize,
    pub queue: Queue,
    pub kick: Rc<EventFd>,
    pub call: Option<Rc<EventFd>>,
    pub fault: Option<Rc<EventFd>>,
    pub inflight: Option<InflightQueue>,
}

/// A queue that is being served.
pub struct Running<X: Disks> {
    device: Rc<Device<X>>,
    index: usize,
    queue: RefCell<Queue>,
    call: RefCell<Option<Rc<EventFd>>>,
    fault: RefCell<Option<Rc<EventFd>>>,
    inflight: Option<InflightQueue>,
    in_flight: Cell<u16>,
    /// Answers were added, and the guest was not notified of them.
    unannounced: Cell<bool>,
    /// Requests may be left in the ring for want of room.
    is_full: Cell<bool>,
    is_stopping: Cell<bool>,
    has_ended: Cell<bool>,
    /// Why a request could not be answered.
    broken: RefCell<Option<Broken>>,
    wake: WakeCell,
}

/// Why a queue is not served any more.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("{0}")]
    Request(#[from] Malformed),
    #[error("its rings: {0}")]
    Rings(#[from] virtio_queue::Error),
    #[error("its ring of requests cannot be read")]
    Unreadable,
    #[error("the status of a request lies outside of the memory")]
    Status,
    #[error("its notifications: {0}")]
    Kick(#[from] std::io::Error),
    #[error("the front end took the guest's memory away")]
    Lost,
}

impl<X: Disks> Running<X> {
    /// Starts to serve a queue.
    pub fn start(device: &Rc<Device<X>>, start: Start) -> Rc<Running<X>> {
        let Start { index, queue, kick, call, fault, inflight } = start;
        let running = Rc::new(Running {
            device: device.clone(),
            index,
            queue: RefCell::new(queue),
            call: RefCell::new(call),
            fault: RefCell::new(fault),
            inflight,
            in_flight: Cell::default(),
            unannounced: Cell::default(),
            is_full: Cell::default(),
            is_stopping: Cell::default(),
            has_ended: Cell::default(),
            broken: RefCell::default(),
            wake: WakeCell::default(),
        });
        // The last server may have answered requests and ended before it said so.
        if let Some(call) = &*running.call.borrow() {
            call.raise();
        }
        device.rt.spawn(running.clone().run(kick));
        running
    }

    /// Stops taking requests and waits for those in flight; returns the index of the next request.
    pub async fn stop(&self) -> u16 {
        self.is_stopping.set(true);
        self.wake.wake();
        self.device.changes.until(|| self.has_ended.get() && self.in_flight.get() == 0).await;
        // A ring that cannot be read was logged.
        let _ = self.announce();
        self.queue.borrow().next_avail()
    }

    /// Replaces the descriptor by which the guest is notified.
    pub fn set_call(&self, call: Option<Rc<EventFd>>) {
        *self.call.borrow_mut() = call;
        // What was answered before may not have been announced to the new one.
        if let Some(call) = &*self.call.borrow() {
            call.raise();
        }
    }

    /// Replaces the descriptor by which the front end is notified that the queue is broken.
    pub fn set_fault(&self, fault: Option<Rc<EventFd>>) {
        *self.fault.borrow_mut() = fault;
    }

    /// Changes the addresses of the rings.
    pub fn change(&self, change: impl FnOnce(&mut Queue) -> Result<(), String>) -> Result<(), String> {
        change(&mut self.queue.borrow_mut())
    }

    async fn run(self: Rc<Self>, kick: Rc<EventFd>) {
        let outcome = self.serve(&kick).await;
        self.has_ended.set(true);
        if let Err(broken) = outcome {
            let name = self.device.disk.info().name;
            tracing::warn!("queue {} of {name:?} is not served any more: {broken}", self.index);
            if let Some(fault) = &*self.fault.borrow() {
                fault.raise();
            }
            if matches!(broken, Broken::Lost) {
                // Nothing can be served without memory. Fails if the front end is gone already.
                let _ = self.device.stream.shutdown(std::net::Shutdown::Both);
            }
        }
        self.device.changes.wake();
    }

    async fn serve(self: &Rc<Self>, kick: &EventFd) -> Result<(), Broken> {
        self.resume().await?;
        let mut poll = MIN_POLL;
        let mut kicks = kick.kicks();
        while !self.is_stopping.get() {
            self.take_requests().await?;
            self.announce()?;
            if self.poll_for_requests(&mut poll).await? {
                continue;
            }
            let woken = poll_fn(|cx| {
                if self.is_stopping.get() || self.unannounced.get() || self.broken.borrow().is_some() {
                    return Poll::Ready(Ok(()));
                }
                if self.is_full.get() {
                    if self.has_room() {
                        return Poll::Ready(Ok(()));
                    }
                    self.device.changes.register(cx);
                }
                self.wake.register(cx);
                kicks.poll_next(cx)
            });
            woken.await?;
            if let Some(broken) = self.broken.take() {
                return Err(broken);
            }
        }
        Ok(())
    }

    /// Continues where the last server of this queue ended.
    async fn resume(self: &Rc<Self>) -> Result<(), Broken> {
        let memory = self.device.memory.borrow().clone();
        let used = self.queue.borrow().used_idx(memory.map(), Ordering::Acquire)?.0;
        self.queue.borrow_mut().set_next_used(used);
        let Some(heads) = self.inflight.as_ref().and_then(|inflight| inflight.resume(used)) else { return Ok(()) };
        self.queue.borrow_mut().set_next_avail(used.wrapping_add(heads.len() as u16));
        for head in heads {
            self.device.changes.until(|| self.has_room()).await;
            let memory = self.device.memory.borrow().clone();
            self.begin(&memory, head)?;
        }
        Ok(())
    }

    /// Whether another request can be taken.
    fn has_room(&self) -> bool {
        let buffered = self.device.buffered.get();
        let fits = buffered == 0 || buffered + PIECE_BYTES <= self.device.options.max_buffered;
        fits && self.in_flight.get() < self.queue.borrow().size()
    }

    /// Takes all requests from the ring for which there is room.
    async fn take_requests(self: &Rc<Self>) -> Result<(), Broken> {
        let mut is_first = true;
        let mut taken = 0;
        self.is_full.set(false);
        loop {
            let memory = self.device.memory.borrow().clone();
            if !self.has_room() {
                self.is_full.set(true);
                return Ok(());
            }
            match self.next_head(memory.map())? {
                Some(head) => self.begin(&memory, head)?,
                None if self.queue.borrow_mut().enable_notification(memory.map())? => {
                    // The ring has more requests than a moment ago, but none can be read.
                    if !is_first && taken == 0 {
                        return Err(Broken::Unreadable);
                    }
                    (is_first, taken) = (false, 0);
                    continue;
                }
                None => return Ok(()),
            }
            taken += 1;
            if taken % BATCH_COUNT == 0 {
                self.device.rt.yield_now().await;
                if self.is_stopping.get() {
                    return Ok(());
                }
            }
        }
    }

    fn next_head(&self, map: &GuestMemoryMmap) -> Result<Option<u16>, Broken> {
        let mut queue = self.queue.borrow_mut();
        let next = queue.iter(map)?.next();
        Ok(next.map(|chain| chain.head_index()))
    }

    /// Decodes a request and starts a task for it.
    fn begin(self: &Rc<Self>, memory: &Rc<Memory>, head: u16) -> Result<(), Broken> {
        let (table, size) = {
            let queue = self.queue.borrow();
            (GuestAddress(queue.desc_table()), queue.size())
        };
        let decoded = Request::decode(memory.map(), table, size, head);
        if memory.is_lost() {
            return Err(Broken::Lost);
        }
        let request = decoded?;
        if let Some(inflight) = &self.inflight {
            inflight.take(head);
        }
        let is_buffered = matches!(request.action, Action::Read | Action::Write);
        let bytes = if is_buffered { request.len.min(PIECE_BYTES as u64) as usize } else { 0 };
        let device = &self.device;
        device.buffered.set(device.buffered.get() + bytes);
        self.in_flight.set(self.in_flight.get() + 1);
        let (queue, memory) = (self.clone(), memory.clone());
        device.rt.spawn(async move {
            let device = &queue.device;
            let pass = Turnstile::pass_any(device.disk.turnstile()).await;
            let outcome = perform(&device.disks, &device.disk, &memory, &request, device.writethrough.get()).await;
            drop(pass);
            device.buffered.set(device.buffered.get() - bytes);
            queue.end(&memory, &request, outcome);
        });
        Ok(())
    }

    /// Answers a request.
    fn end(&self, memory: &Memory, request: &Request, outcome: Outcome) {
        if let Err(broken) = self.answer(memory, request, outcome) {
            *self.broken.borrow_mut() = Some(broken);
        }
        self.in_flight.set(self.in_flight.get() - 1);
        self.wake.wake();
        self.device.changes.wake();
    }

    fn answer(&self, memory: &Memory, request: &Request, outcome: Outcome) -> Result<(), Broken> {
        let written = memory.map().write_obj(outcome.status, request.status);
        if memory.is_lost() {
            return Err(Broken::Lost);
        }
        written.map_err(|_| Broken::Status)?;
        let now = self.device.memory.borrow().clone();
        let mut queue = self.queue.borrow_mut();
        if let Some(inflight) = &self.inflight {
            inflight.answering(request.head);
        }
        queue.add_used(now.map(), request.head, outcome.written.saturating_add(1))?;
        if let Some(inflight) = &self.inflight {
            inflight.answered(request.head, queue.next_used());
        }
        self.unannounced.set(true);
        Ok(())
    }

    /// Notifies the guest of answers, unless its driver declines that.
    fn announce(&self) -> Result<(), Broken> {
        if !self.unannounced.replace(false) {
            return Ok(());
        }
        let memory = self.device.memory.borrow().clone();
        let mut queue = self.queue.borrow_mut();
        let is_wanted = queue.needs_notification(memory.map())?;
        let is_wanted = is_wanted && (queue.event_idx_enabled() || !is_declined(&queue, memory.map())?);
        if is_wanted && let Some(call) = &*self.call.borrow() {
            call.raise();
        }
        Ok(())
    }

    /// Polls the ring for a while; returns whether there is something to do. The time adapts to what was found.
    async fn poll_for_requests(&self, poll: &mut Duration) -> Result<bool, Broken> {
        let most = self.device.options.max_poll;
        if most.is_zero() || self.is_full.get() {
            return Ok(false);
        }
        let start = Instant::now();
        loop {
            let has_news = self.unannounced.get() || self.is_stopping.get() || self.broken.borrow().is_some();
            if has_news || self.has_requests()? {
                *poll = (*poll * 2).min(most);
                return Ok(true);
            }
            if start.elapsed() >= (*poll).min(most) {
                *poll = (*poll / 2).max(MIN_POLL);
                return Ok(false);
            }
            self.device.rt.yield_now().await;
        }
    }

    fn has_requests(&self) -> Result<bool, Broken> {
        let memory = self.device.memory.borrow().clone();
        let queue = self.queue.borrow();
        Ok(queue.avail_idx(memory.map(), Ordering::Acquire)?.0 != queue.next_avail())
    }
}

/// Whether the driver declines notifications by the flag of its ring.
fn is_declined(queue: &Queue, map: &GuestMemoryMmap) -> Result<bool, Broken> {
    let flags: u16 = map.load(GuestAddress(queue.avail_ring()), Ordering::Acquire).map_err(|_| Broken::Unreadable)?;
    Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT != 0)
}
