//! The executor: one thread, one ring, any number of tasks that never leave the thread.
//!
//! Each turn polls every task that is ready, then passes all requests they queued to the kernel in
//! one system call, which also waits if nothing is ready any more. Wakers may be used on any
//! thread; the tasks run on the thread of [`block_on`] only.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use async_task::Runnable;
use forkdisk::device::BufPool;
use forkdisk::{Buf, Error, ErrorKind, LocalFuture, Runtime};
use pin_project_lite::pin_project;
use slab::Slab;

use crate::config::Config;
use crate::driver::Driver;
use crate::signal::Signals;
use crate::sys;
use crate::timer::{self, Elapsed, Sleep};

/// Tasks polled in one turn before completions are processed again.
const TASKS_PER_TURN: usize = 256;

thread_local! {
    /// The executor that runs on this thread.
    static CURRENT: Cell<*const Shared> = const { Cell::new(ptr::null()) };
    /// Its ready tasks, in the order in which they were woken.
    static READY: RefCell<VecDeque<Runnable>> = const { RefCell::new(VecDeque::new()) };
}

/// The part of an executor that other threads may access.
struct Shared {
    eventfd: Arc<OwnedFd>,
    /// Tasks woken by other threads.
    remote: Mutex<Vec<Runnable>>,
    remote_waiting: AtomicBool,
    /// The future given to `block_on` has been woken.
    main_ready: AtomicBool,
}

impl Shared {
    fn is_here(&self) -> bool {
        ptr::eq(CURRENT.get(), self)
    }

    fn schedule(&self, task: Runnable) {
        if self.is_here() {
            READY.with_borrow_mut(|ready| ready.push_back(task));
            return;
        }
        self.remote.lock().unwrap_or_else(PoisonError::into_inner).push(task);
        if !self.remote_waiting.swap(true, Ordering::AcqRel) {
            sys::eventfd_raise(self.eventfd.as_fd());
        }
    }

    fn take_remote(&self) {
        if !self.remote_waiting.swap(false, Ordering::AcqRel) {
            return;
        }
        let woken = std::mem::take(&mut *self.remote.lock().unwrap_or_else(PoisonError::into_inner));
        READY.with_borrow_mut(|ready| ready.extend(woken));
    }
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let was_ready = self.main_ready.swap(true, Ordering::AcqRel);
        if !was_ready && !self.is_here() {
            sys::eventfd_raise(self.eventfd.as_fd());
        }
    }
}

/// A handle to the executor of this thread: spawns tasks, sleeps, takes buffers. Cheap to clone.
#[derive(Clone)]
pub struct Rt {
    inner: Rc<Inner>,
}

struct Inner {
    driver: Rc<Driver>,
    shared: Arc<Shared>,
    tasks: Rc<Tasks>,
    started: Instant,
}

/// All tasks that have not ended, so that they can be dropped when the executor ends.
#[derive(Default)]
struct Tasks {
    wakers: RefCell<Slab<Option<Waker>>>,
    closed: Cell<bool>,
}

/// Removes its task from the list when the task's future is dropped.
struct Listed {
    tasks: Rc<Tasks>,
    key: usize,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let waker = self.tasks.wakers.borrow_mut().remove(self.key);
        drop(waker);
    }
}

pin_project! {
    /// Future of a task. An async block would store the future twice, and move it at its first poll.
    struct Spawned<F> {
        #[pin]
        future: F,
        _listed: Listed,
    }
}

impl<F: Future> Future for Spawned<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.project().future.poll(cx)
    }
}

/// Sets up a ring on this thread, runs the future that `main` returns to its end and returns its
/// result. Then drops all remaining tasks and waits for requests to disks
/// that are in flight.
///
/// Fails if io_uring is not available (the message says why), and if an executor already runs
/// on this thread. A panic in any task ends `block_on` with that panic.
///
/// # Errors
/// io_uring is not available, or an executor already runs on this thread.
pub fn block_on<F: Future>(config: Config, main: impl FnOnce(Rt) -> F) -> forkdisk::Result<F::Output> {
    if !CURRENT.get().is_null() {
        return Err(Error::new(ErrorKind::Invalid, "an executor already runs on this thread"));
    }
    let eventfd = sys::eventfd().map_err(|e| Error::io("cannot make an eventfd", e))?;
    let shared = Arc::new(Shared {
        eventfd: Arc::new(eventfd),
        remote: Mutex::default(),
        remote_waiting: AtomicBool::new(false),
        main_ready: AtomicBool::new(true),
    });
    let driver = Driver::new(&config, shared.eventfd.clone())?;
    let rt = Rt { inner: Rc::new(Inner { driver, shared, tasks: Rc::default(), started: Instant::now() }) };
    CURRENT.set(Arc::as_ptr(&rt.inner.shared));
    let end = End(rt.clone());
    // Declared after `end`, so that it is dropped before the executor is shut down.
    let main = pin!(main(rt.clone()));
    let result = rt.inner.run(main).map_err(|e| Error::io("io_uring_enter failed", e));
    drop(end);
    result
}

/// Shuts the executor down, even if a task panics.
struct End(Rt);

