//! Events of a pool that no request asked for, for logs and notifications.

use crate::device::Device;
use crate::error::{ErrorKind, Result};
use crate::types::VolumeId;

use super::Store;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolEvent {
    /// An origin's oldest droppable snapshot was deleted, durably, because the pool is full.
    Dropped {
        /// As `volume@snapshot`.
        snapshot: String,
    },
    /// A write found no space in the pool or the host file system, and waits for some. Reported for each
    /// write.
    WaitsForSpace {
        /// The volume's name; empty if it has none.
        volume: String,
    },
    /// A write failed for lack of space. Reported for each write.
    OutOfSpace {
        /// The volume's name; empty if it has none.
        volume: String,
    },
}

/// Receiver of events.
pub type Observer = Box<dyn Fn(&PoolEvent)>;

/// Reports that a write to `id` waits for space.
pub fn report_waiting<D: Device>(store: &Store<D>, id: VolumeId) {
    if let Some(volume) = name_to_report(store, id) {
        report(store, &PoolEvent::WaitsForSpace { volume });
    }
}

/// Reports that a write to `id` fails, if `outcome` is a lack of space.
pub fn report_if_full<D: Device, T>(store: &Store<D>, id: VolumeId, outcome: Result<T>) -> Result<T> {
    if outcome.as_ref().is_err_and(|e| e.kind() == ErrorKind::NoSpace)
        && let Some(volume) = name_to_report(store, id)
    {
        report(store, &PoolEvent::OutOfSpace { volume });
    }
    outcome
}

/// The name of a volume; `None` without a receiver.
fn name_to_report<D: Device>(store: &Store<D>, id: VolumeId) -> Option<String> {
    store.observer.borrow().as_ref()?;
    let meta = store.meta.borrow();
    Some(meta.directory.get(id).map_or_else(String::new, |v| meta.directory.full_name(&v.record)))
}

pub fn report<D: Device>(store: &Store<D>, event: &PoolEvent) {
    if let Some(observer) = &*store.observer.borrow() {
        observer(event);
    }
}
