//! Pages of the pool that several volumes or snapshots refer to, in memory, by where they lie in the pool: however many
//! of them are read, the device reads each page once.
//!
//! What the cache holds of a page is always what the device would return. It owns no knowledge of maps: the device that
//! it belongs to ([`CachedDevice`](super::CachedDevice)) announces each request that changes contents, and so
//!
//! - a page is dropped when a request that changes it is submitted;
//! - a read that was in flight at that moment ends without leaving the page here, and later reads do not join
//!   it;
//! - until that request has ended, reads of the page go to the device, and leave nothing here.
//!
//! Until the first read of a shared page, changes are only counted, so that a pool without such pages pays nothing for
//! the cache. While one of those is in flight, nothing is kept.
//!
//! Reads of a page that is being read *join* that read. If it fails or is given up, each of them reads by itself.
//! Errors are not kept.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use quick_cache::UnitWeighter;
use quick_cache::unsync::Cache;
use rustc_hash::{FxBuildHasher, FxHashMap};
use slab::Slab;
use smallvec::SmallVec;

use super::{Segment, Segments, add_segment};
use crate::planted::correct;
use crate::sync::Event;
use crate::types::{BLOCK_PAGES, PAGE_BYTES, PAGE_SIZE};

/// What the shared cache did since the pool was opened. All but `bytes` are counts of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedCacheStatistics {
    /// Bytes of the pages in it.
    pub bytes: u64,
    /// Pages that were in it when they were read.
    pub hits: u64,
    /// Shared pages that were read from the device.
    pub misses: u64,
    /// Pages that came from a read of another request that was in flight.
    pub joined: u64,
    /// Pages that made room for others.
    pub evictions: u64,
}

/// See the module.
pub struct SharedCache {
    state: RefCell<State>,
    /// A shared page has been read: changes are noted with their pages from then on.
    is_used: Cell<bool>,
    /// Changes in flight that were not noted.
    unnoted: Cell<usize>,
    hits: Cell<u64>,
    misses: Cell<u64>,
    joined: Cell<u64>,
    evictions: Cell<u64>,
}

/// Keeps the numbers of evicted pages.
#[derive(Clone, Default)]
struct Evicted;

impl quick_cache::Lifecycle<u64, Rc<[u8]>> for Evicted {
    type RequestState = SmallVec<[u64; 2]>;

    fn on_evict(&self, evicted: &mut Self::RequestState, page: u64, _bytes: Rc<[u8]>) {
        evicted.push(page);
    }
}

struct State {
    pages: Cache<u64, Rc<[u8]>, UnitWeighter, FxBuildHasher, Evicted>,
    /// The read in flight that will leave a page here.
    reads: FxHashMap<u64, Rc<SharedRead>>,
    /// Number of pages in `pages` and `reads`, by block, where there are some: most writes are to other blocks.
    blocks: BTreeMap<u64, u32>,
    /// The pages that each request in flight changes.
    changes: Slab<SmallVec<[Range<u64>; 1]>>,
}

/// A read in flight of pages that others may wait for.
#[derive(Default)]
struct SharedRead {
    has_ended: Cell<bool>,
    /// Pages that others wait for, and once it has succeeded, their contents.
    waited: RefCell<FxHashMap<u64, Option<Rc<[u8]>>>>,
    ended: Event,
}

impl SharedRead {
    /// Returns a page once the read has ended; `None` if it failed.
    async fn wait(&self, page: u64) -> Option<Rc<[u8]>> {
        while !self.has_ended.get() {
            self.ended.wait().await;
        }
        self.waited.borrow().get(&page).cloned().flatten()
    }

    fn end(&self) {
        self.has_ended.set(true);
        self.ended.notify();
    }
}

/// A part of a page that is being read by another request.
pub struct Join {
    read: Rc<SharedRead>,
    /// The part, on the device and in the buffer.
    pub part: Segment,
}

/// A read of the pages that were neither in the cache nor being read. Dropping it gives the read up.
pub struct CacheRead {
    cache: Rc<SharedCache>,
    read: Rc<SharedRead>,
    /// Each page, and where it lies in the buffer of the request.
    pages: Vec<(u64, usize)>,
}

