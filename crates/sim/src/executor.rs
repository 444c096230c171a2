//! A deterministic executor: one thread, virtual time, every choice drawn from a seed.
//!
//! Each step polls one ready task, or ends one pending device request, or - when there is nothing else to do,
//! and sometimes before - lets the earliest timer expire. The choice is drawn from the seed, so that one seed
//! is one interleaving, independent of clocks, threads and hash order. Sometimes a request is *parked*: it
//! ends long after later ones. The executor can be stopped between any two steps, which simulates a crash of
//! the software.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use forkdisk::{LocalFuture, Runtime};

use crate::rng::Rng;

/// Result of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Something ran.
    Ran,
    /// Nothing is ready, nothing is pending, no timer is set.
    Idle,
}

/// Why a future did not end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// It waits for something that will never happen.
    Deadlock {
        /// Steps run so far.
        step: u64,
        /// Waiting tasks.
        tasks: usize,
    },
    /// It did not end within the step limit.
    Endless {
        /// Steps run so far.
        step: u64,
    },
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stuck::Deadlock { step, tasks } => write!(
                f,
                "deadlock at step {step}: no task is ready, no request is pending, no timer is set, and {tasks} tasks \
                 wait"
            ),
            Stuck::Endless { step } => {
                write!(f, "no end in sight at step {step}: tasks keep running without finishing")
            }
        }
    }
}

type Completion = Box<dyn FnOnce()>;

struct Task {
    future: Option<LocalFuture<()>>,
    waker: Waker,
    handle: Arc<TaskWaker>,
}

struct TaskWaker {
    id: usize,
    queued: AtomicBool,
    woken: Arc<Mutex<Vec<usize>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.woken.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
        }
    }
}

/// How a seed weighs its choices; drawn once per executor so that some runs have slow disks, some
/// fast ones, and some serve everything in order.
#[derive(Clone, Copy)]
struct Temper {
    /// Of 16 choices between a task and a request, how many go to the task.
    tasks: u64,
    /// Whether tasks run first come, first served.
    fifo_tasks: bool,
    /// Of 16 completions, how many take the oldest request.
    oldest: u64,
    /// One in this many requests is parked; 0: none.
    park: u64,
}

struct State {
    rng: Rng,
    temper: Temper,
    tasks: Vec<Option<Task>>,
    free: Vec<usize>,
    ready: Vec<usize>,
    requests: Vec<Completion>,
    /// Parked requests, by the step at which they join the others.
    parked: BTreeMap<(u64, u64), Completion>,
    timers: BTreeMap<(Duration, u64), Rc<Alarm>>,
    next_timer: u64,
    now: Duration,
}

struct Inner {
    state: RefCell<State>,
    woken: Arc<Mutex<Vec<usize>>>,
    steps: Cell<u64>,
    halted: Cell<bool>,
}

/// The executor; clones are handles to the same one.
#[derive(Clone)]
pub struct Executor(Rc<Inner>);

impl Executor {
    /// Creates an executor whose every choice follows from `seed`.
    pub fn new(seed: u64) -> Executor {
        let mut rng = Rng::new(seed);
        let temper = Temper {
            tasks: *rng.pick(&[8, 8, 12, 15, 4]),
            fifo_tasks: rng.one_in(2),
            oldest: *rng.pick(&[0, 0, 4, 12, 16]),
            park: *rng.pick(&[0, 0, 300, 30]),
        };
        let state = State {
            rng,
            temper,
            tasks: Vec::new(),
            free: Vec::new(),
            ready: Vec::new(),
            requests: Vec::new(),
            parked: BTreeMap::new(),
            timers: BTreeMap::new(),
            next_timer: 0,
            now: Duration::ZERO,
        };
        Executor(Rc::new(Inner {
            state: RefCell::new(state),
            woken: Arc::default(),
            steps: Cell::new(0),
            halted: Cell::new(false),
        }))
    }

    /// Returns the steps run since the start.
    pub fn steps(&self) -> u64 {
        self.0.steps.get()
    }

    /// Returns the virtual time since the start.
    pub fn now(&self) -> Duration {
        self.0.state.borrow().now
    }

    /// Returns the number of tasks that have not ended.
    pub fn tasks(&self) -> usize {
        let state = self.0.state.borrow();
        state.tasks.len() - state.free.len()
    }

    /// Adds a task. After a [`halt`](Self::halt) it is dropped at once.
    pub fn spawn(&self, future: LocalFuture<()>) {
        if self.0.halted.get() {
            return;
        }
        let mut state = self.0.state.borrow_mut();
        let id = state.free.pop().unwrap_or(state.tasks.len());
        let handle = Arc::new(TaskWaker { id, queued: AtomicBool::new(true), woken: Arc::clone(&self.0.woken) });
        let task = Task { future: Some(future), waker: Waker::from(Arc::clone(&handle)), handle };
        if id == state.tasks.len() {
            state.tasks.push(Some(task));
        } else {
            state.tasks[id] = Some(task);
        }
        state.ready.push(id);
    }

