//! Checking, comparing, gathering and freeing space.

use std::rc::Rc;

use crate::Changes;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{GatherPolicy, NO_VOLUME, VolumeState};
use crate::runtime::Runtime;
use crate::upkeep::{self, CheckReport, GatherReport, Repair, Usage};
use crate::volume::{DiffPart, DiffRun, FlattenReport, compare};

use super::Pool;

impl<D: Device> Pool<D> {
    /// Counts every reference again and compares with the counts: in memory, or, if writers are active, in a
    /// view of the next checkpoint. Writers and checkpoints do not wait. `Busy` if the free space is too
    /// small to hold the view.
    ///
    /// # Errors
    /// `Busy` if the free space is too small to hold the view, `Corrupt` if damage ends the walk; and those
    /// of [reading](crate#errors). Damage that can be listed is part of the report.
    pub async fn check(&self) -> Result<CheckReport> {
        self.upkeep.check().await
    }

    /// Computes the counts of the pool on `device` from its maps without writing. All new count pages are
    /// held in memory: one page per seven MiB in use. `Corrupt`, with the place, if a map or the directory is
    /// damaged.
    ///
    /// # Errors
    /// `Corrupt` if a map or the directory is damaged, which no repair mends; those of [`open`](Self::open).
    pub async fn plan_repair(device: D, runtime: Rc<dyn Runtime>) -> Result<Repair<D>> {
        upkeep::plan_repair(device, runtime).await
    }

    /// How much a volume or snapshot refers to, and how much of it is exclusive.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume; and those of [`check`](Self::check).
    pub async fn usage(&self, name: &str) -> Result<Usage> {
        self.upkeep.usage(name).await
    }

    /// Bytes that deleting all of `names` together would free, data and tables.
    ///
    /// # Errors
    /// `NotFound` if one of them does not exist; and those of [`check`](Self::check).
    pub async fn freed_by(&self, names: &[&str]) -> Result<u64> {
        self.upkeep.freed_by(names).await
    }

    /// Like [`freed_by`](Self::freed_by) for each of several lists of names, at one instant. Writers do not
    /// wait; see [`check`](Self::check).
    ///
    /// # Errors
    /// `NotFound` if one of them does not exist; and those of [`check`](Self::check).
    pub async fn freed_by_each(&self, lists: &[Vec<&str>]) -> Result<Vec<u64>> {
        self.upkeep.freed_by_each(lists).await
    }

    /// Compares two volumes or snapshots page by page; shared tables are skipped as a whole. Runs are in
    /// ascending order, neighbours of one class merged. Concurrent writes may or may not be seen.
    ///
    /// # Errors
    /// `NotFound` if one of them does not exist; and those of [`check`](Self::check).
    pub async fn diff(&self, left: &str, right: &str) -> Result<Vec<DiffRun>> {
        Ok(compare::diff_part(&self.store, left, right, 0, usize::MAX).await?.runs)
    }

    /// Like [`diff`](Self::diff), from byte `from` on (0, or the end of the previous part), at most `max`
    /// runs and at least one. A run may continue in the next part.
    ///
    /// # Errors
    /// Those of [`diff`](Self::diff).
    pub async fn diff_part(&self, left: &str, right: &str, from: u64, max: usize) -> Result<DiffPart> {
        compare::diff_part(&self.store, left, right, from, max).await
    }

    /// Gathers the scattered pages of a volume or snapshot, as far as that unshares nothing. Calls `progress`
    /// with the bytes examined and their total; ends when it returns false. Limited by the copier's
    /// throttles; reads, writes and verbs continue meanwhile. Refused while another call gathers the same
    /// volume.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `Busy` if another call gathers it; and those of
    /// [changing](crate#errors).
    pub async fn gather(&self, name: &str, progress: impl FnMut(u64, u64) -> bool) -> Result<GatherReport> {
        self.upkeep.gather(name, progress).await
    }

    /// Sets when the volume's scattered pages are gathered by policy. A clone has the policy of its source.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `ReadOnly` for a snapshot, `Invalid` for a percentage out of
    /// its bounds; and those of [changing](crate#errors).
    pub async fn set_gather(&self, name: &str, gather: GatherPolicy) -> Result<()> {
        self.set(name, &Changes { gather: Some(gather), ..Changes::default() }).await
    }

    /// Resolves when nothing is being gathered by policy, and nothing is due.
    pub async fn wait_gathered(&self) {
        self.upkeep.wait_gathered().await
    }

    /// Makes a clone of an origin's snapshot independent: copies what it reads from the snapshot. `progress`
    /// gets the bytes done and the total; if it returns false, the call ends, what was copied stays, and the
    /// next call continues. Reads and writes continue meanwhile. Without space the clone stays as it is.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, `Invalid` if it is no clone of an origin's snapshot, `Busy` if
    /// the device of the origin is not open; and those of [changing](crate#errors).
    pub async fn flatten(&self, name: &str, progress: impl FnMut(u64, u64) -> bool) -> Result<FlattenReport> {
        self.store.check_writable()?;
        {
            let meta = self.store.meta.borrow();
            let record = &meta.directory.find(name)?.record;
            let refused = |why: &str| Err(Error::new(ErrorKind::Invalid, format!("{name:?} {why}")));
            match record.state {
                VolumeState::Origin => return refused("is an origin; what is flattened is a clone of its snapshot"),
                VolumeState::Snapshot => return refused("is a snapshot and stays as it is; clone it and flatten that"),
                _ if record.base == NO_VOLUME => return refused("depends on no origin: nothing is to be flattened"),
                _ => {}
            }
        }
        self.volume(name)?.flatten(progress).await
    }
}