/// How a request with shared pages is read. What is in the cache is in the buffer already.
pub struct SharedPlan {
    /// Read from the device into the buffer of the request.
    pub direct: Segments,
    /// Read from the device into a buffer aside, page by page in the order of `own`.
    pub aside: Segments,
    pub own: CacheRead,
    pub joins: Vec<Join>,
}

/// A request that changes contents of the device.
pub struct ChangeGuard {
    cache: Rc<SharedCache>,
    /// Its number among those that are noted.
    change: Option<usize>,
}

/// The pages that a range of bytes touches.
fn pages_of(offset: u64, len: u64) -> Range<u64> {
    offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES)
}

impl State {
    /// Whether a request in flight changes some of the pages.
    fn is_changing(&self, pages: &Range<u64>) -> bool {
        let mut changing = self.changes.iter().flat_map(|(_, change)| change);
        changing.any(|change| change.start < pages.end && pages.start < change.end)
    }

    fn add(&mut self, page: u64) {
        *self.blocks.entry(page / BLOCK_PAGES).or_default() += 1;
    }

    fn remove(&mut self, page: u64) {
        let block = page / BLOCK_PAGES;
        let Some(pages) = self.blocks.get_mut(&block) else { return };
        *pages -= 1;
        if *pages == 0 {
            self.blocks.remove(&block);
        }
    }

    /// Drops pages, and takes them from the reads in flight.
    fn forget(&mut self, pages: &Range<u64>) {
        let (mut next, last) = (pages.start / BLOCK_PAGES, (pages.end - 1) / BLOCK_PAGES);
        while next <= last
            && let Some((&block, _)) = self.blocks.range(next..=last).next()
        {
            let first = block * BLOCK_PAGES;
            for page in pages.start.max(first)..pages.end.min(first + BLOCK_PAGES) {
                if self.pages.remove(&page).is_some() {
                    self.remove(page);
                }
                let joinable = correct!(self.reads.remove(&page), Bug::SharedReadOutlivesWrite => None);
                if joinable.is_some() {
                    self.remove(page);
                }
            }
            next = block + 1;
        }
    }
}

impl SharedCache {
    /// Creates a cache of at most `bytes` bytes, at least one page.
    pub fn new(bytes: u64) -> Rc<SharedCache> {
        let pages = (bytes / PAGE_BYTES).max(1);
        let pages = Cache::with(pages as usize, pages, UnitWeighter, FxBuildHasher, Evicted);
        let state = State { pages, reads: FxHashMap::default(), blocks: BTreeMap::new(), changes: Slab::new() };
        let (is_used, unnoted, hits, misses, joined, evictions) = Default::default();
        Rc::new(SharedCache { state: RefCell::new(state), is_used, unnoted, hits, misses, joined, evictions })
    }

    /// Returns what it did.
    pub fn statistics(&self) -> SharedCacheStatistics {
        SharedCacheStatistics {
            bytes: self.state.borrow().pages.len() as u64 * PAGE_BYTES,
            hits: self.hits.get(),
            misses: self.misses.get(),
            joined: self.joined.get(),
            evictions: self.evictions.get(),
        }
    }

    /// To be called when a request that changes these ranges is submitted; the guard, when it has ended.
    pub fn begin_change(self: &Rc<Self>, ranges: impl Iterator<Item = (u64, u64)>) -> ChangeGuard {
        if !self.is_used.get() {
            self.unnoted.set(self.unnoted.get() + 1);
            return ChangeGuard { cache: self.clone(), change: None };
        }
        let pages: SmallVec<[Range<u64>; 1]> = ranges.map(|(offset, len)| pages_of(offset, len)).collect();
        let mut state = self.state.borrow_mut();
        if !state.blocks.is_empty() {
            pages.iter().filter(|pages| !pages.is_empty()).for_each(|pages| state.forget(pages));
        }
        let change = Some(state.changes.insert(pages));
        drop(state);
        ChangeGuard { cache: self.clone(), change }
    }

