//! A thread for the system calls that may block and that the ring does not have: runs them in the order
//! in which they were asked for and wakes who waits.
//!
//! It is started with the first of them. The executor does not end before the last has ended, whether
//! anybody still waits or not: a file that is closed is not changed any more.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::{Builder, JoinHandle};

type Call = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// The thread, once there is one.
#[derive(Default)]
pub(crate) struct Helper {
    running: RefCell<Option<Running>>,
    closed: Cell<bool>,
}

struct Running {
    calls: Sender<(Call, Arc<Mutex<Answer>>)>,
    thread: JoinHandle<()>,
}

/// What came of a call, and who waits for it.
#[derive(Default)]
struct Answer {
    result: Option<io::Result<()>>,
    waker: Option<Waker>,
}

impl Helper {
    /// Has `call` run; the future resolves to what it returned. Dropping that cancels nothing.
    pub(crate) fn run(
        &self,
        call: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        let answer = Arc::new(Mutex::new(Answer::default()));
        if let Err(error) = self.submit(Box::new(call), answer.clone()) {
            lock(&answer).result = Some(Err(error));
        }
        poll_fn(move |context| {
            let mut answer = lock(&answer);
            match answer.result.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    answer.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
    }

    fn submit(&self, call: Call, answer: Arc<Mutex<Answer>>) -> io::Result<()> {
        if self.closed.get() {
            return Err(io::Error::from_raw_os_error(libc::ESHUTDOWN));
        }
        let mut running = self.running.borrow_mut();
        let running = match &mut *running {
            Some(running) => running,
            none => none.insert(Running::start()?),
        };
        running.calls.send((call, answer)).map_err(|_| io::Error::other("the thread for system calls has died"))
    }

    /// Waits until every call has ended. None is taken afterwards.
    pub(crate) fn shut_down(&self) {
        self.closed.set(true);
        let running = self.running.borrow_mut().take();
        if let Some(Running { calls, thread }) = running {
            drop(calls);
            // It ends without a panic, or its callers' requests have failed with it.
            let _ = thread.join();
        }
    }
}

impl Running {
    fn start() -> io::Result<Running> {
        let (calls, queue) = channel::<(Call, Arc<Mutex<Answer>>)>();
        let serve = move || {
            for (call, answer) in queue {
                let result = call();
                let waker = {
                    let mut answer = lock(&answer);
                    answer.result = Some(result);
                    answer.waker.take()
                };
                waker.into_iter().for_each(Waker::wake);
            }
        };
        let thread = Builder::new().name("forkdisk-helper".to_string()).spawn(serve)?;
        Ok(Running { calls, thread })
    }
}

fn lock(answer: &Mutex<Answer>) -> std::sync::MutexGuard<'_, Answer> {
    answer.lock().unwrap_or_else(PoisonError::into_inner)
}
