//! A device with a shared cache of the pages that several volumes or snapshots refer to.
//!
//! Everything that the pool writes, discards, clones or zeroes passes through here, so no part of the engine has to
//! say which contents have changed: see [`SharedCache`].

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use super::shared_cache::{ChangeGuard, SharedCache, SharedCacheStatistics, SharedPlan};
use super::{Buf, Device, IoResult, Segments, add_segment};
use crate::planted::correct;

/// A device with a shared cache, or without one.
pub struct CachedDevice<D> {
    inner: Rc<D>,
    cache: Option<Rc<SharedCache>>,
    changes: Rc<Changes>,
}

/// Changes of the device, and those that a flush has made durable.
#[derive(Default)]
struct Changes {
    begun: Cell<u64>,
    in_flight: Cell<u64>,
    /// Value of `begun` when the last flush began that covered all changes; `None`: there was none.
    flushed: Cell<Option<u64>>,
}

impl Changes {
    fn begin(&self) {
        self.begun.set(self.begun.get() + 1);
        self.in_flight.set(self.in_flight.get() + 1);
    }

    /// What a flush that begins now covers, if that is all.
    fn covered(&self) -> Option<u64> {
        let is_idle = correct!(self.in_flight.get() == 0, Bug::FlushCoversInFlight => true);
        is_idle.then_some(self.begun.get())
    }
}

impl<D: Device> CachedDevice<D> {
    /// Adds a cache of at most `bytes` bytes; 0: none.
    pub fn new(inner: D, bytes: u64) -> Rc<CachedDevice<D>> {
        let cache = (bytes > 0).then(|| SharedCache::new(bytes));
        Rc::new(CachedDevice { inner: Rc::new(inner), cache, changes: Rc::default() })
    }

    /// The device without the cache: changes made through it leave the cache as it is. It is never freed.
    #[cfg(feature = "planted")]
    pub(crate) fn unseen(&self) -> &'static Rc<CachedDevice<D>> {
        let (inner, changes) = (self.inner.clone(), self.changes.clone());
        Box::leak(Box::new(Rc::new(CachedDevice { inner, cache: None, changes })))
    }

    /// The device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// What the cache did.
    pub fn statistics(&self) -> SharedCacheStatistics {
        self.cache.as_ref().map(|cache| cache.statistics()).unwrap_or_default()
    }

    /// Whether everything that was ever written is durable.
    pub fn is_flushed(&self) -> bool {
        self.changes.flushed.get() == Some(self.changes.begun.get())
    }

    fn begin_change(&self, ranges: impl Iterator<Item = (u64, u64)>) -> Option<ChangeGuard> {
        self.cache.as_ref().map(|cache| cache.begin_change(ranges))
    }

    /// The request, which has changed the device when it ends.
    fn changing<F>(&self, request: F, change: Option<ChangeGuard>) -> Changing<F> {
        self.changes.begin();
        Changing { request, change, changes: self.changes.clone() }
    }

    /// Reads every segment into `buf`, of which the ranges `shared` (offset and length in `buf`, ascending) hold pages
    /// to which other volumes or snapshots refer. Calls `count` with the segments of each device request.
    pub async fn read_shared(
        &self,
        mut buf: Buf,
        segments: Segments,
        shared: &[(usize, usize)],
        count: impl Fn(&Segments),
    ) -> IoResult {
        let Some(cache) = &self.cache else {
            count(&segments);
            return self.inner.read(buf, segments).await;
        };
        let is_aside = buf.is_shared();
        let SharedPlan { direct, aside, own, joins } = cache.plan_read(&mut buf, is_aside, &segments, shared);
        let aside = (!aside.is_empty()).then(|| {
            count(&aside);
            self.inner.read(self.inner.buffer(own.bytes()), aside)
        });
        if !direct.is_empty() {
            count(&direct);
            let (result, read) = self.inner.read(buf, direct).await;
            buf = read;
            if result.is_err() {
                correct!(drop(own), Bug::SharedCacheKeepsFailed => own.succeed(&buf, false));
                return (result, buf);
            }
        }
        // Before it waits for others: they may wait for this one.
        match aside {
            None => own.succeed(&buf, false),
            Some(aside) => {
                let (result, bytes) = aside.await;
                if result.is_err() {
                    return (result, buf);
                }
                own.copy(&bytes, &mut buf);
                own.succeed(&bytes, true);
            }
        }
        let mut left = Segments::new();
        for join in joins {
            if let Some(part) = cache.join(join, &mut buf).await {
                add_segment(&mut left, part.offset, part.at, part.len);
            }
        }
        if left.is_empty() {
            return (Ok(()), buf);
        }
        count(&left);
        self.inner.read(buf, left).await
    }
}

impl<D: Device> Device for CachedDevice<D> {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn block_size(&self) -> usize {
        self.inner.block_size()
    }

    fn buffer(&self, len: usize) -> Buf {
        self.inner.buffer(len)
    }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.inner.read(buf, segments)
    }

    fn cork(&self, more: bool) {
        self.inner.cork(more);
    }

    fn stripe(&self) -> Option<u64> {
        self.inner.stripe()
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        let (covered, changes, flush) = (self.changes.covered(), self.changes.clone(), self.inner.flush());
        async move {
            let flushed = flush.await;
            if flushed.is_ok() && covered.is_some() {
                changes.flushed.set(covered);
            }
            flushed
        }
    }

    fn allocate(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.inner.allocate(offset, len)
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.changing(self.inner.set_len(len), None)
    }

    fn can_clone(&self, source: &Self) -> bool {
        self.inner.can_clone(&source.inner)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let change = self.begin_change(segments.iter().map(|s| (s.offset, s.len as u64)));
        self.changing(self.inner.write(buf, segments, fua), change)
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let change = self.begin_change([(offset, len)].into_iter());
        self.changing(self.inner.discard(offset, len), change)
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        let change = correct!(self.begin_change([(to, len)].into_iter()), Bug::SharedCacheKeepsCloned => None);
        self.changing(self.inner.clone_range(&source.inner, from, to, len), change)
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let change = self.begin_change([(offset, len)].into_iter());
        self.changing(self.inner.zero_range(offset, len), change)
    }
}

pin_project! {
    /// A request, and the change that ends with it. Not an `async` function, which would hold the request twice: this
    /// is a part of every write.
    struct Changing<F> {
        #[pin]
        request: F,
        change: Option<ChangeGuard>,
        changes: Rc<Changes>,
    }
}

impl<F: Future> Future for Changing<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let polled = this.request.poll(cx);
        if polled.is_ready() {
            this.changes.in_flight.set(this.changes.in_flight.get() - 1);
            if let Some(change) = this.change.take() {
                change.end();
            }
        }
        polled
    }
}
