//! Flushing the pool's device.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::planted::correct;

use super::Store;

impl<D: Device> Store<D> {
    /// Makes everything durable that the device acknowledged before this call. A failure fails the pool. Must not be
    /// dropped before it ends.
    pub async fn flush_device(&self) -> Result<()> {
        let request = self.flushes.request();
        while !self.flushes.is_done(request) {
            self.check_failed()?;
            let Some(running) = self.flushes.begin() else {
                self.flushes.wait().await;
                continue;
            };
            let flushed = flush_now(self).await;
            running.end();
            flushed?;
        }
        self.check_failed()
    }

    /// Refuses after a failure of the pool.
    pub fn check_failed(&self) -> Result<()> {
        self.failed.borrow().as_ref().map_or(Ok(()), |e| Err(e.clone()))
    }
}

async fn flush_now<D: Device>(store: &Store<D>) -> Result<()> {
    store.counters.flushes.add(1);
    let once = async || store.device.flush().await.map_err(|e| Error::io("flushing the pool's device", e));
    let outcome = correct!(
        once().await,
        Bug::FailedFlushRetried => match once().await {
            Ok(()) => Ok(()),
            Err(_) => once().await,
        }
    );
    if let Some(error) = correct!(outcome.as_ref().err(), Bug::FailedFlushForgotten => None) {
        store.fail(error);
        // The state of the data that records map is unknown from here on.
        super::end_volatile(store);
    }
    outcome
}
