//! A copy finds no space: the origin's policy decides. Nothing is written without its copy.

use std::rc::Rc;
use std::time::Duration;

use crate::device::Device;
use crate::error::Result;
use crate::format::{OriginFull, Record};
use crate::runtime::LocalFuture;
use crate::store::{PoolEvent, Store, events, no_space_error};
use crate::types::VolumeId;

use super::Origin;

/// Checkpoints that one write starts to get freed space back.
const MAX_CHECKPOINTS: u32 = 2;

/// What a write has tried to get space.
#[derive(Default)]
pub struct SpaceWait {
    emptied: u32,
    /// Most pages that were free before an attempt: more free pages are worth another attempt.
    free: u64,
    /// The rest of its wait.
    left: Option<LocalFuture<()>>,
}

impl SpaceWait {
    /// Notes an attempt with this many free pages.
    pub fn note_attempt(&mut self, free: u64) {
        if free > self.free {
            (self.free, self.emptied) = (free, 0);
        }
    }
}

impl<D: Device> Origin<D> {
    /// Waits for space or frees some; fails if neither helps. Holds nothing meanwhile.
    pub(super) async fn wait_for_space(&self, store: &Rc<Store<D>>, patience: &mut SpaceWait) -> Result<()> {
        store.check_writable()?;
        let free = store.meta.borrow().space.available();
        if free > patience.free {
            // Some was freed since the attempt failed.
            patience.note_attempt(free);
            return Ok(());
        }
        if patience.emptied < MAX_CHECKPOINTS && store.has_pending_space() {
            patience.emptied += 1;
            return store.clone().checkpoint().await;
        }
        store.full.set(true);
        let policy = store.meta.borrow().protects(self.id).map_or(OriginFull::Error, |(p, _)| p.when_full);
        match policy {
            OriginFull::Wait(seconds) => {
                let sleep = || store.runtime.sleep(Duration::from_secs(u64::from(seconds)));
                if patience.left.is_none() {
                    events::report_waiting(store, self.id);
                }
                let left = patience.left.get_or_insert_with(sleep);
                // Other waiting writes start checkpoints, too; those alone free nothing.
                while store.meta.borrow().space.available() <= patience.free {
                    if !store.wait_for_space(left).await {
                        return events::report_if_full(store, self.id, Err(no_space_error()));
                    }
                    store.check_writable()?;
                }
                Ok(())
            }
            OriginFull::DropOldest => {
                let Some(id) = oldest_droppable(self, store) else {
                    return events::report_if_full(store, self.id, Err(no_space_error()));
                };
                let dropped = store
                    .verb(|meta| {
                        // It may have been deleted or opened since.
                        let found = meta.directory.get(id).filter(|_| meta.directory.is_snapshot(id));
                        let name = found.map(|v| meta.directory.full_name(&v.record));
                        Ok((Record::Delete { ids: name.iter().map(|_| id).collect() }, name))
                    })
                    .await?;
                if let Some(snapshot) = dropped {
                    store.counters.dropped.add(1);
                    events::report(store, &PoolEvent::Dropped { snapshot });
                }
                store.hooks.reap_soon();
                store.hooks.wait_freed().await
            }
            OriginFull::Error => events::report_if_full(store, self.id, Err(no_space_error())),
        }
    }
}

fn oldest_droppable<D: Device>(origin: &Origin<D>, store: &Store<D>) -> Option<VolumeId> {
    let meta = store.meta.borrow();
    let chain = meta.directory.chain(origin.id)?;
    let mut all: Vec<VolumeId> = chain.chained.iter().chain(&chain.independent).copied().collect();
    all.sort_unstable();
    all.into_iter().find(|&id| {
        let idle = |v: &crate::catalog::CatalogEntry| v.record.flags.droppable && !v.pending;
        meta.directory.get(id).is_some_and(idle)
            && store.live.borrow().handles(id) == 0
            && meta.directory.clones_backed_by(id).is_none()
    })
}
