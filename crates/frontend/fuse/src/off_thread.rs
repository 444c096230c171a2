//! Runs work that waits for this process's own mount (unmounting, writing back) outside the thread that serves it.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

struct Slot<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

/// Runs `work` on a separate thread; resolves with its result. The work runs to its end even if the
/// future is dropped.
pub fn off_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> impl Future<Output = T> {
    let slot = Arc::new(Mutex::new(Slot { value: None, waker: None }));
    let shared = slot.clone();
    std::thread::spawn(move || {
        let value = work();
        let mut slot = shared.lock().unwrap_or_else(PoisonError::into_inner);
        slot.value = Some(value);
        if let Some(waker) = slot.waker.take() {
            drop(slot);
            waker.wake();
        }
    });
    poll_fn(move |cx| {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                slot.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use forkdisk_uring::{Config, block_on};

    use super::*;

    #[test]
    fn what_another_thread_returns_arrives() {
        let done = block_on(Config::default(), |_| async {
            let late = off_thread(|| {
                std::thread::sleep(std::time::Duration::from_millis(20));
                7
            });
            (late.await, off_thread(|| 8).await)
        });
        assert_eq!(done.unwrap(), (7, 8));
    }
}