    /// Adds a device request: `end` runs at a step of the executor's choice; if it is `slow`, when nothing
    /// else can continue.
    pub fn request(&self, slow: bool, end: impl FnOnce() + 'static) {
        if self.0.halted.get() {
            return;
        }
        let mut state = self.0.state.borrow_mut();
        let park = state.temper.park;
        if slow || state.rng.one_in(park) {
            // At the latest until nothing else can continue.
            let reach = *state.rng.pick(&[100, 2000, 1 << 40]);
            let until = if slow { u64::MAX } else { self.steps() + state.rng.below(reach) };
            let number = state.next_timer;
            state.next_timer += 1;
            state.parked.insert((until, number), Box::new(end));
        } else {
            state.requests.push(Box::new(end));
        }
    }

    /// Runs one step.
    pub fn step(&self) -> Step {
        match self.choose() {
            Choice::Nothing => return Step::Idle,
            Choice::Poll(id) => self.poll(id),
            Choice::End(request) => request(),
            Choice::Ring(alarm) => alarm.ring(),
        }
        self.0.steps.set(self.0.steps.get() + 1);
        Step::Ran
    }

    fn choose(&self) -> Choice {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        state.ready.append(&mut self.0.woken.lock().unwrap_or_else(PoisonError::into_inner));
        let idle = state.ready.is_empty() && state.requests.is_empty();
        while let Some(parked) = state.parked.first_entry() {
            if parked.key().0 > self.steps() && !(idle && state.requests.is_empty()) {
                break;
            }
            state.requests.push(parked.remove());
        }
        let (tasks, requests) = (state.ready.len(), state.requests.len());
        let early = requests > 0 && !state.timers.is_empty() && state.rng.one_in(64);
        if tasks + requests == 0 || early {
            let Some((at, alarm)) = state.timers.pop_first() else {
                return Choice::Nothing;
            };
            state.now = state.now.max(at.0);
            return Choice::Ring(alarm);
        }
        let temper = state.temper;
        if requests == 0 || (tasks > 0 && state.rng.below(16) < temper.tasks) {
            let at = if temper.fifo_tasks { 0 } else { state.rng.index(tasks) };
            return Choice::Poll(state.ready.remove(at));
        }
        let at = if state.rng.below(16) < temper.oldest { 0 } else { state.rng.index(requests) };
        Choice::End(state.requests.remove(at))
    }

    /// Polls without holding any borrow, because the task will call back.
    fn poll(&self, id: usize) {
        let taken = {
            let mut state = self.0.state.borrow_mut();
            state.tasks[id].as_mut().and_then(|task| {
                task.handle.queued.store(false, Ordering::Relaxed);
                task.future.take().map(|future| (future, task.waker.clone()))
            })
        };
        let Some((mut future, waker)) = taken else {
            return;
        };
        let done = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        let mut state = self.0.state.borrow_mut();
        let Some(slot) = state.tasks.get_mut(id) else {
            return;
        };
        if !done {
            if let Some(task) = slot {
                task.future = Some(future);
            }
            return;
        }
        // A late wake of this number reaches its next owner: a spurious poll, which is harmless.
        let ended = slot.take();
        state.free.push(id);
        drop(state);
        drop((ended, future));
    }

