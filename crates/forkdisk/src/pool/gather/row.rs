//! The order of a volume's blocks among each other.
//!
//! Each may lie in one piece and be read from far away from the one before. Where somebody asks for a volume to be
//! gathered, and many of its blocks lie so, they are all moved to blocks in a row, those that lie in one piece already
//! included; that is looked at a stretch of the volume at a time.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::device::Device;
use crate::error::Result;
use crate::map::{Home, Stop};
use crate::pool::{Failure, Inner, Meta, yield_now};
use crate::types::{BLOCK_PAGES, VirtualPage, VolumeId, table_span};

use super::plan::Way;

/// Most virtual blocks in a row.
const STRETCH: usize = 128;
/// A jump to another place for so many blocks is one too many: a disk takes about as long for one as for a block.
const BLOCKS_PER_JUMP: usize = 16;

/// Goes over a volume, for somebody who asks for it to be gathered.
pub struct Rows {
    id: VolumeId,
    at: VirtualPage,
    /// Behind the last virtual block of this stretch.
    end: VirtualPage,
    /// Those of it that are to be moved to blocks in a row; none if they lie so, or there is no room for that.
    row: VecDeque<VirtualPage>,
    /// The first scattered one, when it was last looked for; `None`: there is none.
    scattered: Option<VirtualPage>,
    is_last: bool,
}

impl Rows {
    pub fn new(id: VolumeId) -> Rows {
        let start = VirtualPage(0);
        Rows { id, at: start, end: start, row: VecDeque::new(), scattered: Some(start), is_last: false }
    }

    /// The virtual block that is to be gathered next, and how.
    pub async fn next<D: Device>(&mut self, inner: &Rc<Inner<D>>) -> Result<Option<(VirtualPage, Way)>> {
        loop {
            if let Some(next) = self.row.pop_front() {
                self.at = VirtualPage(next.0 + BLOCK_PAGES);
                return Ok(Some((next, Way::InOrder)));
            }
            // What could not be moved may be gathered by itself: it was tried.
            if let Some(found) = self.scattered.filter(|&found| found <= self.at) {
                let from = found.max(self.at);
                self.scattered = inner.next_scattered(self.id, from).await?;
            }
            if let Some(next) = self.scattered.filter(|&next| next < self.end) {
                self.at = VirtualPage(next.0 + BLOCK_PAGES);
                return Ok(Some((next, Way::Asked)));
            }
            if self.is_last {
                return Ok(None);
            }
            self.at = self.end;
            (self.end, self.row, self.is_last) = inner.stretch_from(self.id, self.at).await?;
        }
    }
}

/// Where virtual blocks will lie when each has been gathered by itself.
#[derive(Default)]
struct Homes(Vec<(VirtualPage, Home)>);

impl Homes {
    /// Whether reading them jumps about more than it should.
    fn are_out_of_order(&self) -> bool {
        let jumps =
            |pair: &&[(VirtualPage, Home)]| pair[1].0.0 == pair[0].0.0 + BLOCK_PAGES && !pair[1].1.follows(pair[0].1);
        let jumps = self.0.windows(2).filter(jumps).count();
        jumps > 0 && jumps * BLOCKS_PER_JUMP >= self.0.len()
    }
}

impl<D: Device> Inner<D> {
    /// A stretch of virtual blocks from `at` on: its end, what of it is to be moved to blocks in a row, and whether the
    /// map ends with it.
    async fn stretch_from(&self, id: VolumeId, at: VirtualPage) -> Result<(VirtualPage, VecDeque<VirtualPage>, bool)> {
        let (mut homes, mut next, mut is_last) = (Homes::default(), at, false);
        for _ in 0..STRETCH {
            let here = next;
            let (home, behind, is_end) = self.look(|meta| home_of(meta, id, here)).await?;
            if is_end {
                is_last = true;
                break;
            }
            homes.0.extend(home.map(|home| (here, home)));
            next = behind;
            yield_now().await;
        }
        let wanted = homes.0.len() as u64;
        let room = |meta: &mut Meta| meta.space.row_to_gather(wanted).map_err(|miss| Failure::Stop(miss.into()));
        let is_to_move = homes.are_out_of_order() && self.look(room).await? >= wanted;
        let blocks = if is_to_move { homes.0.into_iter().map(|(at, _)| at).collect() } else { VecDeque::new() };
        Ok((next, blocks, is_last))
    }
}

/// See [`Editor::home_of`](crate::map::Editor::home_of); also whether the map ends before.
fn home_of(
    meta: &mut Meta,
    id: VolumeId,
    at: VirtualPage,
) -> std::result::Result<(Option<Home>, VirtualPage, bool), Failure> {
    let (mut editor, record) = meta.view(id).ok_or(Failure::Gone)?;
    if at.0 >= table_span(record.level) {
        return Ok((None, at, true));
    }
    let (home, next) = editor.home_of(record, at).map_err(Stop::from)?;
    Ok((home, next, false))
}
