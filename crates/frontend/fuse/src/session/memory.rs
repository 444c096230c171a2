//! Memory of requests in flight: its limit, and reuse of full-size buffers.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

use forkdisk::Buf;

use crate::codec::MAX_WRITE;

/// Most full-size buffers that are kept.
const KEPT_COUNT: usize = 32;
/// Largest buffer in bytes that is allocated with its exact size.
const SMALL_BYTES: usize = 64 << 10;

pub struct Memory {
    used: Cell<usize>,
    most: usize,
    source: Box<dyn Fn(usize) -> Buf>,
    free: RefCell<Vec<Buf>>,
    waiting: RefCell<Option<Waker>>,
    changes: Cell<u64>,
}

impl Memory {
    /// Creates the limit of `most` bytes in flight; `source` allocates buffers.
    pub fn new(most: usize, source: Box<dyn Fn(usize) -> Buf>) -> Memory {
        let (free, waiting) = (RefCell::default(), RefCell::default());
        Memory { used: Cell::new(0), most, source, free, waiting, changes: Cell::new(0) }
    }

    /// Returns a buffer of `len` bytes with unspecified contents.
    pub fn buffer(&self, len: usize) -> Buf {
        if len <= SMALL_BYTES {
            return (self.source)(len);
        }
        let mut buf = self.free.borrow_mut().pop().unwrap_or_else(|| (self.source)(len.max(MAX_WRITE)));
        buf.set_len(len);
        buf
    }

    /// Keeps a buffer for reuse, if it has full size and belongs to no pool of registered buffers.
    pub fn keep(&self, mut buf: Buf) {
        let mut free = self.free.borrow_mut();
        if buf.slot().is_none() && buf.capacity() == MAX_WRITE && free.len() < KEPT_COUNT {
            buf.set_len(MAX_WRITE);
            free.push(buf);
        }
    }

    pub fn take(&self, bytes: usize) {
        self.used.set(self.used.get() + bytes);
    }

    pub fn give_back(&self, bytes: usize) {
        self.used.set(self.used.get() - bytes);
        self.changes.set(self.changes.get() + 1);
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    /// Waits until memory has been released since the call.
    pub async fn changed(&self) {
        let seen = self.changes.get();
        self.until(|| self.changes.get() != seen).await;
    }

    /// Waits until there is memory for a request.
    pub async fn wait_for_room(&self) {
        if self.used.get() + MAX_WRITE > self.most {
            self.until(|| self.used.get() + MAX_WRITE <= self.most).await;
        }
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        poll_fn(|cx| match is_so() {
            true => Poll::Ready(()),
            false => {
                *self.waiting.borrow_mut() = Some(cx.waker().clone());
                Poll::Pending
            }
        })
        .await;
    }
}
