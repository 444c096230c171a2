//! A device with a shared cache of the pages that several volumes or snapshots refer to.
//!
//! Everything that the pool writes, discards, clones or zeroes passes through here, so no part of the engine has to
//! say which contents have changed: see [`SharedCache`].

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
}

impl<D: Device> CachedDevice<D> {
    /// Adds a cache of at most `bytes` bytes; 0: none.
    pub fn new(inner: D, bytes: u64) -> Rc<CachedDevice<D>> {
        Rc::new(CachedDevice { inner: Rc::new(inner), cache: (bytes > 0).then(|| SharedCache::new(bytes)) })
    }

    /// The device without the cache: changes made through it leave the cache as it is. It is never freed.
    #[cfg(feature = "planted")]
    pub(crate) fn unseen(&self) -> &'static Rc<CachedDevice<D>> {
        Box::leak(Box::new(Rc::new(CachedDevice { inner: self.inner.clone(), cache: None })))
    }

    /// The device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// What the cache did.
    pub fn statistics(&self) -> SharedCacheStatistics {
        self.cache.as_ref().map(|cache| cache.statistics()).unwrap_or_default()
    }

    fn begin_change(&self, ranges: impl Iterator<Item = (u64, u64)>) -> Option<ChangeGuard> {
        self.cache.as_ref().map(|cache| cache.begin_change(ranges))
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
        self.inner.flush()
    }

    fn allocate(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.inner.allocate(offset, len)
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.inner.set_len(len)
    }

    fn can_clone(&self, source: &Self) -> bool {
        self.inner.can_clone(&source.inner)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let change = self.begin_change(segments.iter().map(|s| (s.offset, s.len as u64)));
        Changing { change, request: self.inner.write(buf, segments, fua) }
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let change = self.begin_change([(offset, len)].into_iter());
        Changing { change, request: self.inner.discard(offset, len) }
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        let change = correct!(self.begin_change([(to, len)].into_iter()), Bug::SharedCacheKeepsCloned => None);
        Changing { change, request: self.inner.clone_range(&source.inner, from, to, len) }
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let change = self.begin_change([(offset, len)].into_iter());
        Changing { change, request: self.inner.zero_range(offset, len) }
    }
}

pin_project! {
    /// A request, and the change that ends with it. Not an `async` function, which would hold the request twice: this
    /// is a part of every write.
    struct Changing<F> {
        #[pin]
        request: F,
        change: Option<ChangeGuard>,
    }
}

impl<F: Future> Future for Changing<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let polled = this.request.poll(cx);
        if polled.is_ready()
            && let Some(change) = this.change.take()
        {
            change.end();
        }
        polled
    }
}