impl Drop for End {
    fn drop(&mut self) {
        let inner = &self.0.inner;
        inner.drop_tasks();
        inner.driver.shut_down();
        CURRENT.set(ptr::null());
    }
}

impl Inner {
    fn run<F: Future>(&self, mut main: Pin<&mut F>) -> std::io::Result<F::Output> {
        let waker = Waker::from(self.shared.clone());
        let mut cx = Context::from_waker(&waker);
        loop {
            // Swapped, not stored: a waker that finds the flag set signals nothing, so its writes
            // must be visible here.
            if self.shared.main_ready.swap(false, Ordering::AcqRel)
                && let Poll::Ready(value) = main.as_mut().poll(&mut cx)
            {
                return Ok(value);
            }
            self.shared.take_remote();
            for _ in 0..TASKS_PER_TURN {
                let Some(task) = READY.with_borrow_mut(VecDeque::pop_front) else { break };
                task.run();
            }
            self.driver.turn(self.is_idle())?;
        }
    }

    fn is_idle(&self) -> bool {
        READY.with_borrow(VecDeque::is_empty)
            && !self.shared.main_ready.load(Ordering::Acquire)
            && !self.shared.remote_waiting.load(Ordering::Acquire)
    }

    /// Drops every task's future on this thread. A task that another thread is waking arrives
    /// through the remote queue, hence the loop.
    fn drop_tasks(&self) {
        self.tasks.closed.set(true);
        loop {
            let wakers: Vec<Waker> = self.tasks.wakers.borrow().iter().filter_map(|(_, waker)| waker.clone()).collect();
            wakers.into_iter().for_each(Waker::wake);
            self.shared.take_remote();
            while let Some(task) = READY.with_borrow_mut(VecDeque::pop_front) {
                drop(task);
            }
            if self.tasks.wakers.borrow().is_empty() {
                return;
            }
            std::thread::yield_now();
        }
    }
}

impl Rt {
    pub(crate) fn driver(&self) -> &Rc<Driver> {
        &self.inner.driver
    }

    /// Runs `future` as a separate task. It continues if the handle is dropped. After the end of
    /// [`block_on`] no task runs any more, and the future is dropped at once.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let tasks = &self.inner.tasks;
        let listed = Listed { tasks: tasks.clone(), key: tasks.wakers.borrow_mut().insert(None) };
        let key = listed.key;
        let shared = self.inner.shared.clone();
        let task = Spawned { future, _listed: listed };
        let (task, handle) = async_task::spawn_local(task, move |task| shared.schedule(task));
        if tasks.closed.get() {
            drop(task);
        } else {
            tasks.wakers.borrow_mut()[key] = Some(task.waker());
            task.schedule();
        }
        JoinHandle { task: Some(handle) }
    }

    /// Sleeps for `time`.
    pub fn sleep_for(&self, time: Duration) -> Sleep {
        Sleep::new(self.driver(), time)
    }

    /// Runs `future` for at most `time`, then drops it.
    ///
    /// # Errors
    /// [`Elapsed`] if the future did not end in time.
    pub async fn timeout<F: Future>(&self, time: Duration, future: F) -> Result<F::Output, Elapsed> {
        timer::timeout(self.sleep_for(time), future).await
    }

    /// Lets all other ready tasks run first.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|cx| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// Redirects `signals` (such as `libc::SIGTERM`) from now on. Call it before the first
    /// thread is started: existing threads would still receive them.
    ///
    /// # Errors
    /// The kernel refuses a signal number, or there is no free descriptor.
    pub fn signals(&self, signals: &[i32]) -> forkdisk::Result<Signals> {
        Signals::new(self.driver(), signals)
    }

    /// Returns the pool of registered buffers of this ring, shared by all its devices.
    pub fn buffers(&self) -> &Rc<BufPool> {
        &self.driver().pool
    }

    /// Returns a buffer of `len` bytes with unspecified contents, registered if one is free.
    pub fn buffer(&self, len: usize) -> Buf {
        self.buffers().take(len)
    }

    /// Returns whether the kernel registered the buffers. It refuses if `ulimit -l` is too
    /// low for an unprivileged user; everything works without, a little slower.
    pub fn has_registered_buffers(&self) -> bool {
        self.driver().has_registered_buffers()
    }
}

impl Runtime for Rt {
    fn spawn(&self, task: LocalFuture<()>) {
        drop(Rt::spawn(self, task));
    }

    fn sleep(&self, time: Duration) -> LocalFuture<()> {
        Box::pin(self.sleep_for(time))
    }

    fn now(&self) -> Duration {
        self.inner.started.elapsed()
    }
}

/// Handle of a spawned task, resolves to its result. Dropping it detaches the task.
///
/// # Panics
/// When awaited after the task was dropped with its executor.
pub struct JoinHandle<T> {
    task: Option<async_task::Task<T>>,
}

impl<T> JoinHandle<T> {
    /// Returns whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.task.as_ref().is_none_or(async_task::Task::is_finished)
    }

    /// Drops the task's future in its current state; resolves when that is done.
    pub async fn cancel(mut self) -> Option<T> {
        match self.task.take() {
            Some(task) => task.cancel().await,
            None => None,
        }
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let task = self.task.as_mut().expect("present until dropped");
        Pin::new(task).poll(cx)
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.detach();
        }
    }
}
