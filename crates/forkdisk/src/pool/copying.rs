//! What can be set and asked about copying: break policy, throttles, the copier's settings.

use crate::copier::CopyStats;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, CopierSettings, Record, Throttle, VolumeState};

use super::Pool;
use super::verbs::writable_volume;

/// A pool's copier: how it works, and what it has done since the pool was opened.
#[derive(Clone, Copy, Debug)]
pub struct CopierInfo {
    /// Its settings.
    pub settings: CopierSettings,
    /// Figures of everything that was copied.
    pub stats: CopyStats,
    /// Bytes of buffers in use.
    pub buffers_in_use: u64,
}

/// How a volume's data is copied, and what has been copied for it since the pool was opened.
#[derive(Clone, Copy, Debug)]
pub struct VolumeCopying {
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// What its copies are held to, beside what all copies of the pool are.
    pub throttle: Throttle,
    /// Figures of what was copied for it.
    pub stats: CopyStats,
}

impl<D: Device> Pool<D> {
    /// What a first write to a shared chunk of the volume does from now on. A clone has the policy
    /// of what it was cloned from.
    pub async fn set_break_policy(&self, name: &str, break_policy: BreakPolicy) -> Result<()> {
        self.set_copying(name, |_, throttle| (break_policy, throttle)).await
    }

    /// What copies for the volume are held to from now on, those under way included. Clients' writes
    /// that need a copy wait with it.
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
        self.0
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
        self.0.copier.throttle_changed();
        Ok(())
    }

    /// How the pool's copier works from now on.
    pub async fn set_copier(&self, settings: CopierSettings) -> Result<()> {
        if let Some(flaw) = settings.flaw() {
            return Err(Error::new(ErrorKind::Invalid, flaw));
        }
        self.0.verb(|_| Ok((Record::SetCopier { settings }, ()))).await?;
        self.0.copier.set(self.0.meta.borrow().copier);
        Ok(())
    }

    /// The pool's copier.
    pub fn copier(&self) -> CopierInfo {
        let (stats, buffers_in_use) = self.0.copier.stats();
        CopierInfo { settings: self.0.meta.borrow().copier, stats, buffers_in_use }
    }

    /// How one volume's data is copied.
    pub fn copying(&self, name: &str) -> Result<VolumeCopying> {
        let meta = self.0.meta.borrow();
        let volume = meta.directory.find(name)?;
        let (VolumeState::Volume | VolumeState::Origin) = volume.record.state else {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{name:?} is a snapshot; nothing is copied for it")));
        };
        let (break_policy, throttle) = (volume.record.break_policy, volume.record.throttle);
        Ok(VolumeCopying {
            break_policy,
            throttle,
            stats: meta
                .live
                .activity(volume.record.id)
                .map_or_else(Default::default, |activity| activity.copies.stats()),
        })
    }
}
