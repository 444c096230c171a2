//! Flushing an origin's device: one flush at a time, shared by all who asked before it began, and
//! none after one has failed (as `pool/flush.rs` does for the pool's).

use std::cell::Cell;

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Event;

use super::Origin;

/// Who flushes, and who waits for it.
#[derive(Default)]
pub struct Flushes {
    running: Cell<bool>,
    asked: Cell<u64>,
    done: Cell<u64>,
    changed: Event,
}

impl<D: Device> Origin<D> {
    /// Makes everything written to the origin before this call durable. If that fails, it takes no
    /// more writes until it is opened again.
    pub async fn flush(&self) -> Result<()> {
        let flushes = &self.flushes;
        let ticket = flushes.asked.get() + 1;
        flushes.asked.set(ticket);
        while flushes.done.get() < ticket {
            self.check_alive()?;
            if flushes.running.get() {
                flushes.changed.wait().await;
                continue;
            }
            flushes.running.set(true);
            let covered = flushes.asked.get();
            let outcome = self.device.flush().await.map_err(|e| Error::io("flushing the origin's device", e));
            flushes.running.set(false);
            if let Err(error) = &outcome {
                let message = format!("{error}; the origin refuses writes until it is opened again");
                self.failed.borrow_mut().get_or_insert(Error::new(ErrorKind::Failed, message));
            }
            flushes.done.set(covered);
            flushes.changed.notify();
            outcome?;
        }
        self.check_alive()
    }
}
