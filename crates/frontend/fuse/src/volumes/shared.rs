//! Volumes that are also changed other than through the mount: the kernel's cache for them is
//! dropped before the change is acknowledged, so that later reads of the file see it.
//!
//! For a file that is not open nothing is dropped: at the next open the kernel is told to drop its cache if the volume
//! was changed meanwhile (`opens.rs`).

use forkdisk::{Device, VolumeId};

use super::{Failed, InUse, Outcome, nodes::Node};
use super::{Volumes, Watcher};
use crate::off_thread::off_thread;

impl<D: Device> Volumes<D> {
    /// Reports that `len` bytes of a volume from `offset` (0: to its end), or its length, were
    /// changed other than through this mount. After it returns, programs read the new contents.
    pub async fn changed(&self, id: VolumeId, offset: u64, len: u64) {
        let (true, Some(notifier)) = (self.is_open(id), self.notifier.get().cloned()) else { return };
        let node = self.nodes.borrow().number(&Node::Volume(id));
        if let Err(error) = off_thread(move || notifier.forget(node, offset, len)).await {
            // The mount is ending: it is not read any more.
            tracing::debug!(%error, node, "what the kernel has cached stays");
        }
    }

    /// Sets the watcher that is called for each change through this mount. Only the first call has an effect.
    pub fn watch(&self, watcher: Watcher) {
        let _ = self.watcher.set(watcher);
    }

    /// Sets `in_use`, which is called before a volume is removed, replaced or shortened.
    pub fn guard(&self, in_use: InUse) {
        let _ = self.in_use.set(in_use);
    }

    /// Refuses to remove or shorten a volume that is in use elsewhere.
    pub(super) fn check_unused(&self, name: &str) -> Outcome<()> {
        if self.in_use.get().is_some_and(|in_use| in_use(name)) { Err(Failed(libc::EBUSY)) } else { Ok(()) }
    }

    /// Tells the watcher that `len` bytes of a volume from `offset` (0: to its end), or its length,
    /// were changed here.
    pub(super) async fn tell(&self, id: VolumeId, offset: u64, len: u64) {
        if let Some(watcher) = self.watcher.get() {
            watcher(id, offset, len).await;
        }
    }

    /// Returns whether a program has the volume's file open.
    pub fn is_open(&self, id: VolumeId) -> bool {
        self.opens.borrow().has(id)
    }
}
