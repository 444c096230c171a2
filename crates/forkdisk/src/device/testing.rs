//! Runs futures in tests of devices.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Polls until the future is ready. Only for futures that become ready by being polled.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
    }
}
