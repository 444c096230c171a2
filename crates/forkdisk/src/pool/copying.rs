//! Settings and figures of copying: break policy, throttles, the copier.

use crate::Changes;
use crate::copier::CopyStats;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, CopierSettings, Record, Throttle, VolumeState};

use super::Pool;

/// Settings and figures of a pool's copier.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CopierInfo {
    /// Its settings.
    pub settings: CopierSettings,
    /// Figures of all copies since the pool was opened.
    pub stats: CopyStats,
    /// Bytes of buffers in use.
    pub buffers_in_use: u64,
}

/// Settings and figures of the copies of a volume.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct VolumeCopying {
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// Limit of its copies, besides that of the pool.
    pub throttle: Throttle,
    /// Figures of its copies since the pool was opened.
    pub stats: CopyStats,
}

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
        let meta = self.store.meta.borrow();
        let volume = meta.directory.find(name)?;
        let (VolumeState::Volume | VolumeState::Origin) = volume.record.state else {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{name:?} is a snapshot; nothing is copied for it")));
        };
        let (break_policy, throttle) = (volume.record.break_policy, volume.record.throttle);
        Ok(VolumeCopying {
            break_policy,
            throttle,
            stats: self
                .store
                .live
                .borrow()
                .activity(volume.record.id)
                .map_or_else(Default::default, |activity| activity.copies.stats()),
        })
    }
}
