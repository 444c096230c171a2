//! Comparing volumes page by page, by their maps.

use crate::catalog::{Catalog, Failure, PageSource, pages_of, rollback};
use crate::device::Device;
use crate::error::Result;
use crate::format::{Kind, VolumeRecord, VolumeState};
use crate::map::{Stop, Tables, lookup};
use crate::planted::correct;
use crate::runtime::yield_now;
use crate::store::{Store, deleted_error};
use crate::types::{PAGE_SIZE, PageAddr, VirtualPage, VolumeId, table_span};

/// Result of comparing a range of two volumes, in the terms of `thin_delta`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiffClass {
    /// Shared data, or holes in both.
    Same,
    /// Data in both, on different pages.
    Different,
    /// Data only in the left one.
    LeftOnly,
    /// Data only in the right one.
    RightOnly,
}

/// A run of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiffRun {
    /// Start in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Class.
    pub class: DiffClass,
}

/// A part of a comparison.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DiffPart {
    /// In ascending order without gaps.
    pub runs: Vec<DiffRun>,
    /// Start of the next part; `None` after the last.
    pub next: Option<u64>,
}

/// Steps of a comparison before other tasks run.
const STEPS_PER_TURN: usize = 256;

/// Pages from `at` on for which both maps have the same table or both have none.
fn same_tables(
    tables: &mut Tables,
    a: &VolumeRecord,
    b: &VolumeRecord,
    at: VirtualPage,
) -> std::result::Result<u64, Stop> {
    let (mut x, mut xl, mut y, mut yl) = (a.root, a.level, b.root, b.level);
    loop {
        // Descend in the higher one first.
        let level = xl.max(yl);
        let span = table_span(level);
        let same = x.is_absent() && y.is_absent()
            || xl == yl
                && x.kind() == Kind::Table
                && y.kind() == Kind::Table
                && tables.resolve(x.table_ref()) == tables.resolve(y.table_ref());
        if same {
            return Ok(span - at.0 % span);
        }
        if level == 0 || x.kind() == Kind::Block || y.kind() == Kind::Block {
            return Ok(0);
        }
        for (entry, own) in [(&mut x, &mut xl), (&mut y, &mut yl)] {
            if *own < level {
                continue;
            }
            if entry.kind() == Kind::Table {
                let id = tables.get(*entry, level)?;
                *entry = tables.node(id).entry(at.slot(level));
            }
            *own -= 1;
        }
    }
}

/// The next run of the volumes `ids`, of which only those in `sides` are compared.
fn next_run(
    meta: &mut Catalog,
    ids: (VolumeId, VolumeId),
    sides: (bool, bool),
    at: VirtualPage,
    max: u64,
) -> std::result::Result<(u64, DiffClass), Failure> {
    let record = |id| meta.directory.get(id).map(|v| v.record.clone()).ok_or(Failure::Gone);
    let (a, b) = (record(ids.0)?, record(ids.1)?);
    let alike = meta.view_of(a.id) == meta.view_of(b.id);
    if sides == (true, true) && alike && ![a.state, b.state].contains(&VolumeState::Origin) {
        let same = same_tables(&mut meta.tables, &a, &b, at)?;
        if same > 0 {
            return Ok((same.min(max), DiffClass::Same));
        }
    }
    let x = if sides.0 { place_of(meta, &a, at, max)? } else { (None, max) };
    let y = if sides.1 { place_of(meta, &b, at, max)? } else { (None, max) };
    let class = match (x.0, y.0) {
        (None, None) => DiffClass::Same,
        (Some(_), None) => DiffClass::LeftOnly,
        (None, Some(_)) => DiffClass::RightOnly,
        (Some(p), Some(q)) if p == q => DiffClass::Same,
        _ => DiffClass::Different,
    };
    Ok((x.1.min(y.1), class))
}

/// Place of a page of a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In the pool.
    Pool(PageAddr),
    /// On the device of this origin, at the same offset.
    Origin(VolumeId),
}

