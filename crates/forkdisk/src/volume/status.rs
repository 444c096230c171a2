//! Which parts of a range are mapped, exclusive, or changed since a snapshot: from the map alone, in bounded
//! portions.
//!
//! Each call looks at no more runs of the map than `looks` and describes the front of its range up to there.
//! It reads and changes no data. Concurrent writes may or may not be seen.

use crate::device::Device;
use crate::error::Result;
use crate::map::{Stop, lookup};
use crate::types::{PAGE_BYTES, VirtualPage};
use crate::volume::compare;

use super::Volume;
use super::backing::Backing;

/// Pages of a run whose counts are looked up in one step.
const PAGES_PER_STEP: u64 = 256;

/// Which volumes refer to a part of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// None: a hole, which reads as zeroes.
    Hole,
    /// Only this volume or snapshot.
    Own,
    /// Other volumes or snapshots, too.
    Shared,
}

/// A run of bytes with one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatusRun<T> {
    /// Bytes; never 0.
    pub len: u64,
    /// The value.
    pub value: T,
}

/// Appends a run; merges neighbours with the same value.
fn push<T: PartialEq>(runs: &mut Vec<StatusRun<T>>, len: u64, value: T) {
    match runs.last_mut() {
        Some(last) if last.value == value => last.len += len,
        _ => runs.push(StatusRun { len, value }),
    }
}

impl<D: Device> Volume<D> {
    /// Data and holes from `offset` on, looking at no more than `looks` runs of the map (at least one).
    ///
    /// # Errors
    /// `Invalid` for a range past the end; and those of [reading](crate#errors).
    pub async fn allocation(&self, offset: u64, len: u64, looks: usize) -> Result<Vec<StatusRun<bool>>> {
        self.check_range(offset, len)?;
        let (mut at, end) = (offset, offset + len);
        let mut runs = Vec::new();
        for _ in 0..looks.max(1) {
            if at >= end {
                break;
            }
            let first = VirtualPage(at / PAGE_BYTES);
            let run = self.store.retry_no_alloc(|meta| {
                let record = meta.directory.of_handle(self.id);
                Ok(lookup(&mut meta.tables, record, first, end.div_ceil(PAGE_BYTES) - first.0).map_err(Stop::from)?)
            });
            let run = run.await?;
            let stop = ((first.0 + run.len) * PAGE_BYTES).min(end);
            push(&mut runs, stop - at, run.data.is_some() || self.has_backing());
            at = stop;
        }
        Ok(runs)
    }

    /// Which volumes refer to each page from `offset` on, looking at no more than `looks` runs of the map (at
    /// least one).
    ///
    /// # Errors
    /// `Invalid` for a range past the end; and those of [reading](crate#errors).
    pub async fn sharing(&self, offset: u64, len: u64, looks: usize) -> Result<Vec<StatusRun<Sharing>>> {
        self.check_range(offset, len)?;
        let (mut at, end) = (offset, offset + len);
        let mut runs = Vec::new();
        for _ in 0..looks.max(1) {
            if at >= end {
                break;
            }
            let first = VirtualPage(at / PAGE_BYTES);
            let (pages, sharing) = self.sharing_of(first, end.div_ceil(PAGE_BYTES) - first.0).await?;
            let stop = ((first.0 + pages) * PAGE_BYTES).min(end);
            push(&mut runs, stop - at, sharing);
            at = stop;
        }
        Ok(runs)
    }

    /// Pages from `first` on with one answer. The counts of every page are needed: one page of a run may have
    /// lost its other references long before its neighbours.
    async fn sharing_of(&self, first: VirtualPage, max: u64) -> Result<(u64, Sharing)> {
        let step = self.store.retry_no_alloc(|meta| {
            let (mut editor, record) = meta.handle_editor(self.id);
            let run = lookup(editor.tables, record, first, max).map_err(Stop::from)?;
            let Some((_, birth)) = run.data else {
                let through = match self.backing() {
                    Backing::None => Sharing::Hole,
                    Backing::Origin(_) => Sharing::Own,
                    Backing::Snapshot(..) => Sharing::Shared,
                };
                return Ok((run.len, through));
            };
            if !self.read_only && birth > record.shared_at {
                return Ok((run.len, Sharing::Own));
            }
            let is_own = editor.is_alone(record, first)?;
            let mut pages = 1;
            while pages < run.len.min(PAGES_PER_STEP)
                && editor.is_alone(record, VirtualPage(first.0 + pages))? == is_own
            {
                pages += 1;
            }
            Ok((pages, if is_own { Sharing::Own } else { Sharing::Shared }))
        });
        step.await
    }

    /// Where this volume may differ from `other`, from `offset` on, looking at no more than `looks` runs of
    /// the maps (at least one). Shared pages are equal; where the pages differ or only one volume has any,
    /// the value is true, whatever the bytes are. Beyond the end of `other`, data of this volume has changed.
    ///
    /// The cost is that of the map pages which the two do not share.
    ///
    /// # Errors
    /// `Invalid` for a range past the end; and those of [reading](crate#errors).
    pub async fn changed_since(
        &self,
        other: &Volume<D>,
        offset: u64,
        len: u64,
        looks: usize,
    ) -> Result<Vec<StatusRun<bool>>> {
        self.check_range(offset, len)?;
        let (mut at, end) = (offset, offset + len);
        let mut runs = Vec::new();
        for _ in 0..looks.max(1) {
            if at >= end {
                break;
            }
            let (stop, is_same) = compare::compare_from(&self.store, self.id, other.id, at, end).await?;
            push(&mut runs, stop - at, !is_same);
            at = stop;
        }
        Ok(runs)
    }
}