    /// Plans the read of `segments` into `buf`, of which the ranges `shared` hold shared pages. Copies what is in the
    /// cache. Pages that are to be kept are read aside if others may change `buf`.
    pub fn plan_read(
        self: &Rc<Self>,
        buf: &mut [u8],
        aside: bool,
        segments: &Segments,
        shared: &[(usize, usize)],
    ) -> SharedPlan {
        self.is_used.set(true);
        let own = CacheRead { cache: self.clone(), read: Rc::default(), pages: Vec::new() };
        let mut plan = SharedPlan { direct: Segments::new(), aside: Segments::new(), own, joins: Vec::new() };
        let mut ranges = shared.iter().copied().peekable();
        for &Segment { offset, at: start, len } in segments {
            let (mut at, end) = (start, start + len);
            while at < end {
                while ranges.next_if(|&(from, len)| from + len <= at).is_some() {}
                let from = offset + (at - start) as u64;
                let stop = match ranges.peek() {
                    Some(&(shared, len)) if shared <= at => {
                        let stop = end.min(shared + len);
                        self.plan_part(&mut plan, buf, aside, Segment { offset: from, at, len: stop - at });
                        at = stop;
                        continue;
                    }
                    Some(&(shared, _)) => end.min(shared),
                    None => end,
                };
                add_segment(&mut plan.direct, from, at, stop - at);
                at = stop;
            }
        }
        plan
    }

    /// Plans a part that consists of shared pages.
    fn plan_part(&self, plan: &mut SharedPlan, buf: &mut [u8], aside: bool, part: Segment) {
        let mut state = self.state.borrow_mut();
        let pages = pages_of(part.offset, part.len as u64);
        let may_change = self.unnoted.get() > 0 || state.is_changing(&pages);
        let is_changing = correct!(may_change, Bug::SharedReadDuringWrite => false);
        let (mut offset, mut at) = (part.offset, part.at);
        while at < part.at + part.len {
            let (page, within) = (offset / PAGE_BYTES, (offset % PAGE_BYTES) as usize);
            let len = (PAGE_SIZE - within).min(part.at + part.len - at);
            if let Some(bytes) = state.pages.get(&page) {
                buf[at..at + len].copy_from_slice(&bytes[within..within + len]);
                self.hits.set(self.hits.get() + 1);
            } else if let Some(read) = state.reads.get(&page) {
                read.waited.borrow_mut().insert(page, None);
                plan.joins.push(Join { read: read.clone(), part: Segment { offset, at, len } });
            } else {
                self.misses.set(self.misses.get() + 1);
                let is_kept = len == PAGE_SIZE && !is_changing;
                match is_kept && aside {
                    true => add_segment(&mut plan.aside, offset, plan.own.pages.len() * PAGE_SIZE, len),
                    false => add_segment(&mut plan.direct, offset, at, len),
                }
                if is_kept {
                    state.reads.insert(page, plan.own.read.clone());
                    state.add(page);
                    plan.own.pages.push((page, at));
                }
            }
            (offset, at) = (offset + len as u64, at + len);
        }
    }

    /// Copies a page that another request reads; returns the part that is left to read if that failed.
    pub async fn join(&self, join: Join, buf: &mut [u8]) -> Option<Segment> {
        let Segment { offset, at, len } = join.part;
        match join.read.wait(offset / PAGE_BYTES).await {
            Some(bytes) => {
                let within = (offset % PAGE_BYTES) as usize;
                buf[at..at + len].copy_from_slice(&bytes[within..within + len]);
                self.joined.set(self.joined.get() + 1);
                None
            }
            None => {
                self.misses.set(self.misses.get() + 1);
                Some(join.part)
            }
        }
    }
}

impl ChangeGuard {
    /// The request has ended. Without this call, the pages of a noted request are never cached again; after a request
    /// that was only counted, no page is.
    pub fn end(self) {
        match self.change {
            Some(change) => drop(self.cache.state.borrow_mut().changes.remove(change)),
            None => self.cache.unnoted.set(self.cache.unnoted.get() - 1),
        }
    }
}

impl CacheRead {
    /// Bytes of its pages.
    pub fn bytes(&self) -> usize {
        self.pages.len() * PAGE_SIZE
    }

