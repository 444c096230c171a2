//! What of a volume is data and what is holes.

use crate::device::Device;
use crate::error::Result;
use crate::map::{Stop, lookup};
use crate::types::{PAGE_SIZE, VirtualPage};

use super::Volume;

/// A run of a volume that is alike. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it starts.
    pub offset: u64,
    /// How long it is.
    pub len: u64,
    /// Whether it holds data; a hole reads as zeroes and holds no space.
    pub data: bool,
    /// Where the data lies in the pool (0 for a hole).
    pub physical: u64,
    /// Whether others refer to it, too (judged by the first page of the run).
    pub shared: bool,
}

/// What a volume is from some place on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Whether it is data; else a hole.
    pub data: bool,
    /// Up to where it is known to be so, at most the volume's length; what follows may be alike.
    pub end: u64,
}

impl<D: Device> Volume<D> {
    /// What the volume is at `offset`, which must be before its end, and up to where that is found out in
    /// one look at the map.
    pub async fn run_at(&self, offset: u64) -> Result<Run> {
        self.check_range(offset, 1)?;
        let (page, size) = (PAGE_SIZE as u64, self.size());
        let first = VirtualPage(offset / page);
        let max = size.div_ceil(page).saturating_sub(first.0).max(1);
        let run = self.inner.look(|meta| {
            let record = &meta.directory.get(self.id).expect("a volume with a handle is not removed").record;
            Ok(lookup(&mut meta.tables, record, first, max).map_err(Stop::from)?)
        });
        let run = run.await?;
        Ok(Run { data: run.data.is_some(), end: ((first.0 + run.len) * page).min(size.max(offset + 1)) })
    }

    /// The extents of a range, in order, without gaps.
    pub async fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>> {
        self.check_range(offset, len)?;
        let page = PAGE_SIZE as u64;
        let (mut at, end) = (offset, offset + len);
        let mut out: Vec<Extent> = Vec::new();
        while at < end {
            let first = VirtualPage(at / page);
            let max = end.div_ceil(page) - first.0;
            let (run, shared) = self
                .inner
                .look(|meta| {
                    let (mut editor, record) = meta.view(self.id).expect("a volume with a handle is not removed");
                    let run = lookup(editor.tables, record, first, max).map_err(Stop::from)?;
                    let young = !self.read_only && run.data.is_some_and(|(_, birth)| birth > record.shared_at);
                    let shared = run.data.is_some() && !young && !editor.is_alone(record, first)?;
                    Ok((run, shared))
                })
                .await?;
            let stop = ((first.0 + run.len) * page).min(end);
            let physical = run.data.map_or(0, |(addr, _)| addr.offset() + at % page);
            let extent = Extent { offset: at, len: stop - at, data: run.data.is_some(), physical, shared };
            match out.last_mut() {
                Some(last) if follows(last, &extent) => last.len += extent.len,
                _ => out.push(extent),
            }
            at = stop;
        }
        Ok(out)
    }
}

fn follows(last: &Extent, next: &Extent) -> bool {
    let place = !last.data || last.physical + last.len == next.physical;
    last.data == next.data && last.shared == next.shared && place
}
