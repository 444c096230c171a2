//! The ring and everything in flight on it: submits entries in the order in which they were
//! queued, passes completions to their operations, keeps the table of registered
//! buffers. Knows nothing of tasks except their wakers.
//!
//! Invariants: entries reach the kernel in the order of [`start`](Driver::start), even when the
//! queue is full; an operation stays in the slab until its last completion; no borrow of the
//! driver's cells is held while other code (a waker, a destructor) runs.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use forkdisk::device::BufPool;
use io_uring::squeue::{Entry, Entry128, Flags};
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{cqueue, opcode};
use slab::Slab;

use crate::config::Config;
use crate::handle::Handle;
use crate::helper::Helper;
use crate::huge_pages::HugePages;
use crate::net::Listeners;
use crate::op::{Op, Step, Work};
use crate::ring::{Request, Ring};
use crate::setup;
use crate::sys;
use crate::timer::Timers;

/// `user_data` of the poll on the eventfd.
const WAKE_ID: u64 = u64::MAX;
/// `user_data` of entries whose completion is ignored.
const IGNORE_ID: u64 = u64::MAX - 1;

pub(crate) struct Driver {
    queue: RefCell<Queue>,
    ops: RefCell<Slab<Op>>,
    pub(crate) pool: Rc<BufPool>,
    /// Address of each registered buffer, by slot; empty if registration failed.
    registered: Vec<*const u8>,
    pub(crate) timers: RefCell<Timers>,
    /// Runs system calls that the ring does not have.
    pub(crate) helper: Helper,
    pub(crate) listeners: Listeners,
    wake: Arc<OwnedFd>,
    closed: Cell<bool>,
    /// Number of turns, for tests.
    pub(crate) turns: Cell<u64>,
    /// Bytes that this turn's tasks have transferred without the ring.
    at_once: Cell<usize>,
    /// Whether the kernel leaves out completions of entries that succeed (Linux 5.17). It then also has today's
    /// implementation of polls that stay.
    pub(crate) skips_successes: Cell<bool>,
}

struct Queue {
    ring: Ring,
    /// Entries that found the ring full, oldest first.
    overflow: VecDeque<Request>,
    completed: Vec<Completed>,
    /// Operations that have no completion if they succeed. The kernel may not have taken all of them yet.
    silent: Vec<usize>,
}

#[derive(Clone, Copy)]
struct Completed {
    user_data: u64,
    result: i32,
    /// Further completions of the same entry follow.
    more: bool,
}

impl Driver {
    /// Creates a ring that also wakes up when the eventfd `wake` is raised.
    pub(crate) fn new(config: &Config, wake: Arc<OwnedFd>) -> forkdisk::Result<Rc<Driver>> {
        let ring = setup::ring(config.entries)?;
        let skips_successes = Cell::new(ring.params().is_feature_skip_cqe_on_success());
        let pool = BufPool::with_source(&config.buffers, Rc::new(HugePages::default()));
        let registered = setup::register_buffers(&ring, &pool);
        let driver = Driver {
            queue: RefCell::new(Queue { ring, overflow: VecDeque::new(), completed: Vec::new(), silent: Vec::new() }),
            ops: RefCell::new(Slab::new()),
            pool,
            registered,
            timers: RefCell::new(Timers::default()),
            helper: Helper::default(),
            listeners: Listeners::default(),
            wake,
            closed: Cell::new(false),
            turns: Cell::new(0),
            at_once: Cell::new(0),
            skips_successes,
        };
        driver.listen_for_wakes();
        Ok(Rc::new(driver))
    }

