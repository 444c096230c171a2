//! Settings and figures of copying: break policy, throttles, the copier.

use crate::Changes;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, CopierSettings, Record, Throttle};

use crate::store::{CopierInfo, VolumeCopying, volume_copying};

use super::Pool;

impl<D: Device> Pool<D> {
    /// Sets the break policy of the volume. A clone inherits it.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `ReadOnly` for a snapshot; and those of
    /// [changing](crate#errors).
    pub async fn set_break_policy(&self, name: &str, break_policy: BreakPolicy) -> Result<()> {
        self.set(name, &Changes { break_policy: Some(break_policy), ..Changes::default() }).await
    }

    /// Limits copies for the volume, including those under way. Clients' writes that need a copy wait with
    /// it.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `ReadOnly` for a snapshot, `Invalid` if a limit is out of its
    /// bounds; and those of [changing](crate#errors).
    pub async fn set_throttle(&self, name: &str, throttle: Throttle) -> Result<()> {
        self.set(name, &Changes { throttle: Some(throttle), ..Changes::default() }).await
    }

    /// Sets how the pool's copier works.
    ///
    /// # Errors
    /// `Invalid` if a setting is out of its bounds; and those of [changing](crate#errors).
    pub async fn set_copier(&self, settings: CopierSettings) -> Result<()> {
        if let Some(flaw) = settings.flaw() {
            return Err(Error::new(ErrorKind::Invalid, flaw));
        }
        self.store.verb(|_| Ok((Record::SetCopier { settings }, ()))).await?;
        self.store.copier.set(self.store.meta.borrow().copier);
        Ok(())
    }

    /// Settings and figures of the copier.
    pub fn copier(&self) -> CopierInfo {
        let (stats, buffers_in_use) = self.store.copier.stats();
        CopierInfo { settings: self.store.meta.borrow().copier, stats, buffers_in_use }
    }

    /// Settings and figures of one volume.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `ReadOnly` for a snapshot, for which nothing is copied.
    pub fn copying(&self, name: &str) -> Result<VolumeCopying> {
        volume_copying(&self.store, name)
    }
}
