//! What happens to a pool without anybody asking for it, for whoever tells people.

use crate::device::Device;

use super::{Inner, Pool};

/// Something that nobody asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolEvent {
    /// An origin's oldest droppable snapshot was deleted, durably, because the pool is full.
    Dropped {
        /// As `volume@snapshot`.
        snapshot: String,
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
    pub fn tell(&self, event: &PoolEvent) {
        if let Some(observer) = &*self.observer.borrow() {
            observer(event);
        }
    }
}
