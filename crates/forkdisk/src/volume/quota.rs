//! Quotas of range clones.

use crate::catalog::{Catalog, Failure, folder_of};
use crate::device::Device;
use crate::map::{Run, Stop, lookup, shared_level};
use crate::types::{VirtualPage, VolumeId};

use super::Volume;

impl<D: Device> Volume<D> {
    /// Refuses the next `share_step` of a range clone if it would exceed the quota of this volume, or of a folder
    /// above it.
    pub(super) fn check_quota_for_sharing(
        &self,
        meta: &mut Catalog,
        source: &Volume<D>,
        from: VirtualPage,
        to: VirtualPage,
        pages: u64,
    ) -> Result<(), Failure> {
        if self.record(meta).quota == 0 && folder_of(meta, self.id).is_none() {
            return Ok(());
        }
        let (s, t) = (source.record(meta).clone(), self.record(meta).clone());
        let (comes, goes) = match shared_level(&s, from, &t, to, pages) {
            Some(level) => meta.editor().difference(&s, from, &t, to, level)?,
            None => {
                let run = run_at(meta, source.id, from, pages)?;
                (if run.data.is_some() { run.len } else { 0 }, mapped_pages(meta, self.id, to, run.len)?)
            }
        };
        meta.admits(self.id, self.live.claims.pages(), comes.saturating_sub(goes))
    }
}

fn run_at(meta: &mut Catalog, id: VolumeId, at: VirtualPage, max: u64) -> Result<Run, Failure> {
    let record = meta.directory.of_handle(id);
    Ok(lookup(&mut meta.tables, record, at, max).map_err(Stop::from)?)
}

/// Number of these pages that are mapped.
fn mapped_pages(meta: &mut Catalog, id: VolumeId, at: VirtualPage, pages: u64) -> Result<u64, Failure> {
    let (mut done, mut found) = (0, 0);
    while done < pages {
        let run = run_at(meta, id, VirtualPage(at.0 + done), pages - done)?;
        found += if run.data.is_some() { run.len } else { 0 };
        done += run.len;
    }
    Ok(found)
}