/// Place of page `at` of a volume, and the number of contiguous pages from there; `None`: a hole.
fn place_of(
    catalog: &mut Catalog,
    record: &VolumeRecord,
    at: VirtualPage,
    max: u64,
) -> std::result::Result<(Option<Place>, u64), Failure> {
    if record.state == VolumeState::Origin {
        let chunk_pages = record.chunk / PAGE_SIZE as u64;
        let (chunk, end) = (at.0 / chunk_pages, (at.0 + max).div_ceil(chunk_pages));
        let (back, chunks) = rollback::is_rolled_back(catalog, record.id, chunk, end)?;
        let max = max.min((chunk + chunks) * chunk_pages - at.0);
        return match catalog.rollback(record.id).filter(|_| !back) {
            None => Ok((Some(Place::Origin(record.id)), max)),
            Some(rolling) => {
                let snapshot = catalog.directory.get(rolling.snapshot).ok_or(Failure::Gone)?.record.clone();
                place_of(catalog, &snapshot, at, max)
            }
        };
    }
    let Some((origin, view)) = catalog.view_of(record.id) else {
        let run = lookup(&mut catalog.tables, record, at, max).map_err(Stop::from)?;
        return Ok((run.data.map(|(page, _)| Place::Pool(page)), run.len));
    };
    let end = catalog.directory.get(origin).map_or(0, |v| pages_of(v.record.size));
    let (source, len) = catalog.source_of(record.id, (origin, view, end), at, max)?;
    let place = match source {
        PageSource::Own(page) | PageSource::Exception(page) => Some(Place::Pool(page)),
        PageSource::Origin => Some(Place::Origin(origin)),
        PageSource::Zero => None,
    };
    Ok((place, len))
}

/// Compares two volumes or snapshots from byte `from` on (0, or the end of the previous part), at most `max`
/// runs and at least one. A run may continue in the next part.
pub async fn diff_part<D: Device>(
    store: &Store<D>,
    left: &str,
    right: &str,
    from: u64,
    max: usize,
) -> Result<DiffPart> {
    let (a, b) = (store.find(left)?, store.find(right)?);
    let bytes = a.size.max(b.size);
    let mut at = from;
    let mut runs: Vec<DiffRun> = Vec::new();
    let mut steps = 0;
    while at < bytes {
        let (stop, class) = compare_step(store, (a.id, a.size), (b.id, b.size), at, bytes).await?;
        let room = runs.len() < max.max(1);
        match runs.last_mut() {
            Some(last) if last.class == class => last.len = stop - last.offset,
            _ if !room => return Ok(DiffPart { runs, next: Some(at) }),
            _ => runs.push(DiffRun { offset: at, len: stop - at, class }),
        }
        at = stop;
        steps += 1;
        if steps % STEPS_PER_TURN == 0 {
            yield_now().await;
        }
    }
    Ok(DiffPart { runs, next: None })
}

/// End of the run from byte `at` on (at most `end`) of two volumes of these sizes, and its class.
async fn compare_step<D: Device>(
    store: &Store<D>,
    a: (VolumeId, u64),
    b: (VolumeId, u64),
    at: u64,
    end: u64,
) -> Result<(u64, DiffClass)> {
    let page = PAGE_SIZE as u64;
    // The part of the last page and of the map beyond the end is no contents.
    let both = a.1.min(b.1);
    let end = if at < both { both.min(end) } else { end };
    let (sides, first) = ((at < a.1, at < b.1), VirtualPage(at / page));
    let max = end.div_ceil(page) - first.0;
    let (n, class) = store.retry_no_alloc(|meta| next_run(meta, (a.0, b.0), sides, first, max)).await?;
    Ok((((first.0 + n) * page).min(end), class))
}

/// End of the run of `a` and `b` from byte `at` on (at most `end`), and whether both are equal there.
pub(crate) async fn compare_from<D: Device>(
    store: &Store<D>,
    a: VolumeId,
    b: VolumeId,
    at: u64,
    end: u64,
) -> Result<(u64, bool)> {
    let size = |id| match store.meta.borrow().directory.get(id) {
        Some(volume) => Ok(volume.record.size),
        None => Err(deleted_error()),
    };
    let (stop, class) = compare_step(store, (a, size(a)?), (b, size(b)?), at, end).await?;
    let is_same = correct!(
        class == DiffClass::Same,
        Bug::ChangesLeaveOutHoles => matches!(class, DiffClass::Same | DiffClass::RightOnly)
    );
    let until = correct!(
        stop,
        Bug::ChangesTakeTheFirstPage => match is_same {
            true => (at + 1).next_multiple_of(crate::types::BLOCK_SIZE).min(end),
            false => stop,
        }
    );
    Ok((until, is_same))
}
