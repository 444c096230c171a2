//! A thread for system calls that may block and that the ring does not have: runs them in order
//! and wakes the waiting tasks.
//!
//! It is started with the first call. The executor does not end before the last call has ended,
//! whether its result is awaited or not: a closed file is not changed any more.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::{Builder, JoinHandle};

type Call = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// The thread, if it was started.
#[derive(Default)]
pub(crate) struct Helper {
    running: RefCell<Option<Running>>,
    closed: Cell<bool>,
}

struct Running {
    calls: Sender<(Call, Arc<Mutex<Answer>>)>,
    thread: JoinHandle<()>,
}

/// Result of a call, and the task that waits for it.
#[derive(Default)]
struct Answer {
    result: Option<io::Result<()>>,
    waker: Option<Waker>,
}

impl Helper {
    /// Runs `call`; the future resolves to its result. Dropping the future cancels nothing.
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

    /// Waits until every call has ended. Later calls are refused.
    pub(crate) fn shut_down(&self) {
        self.closed.set(true);
        let running = self.running.borrow_mut().take();
        if let Some(Running { calls, thread }) = running {
            drop(calls);
            // It does not panic; if it did, the requests of its callers have failed already.
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::*;
    use crate::{Config, block_on};

    fn config() -> Config {
        Config { entries: 8, buffers: Vec::new() }
    }

    #[test]
    fn a_call_that_blocks_holds_up_no_task_and_its_result_arrives() {
        let answers = block_on(config(), |rt| async move {
            let (open, gate) = channel::<()>();
            let first = rt.driver().helper.run(move || gate.recv().map_err(io::Error::other));
            let second = rt.driver().helper.run(|| Err(io::Error::from_raw_os_error(libc::EXDEV)));
            let waiting = rt.spawn(first);
            rt.yield_now().await;
            assert!(!waiting.is_finished());
            // The wait ends only because this task continues while the call blocks.
            open.send(()).unwrap();
            (waiting.await.is_ok(), second.await.unwrap_err().raw_os_error())
        });
        assert_eq!(answers.unwrap(), (true, Some(libc::EXDEV)));
    }

    #[test]
    fn calls_that_nobody_waits_for_end_before_the_executor_does_and_in_order() {
        let (done, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let (count, list) = (done.clone(), seen.clone());
        block_on(config(), |rt| async move {
            for i in 0..20 {
                let (count, list) = (count.clone(), list.clone());
                drop(rt.driver().helper.run(move || {
                    std::thread::yield_now();
                    list.lock().unwrap().push(i);
                    count.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                }));
            }
        })
        .unwrap();
        assert_eq!(done.load(Ordering::SeqCst), 20);
        assert!(seen.lock().unwrap().is_sorted());
    }

    #[test]
    fn none_is_taken_after_the_end() {
        let helper = Helper::default();
        helper.shut_down();
        let result = block_on(config(), |_| helper.run(|| Ok(()))).unwrap();
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ESHUTDOWN));
    }
}
