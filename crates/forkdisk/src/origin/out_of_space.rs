//! A copy finds no space: what then is the origin's policy. Nothing is ever written without its copy.

use std::rc::Rc;
use std::time::Duration;

use crate::device::Device;
use crate::error::Result;
use crate::format::{OriginFull, Record};
use crate::pool::{Inner, PoolEvent, no_space_error};
use crate::runtime::LocalFuture;
use crate::types::VolumeId;

use super::Origin;

/// Checkpoints that one write begins for space that was given up.
const MAX_CHECKPOINTS: u32 = 2;

/// What a write has tried already to get space.
#[derive(Default)]
pub struct SpaceWait {
    emptied: u32,
    /// Most pages that were free before it tried: it tries again when there are more.
    free: u64,
    /// What is left of it, once it waits.
    left: Option<LocalFuture<()>>,
}

impl SpaceWait {
    /// It is about to try, with so many pages free.
    pub fn note_attempt(&mut self, free: u64) {
        if free > self.free {
            (self.free, self.emptied) = (free, 0);
        }
    }
}

impl<D: Device> Origin<D> {
    /// Waits for space or makes some; fails when neither helps. Nothing is held meanwhile.
    pub(super) async fn wait_for_space(&self, inner: &Rc<Inner<D>>, patience: &mut SpaceWait) -> Result<()> {
        inner.check_writable()?;
        let free = inner.meta.borrow().space.available();
        if free > patience.free {
            // Some came back while it was found that there is none.
            patience.note_attempt(free);
            return Ok(());
        }
        if patience.emptied < MAX_CHECKPOINTS && inner.has_pending_space() {
            patience.emptied += 1;
            return inner.clone().checkpoint().await;
        }
        inner.full.set(true);
        let policy = inner.meta.borrow().protects(self.id).map_or(OriginFull::Error, |(p, _)| p.when_full);
        match policy {
            OriginFull::Wait(seconds) => {
                let sleep = || inner.runtime.sleep(Duration::from_secs(u64::from(seconds)));
                if patience.left.is_none() {
                    inner.report_waiting(self.id);
                }
                let left = patience.left.get_or_insert_with(sleep);
                // Others that wait begin checkpoints, too: those alone bring nothing.
                while inner.meta.borrow().space.available() <= patience.free {
                    if !inner.wait_for_space(left).await {
                        return inner.report_if_full(self.id, Err(no_space_error()));
                    }
                    inner.check_writable()?;
                }
                Ok(())
            }
            OriginFull::DropOldest => {
                let Some(id) = self.oldest_droppable(inner) else {
                    return inner.report_if_full(self.id, Err(no_space_error()));
                };
                let dropped = inner
                    .verb(|meta| {
                        // It may have been deleted or taken into use since.
                        let found = meta.directory.get(id).filter(|_| meta.directory.is_snapshot(id));
                        let name = found.map(|v| meta.directory.full_name(&v.record));
                        Ok((Record::Delete { ids: name.iter().map(|_| id).collect() }, name))
                    })
                    .await?;
                if let Some(snapshot) = dropped {
                    inner.counters.dropped.add(1);
                    inner.report(&PoolEvent::Dropped { snapshot });
                }
                inner.reap_soon();
                inner.clone().wait_freed().await
            }
            OriginFull::Error => inner.report_if_full(self.id, Err(no_space_error())),
        }
    }

    fn oldest_droppable(&self, inner: &Inner<D>) -> Option<VolumeId> {
        let meta = inner.meta.borrow();
        let chain = meta.directory.chain(self.id)?;
        let mut all: Vec<VolumeId> = chain.chained.iter().chain(&chain.independent).copied().collect();
        all.sort_unstable();
        all.into_iter().find(|&id| {
            let idle = |v: &crate::pool::CatalogEntry| v.record.flags.droppable && !v.pending;
            meta.directory.get(id).is_some_and(idle)
                && meta.live.handles(id) == 0
                && meta.directory.clones_backed_by(id).is_none()
        })
    }
}
