//! Walks over all of several maps, which must not change meanwhile.
//!
//! A walk holds entries while it waits for the device. That is safe only as long as nothing has
//! changed: every step looks first, and if something has, the whole walk begins again.

use crate::device::Device;
use crate::error::{ErrorKind, Result};
use crate::sync::Hold;

use super::load::changed;
use super::{Failure, Inner, Meta};

/// How often a walk begins again.
const ATTEMPTS: usize = 50;

/// What the metadata was when a walk began: different whenever a reference is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    records: u64,
    checkpoint: u64,
    unwritten: usize,
    dirty: usize,
}

impl<D: Device> Inner<D> {
    /// Runs `walk` until nothing has changed under it; after some attempts it is `Busy`. Nothing is
    /// reaped meanwhile.
    pub async fn walk<T>(&self, walk: impl AsyncFn(Walk) -> Result<T>) -> Result<T> {
        for _ in 0..ATTEMPTS {
            let _still = self.reap_lock.lock(0..1, Hold::Alone).await;
            let now = self.state_of(&self.meta.borrow());
            match walk(now).await {
                Err(e) if e.kind() == ErrorKind::Busy => {}
                outcome if self.state_of(&self.meta.borrow()) == now => return outcome,
                _ => {}
            }
        }
        Err(changed())
    }

    /// Refuses a step of a walk under which something has changed.
    pub fn still(&self, meta: &Meta, walk: Walk) -> std::result::Result<(), Failure> {
        if self.state_of(meta) == walk { Ok(()) } else { Err(Failure::Changed) }
    }

    fn state_of(&self, meta: &Meta) -> Walk {
        Walk {
            records: meta.journal.appended(),
            checkpoint: self.superblock.borrow().generation,
            unwritten: meta.tables.unwritten(),
            dirty: meta.tables.dirty(),
        }
    }
}
