//! Quota promised to writes under way.
//!
//! A page is claimed from the plan that maps a hole until it is mapped or the plan is dropped: exactly once.

use std::cell::Cell;
use std::rc::Rc;

use crate::device::Device;
use crate::map::{Run, Stop, lookup, shared_level};
use crate::pool::{Failure, Meta};
use crate::types::{VirtualPage, VolumeId};

use super::Volume;

/// Pages that writes under way will add to those that a volume refers to.
#[derive(Default)]
pub struct QuotaClaims(Cell<u64>);

impl QuotaClaims {
    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.0.get()
    }
}

/// The claim of one write; dropping it returns the rest.
#[derive(Default)]
pub(super) struct QuotaClaim {
    of: Option<Rc<QuotaClaims>>,
    pages: Cell<u64>,
}

impl QuotaClaim {
    /// Claims `pages` more of volume `id`.
    pub fn add(&mut self, meta: &Meta, id: VolumeId, pages: u64) {
        let all = self.of.get_or_insert_with(|| meta.live.of_handle(id).claims.clone());
        all.0.set(all.0.get() + pages);
        self.pages.set(self.pages.get() + pages);
    }

    /// `pages` of the claim were mapped.
    pub fn commit(&self, pages: u64) {
        let Some(all) = &self.of else { return };
        debug_assert!(pages <= self.pages.get(), "a page that becomes the volume's was claimed");
        let pages = pages.min(self.pages.get());
        all.0.set(all.0.get() - pages);
        self.pages.set(self.pages.get() - pages);
    }
}

impl Drop for QuotaClaim {
    fn drop(&mut self) {
        self.commit(self.pages.get());
    }
}

impl<D: Device> Volume<D> {
    /// Refuses the next `share_step` of a range clone if it would exceed the quota of this volume.
    pub(super) fn check_quota_for_sharing(
        &self,
        meta: &mut Meta,
        source: &Volume<D>,
        from: VirtualPage,
        to: VirtualPage,
        pages: u64,
    ) -> Result<(), Failure> {
        if self.record(meta).quota == 0 {
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
        meta.admits(self.id, comes.saturating_sub(goes))
    }
}

fn run_at(meta: &mut Meta, id: VolumeId, at: VirtualPage, max: u64) -> Result<Run, Failure> {
    let record = &meta.directory.get(id).expect("a volume with a handle is not removed").record;
    Ok(lookup(&mut meta.tables, record, at, max).map_err(Stop::from)?)
}

/// Number of these pages that are mapped.
fn mapped_pages(meta: &mut Meta, id: VolumeId, at: VirtualPage, pages: u64) -> Result<u64, Failure> {
    let (mut done, mut found) = (0, 0);
    while done < pages {
        let run = run_at(meta, id, VirtualPage(at.0 + done), pages - done)?;
        found += if run.data.is_some() { run.len } else { 0 };
        done += run.len;
    }
    Ok(found)
}
