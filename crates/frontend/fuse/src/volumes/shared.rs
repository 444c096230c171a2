//! Volumes that others change, too: what the kernel has cached of them is taken from it before the change is
//! acknowledged, so that a program that reads the file afterwards finds it.
//!
//! A file that nobody has open needs nothing: without [`KEEP_CACHE`](crate::codec::open_flags::KEEP_CACHE) the kernel
//! forgets what it has of it with the next open.

use forkdisk::{Device, VolumeId};

use super::{Failed, InUse, Outcome, nodes::Node};
use super::{Volumes, Watcher};
use crate::off_thread::off_thread;

impl<D: Device> Volumes<D> {
    /// Says that `len` bytes of a volume from `offset` on (0: all to its end), or its length, were changed by
    /// another way than this mount. When it returns, programs read what is there now.
    pub async fn changed(&self, id: VolumeId, offset: u64, len: u64) {
        let (true, Some(notifier)) = (self.is_open(id), self.notifier.get().cloned()) else { return };
        let node = self.nodes.borrow().number(&Node::Volume(id));
        if let Err(error) = off_thread(move || notifier.forget(node, offset, len)).await {
            // The mount is going: nobody reads from it any more.
            tracing::debug!(%error, node, "what the kernel has cached stays");
        }
    }

    /// Has `watcher` told of all that is changed through this mount. There can be one.
    pub fn watch(&self, watcher: Watcher) {
        let _ = self.watcher.set(watcher);
    }

    /// `in_use` is asked before a volume is removed, replaced or shortened.
    pub fn guard(&self, in_use: InUse) {
        let _ = self.in_use.set(in_use);
    }

    /// Refuses what would take a volume, or a part of it, from under others.
    pub(super) fn check_unused(&self, name: &str) -> Outcome<()> {
        if self.in_use.get().is_some_and(|in_use| in_use(name)) { Err(Failed(libc::EBUSY)) } else { Ok(()) }
    }

    /// `len` bytes of a volume from `offset` on (0: all to its end), or its length, were changed through this mount.
    pub(super) async fn tell(&self, id: VolumeId, offset: u64, len: u64) {
        if let Some(watcher) = self.watcher.get() {
            watcher(id, offset, len).await;
        }
    }

    /// Whether a program has the volume's file open.
    pub fn is_open(&self, id: VolumeId) -> bool {
        self.files.borrow().iter().any(|(_, file)| file.volume.id() == id)
    }
}
