//! What writes under way have been promised of their volume's quota.
//!
//! A page counts as claimed from the plan that maps it where nothing was mapped, until it is mapped or
//! the plan is given up: never twice, and never not at all.

use std::cell::Cell;
use std::rc::Rc;

use crate::device::Device;
use crate::map::{Run, Stop, lookup, shared_level};
use crate::pool::{Failure, Meta};
use crate::types::{VirtualPage, VolumeId};

use super::Volume;

/// Pages that writes under way will add to what a volume refers to.
#[derive(Default)]
pub struct QuotaClaims(Cell<u64>);

impl QuotaClaims {
    /// How many.
    pub fn pages(&self) -> u64 {
        self.0.get()
    }
}

/// What one write claims; given back when it goes.
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

    /// `pages` of them are mapped.
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
    /// Refuses the step of a range clone that `share_step` will take, if this volume's quota has no room
    /// for it.
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

/// How many of these pages hold something.
fn mapped_pages(meta: &mut Meta, id: VolumeId, at: VirtualPage, pages: u64) -> Result<u64, Failure> {
    let (mut done, mut found) = (0, 0);
    while done < pages {
        let run = run_at(meta, id, VirtualPage(at.0 + done), pages - done)?;
        found += if run.data.is_some() { run.len } else { 0 };
        done += run.len;
    }
    Ok(found)
}
