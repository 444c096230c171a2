//! Data and holes of a volume.

use crate::device::Device;
use crate::error::Result;
use crate::map::{Stop, lookup};
use crate::types::{PAGE_SIZE, VirtualPage};

use super::Volume;
use super::backing::Backing;

/// A run of a volume with one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extent {
    /// Start in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Whether it holds data; a hole reads as zeroes and holds no space.
    pub data: bool,
    /// Byte offset of the data in the pool (0 for a hole).
    pub physical: u64,
    /// Whether others refer to it, according to the first page of the run.
    pub shared: bool,
}

impl<D: Device> Volume<D> {
    /// The extents of a range, in ascending order without gaps.
    ///
    /// # Errors
    /// `Invalid` for a range past the end; and those of [reading](crate#errors).
    pub async fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>> {
        self.check_range(offset, len)?;
        let page = PAGE_SIZE as u64;
        let (mut at, end) = (offset, offset + len);
        let mut out: Vec<Extent> = Vec::new();
        if let Backing::Origin(_) = &self.backing {
            let shared = false;
            return Ok(vec![Extent { offset, len, data: true, physical: 0, shared }]);
        }
        let through = self.has_backing();
        while at < end {
            let first = VirtualPage(at / page);
            let max = end.div_ceil(page) - first.0;
            let (run, shared) = self
                .store
                .retry_no_alloc(|meta| {
                    let (mut editor, record) = meta.handle_editor(self.id);
                    let run = lookup(editor.tables, record, first, max).map_err(Stop::from)?;
                    let young = !self.read_only && run.data.is_some_and(|(_, birth)| birth > record.shared_at);
                    let shared = run.data.is_some() && !young && !editor.is_alone(record, first)?;
                    Ok((run, shared))
                })
                .await?;
            let stop = ((first.0 + run.len) * page).min(end);
            let physical = run.data.map_or(0, |(addr, _)| addr.offset() + at % page);
            // Data of the backing belongs to others.
            let (data, shared) = (run.data.is_some() || through, shared || through && run.data.is_none());
            let extent = Extent { offset: at, len: stop - at, data, physical, shared };
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
    let place = !last.data || last.physical + last.len == next.physical || last.physical + next.physical == 0;
    last.data == next.data && last.shared == next.shared && place
}
