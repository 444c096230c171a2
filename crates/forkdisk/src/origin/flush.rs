//! Flushing an origin's device.

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};

use super::Origin;

impl<D: Device> Origin<D> {
    /// Makes all earlier writes to the origin durable. After a failure it accepts no writes until it is
    /// opened again. Must not be dropped before it ends.
    pub async fn flush(&self) -> Result<()> {
        let request = self.flushes.request();
        while !self.flushes.is_done(request) {
            self.check_alive()?;
            let Some(running) = self.flushes.begin() else {
                self.flushes.wait().await;
                continue;
            };
            self.counters.flushes.add(1);
            self.is_dirty.set(false);
            let flushed = self.device.flush().await.map_err(|e| Error::io("flushing the origin's device", e));
            if let Err(error) = &flushed {
                let message = format!("{error}; the origin refuses writes until it is opened again");
                self.failed.borrow_mut().get_or_insert(Error::new(ErrorKind::Failed, message));
            }
            running.end();
            flushed?;
        }
        self.check_alive()
    }
}
