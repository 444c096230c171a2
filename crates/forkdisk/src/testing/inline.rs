//! A runtime on the calling thread, for tests, examples and first programs.
//!
//! Time is virtual: it starts at 0 and advances to the next timer when no task can continue. Use it with
//! [`MemoryDevice`](super::MemoryDevice) or another device with futures that wake their waker from the
//! same thread; for real devices use the executor of `forkdisk-uring`.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::runtime::{LocalFuture, Runtime};

/// Set when a task must be polled again.
struct Woken(AtomicBool);

impl Woken {
    fn new() -> Arc<Woken> {
        Arc::new(Woken(AtomicBool::new(true)))
    }

    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Timer {
    expired: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Default)]
struct State {
    tasks: RefCell<VecDeque<(Arc<Woken>, LocalFuture<()>)>>,
    /// By deadline and number.
    timers: RefCell<BTreeMap<(Duration, u64), Rc<Timer>>>,
    next_timer: Cell<u64>,
    now: Cell<Duration>,
}

/// Tasks, polled in the order in which they were spawned, and a virtual clock. Clones are the same runtime.
#[derive(Clone, Default)]
pub struct Inline(Rc<State>);

impl Runtime for Inline {
    fn spawn(&self, task: LocalFuture<()>) {
        self.0.tasks.borrow_mut().push_back((Woken::new(), task));
    }

    fn sleep(&self, time: Duration) -> LocalFuture<()> {
        let timer = Rc::new(Timer::default());
        self.0.next_timer.set(self.0.next_timer.get() + 1);
        self.0.timers.borrow_mut().insert((self.0.now.get() + time, self.0.next_timer.get()), timer.clone());
        Box::pin(poll_fn(move |cx| {
            if timer.expired.get() {
                return Poll::Ready(());
            }
            *timer.waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        }))
    }

    fn now(&self) -> Duration {
        self.0.now.get()
    }
}

impl Inline {
    /// Creates a runtime without tasks, at time 0.
    pub fn new() -> Inline {
        Inline::default()
    }

    /// Returns the time since the runtime was created.
    pub fn now(&self) -> Duration {
        self.0.now.get()
    }

    /// Runs `main` and the spawned tasks until `main` ends; the other tasks stay for the next call.
    ///
    /// # Panics
    /// If `main` waits and neither a task nor a timer is left that could wake it.
    pub fn run<T>(&self, main: impl Future<Output = T>) -> T {
        let (mut main, woken) = (pin!(main), Woken::new());
        let waker = Waker::from(woken.clone());
        let mut cx = Context::from_waker(&waker);
        loop {
            if woken.take()
                && let Poll::Ready(value) = main.as_mut().poll(&mut cx)
            {
                return value;
            }
            if !self.poll_tasks() && !woken.0.load(Ordering::Relaxed) {
                assert!(self.advance(), "deadlock: no task can go on and no timer is set");
            }
        }
    }

    /// Spawns a task; the returned future resolves to its output.
    pub fn start<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> LocalFuture<T> {
        let (slot, waiter) = (Rc::new(RefCell::new(None)), Rc::new(RefCell::new(None::<Waker>)));
        let (result, waker) = (slot.clone(), waiter.clone());
        self.spawn(Box::pin(async move {
            let value = future.await;
            *result.borrow_mut() = Some(value);
            if let Some(waker) = waker.take() {
                waker.wake();
            }
        }));
        Box::pin(poll_fn(move |cx| match slot.take() {
            Some(value) => Poll::Ready(value),
            None => {
                *waiter.borrow_mut() = Some(cx.waker().clone());
                Poll::Pending
            }
        }))
    }

    /// Polls spawned tasks until none can continue at the current time.
    pub fn run_until_idle(&self) {
        while self.poll_tasks() {}
    }

    /// Polls each task that was woken once; returns whether there was any.
    fn poll_tasks(&self) -> bool {
        let (mut any, count) = (false, self.0.tasks.borrow().len());
        for _ in 0..count {
            let Some((woken, mut task)) = self.0.tasks.borrow_mut().pop_front() else { break };
            if woken.take() {
                any = true;
                let waker = Waker::from(woken.clone());
                if task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                    continue;
                }
            }
            self.0.tasks.borrow_mut().push_back((woken, task));
        }
        any
    }

    /// Advances the clock to the next timer; returns false if there is none.
    pub fn advance(&self) -> bool {
        let Some(((at, _), timer)) = self.0.timers.borrow_mut().pop_first() else { return false };
        self.0.now.set(at);
        timer.expired.set(true);
        if let Some(waker) = timer.waker.take() {
            waker.wake();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_expire_in_order_when_no_task_can_go_on() {
        let runtime = Inline::new();
        let seen = Rc::new(RefCell::new(Vec::new()));
        for millis in [30, 10, 20] {
            let (clock, seen) = (runtime.clone(), seen.clone());
            runtime.spawn(Box::pin(async move {
                clock.sleep(Duration::from_millis(millis)).await;
                seen.borrow_mut().push(clock.now().as_millis());
            }));
        }
        let slowest = runtime.sleep(Duration::from_millis(40));
        runtime.run(slowest);
        assert_eq!(*seen.borrow(), [10, 20, 30]);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn a_future_that_nothing_wakes_is_a_deadlock() {
        Inline::new().run(std::future::pending::<()>());
    }

    #[test]
    fn a_started_task_resolves_to_its_output() {
        let runtime = Inline::new();
        let clock = runtime.clone();
        let task = runtime.start(async move {
            clock.sleep(Duration::from_secs(1)).await;
            7
        });
        assert_eq!(runtime.run(task), 7);
    }
}
