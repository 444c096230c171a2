//! A decorator that delays the end of every request.

use std::future::Future;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use crate::device::{Buf, Device, IoResult, Segments};
use crate::runtime::Runtime;

/// A device with additional latency. Requests reach the device below at once and in order; only their ends
/// are delayed, in parallel.
pub struct DelayingDevice<D> {
    inner: D,
    runtime: Rc<dyn Runtime>,
    latency: Duration,
}

impl<D: Clone> Clone for DelayingDevice<D> {
    fn clone(&self) -> Self {
        DelayingDevice { inner: self.inner.clone(), runtime: self.runtime.clone(), latency: self.latency }
    }
}

impl<D: Device> DelayingDevice<D> {
    /// Adds `latency` to every request, by the clock of `runtime`.
    pub fn new(inner: D, runtime: Rc<dyn Runtime>, latency: Duration) -> DelayingDevice<D> {
        DelayingDevice { inner, runtime, latency }
    }

    /// Returns the device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    fn late<T>(&self, request: impl Future<Output = T> + 'static) -> impl Future<Output = T> + 'static {
        let pause = (!self.latency.is_zero()).then(|| self.runtime.sleep(self.latency));
        async move {
            let outcome = request.await;
            if let Some(pause) = pause {
                pause.await;
            }
            outcome
        }
    }
}

impl<D: Device> Device for DelayingDevice<D> {
    crate::forward_device! { inner: len block_size buffer cork stripe allocate can_clone set_len }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.late(self.inner.read(buf, segments))
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        self.late(self.inner.write(buf, segments, fua))
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        self.late(self.inner.flush())
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.late(self.inner.discard(offset, len))
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        self.late(self.inner.clone_range(&source.inner, from, to, len))
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.late(self.inner.zero_range(offset, len))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use smallvec::smallvec;

    use super::super::MemoryDevice;
    use super::super::run;
    use super::*;
    use crate::device::Segment;
    use crate::runtime::LocalFuture;

    /// A clock that is set by hand.
    #[derive(Clone, Default)]
    struct Clock(Rc<Cell<Duration>>);

    impl Runtime for Clock {
        fn spawn(&self, _: LocalFuture<()>) {
            unreachable!("a device spawns nothing");
        }

        fn sleep(&self, time: Duration) -> LocalFuture<()> {
            let (now, end) = (self.0.clone(), self.0.get() + time);
            Box::pin(poll_fn(move |_| if now.get() >= end { Poll::Ready(()) } else { Poll::Pending }))
        }

        fn now(&self) -> Duration {
            self.0.get()
        }
    }

    #[test]
    fn a_request_has_its_effect_at_once_and_ends_late() {
        let (clock, memory) = (Clock::default(), MemoryDevice::new(1 << 20));
        let device = DelayingDevice::new(memory.clone(), Rc::new(clock.clone()), Duration::from_millis(5));
        let page = smallvec![Segment { offset: 0, at: 0, len: 4096 }];
        let mut write = pin!(device.write(Buf::copy_of(&[7; 4096]), page, false));
        assert_eq!(memory.resident(), 4096, "before it is polled");
        let mut context = Context::from_waker(Waker::noop());
        for millis in [0, 3, 4] {
            clock.0.set(Duration::from_millis(millis));
            assert!(write.as_mut().poll(&mut context).is_pending(), "at {millis} ms");
        }
        clock.0.set(Duration::from_millis(5));
        run(write).0.unwrap();
    }
}
