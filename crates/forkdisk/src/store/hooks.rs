//! Calls from the store, and from volumes, to the layers above them.

use std::cell::OnceCell;
use std::rc::{Rc, Weak};

use crate::catalog::Catalog;
use crate::error::{Error, ErrorKind, Result};
use crate::runtime::LocalFuture;
use crate::types::VolumeId;

/// Calls from the store and from volumes to the layers above them.
pub trait Hooks {
    /// Whether origins have to be flushed before records of new snapshots become durable.
    fn has_unflushed_snapshots(&self) -> bool;
    /// Flushes them. Snapshots of an origin whose flush fails are deleted with the same commit.
    fn flush_snapshotted_origins(&self) -> LocalFuture<Result<()>>;
    /// Flushes origins that were written.
    fn flush_origins(&self) -> LocalFuture<()>;
    /// Waits until all deleted space is free and reusable.
    fn wait_freed(&self) -> LocalFuture<Result<()>>;
    /// There may be space of deleted volumes to free.
    fn reap_soon(&self);
    /// There may be pages to gather.
    fn gather_soon(&self);
    /// `copy` has just become a clone of `source`.
    fn note_cloned(&self, catalog: &Catalog, source: VolumeId, copy: VolumeId);
}

/// The hooks of a store; none once the pool and its volumes were dropped.
#[derive(Default)]
pub struct StoreHooks(OnceCell<Weak<dyn Hooks>>);

impl StoreHooks {
    /// Connects the layers above.
    ///
    /// # Panics
    /// If there are some already.
    pub fn connect(&self, hooks: Weak<dyn Hooks>) {
        assert!(self.0.set(hooks).is_ok(), "a store has one upkeep");
    }

    /// The layers above; none while the pool is being opened or dropped.
    pub fn get(&self) -> Option<Rc<dyn Hooks>> {
        self.0.get().and_then(Weak::upgrade)
    }

    /// Whether origins have to be flushed before records of new snapshots become durable.
    pub fn has_unflushed_snapshots(&self) -> bool {
        self.get().is_some_and(|hooks| hooks.has_unflushed_snapshots())
    }

    /// Before records become durable: flushes the origins of new snapshots.
    pub async fn flush_snapshotted_origins(&self) -> Result<()> {
        match self.get().filter(|hooks| hooks.has_unflushed_snapshots()) {
            Some(hooks) => hooks.flush_snapshotted_origins().await,
            None => Ok(()),
        }
    }

    /// Waits until all deleted space is free and reusable.
    pub async fn wait_freed(&self) -> Result<()> {
        match self.get() {
            Some(hooks) => hooks.wait_freed().await,
            None => Err(Error::new(ErrorKind::Failed, "the pool has been dropped")),
        }
    }

    /// Starts freeing space of deleted volumes if there is some.
    pub fn reap_soon(&self) {
        if let Some(hooks) = self.get() {
            hooks.reap_soon();
        }
    }

    /// `copy` has just become a clone of `source`.
    pub fn note_cloned(&self, catalog: &Catalog, source: VolumeId, copy: VolumeId) {
        if let Some(hooks) = self.get() {
            hooks.note_cloned(catalog, source, copy);
        }
    }

    /// Starts gathering pages if some are scattered.
    pub fn gather_soon(&self) {
        if let Some(hooks) = self.get() {
            hooks.gather_soon();
        }
    }
}