    /// Copies the pages to the buffer of the request from one in which they lie one behind the other.
    pub fn copy(&self, aside: &[u8], buf: &mut [u8]) {
        for (&(_, at), bytes) in self.pages.iter().zip(aside.chunks_exact(PAGE_SIZE)) {
            buf[at..at + PAGE_SIZE].copy_from_slice(bytes);
        }
    }

    /// The read has succeeded: its pages go to the cache, unless they changed meanwhile, and to the reads that joined.
    /// They are in the buffer of the request, or one behind the other in one `aside`.
    pub fn succeed(mut self, bytes: &[u8], aside: bool) {
        let mut evicted = SmallVec::new();
        let mut state = self.cache.state.borrow_mut();
        let mut waited = self.read.waited.borrow_mut();
        for (i, (page, at)) in std::mem::take(&mut self.pages).into_iter().enumerate() {
            let at = if aside { i * PAGE_SIZE } else { at };
            let is_current = state.reads.get(&page).is_some_and(|read| Rc::ptr_eq(read, &self.read));
            let waiting = waited.get_mut(&page);
            if !is_current && waiting.is_none() {
                continue;
            }
            let bytes: Rc<[u8]> = bytes[at..at + PAGE_SIZE].into();
            if let Some(place) = waiting {
                *place = Some(bytes.clone());
            }
            if is_current {
                // The page stays counted in its block.
                state.reads.remove(&page);
                state.pages.insert_with_lifecycle(page, bytes, &mut evicted);
                for page in evicted.drain(..) {
                    state.remove(page);
                    self.cache.evictions.set(self.cache.evictions.get() + 1);
                }
            }
        }
    }
}

