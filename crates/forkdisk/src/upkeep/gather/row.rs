//! The order of a volume's blocks.
//!
//! Each block may be contiguous and still be far from the one before. When gathering is requested for a
//! volume, and many of its blocks are far apart, all of them are moved to contiguous blocks, including those
//! that are contiguous already; the volume is examined a stretch at a time. If there are not enough
//! contiguous blocks for a stretch, shorter rows are used, and the volume is processed once more after
//! everything else is gathered, because that frees space.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::catalog::{Catalog, Failure};
use crate::device::Device;
use crate::error::Result;
use crate::map::{Home, Stop};
use crate::runtime::yield_now;
use crate::space::contiguous;
use crate::types::{BLOCK_PAGES, VirtualPage, VolumeId, table_span};

use super::super::Upkeep;
use super::plan::{GatherMode, living};
use super::{next_scattered, wait_space_freed};

/// Most virtual blocks in a stretch.
const STRETCH_BLOCKS: usize = 128;
/// More than one jump to another place per this many blocks is too many: a disk takes about as long for a
/// jump as for a block.
const BLOCKS_PER_JUMP: usize = 16;

/// Pass over a volume for which gathering was requested.
pub struct Rows {
    id: VolumeId,
    at: VirtualPage,
    /// Behind the last virtual block of this stretch.
    end: VirtualPage,
    /// Its blocks that are moved to contiguous blocks; empty if they are contiguous, or there is no space for
    /// that.
    row: VecDeque<VirtualPage>,
    /// The first scattered block, at the last search; `None`: there is none.
    scattered: Option<VirtualPage>,
    is_last: bool,
    /// There was no space for contiguous blocks somewhere, which may change when everything else is gathered.
    lacked_space: bool,
    is_second: bool,
}

/// Virtual blocks that are examined together.
struct Stretch {
    /// Behind the last one.
    end: VirtualPage,
    /// Its blocks that are moved to contiguous blocks.
    row: VecDeque<VirtualPage>,
    lacks_room: bool,
    /// The map ends with it.
    is_last: bool,
}

impl Rows {
    pub fn new(id: VolumeId) -> Rows {
        let (start, row) = (VirtualPage(0), VecDeque::new());
        let scattered = Some(start);
        Rows { id, at: start, end: start, row, scattered, is_last: false, lacked_space: false, is_second: false }
    }

    /// Returns the virtual block that is gathered next, and how.
    pub async fn next<D: Device>(&mut self, upkeep: &Rc<Upkeep<D>>) -> Result<Option<(VirtualPage, GatherMode)>> {
        loop {
            if let Some(next) = self.row.pop_front() {
                self.at = VirtualPage(next.0 + BLOCK_PAGES);
                return Ok(Some((next, GatherMode::Sequential)));
            }
            // Blocks that could not be moved may be gathered individually: that was tried.
            if let Some(found) = self.scattered.filter(|&found| found <= self.at) {
                let from = found.max(self.at);
                self.scattered = next_scattered(upkeep, self.id, from).await?;
            }
            if let Some(next) = self.scattered.filter(|&next| next < self.end) {
                self.at = VirtualPage(next.0 + BLOCK_PAGES);
                return Ok(Some((next, GatherMode::Requested)));
            }
            if self.is_last {
                if self.is_second || !self.lacked_space {
                    return Ok(None);
                }
                wait_space_freed(upkeep).await?;
                // Each was gathered individually, as far as possible.
                *self = Rows { is_second: true, scattered: None, ..Rows::new(self.id) };
            }
            self.at = self.end;
            let stretch = stretch_from(upkeep, self.id, self.at).await?;
            (self.end, self.row, self.is_last) = (stretch.end, stretch.row, stretch.is_last);
            self.lacked_space |= stretch.lacks_room;
        }
    }
}

/// Where virtual blocks will lie when each has been gathered individually.
#[derive(Default)]
struct BlockPlaces(Vec<(VirtualPage, Home)>);

impl BlockPlaces {
    /// Whether reading them jumps more often than it should.
    fn are_out_of_order(&self) -> bool {
        let jumps =
            |pair: &&[(VirtualPage, Home)]| pair[1].0.0 == pair[0].0.0 + BLOCK_PAGES && !pair[1].1.follows(pair[0].1);
        let jumps = self.0.windows(2).filter(jumps).count();
        jumps > 0 && jumps * BLOCKS_PER_JUMP >= self.0.len()
    }
}

/// See [`Editor::home_of`](crate::map::Editor::home_of); also returns whether the map ends before.
fn home_of(
    meta: &mut Catalog,
    id: VolumeId,
    at: VirtualPage,
) -> std::result::Result<(Option<Home>, VirtualPage, bool), Failure> {
    let (mut editor, record) = living(meta, id)?;
    if at.0 >= table_span(record.level) {
        return Ok((None, at, true));
    }
    let (home, next) = editor.home_of(record, at).map_err(Stop::from)?;
    Ok((home, next, false))
}

/// Returns a stretch of virtual blocks from `at` on.
async fn stretch_from<D: Device>(upkeep: &Rc<Upkeep<D>>, id: VolumeId, at: VirtualPage) -> Result<Stretch> {
    let (mut homes, mut stretch) =
        (BlockPlaces::default(), Stretch { end: at, row: VecDeque::new(), lacks_room: false, is_last: false });
    for _ in 0..STRETCH_BLOCKS {
        let here = stretch.end;
        let (home, behind, is_end) = upkeep.store.retry_no_alloc(|meta| home_of(meta, id, here)).await?;
        if is_end {
            stretch.is_last = true;
            break;
        }
        homes.0.extend(home.map(|home| (here, home)));
        stretch.end = behind;
        yield_now().await;
    }
    if !homes.are_out_of_order() {
        return Ok(stretch);
    }
    let wanted = homes.0.len();
    let mut room = row_to_gather(upkeep, wanted).await?;
    if room < wanted && upkeep.store.has_pending_space() {
        wait_space_freed(upkeep).await?;
        room = row_to_gather(upkeep, wanted).await?;
    }
    stretch.lacks_room = room < wanted;
    if room < wanted.min(BLOCKS_PER_JUMP) {
        return Ok(stretch);
    }
    if let Some(&(behind, _)) = homes.0.get(room) {
        homes.0.truncate(room);
        (stretch.end, stretch.is_last) = (behind, false);
    }
    if homes.are_out_of_order() {
        stretch.row = homes.0.into_iter().map(|(at, _)| at).collect();
    }
    Ok(stretch)
}

/// Returns how many contiguous empty blocks there are, at most `wanted`.
async fn row_to_gather<D: Device>(upkeep: &Upkeep<D>, wanted: usize) -> Result<usize> {
    let room = |meta: &mut Catalog| {
        contiguous::row_to_gather(&mut meta.space, wanted as u64).map_err(|miss| Failure::Stop(miss.into()))
    };
    Ok((upkeep.store.retry_no_alloc(room).await? as usize).min(wanted))
}
