//! Deadlines of sleeping tasks, earliest first. The loop sleeps no longer than the first one.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::driver::Driver;

#[derive(Default)]
pub(crate) struct Timers {
    waiting: BTreeMap<(Instant, u64), Waker>,
    last_id: u64,
}

impl Timers {
    pub(crate) fn next(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(&(deadline, _), _)| deadline)
    }

    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let first = self.waiting.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}

/// Resolves at its deadline. From [`Rt::sleep_for`](crate::Rt::sleep_for).
pub struct Sleep {
    driver: Rc<Driver>,
    key: (Instant, u64),
}

impl Sleep {
    pub(crate) fn new(driver: &Rc<Driver>, time: Duration) -> Sleep {
        // Limited to 100 years: an Instant cannot represent every Duration.
        let never = Duration::from_secs(100 * 365 * 86_400);
        let deadline = Instant::now() + time.min(never);
        let id = driver.timers.borrow_mut().new_id();
        Sleep { driver: driver.clone(), key: (deadline, id) }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.key.0 <= Instant::now() {
            return Poll::Ready(());
        }
        let old = self.driver.timers.borrow_mut().waiting.insert(self.key, cx.waker().clone());
        drop(old);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let waker = self.driver.timers.borrow_mut().waiting.remove(&self.key);
        drop(waker);
    }
}

/// The time elapsed before the future was ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed;

impl std::fmt::Display for Elapsed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for Elapsed {}

impl From<Elapsed> for std::io::Error {
    fn from(_: Elapsed) -> std::io::Error {
        std::io::ErrorKind::TimedOut.into()
    }
}

pub(crate) async fn timeout<F: Future>(sleep: Sleep, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut sleep = pin!(sleep);
    poll_fn(|cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(value));
        }
        sleep.as_mut().poll(cx).map(|()| Err(Elapsed))
    })
    .await
}