    /// Queues all entries of `work`; they reach the kernel at the end of this turn of the loop.
    pub(crate) fn start(self: &Rc<Self>, file: &Rc<Handle>, work: Work) -> Ticket {
        let parts = work.parts();
        let is_silent = work.is_silent();
        debug_assert!(!is_silent || parts == 1 && self.skips_successes.get(), "the caller looked");
        let file = file.clone();
        let mut op =
            Op { work, file, waker: None, pending: 0, result: 0, ends: false, abandoned: false, silent: is_silent };
        if self.closed.get() {
            op.result = -libc::ESHUTDOWN;
            return Ticket { driver: self.clone(), key: Some(self.ops.borrow_mut().insert(op)) };
        }
        op.pending = parts as u32;
        let mut ops = self.ops.borrow_mut();
        let key = ops.insert(op);
        assert!(key < u32::MAX as usize, "fewer than 2^32 requests in flight");
        let op = &mut ops[key];
        let mut queue = self.queue.borrow_mut();
        for part in 0..parts {
            if let Work::Fuse(command) = &op.work {
                queue.push_wide(command.entry(&op.file).user_data(key as u64));
                continue;
            }
            let entry = op.work.entry(part, &op.file).user_data((part as u64) << 32 | key as u64);
            queue.push(if is_silent { entry.flags(Flags::SKIP_SUCCESS) } else { entry });
        }
        if is_silent {
            queue.silent.push(key);
        }
        Ticket { driver: self.clone(), key: Some(key) }
    }

    /// Submits queued entries and processes completions. With `wait` it sleeps until there
    /// is a completion or a timer is due, unless entries are left for which the ring was full.
    pub(crate) fn turn(&self, wait: bool) -> io::Result<()> {
        self.turns.set(self.turns.get() + 1);
        self.at_once.set(0);
        // When this shuts down, nothing else may wake it after the success of a silent operation.
        let wait = wait && (!self.closed.get() || self.queue.borrow().silent.is_empty());
        let timeout = if wait { self.timers.borrow().next().map(until) } else { None };
        let (completed, silent) = {
            let mut queue = self.queue.borrow_mut();
            queue.enter(wait, timeout)?;
            let completed = queue.reap();
            (completed, queue.take_silent())
        };
        for &Completed { user_data, result, more } in &completed {
            match user_data {
                WAKE_ID => {
                    sys::eventfd_clear(self.wake.as_fd());
                    self.listen_for_wakes();
                }
                IGNORE_ID => {}
                _ if more => self.occurred(user_data as u32 as usize, result),
                _ => self.complete(user_data as u32 as usize, (user_data >> 32) as usize, result),
            }
        }
        for &key in &silent {
            self.succeeded(key);
        }
        let mut queue = self.queue.borrow_mut();
        queue.completed = completed;
        queue.silent_again(silent);
        drop(queue);
        self.fire_timers();
        Ok(())
    }

