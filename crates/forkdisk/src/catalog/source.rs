//! Where the pages of a volume with an origin as backing come from: own pages first, then exceptions, then the
//! origin.

use crate::map::{Stop, lookup};
use crate::types::{PageAddr, VirtualPage, VolumeId};

use super::{Catalog, ExceptionView, Failure, exception_run};

/// Source of a page of a volume that has an origin as backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSource {
    /// A page of its own, in the pool.
    Own(PageAddr),
    /// An exception, in the pool.
    Exception(PageAddr),
    /// The same page of the origin.
    Origin,
    /// Zeroes, beyond the end of the backing.
    Zero,
}

impl Catalog {
    /// Returns where page `at` of `id` and the pages after it (at most `max`) come from. The backing of `id` is
    /// `origin`, up to page `end`.
    pub fn source_of(
        &mut self,
        id: VolumeId,
        (origin, view, end): (VolumeId, ExceptionView, u64),
        at: VirtualPage,
        max: u64,
    ) -> std::result::Result<(PageSource, u64), Failure> {
        let record = &self.directory.get(id).ok_or(Failure::Gone)?.record;
        let own = lookup(&mut self.tables, record, at, max).map_err(Stop::from)?;
        if let Some((page, _)) = own.data {
            return Ok((PageSource::Own(page), own.len));
        }
        if at.0 >= end {
            return Ok((PageSource::Zero, own.len));
        }
        let (protects, chunk_pages) = self.protects(origin).ok_or(Failure::Gone)?;
        let max = own.len.min(end - at.0);
        let run =
            exception_run(&mut self.tables, &protects.exceptions, chunk_pages, view, at, max).map_err(Stop::from)?;
        Ok((run.at.map_or(PageSource::Origin, PageSource::Exception), run.len))
    }
}
