//! What happens to a pool without anybody asking for it, for whoever tells people.

use crate::device::Device;
use crate::error::{ErrorKind, Result};
use crate::types::VolumeId;

use super::{Inner, Pool};

/// Something that nobody asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolEvent {
    /// An origin's oldest droppable snapshot was deleted, durably, because the pool is full.
    Dropped {
        /// As `volume@snapshot`.
        snapshot: String,
    },
    /// A write found no space, be it in the pool or in the file system under it, and waits for some. Each is told.
    WaitsForSpace {
        /// The volume's name; empty if it has none.
        volume: String,
    },
    /// A write found no space and fails. Each is told.
    OutOfSpace {
        /// The volume's name; empty if it has none.
        volume: String,
    },
}

/// Whoever is told of them.
pub type Observer = Box<dyn Fn(&PoolEvent)>;

impl<D: Device> Pool<D> {
    /// Has `observer` told of every event from now on; whoever was told before is not any more. It must not wait, nor
    /// use the pool.
    pub fn observe(&self, observer: impl Fn(&PoolEvent) + 'static) {
        *self.0.observer.borrow_mut() = Some(Box::new(observer));
    }
}

impl<D: Device> Inner<D> {
    /// Tells that a write to `id` waits for space.
    pub fn report_waiting(&self, id: VolumeId) {
        if let Some(volume) = self.name_to_report(id) {
            self.report(&PoolEvent::WaitsForSpace { volume });
        }
    }

    /// Tells that a write to `id` fails, if `outcome` is that it found no space.
    pub fn report_if_full<T>(&self, id: VolumeId, outcome: Result<T>) -> Result<T> {
        if outcome.as_ref().is_err_and(|e| e.kind() == ErrorKind::NoSpace)
            && let Some(volume) = self.name_to_report(id)
        {
            self.report(&PoolEvent::OutOfSpace { volume });
        }
        outcome
    }

    /// The name of a volume; nothing while no observer is there.
    fn name_to_report(&self, id: VolumeId) -> Option<String> {
        self.observer.borrow().as_ref()?;
        let meta = self.meta.borrow();
        Some(meta.directory.get(id).map_or_else(String::new, |v| meta.directory.full_name(&v.record)))
    }

    pub fn report(&self, event: &PoolEvent) {
        if let Some(observer) = &*self.observer.borrow() {
            observer(event);
        }
    }
}