    /// Processes a completion of an entry that stays.
    fn occurred(&self, key: usize, result: i32) {
        let mut ops = self.ops.borrow_mut();
        let op = &mut ops[key];
        op.result = result;
        let waker = op.waker.take();
        drop(ops);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Completes an operation after the kernel has taken its entry without a completion.
    fn succeeded(&self, key: usize) {
        let ops = self.ops.borrow();
        let result = match ops.get(key) {
            Some(op) if op.silent && op.pending > 0 => op.work.success(),
            // It failed, and is continued or ended.
            _ => return,
        };
        drop(ops);
        self.complete(key, 0, result);
    }

    fn complete(&self, key: usize, part: usize, result: i32) {
        let mut ops = self.ops.borrow_mut();
        let op = &mut ops[key];
        op.silent = false;
        match op.work.step(part, result, &op.file, op.ends || op.abandoned) {
            Step::Again(entry) => {
                let entry = entry.user_data((part as u64) << 32 | key as u64);
                return self.queue.borrow_mut().push(entry);
            }
            Step::Done(result) if op.result >= 0 => op.result = result,
            Step::Done(_) => {}
        }
        op.pending -= 1;
        if op.pending > 0 {
            return;
        }
        if op.abandoned {
            let op = ops.remove(key);
            drop(ops);
            self.discard(op);
        } else if let Some(waker) = op.waker.take() {
            drop(ops);
            waker.wake();
        }
    }

    fn fire_timers(&self) {
        if self.timers.borrow().next().is_none() {
            return;
        }
        let now = Instant::now();
        loop {
            let due = self.timers.borrow_mut().pop_due(now);
            match due {
                Some(waker) => waker.wake(),
                None => return,
            }
        }
    }

    fn listen_for_wakes(&self) {
        let poll = opcode::PollAdd::new(Fd(self.wake.as_raw_fd()), libc::POLLIN as u32);
        self.queue.borrow_mut().push(poll.build().user_data(WAKE_ID));
    }

    fn cancel(&self, key: usize) {
        let entry = opcode::AsyncCancel::new(key as u64).build();
        self.queue.borrow_mut().push(entry.user_data(IGNORE_ID));
    }

    /// Ends operations in flight on a file with `ECANCELED`: its send, or its receive and waits for readiness. Their
    /// tasks stay; what was transferred before counts.
    pub(crate) fn interrupt(&self, file: &Rc<Handle>, send: bool) {
        let is_meant = |work: &Work| match work {
            Work::Send(_) => send,
            Work::Recv { .. } | Work::Readable => !send,
            _ => false,
        };
        let is_it = |op: &Op| op.pending > 0 && Rc::ptr_eq(&op.file, file) && is_meant(&op.work);
        let keys: Vec<usize> = self.ops.borrow().iter().filter(|(_, op)| is_it(op)).map(|(key, _)| key).collect();
        for key in keys {
            self.ops.borrow_mut()[key].ends = true;
            self.cancel(key);
        }
    }

    /// Returns whether an accept is in flight.
    pub(crate) fn is_accepting(&self) -> bool {
        self.ops.borrow().iter().any(|(_, op)| op.pending > 0 && matches!(op.work, Work::Accept))
    }

    /// Drops an operation whose ticket is gone, and its result.
    fn discard(&self, op: Op) {
        if matches!(op.work, Work::Accept) && op.result >= 0 {
            let connection = sys::own(op.result);
            let Some(connection) = self.listeners.keep(&op.file, connection) else { return };
            // As at every end of a connection; fails if the peer closed it first.
            let _ = sys::shutdown(connection.as_fd(), Shutdown::Both);
        }
    }

    /// Shuts down: waits for requests to disks, cancels all others. Nothing can be started
    /// afterwards.
    pub(crate) fn shut_down(&self) {
        self.closed.set(true);
        self.helper.shut_down();
        let cancellable = |op: &Op| op.pending > 0 && op.work.is_cancellable();
        let keys: Vec<usize> = self.ops.borrow().iter().filter(|(_, op)| cancellable(op)).map(|(key, _)| key).collect();
        for key in keys {
            // A waiting task sees an interrupted operation end instead of being repeated.
            self.ops.borrow_mut()[key].abandoned |= false;
            self.cancel(key);
        }
        // A driver's command ends with the process, and holds no memory of it or, for FUSE, memory that is never freed.
        for (_, op) in self.ops.borrow().iter().filter(|(_, op)| op.pending > 0) {
            if let Work::Fuse(command) = &op.work {
                command.leak();
            }
        }
        let is_awaited = |op: &Op| op.pending > 0 && !matches!(op.work, Work::Command { .. } | Work::Fuse(_));
        while self.ops.borrow().iter().any(|(_, op)| is_awaited(op)) {
            self.turn(true).expect("a ring that has taken requests completes them");
        }
    }

    /// Returns the registered slot of the memory at `base`, if the buffer is from this ring's pool.
    pub(crate) fn registered_slot(&self, slot: Option<u16>, base: *const u8) -> Option<u16> {
        slot.filter(|&slot| self.registered.get(slot as usize) == Some(&base))
    }

    /// Returns whether the ring takes commands of FUSE.
    pub(crate) fn takes_fuse(&self) -> bool {
        self.queue.borrow().ring.is_wide()
    }

    /// Returns whether a task may transfer `len` bytes without the ring, and counts them: at most `most` of a turn.
    pub(crate) fn copies_at_once(&self, len: usize, most: usize) -> bool {
        let sum = self.at_once.get() + len;
        let may = sum <= most && !self.closed.get();
        if may {
            self.at_once.set(sum);
        }
        may
    }

    pub(crate) fn has_registered_buffers(&self) -> bool {
        !self.registered.is_empty()
    }
}

fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

impl Queue {
    fn push(&mut self, entry: Entry) {
        if !self.overflow.is_empty() {
            return self.overflow.push_back(Request::Narrow(entry));
        }
        // SAFETY: all memory an entry points to belongs to its operation, which stays in the slab
        // until the entry's completion (see `op`); poll and cancel entries point to none.
        if unsafe { self.ring.push(&entry) }.is_err() {
            self.overflow.push_back(Request::Narrow(entry));
        }
    }

