//! Memory and requests in flight: limits of each connection, and of all together.
//!
//! A request is admitted before memory is allocated for it, and holds its [`Permit`] until its
//! reply was sent. Its bytes are charged to the connection's own reserve or, if they do not fit
//! there, entirely to the memory that connections share, where waiting requests are served in
//! order. So a connection can always make progress with small requests, whatever the others hold.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk_uring::WakeCell;

use super::options::ServerOptions;

/// Memory that connections share beyond their reserves.
pub(super) struct SharedMemory {
    size: usize,
    free: Cell<usize>,
    waiting: RefCell<VecDeque<Rc<Waiter>>>,
    /// Woken when a request begins to wait.
    pressure: WakeCell,
}

struct Waiter {
    bytes: usize,
    granted: Cell<bool>,
    wake: WakeCell,
}

impl SharedMemory {
    pub(super) fn new(bytes: usize) -> Rc<SharedMemory> {
        let (size, free) = (bytes, Cell::new(bytes));
        let memory = SharedMemory { size, free, waiting: RefCell::default(), pressure: WakeCell::default() };
        Rc::new(memory)
    }

    /// Returns the size and the bytes in use.
    pub(super) fn usage(&self) -> (usize, usize) {
        (self.size, self.size - self.free.get())
    }

    /// Returns whether a request waits.
    pub(super) fn is_short(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    /// Waits until a request waits for memory.
    pub(super) async fn short(&self) {
        self.pressure.until(|| self.is_short().then_some(())).await
    }

    fn try_take(&self, bytes: usize) -> bool {
        let free = self.free.get();
        let takes = bytes <= free && !self.is_short();
        if takes {
            self.free.set(free - bytes);
        }
        takes
    }

    async fn take(self: &Rc<Self>, bytes: usize) {
        if self.try_take(bytes) {
            return;
        }
        let waiter = Rc::new(Waiter { bytes, granted: Cell::new(false), wake: WakeCell::default() });
        self.waiting.borrow_mut().push_back(waiter.clone());
        self.pressure.wake();
        let place = Place { memory: self, waiter: &waiter, taken: false };
        waiter.wake.until(|| waiter.granted.get().then_some(())).await;
        place.leave();
    }

    fn give_back(&self, bytes: usize) {
        self.free.set(self.free.get() + bytes);
        self.serve();
    }

    /// Grants memory to the first waiting requests, as far as there is enough.
    fn serve(&self) {
        loop {
            let mut waiting = self.waiting.borrow_mut();
            match waiting.front() {
                Some(first) if first.bytes <= self.free.get() => {}
                _ => return,
            }
            let Some(first) = waiting.pop_front() else {
                return;
            };
            drop(waiting);
            self.free.set(self.free.get() - first.bytes);
            first.granted.set(true);
            first.wake.wake();
        }
    }
}

/// A place in the queue; dropping it gives the place up.
struct Place<'a> {
    memory: &'a SharedMemory,
    waiter: &'a Rc<Waiter>,
    taken: bool,
}

impl Place<'_> {
    fn leave(mut self) {
        self.taken = true;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        if self.waiter.granted.get() {
            return self.memory.give_back(self.waiter.bytes);
        }
        self.memory.waiting.borrow_mut().retain(|w| !Rc::ptr_eq(w, self.waiter));
        self.memory.serve();
    }
}

/// Requests and bytes that one connection has in flight.
pub(super) struct Quota {
    memory: Rc<SharedMemory>,
    max_requests: usize,
    max_bytes: usize,
    reserve: Cell<usize>,
    requests: Cell<usize>,
    bytes: Cell<usize>,
    changed: WakeCell,
}

impl Quota {
    pub(super) fn new(options: &ServerOptions, memory: Rc<SharedMemory>) -> Rc<Quota> {
        Rc::new(Quota {
            memory,
            max_requests: options.max_requests,
            max_bytes: options.max_request_bytes,
            reserve: Cell::new(options.connection_reserve),
            requests: Cell::new(0),
            bytes: Cell::new(0),
            changed: WakeCell::default(),
        })
    }

