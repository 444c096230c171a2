//! Settings and figures of copying: break policy, throttles, the copier.

use super::Pool;
use crate::catalog::writable_volume;
use crate::copier::CopyStats;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, CopierSettings, Record, Throttle, VolumeState};

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
    pub async fn set_break_policy(&self, name: &str, break_policy: BreakPolicy) -> Result<()> {
        self.set_copying(name, |_, throttle| (break_policy, throttle)).await
    }

    /// Limits copies for the volume, including those under way. Clients' writes that need a copy wait with
    /// it.
    pub async fn set_throttle(&self, name: &str, throttle: Throttle) -> Result<()> {
        if !throttle.is_valid() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "bad throttle: 1% to 100%, and whole KiB per second up to 4 TiB",
            ));
        }
        self.set_copying(name, |policy, _| (policy, throttle)).await
    }

    async fn set_copying(
        &self,
        name: &str,
        change: impl FnOnce(BreakPolicy, Throttle) -> (BreakPolicy, Throttle),
    ) -> Result<()> {
        self.store
            .verb(|meta| {
                let volume = meta.directory.find(name)?;
                let id = match volume.record.state {
                    VolumeState::Origin => volume.record.id,
                    _ => writable_volume(volume, name)?,
                };
                let (break_policy, throttle) = change(volume.record.break_policy, volume.record.throttle);
                Ok((Record::SetCopying { id, break_policy, throttle }, ()))
            })
            .await?;
        self.store.copier.throttle_changed();
        Ok(())
    }

    /// Sets how the pool's copier works.
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
