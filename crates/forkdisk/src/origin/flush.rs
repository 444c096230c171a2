//! Flushing an origin's device.

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};

use super::Origin;

impl<D: Device> Origin<D> {
    /// Makes all earlier writes to the origin durable. After a failure it accepts no writes until it is
    /// opened again.
    pub async fn flush(&self) -> Result<()> {
        let flush = async || {
            self.counters.flushes.add(1);
            self.is_dirty.set(false);
            let outcome = self.device.flush().await.map_err(|e| Error::io("flushing the origin's device", e));
            if let Err(error) = &outcome {
                let message = format!("{error}; the origin refuses writes until it is opened again");
                self.failed.borrow_mut().get_or_insert(Error::new(ErrorKind::Failed, message));
            }
            outcome
        };
        self.flushes.join(|| self.check_alive(), flush).await
    }
}
