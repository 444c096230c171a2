//! When freed space is given back to the host: at once, later or never ([`DiscardPolicy`]).
//!
//! A pool usually lies in a sparse file, and a write to a place that the host has to allocate costs more than another
//! one. With [`DiscardPolicy::Later`] freed space is *retained* ([`space::retained`](crate::space)), so that the
//! allocator can take it first. It is discarded when it has been free for some time, when there is too much of it, when
//! the host has no space, and when the pool is closed.
//!
//! One task discards at a time, and one sleeps while anything is retained. An idle pool that retains nothing does
//! nothing.

use std::cell::Cell;
use std::rc::Rc;

use crate::device::Device;
use crate::planted::correct;
use crate::space::{Runs, retained};
use crate::sync::Event;
use crate::types::PAGE_SIZE;

use super::{DiscardPolicy, Store};

/// The tasks that discard retained space.
#[derive(Default)]
pub struct RetainedSpace {
    /// Some of it is being discarded.
    running: Cell<bool>,
    ended: Event,
    /// The task that waits until it has been free for long enough.
    sleeps: Cell<bool>,
}

/// Discards pages on the device.
pub async fn discard_freed<D: Device>(store: &Store<D>, runs: &Runs) {
    if store.options.discard == DiscardPolicy::Never {
        return;
    }
    for &(first, pages) in runs {
        // A failed discard costs space on the host and nothing else.
        store.counters.discards.add_one(pages * PAGE_SIZE as u64);
        let _ = store.device.discard(first.offset(), pages * PAGE_SIZE as u64).await;
    }
}

/// Discards those of the freed pages that are not to be retained. Returns the others, for [`retain`] once they are
/// released.
pub async fn discard_excess<D: Device>(store: &Store<D>, freed: &Runs) -> Runs {
    // A request waits for space, or the pool is about to be closed.
    if store.full.get() || store.closing.get() {
        discard_freed(store, freed).await;
        return Runs::new();
    }
    let (kept, rest) = retained::split(&store.meta.borrow().space, freed);
    discard_freed(store, &rest).await;
    kept
}

/// Retains pages that were released.
pub fn retain<D: Device>(store: &Rc<Store<D>>, runs: &Runs) {
    retained::retain(&mut store.meta.borrow_mut().space, runs);
    let DiscardPolicy::Later { time, .. } = store.options.discard else { return };
    if runs.is_empty() || time.is_zero() || store.retained.sleeps.replace(true) {
        return;
    }
    let (weak, runtime) = (Rc::downgrade(store), store.runtime.clone());
    store.runtime.spawn(Box::pin(async move {
        loop {
            runtime.sleep(time).await;
            let Some(store) = weak.upgrade() else { return };
            give_back(&store, true).await;
            let meta = &mut *store.meta.borrow_mut();
            retained::age(&mut meta.space);
            if meta.space.retained().pages() == 0 || store.check_alive().is_err() {
                return store.retained.sleeps.set(false);
            }
        }
    }));
}

/// Whether space is retained or being discarded.
pub fn is_any<D: Device>(store: &Store<D>) -> bool {
    let meta = store.meta.borrow();
    meta.space.retained().pages() > 0 || store.retained.running.get()
}

/// Discards the retained pages, all or the old ones. Returns whether there were any, or some were just being
/// discarded.
pub async fn give_back<D: Device>(store: &Rc<Store<D>>, old_only: bool) -> bool {
    let mut any = false;
    loop {
        if wait_given_back(store).await {
            any = true;
            continue;
        }
        if store.check_alive().is_err() {
            return any;
        }
        let runs = retained::begin_discard(&mut store.meta.borrow_mut().space, old_only);
        if runs.is_empty() {
            return any;
        }
        start_discard(store.clone(), runs);
    }
}

/// Waits for the end of a discard of retained pages; false if there is none.
pub async fn wait_given_back<D: Device>(store: &Store<D>) -> bool {
    let is_running = store.retained.running.get();
    if is_running {
        store.retained.ended.wait().await;
    }
    is_running
}

/// In a task of its own: what has begun ends even if no caller waits any longer.
fn start_discard<D: Device>(store: Rc<Store<D>>, runs: Runs) {
    store.retained.running.set(true);
    let runtime = store.runtime.clone();
    runtime.spawn(Box::pin(async move {
        discard_freed(&store, &runs).await;
        correct!(
            retained::end_discard(&mut store.meta.borrow_mut().space, &runs),
            Bug::RetainedReturnedTwice => end_discard_twice(&store, runs)
        );
        store.retained.running.set(false);
        store.retained.ended.notify();
        store.space_changed.notify();
    }));
}

/// Makes pages available now, and once more after some time.
#[cfg(feature = "planted")]
fn end_discard_twice<D: Device>(store: &Rc<Store<D>>, runs: Runs) {
    retained::end_discard(&mut store.meta.borrow_mut().space, &runs);
    let (weak, pause) = (Rc::downgrade(store), store.runtime.sleep(std::time::Duration::from_millis(5)));
    store.runtime.spawn(Box::pin(async move {
        pause.await;
        if let Some(store) = weak.upgrade() {
            retained::return_again(&mut store.meta.borrow_mut().space, &runs);
        }
    }));
}
