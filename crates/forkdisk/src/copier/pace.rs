//! Pacing for transfers without a job, under the same throttles as jobs.

use std::rc::Rc;
use std::time::Duration;

use crate::device::Device;

use super::{Client, Copier};

/// Longest sleep before the next check: throttles may have changed.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// A transfer without a job on behalf of a client; ends when it is dropped.
pub struct PacedTransfer<'a, D: Device> {
    copier: &'a Copier<D>,
    client: Rc<Client>,
    since: Duration,
    bytes: u64,
}

impl<D: Device> PacedTransfer<'_, D> {
    /// Notes that `bytes` have been moved: later transfers pay for them.
    pub fn moved(&mut self, bytes: u64) {
        self.bytes += bytes;
    }
}

impl<D: Device> Drop for PacedTransfer<'_, D> {
    fn drop(&mut self) {
        self.copier.0.charge(&self.client, self.bytes, self.since);
    }
}

impl<D: Device> Copier<D> {
    /// Returns the most bytes to move at a time on behalf of `client`; `None` if no throttle limits it.
    pub fn stride(&self, client: &Client) -> Option<u64> {
        let settings = self.settings();
        let held = !client.throttle().is_none() || !settings.throttle.is_none();
        held.then_some(u64::from(settings.subjob_size))
    }

    /// Waits until the throttles of the pool and of `client` allow more; returns `None` if `goes_on`, which
    /// is called from time to time, returns false before that. What is moved until the returned value is
    /// dropped counts for both throttles, but as if it came after everything else: such a transfer may wait
    /// for a task whose copy must not wait for the transfer.
    pub async fn pace(&self, client: &Rc<Client>, mut goes_on: impl FnMut() -> bool) -> Option<PacedTransfer<'_, D>> {
        let mut held = false;
        while let Some(wait) = self.0.wait(client, held) {
            held = true;
            if !goes_on() {
                return None;
            }
            self.0.runtime.sleep(wait.min(MAX_SLEEP)).await;
        }
        Some(PacedTransfer { copier: self, client: client.clone(), since: self.0.runtime.now(), bytes: 0 })
    }
}