impl Drop for CacheRead {
    fn drop(&mut self) {
        let mut state = self.cache.state.borrow_mut();
        for &(page, _) in &self.pages {
            if state.reads.get(&page).is_some_and(|read| Rc::ptr_eq(read, &self.read)) {
                state.reads.remove(&page);
                state.remove(page);
            }
        }
        drop(state);
        self.read.end();
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    const PAGES: usize = 8;

    fn segments(page: u64, pages: usize) -> Segments {
        smallvec![Segment { offset: page * PAGE_BYTES, at: 0, len: pages * PAGE_SIZE }]
    }

    fn plan(cache: &Rc<SharedCache>, page: u64, pages: usize) -> (SharedPlan, Vec<u8>) {
        let mut buf = vec![0; pages * PAGE_SIZE];
        let plan = cache.plan_read(&mut buf, false, &segments(page, pages), &[(0, pages * PAGE_SIZE)]);
        (plan, buf)
    }

    /// Reads pages that all contain `fill`.
    fn fill(cache: &Rc<SharedCache>, page: u64, pages: usize, fill: u8) {
        plan(cache, page, pages).0.own.succeed(&vec![fill; pages * PAGE_SIZE], false);
    }

    fn change(cache: &Rc<SharedCache>, page: u64, pages: u64) -> ChangeGuard {
        cache.begin_change([(page * PAGE_BYTES, pages * PAGE_BYTES)].into_iter())
    }

    /// Returns whether the page is in the cache.
    fn is_cached(cache: &Rc<SharedCache>, page: u64) -> bool {
        let (plan, _) = plan(cache, page, 1);
        plan.direct.is_empty() && plan.joins.is_empty()
    }

    #[test]
    fn what_was_read_is_copied_and_the_rest_is_read() {
        let cache = SharedCache::new(64 * PAGE_BYTES);
        fill(&cache, 2, 3, 7);
        let (plan, buf) = plan(&cache, 0, PAGES);
        let read: Vec<_> = plan.direct.iter().map(|s| (s.offset / PAGE_BYTES, s.len / PAGE_SIZE)).collect();
        assert_eq!(read, [(0, 2), (5, 3)]);
        let is_filled = |page: usize| buf[page * PAGE_SIZE..(page + 1) * PAGE_SIZE] == [7; PAGE_SIZE];
        assert_eq!((0..PAGES).map(is_filled).filter(|&filled| filled).count(), 3);
        assert!((2..5).all(is_filled));
    }

    #[test]
    fn only_shared_ranges_are_kept() {
        let cache = SharedCache::new(64 * PAGE_BYTES);
        let mut buf = vec![0; 4 * PAGE_SIZE];
        let shared = [(PAGE_SIZE, PAGE_SIZE), (3 * PAGE_SIZE, PAGE_SIZE)];
        let plan = cache.plan_read(&mut buf, false, &segments(10, 4), &shared);
        assert_eq!(plan.direct, segments(10, 4), "one request");
        plan.own.succeed(&buf, false);
        assert_eq!([10, 11, 12, 13].map(|page| is_cached(&cache, page)), [false, true, false, true]);
    }

    #[test]
    fn a_change_drops_its_pages_only() {
        let cache = SharedCache::new(1024 * PAGE_BYTES);
        fill(&cache, 250, 16, 1);
        change(&cache, 254, 4).end();
        let left: Vec<u64> = (250..266).filter(|&page| is_cached(&cache, page)).collect();
        assert_eq!(left, [250, 251, 252, 253, 258, 259, 260, 261, 262, 263, 264, 265]);
        change(&cache, 0, 1 << 40).end();
        assert!(cache.state.borrow().blocks.is_empty() && cache.state.borrow().changes.is_empty());
        assert_eq!(cache.statistics().bytes, 0);
    }

    #[test]
    fn a_read_in_flight_while_its_page_changes_leaves_nothing() {
        let cache = SharedCache::new(64 * PAGE_BYTES);
        let (old, _) = plan(&cache, 0, 2);
        let changing = change(&cache, 1, 1);
        let (during, _) = plan(&cache, 0, 2);
        assert_eq!((during.joins.len(), during.own.pages.len()), (1, 0), "the page that changes is not joined");
        changing.end();
        during.own.succeed(&[2; 2 * PAGE_SIZE], false);
        old.own.succeed(&[1; 2 * PAGE_SIZE], false);
        assert_eq!((is_cached(&cache, 0), is_cached(&cache, 1)), (true, false));
    }

    #[test]
    fn a_change_that_never_ends_keeps_its_pages_out() {
        let cache = SharedCache::new(64 * PAGE_BYTES);
        drop(change(&cache, 5, 1));
        fill(&cache, 5, 1, 1);
        assert!(!is_cached(&cache, 5));
    }

    #[test]
    fn pages_that_are_read_aside_are_kept_from_there() {
        let cache = SharedCache::new(64 * PAGE_BYTES);
        fill(&cache, 1, 1, 7);
        let mut buf = vec![0; 3 * PAGE_SIZE];
        let plan = cache.plan_read(&mut buf, true, &segments(0, 3), &[(0, 3 * PAGE_SIZE)]);
        assert!(plan.direct.is_empty());
        assert_eq!(plan.aside.iter().map(|s| (s.offset / PAGE_BYTES, s.at)).collect::<Vec<_>>(), [(0, 0), (2, 4096)]);
        let aside = [[1; PAGE_SIZE], [3; PAGE_SIZE]].concat();
        plan.own.copy(&aside, &mut buf);
        plan.own.succeed(&aside, true);
        assert!([1, 7, 3].iter().zip(buf.chunks(PAGE_SIZE)).all(|(&fill, page)| page == [fill; PAGE_SIZE]));
        assert!((0..3).all(|page| is_cached(&cache, page)));
    }

    #[test]
    fn a_scan_leaves_what_is_read_again() {
        let cache = SharedCache::new(64 * PAGE_BYTES);
        (0..3).for_each(|_| (0..16).for_each(|page| fill(&cache, page, 1, 1)));
        (1000..2000).for_each(|page| fill(&cache, page, 1, 2));
        assert!((0..16).filter(|&page| is_cached(&cache, page)).count() >= 12);
        let state = cache.state.borrow();
        let counted: u64 = state.blocks.values().map(|&pages| u64::from(pages)).sum();
        assert_eq!((counted, state.pages.len() <= 64), (state.pages.len() as u64, true));
    }
}