    /// Runs until `future` has ended, at most `limit` steps.
    ///
    /// # Errors
    /// [`Stuck`] if it never will, or did not within the limit.
    pub fn run<T: 'static>(&self, limit: u64, future: impl Future<Output = T> + 'static) -> Result<T, Stuck> {
        let slot = Rc::new(RefCell::new(None));
        let out = Rc::clone(&slot);
        self.spawn(Box::pin(async move {
            let value = future.await;
            *out.borrow_mut() = Some(value);
        }));
        let end = self.steps().saturating_add(limit);
        loop {
            if let Some(value) = slot.borrow_mut().take() {
                return Ok(value);
            }
            if self.steps() >= end {
                return Err(Stuck::Endless { step: self.steps() });
            }
            if self.step() == Step::Idle {
                return Err(self.deadlock());
            }
        }
    }

    /// Returns the report for an idle step although a future still waits.
    pub fn deadlock(&self) -> Stuck {
        Stuck::Deadlock { step: self.steps(), tasks: self.tasks() }
    }

    /// Stops at once: every task, request and timer is dropped and nothing new is accepted.
    pub fn halt(&self) {
        self.0.halted.set(true);
        let dropped = {
            let mut state = self.0.state.borrow_mut();
            state.ready.clear();
            state.free.clear();
            let requests = (std::mem::take(&mut state.requests), std::mem::take(&mut state.parked));
            (std::mem::take(&mut state.tasks), requests, std::mem::take(&mut state.timers))
        };
        drop(dropped);
        self.0.woken.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Runtime for Executor {
    fn spawn(&self, task: LocalFuture<()>) {
        Executor::spawn(self, task);
    }

    fn sleep(&self, time: Duration) -> LocalFuture<()> {
        let alarm = Rc::new(Alarm::default());
        if !self.0.halted.get() {
            let mut state = self.0.state.borrow_mut();
            let key = (state.now + time, state.next_timer);
            state.next_timer += 1;
            state.timers.insert(key, Rc::clone(&alarm));
        }
        Box::pin(Sleep(alarm))
    }

    fn now(&self) -> Duration {
        Executor::now(self)
    }
}

enum Choice {
    Nothing,
    Poll(usize),
    End(Completion),
    Ring(Rc<Alarm>),
}

#[derive(Default)]
struct Alarm {
    rung: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Alarm {
    fn ring(&self) {
        self.rung.set(true);
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }
}

struct Sleep(Rc<Alarm>);

impl Future for Sleep {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.0.rung.get() {
            return Poll::Ready(());
        }
        *self.0.waker.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that wakes a task when it ends.
    fn io(exec: &Executor) -> LocalFuture<()> {
        let alarm = Rc::new(Alarm::default());
        let ring = Rc::clone(&alarm);
        exec.request(false, move || ring.ring());
        Box::pin(Sleep(alarm))
    }

    fn trace(seed: u64) -> Vec<(usize, usize)> {
        let exec = Executor::new(seed);
        let log = Rc::new(RefCell::new(Vec::new()));
        for task in 0..4 {
            let (log, handle) = (Rc::clone(&log), exec.clone());
            exec.spawn(Box::pin(async move {
                for round in 0..4 {
                    io(&handle).await;
                    log.borrow_mut().push((task, round));
                }
            }));
        }
        while exec.step() == Step::Ran {}
        Rc::try_unwrap(log).unwrap().into_inner()
    }

    #[test]
    fn one_seed_is_one_interleaving() {
        assert_eq!(trace(3), trace(3));
        let different: std::collections::BTreeSet<_> = (0..20).map(trace).collect();
        assert!(different.len() > 10, "only {} interleavings from 20 seeds", different.len());
    }

    #[test]
    fn time_is_virtual_and_ordered() {
        let exec = Executor::new(1);
        let log = Rc::new(RefCell::new(Vec::new()));
        for hours in [3u64, 1, 2] {
            let (log, handle) = (Rc::clone(&log), exec.clone());
            exec.spawn(Box::pin(async move {
                handle.sleep(Duration::from_secs(3600 * hours)).await;
                log.borrow_mut().push(hours);
            }));
        }
        while exec.step() == Step::Ran {}
        assert_eq!(*log.borrow(), [1, 2, 3]);
        assert_eq!(exec.now(), Duration::from_secs(3 * 3600));
    }

    #[test]
    fn a_deadlock_is_told_from_an_endless_run() {
        let exec = Executor::new(1);
        let stuck = exec.run(1000, std::future::pending::<()>()).unwrap_err();
        assert!(matches!(stuck, Stuck::Deadlock { tasks: 1, .. }), "{stuck}");
        assert!(stuck.to_string().contains("no request is pending"));

        let exec = Executor::new(1);
        let handle = exec.clone();
        let forever = async move {
            loop {
                io(&handle).await;
            }
        };
        assert!(matches!(exec.run::<()>(100, forever).unwrap_err(), Stuck::Endless { .. }));
    }

    #[test]
    fn halt_drops_everything_and_takes_nothing_more() {
        struct Spawner(Executor, Rc<Cell<u32>>);
        impl Drop for Spawner {
            fn drop(&mut self) {
                self.1.set(self.1.get() + 1);
                self.0.spawn(Box::pin(async {}));
            }
        }
        let exec = Executor::new(1);
        let dropped = Rc::new(Cell::new(0));
        for _ in 0..3 {
            let guard = Spawner(exec.clone(), Rc::clone(&dropped));
            let request = io(&exec);
            exec.spawn(Box::pin(async move {
                request.await;
                drop(guard);
                std::future::pending::<()>().await;
            }));
        }
        exec.step();
        exec.halt();
        assert_eq!(dropped.get(), 3);
        assert_eq!(exec.tasks(), 0);
        assert_eq!(exec.step(), Step::Idle);
    }
}
