//! Upkeep: what runs in the background or walks all metadata: freeing the space of deleted volumes, gathering
//! scattered pages, checking and comparing.

mod charged;
mod check;
mod gather;
mod identity;
mod reap;
mod repair;
mod usage;
mod walk;

use std::rc::{Rc, Weak};

use crate::catalog::Catalog;
use crate::device::Device;
use crate::error::Result;
use crate::origin::Origins;
use crate::runtime::LocalFuture;
use crate::store::{Hooks, Store};
use crate::sync::RangeLocks;
use crate::types::VolumeId;
pub use check::CheckReport;
pub use gather::GatherReport;
pub use identity::{set_heartbeat, set_uuid};
pub use reap::ignore_no_space;
pub use repair::{Repair, Replacement, plan_repair, replace_pages};
pub use usage::Usage;

/// The background work of a pool.
pub struct Upkeep<D: Device> {
    pub store: Rc<Store<D>>,
    pub origins: Rc<Origins<D>>,
    /// Held by the reaper during a step, and by a check so that nothing is reaped meanwhile.
    reap_lock: Rc<RangeLocks>,
    this: Weak<Upkeep<D>>,
    /// The scheduler of gathering.
    gathering: gather::GatherScheduler,
}

impl<D: Device> Upkeep<D> {
    /// The upkeep of a pool; nothing runs yet.
    pub fn new(store: &Rc<Store<D>>, origins: &Rc<Origins<D>>) -> Rc<Upkeep<D>> {
        let upkeep = Rc::new_cyclic(|this: &Weak<Upkeep<D>>| Upkeep {
            store: store.clone(),
            origins: origins.clone(),
            reap_lock: Rc::default(),
            this: this.clone(),
            gathering: Default::default(),
        });
        store.hooks.connect(upkeep.this.clone());
        upkeep
    }
}

impl<D: Device> Hooks for Upkeep<D> {
    fn has_unflushed_snapshots(&self) -> bool {
        self.origins.has_unflushed_snapshots()
    }

    fn flush_snapshotted_origins(&self) -> LocalFuture<Result<()>> {
        let origins = self.origins.clone();
        Box::pin(async move { origins.flush_snapshotted_origins().await })
    }

    fn flush_origins(&self) -> LocalFuture<()> {
        let origins = self.origins.clone();
        Box::pin(async move { origins.flush_origins().await })
    }

    fn wait_freed(&self) -> LocalFuture<Result<()>> {
        let this = self.this.clone();
        Box::pin(async move {
            match this.upgrade() {
                Some(upkeep) => upkeep.free_deleted().await,
                None => Ok(()),
            }
        })
    }

    fn reap_soon(&self) {
        self.start_reaping();
    }

    fn gather_soon(&self) {
        self.start_gathering();
    }

    fn note_cloned(&self, catalog: &Catalog, source: VolumeId, copy: VolumeId) {
        if let (Some(source), Some(copy)) = (catalog.directory.get(source), catalog.directory.get(copy)) {
            self.gathering.note_clone(&source.record, &copy.record);
        }
    }
}
