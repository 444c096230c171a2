//! Flushing the device: one flush at a time, shared by all who asked before it began.
//!
//! After a flush that failed nobody knows what of the data before it is durable, and a later flush
//! may well succeed without writing it again. Were two under way at once, the second could be taken
//! for good before the failure of the first is known. So none begins before the last has ended, and
//! none at all after one has failed.

use std::cell::Cell;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::sync::Event;

use super::Inner;

/// Who flushes, and who waits for it.
#[derive(Default)]
pub struct Flushes {
    running: Cell<bool>,
    asked: Cell<u64>,
    done: Cell<u64>,
    changed: Event,
}

impl<D: Device> Inner<D> {
    /// Makes everything the device has acknowledged before this call durable. If that fails, so
    /// does the pool.
    pub async fn flush_device(&self) -> Result<()> {
        let flushes = &self.flushes;
        let ticket = flushes.asked.get() + 1;
        flushes.asked.set(ticket);
        while flushes.done.get() < ticket {
            self.check_failed()?;
            if flushes.running.get() {
                flushes.changed.wait().await;
                continue;
            }
            flushes.running.set(true);
            let covered = flushes.asked.get();
            self.counters.flushes.add(1);
            let mut outcome = self.device.flush().await.map_err(|e| Error::io("flushing the pool's device", e));
            if planted(Bug::FailedFlushRetried) && outcome.is_err() {
                outcome = self.device.flush().await.map_err(|e| Error::io("flushing the pool's device", e));
            }
            flushes.running.set(false);
            if let Err(error) = &outcome
                && !planted(Bug::FailedFlushForgotten)
            {
                self.fail(error);
            }
            flushes.done.set(covered);
            flushes.changed.notify();
            outcome?;
        }
        self.check_failed()
    }

    /// Refuses once the pool has failed.
    pub fn check_failed(&self) -> Result<()> {
        self.failed.borrow().as_ref().map_or(Ok(()), |e| Err(e.clone()))
    }
}