    fn push_wide(&mut self, entry: Entry128) {
        // SAFETY: as in `push`.
        if !self.overflow.is_empty() || unsafe { self.ring.push_wide(&entry) }.is_err() {
            self.overflow.push_back(Request::Wide(Box::new(entry)));
        }
    }

    fn refill(&mut self) {
        while let Some(entry) = self.overflow.front() {
            let pushed = match entry {
                // SAFETY: as in `push`.
                Request::Narrow(entry) => unsafe { self.ring.push(entry) },
                // SAFETY: as in `push`.
                Request::Wide(entry) => unsafe { self.ring.push_wide(entry) },
            };
            if pushed.is_err() {
                return;
            }
            self.overflow.pop_front();
        }
    }

    fn enter(&mut self, wait: bool, timeout: Option<Duration>) -> io::Result<()> {
        if !self.overflow.is_empty() {
            self.refill();
        }
        let want = usize::from(wait && self.overflow.is_empty());
        let submission = self.ring.submission();
        let idle = submission.is_empty && !submission.has_work && !submission.overflows;
        if want == 0 && idle {
            return Ok(());
        }
        let result = match timeout {
            Some(time) => {
                let time = Timespec::from(time);
                self.ring.enter(want, Some(&SubmitArgs::new().timespec(&time)))
            }
            None => self.ring.enter(want, None),
        };
        match result {
            Ok(_) => Ok(()),
            // Interrupted, timed out, or out of memory until completions have been processed.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN)) => {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    fn reap(&mut self) -> Vec<Completed> {
        let mut completed = std::mem::take(&mut self.completed);
        completed.clear();
        completed.extend(self.ring.completion().map(|c| Completed {
            user_data: c.user_data(),
            result: c.result(),
            more: cqueue::more(c.flags()),
        }));
        completed
    }

    /// Takes the silent operations if the kernel has taken all entries and all completions were reaped: what failed has
    /// had its completion, since none of these entries can wait.
    fn take_silent(&mut self) -> Vec<usize> {
        if self.silent.is_empty() || !self.overflow.is_empty() {
            return Vec::new();
        }
        let submission = self.ring.submission();
        let is_all = submission.is_empty && !submission.overflows;
        if is_all { std::mem::take(&mut self.silent) } else { Vec::new() }
    }

    /// Gives the memory of the list back.
    fn silent_again(&mut self, mut list: Vec<usize>) {
        if self.silent.is_empty() && list.capacity() > 0 {
            list.clear();
            self.silent = list;
        }
    }
}

/// The claim to an operation's outcome. Dropping it leaves a request to a disk running and
/// cancels any other.
pub(crate) struct Ticket {
    driver: Rc<Driver>,
    key: Option<usize>,
}

impl Future for Ticket {
    type Output = Op;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Op> {
        let key = self.key.expect("not polled again after it was ready");
        let mut ops = self.driver.ops.borrow_mut();
        let op = &mut ops[key];
        if op.pending == 0 {
            let op = ops.remove(key);
            drop(ops);
            self.key = None;
            return Poll::Ready(op);
        }
        let stale = match &mut op.waker {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            waker => waker.replace(cx.waker().clone()),
        };
        drop(ops);
        drop(stale);
        Poll::Pending
    }
}

impl Ticket {
    /// Resolves to `true` whenever an operation that stays has occurred, and to `false` when it has ended.
    pub(crate) fn poll_occurrence(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let Some(key) = self.key else { return Poll::Ready(false) };
        let mut ops = self.driver.ops.borrow_mut();
        let op = &mut ops[key];
        if std::mem::take(&mut op.result) > 0 {
            return Poll::Ready(true);
        }
        if op.pending == 0 {
            return Poll::Ready(false);
        }
        let stale = match &mut op.waker {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            waker => waker.replace(cx.waker().clone()),
        };
        drop(ops);
        drop(stale);
        Poll::Pending
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut ops = self.driver.ops.borrow_mut();
        let op = &mut ops[key];
        if op.pending == 0 {
            let op = ops.remove(key);
            drop(ops);
            return self.driver.discard(op);
        }
        op.abandoned = true;
        let waker = op.waker.take();
        let cancel = op.work.is_cancellable() && !self.driver.closed.get();
        drop(ops);
        drop(waker);
        if cancel {
            self.driver.cancel(key);
        }
    }
}