    /// Waits until a request with `bytes` bytes of data may start. One caller at a time.
    pub(super) async fn admit(self: &Rc<Self>, bytes: usize) -> Permit {
        if !self.has_room(bytes) {
            self.changed.until(|| self.has_room(bytes).then_some(())).await;
        }
        let reserved = bytes <= self.reserve.get();
        if reserved {
            self.reserve.set(self.reserve.get() - bytes);
        } else {
            self.memory.take(bytes).await;
        }
        self.requests.set(self.requests.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        Permit { quota: self.clone(), bytes, reserved, since: Instant::now() }
    }

    /// Returns the number of requests in flight.
    pub(super) fn requests(&self) -> usize {
        self.requests.get()
    }

    /// Waits until nothing is in flight.
    pub(super) async fn idle(&self) {
        self.changed.until(|| (self.requests.get() == 0).then_some(())).await
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.requests.get() < self.max_requests && self.bytes.get() + bytes <= self.max_bytes
    }
}

/// Permission for one request to be in flight, with its memory.
pub(super) struct Permit {
    quota: Rc<Quota>,
    bytes: usize,
    reserved: bool,
    since: Instant,
}

impl Permit {
    /// Restarts the request's clock, when its data has arrived.
    pub(super) fn restart(&mut self) {
        self.since = Instant::now();
    }

    /// Returns the time since the request started.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let quota = &self.quota;
        quota.requests.set(quota.requests.get() - 1);
        quota.bytes.set(quota.bytes.get() - self.bytes);
        if self.reserved {
            quota.reserve.set(quota.reserve.get() + self.bytes);
        } else {
            quota.memory.give_back(self.bytes);
        }
        quota.changed.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn options(reserve: usize) -> ServerOptions {
        ServerOptions {
            max_requests: 3,
            max_request_bytes: 100,
            connection_reserve: reserve,
            ..ServerOptions::default()
        }
    }

    fn now<F: Future>(future: F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn requests_and_bytes_of_a_connection_are_bounded() {
        let quota = Quota::new(&options(0), SharedMemory::new(1000));
        let a = now(quota.admit(60)).expect("the first fits");
        assert!(now(quota.admit(41)).is_none(), "101 bytes");
        let b = now(quota.admit(40)).expect("100 bytes");
        let c = now(quota.admit(0)).expect("three requests");
        assert!(now(quota.admit(0)).is_none(), "four requests");
        assert!(now(quota.idle()).is_none());
        drop((a, b, c));
        assert!(now(quota.idle()).is_some());
    }

    #[test]
    fn a_reserve_is_there_when_the_shared_memory_is_not() {
        let memory = SharedMemory::new(50);
        let greedy = Quota::new(&options(0), memory.clone());
        let modest = Quota::new(&options(10), memory.clone());
        let held = now(greedy.admit(50)).expect("all of the shared memory");
        let small = now(modest.admit(10)).expect("its own reserve");
        assert!(now(modest.admit(1)).is_none());
        assert!(!memory.is_short(), "a cancelled wait does not count");
        drop(small);
        drop(held);
        assert_eq!(memory.free.get(), 50);
        assert_eq!(modest.reserve.get(), 10);
    }

    #[test]
    fn waiters_for_shared_memory_are_served_in_order() {
        let memory = SharedMemory::new(50);
        let [a, b, c] = [0; 3].map(|_| Quota::new(&options(0), memory.clone()));
        let held = now(a.admit(50)).expect("all of it");
        let mut cx = Context::from_waker(Waker::noop());
        let mut large = pin!(b.admit(40));
        let mut small = pin!(c.admit(20));
        assert!(large.as_mut().poll(&mut cx).is_pending());
        assert!(small.as_mut().poll(&mut cx).is_pending());
        drop(held);
        assert!(small.as_mut().poll(&mut cx).is_pending(), "10 bytes are left for it");
        let Poll::Ready(large) = large.as_mut().poll(&mut cx) else { panic!("its turn") };
        drop(large);
        assert!(small.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn a_waiter_that_gives_up_lets_the_next_one_go() {
        let memory = SharedMemory::new(50);
        let [a, b, c] = [0; 3].map(|_| Quota::new(&options(0), memory.clone()));
        let _held = now(a.admit(30)).expect("most of it");
        let mut cx = Context::from_waker(Waker::noop());
        let mut large = Box::pin(b.admit(40));
        let mut small = pin!(c.admit(20));
        assert!(large.as_mut().poll(&mut cx).is_pending());
        assert!(small.as_mut().poll(&mut cx).is_pending());
        drop(large);
        assert!(small.as_mut().poll(&mut cx).is_ready());
    }
}
