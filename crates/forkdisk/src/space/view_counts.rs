//! The counts of one checkpoint, kept for a *view*: for a task that walks it while writers and later
//! checkpoints continue.
//!
//! A walk would lose two things otherwise. Leaves of counts have two slots only, so the second checkpoint
//! after it overwrites them: the first one that changes a leaf keeps its old image here. And tables that
//! later checkpoints replace would be free: these pages are *withheld*, that is, counted as released but not
//! allocated until the view ends.
//!
//! Both are bounded. A view that keeps too many images ends by itself; one that withholds too much is ended
//! by the pool. The walking task must check after every wait whether its view is still the current one.

use std::collections::BTreeMap;

use crate::format::{CountEntry, CountNode, CountPage};
use crate::planted::correct;
use crate::space::tree;
use crate::types::{Bitmap, bit};
use crate::types::{Block, PageAddr};

use super::{Counts, Miss, Space};

/// Most images kept: 64 MiB of them.
const MAX_IMAGES: usize = 16_384;
/// Most leaves whose common count is kept: 8 MiB, approximately.
const MAX_LEAF_NOTES: usize = 16 * MAX_IMAGES;

/// See the module.
#[derive(Default)]
pub struct ViewImages {
    /// Number of views begun so far, which is the number of the last one.
    begun: u64,
    /// Leaves as they were when the view began, if later checkpoints changed them (`None`: never written).
    /// Absent if no view is live.
    images: Option<BTreeMap<CountNode, Option<CountPage>>>,
    /// Common counts of leaves at that time, if later checkpoints changed them or the leaf.
    commons: BTreeMap<CountNode, u16>,
    withheld: BTreeMap<Block, Bitmap>,
    /// Number of withheld pages.
    pub(super) pages: u64,
}

impl ViewImages {
    /// Returns the withheld pages of a block.
    pub fn withheld(&self, block: Block) -> Bitmap {
        self.withheld.get(&block).copied().unwrap_or_default()
    }

    fn set(&mut self, page: PageAddr, is_withheld: bool) {
        let bits = self.withheld.entry(page.block()).or_default();
        if bit(bits, page.index()) == is_withheld {
            return;
        }
        bits[page.index() / 64] ^= 1 << (page.index() % 64);
        match is_withheld {
            true => self.pages += 1,
            false => self.pages -= 1,
        }
        if *bits == [0; 4] {
            self.withheld.remove(&page.block());
        }
    }
}

/// Keeps the counts of the checkpoint that has just finished. Returns the view's number. One view at a
/// time; never while a checkpoint makes its images.
pub fn begin_view(space: &mut Space) -> u64 {
    assert!(space.kept.images.is_none() && space.work.is_none(), "one view at a time, between two checkpoints");
    space.kept.begun += 1;
    space.kept.images = Some(BTreeMap::new());
    space.kept.commons.clear();
    space.kept.begun
}

/// Returns the number of the live view.
pub fn view(space: &Space) -> Option<u64> {
    space.kept.images.as_ref().map(|_| space.kept.begun)
}

/// Called before a checkpoint changes this leaf, whose old contents are `page`.
pub(super) fn keep_image(space: &mut Space, node: CountNode, page: Option<&CountPage>) {
    let Some(images) = correct!(space.kept.images.as_mut(), Bug::ViewTakesNewCounts => None) else { return };
    images.entry(node).or_insert_with(|| page.cloned());
    if images.len() > MAX_IMAGES {
        space.kept.images = None;
    }
}

/// Whether anything is kept of a leaf.
pub(super) fn keeps(space: &Space, leaf: CountNode) -> bool {
    view(space).is_some() && space.kept.commons.contains_key(&leaf)
}

/// Called before a checkpoint changes this leaf or its common count; the old entry is `entry`.
pub(super) fn keep_common(space: &mut Space, node: CountNode, entry: &CountEntry) {
    if correct!(view(space).is_none() || node.level > 0, Bug::ViewTakesNewCounts => true) {
        return;
    }
    space.kept.commons.entry(node).or_insert(entry.common);
    if space.kept.commons.len() > MAX_LEAF_NOTES {
        space.kept.images = None;
    }
}

/// Returns all counts of a block as of the view's checkpoint. A view must be live.
pub fn view_counts(space: &mut Space, block: Block) -> Result<Counts, Miss> {
    let (node, i) = CountNode::leaf_of(block);
    let common = match space.kept.commons.get(&node) {
        Some(&common) => common,
        None => tree::entry(space, node)?.common,
    };
    let images = space.kept.images.as_ref().expect("whoever asks has looked whether its view is live");
    let page = match images.get(&node) {
        Some(image) => image.as_ref(),
        None => tree::page(space, node)?,
    };
    let mut counts = page.map_or_else(Counts::default, |page| Counts::of(page.block(i)));
    counts.whole += u32::from(common);
    Ok(counts)
}

/// Withholds pages that a checkpoint after the view's freed, if the view is still live; otherwise returns
/// them.
pub fn withhold(space: &mut Space, freed: Vec<(PageAddr, u64)>) -> Vec<(PageAddr, u64)> {
    if correct!(view(space).is_none(), Bug::ViewHoldsNothing => true) {
        return freed;
    }
    space.returning = 0;
    for (first, n) in freed {
        (first.0..first.0 + n).for_each(|page| space.kept.set(PageAddr(page), true));
    }
    Vec::new()
}

/// Ends the view, if one is live. Returns the pages withheld for it, as runs; they stay withheld until
/// [`release_withheld`](Self::release_withheld).
pub fn end_view(space: &mut Space) -> Vec<(PageAddr, u64)> {
    space.kept.images = None;
    let mut runs: Vec<(PageAddr, u64)> = Vec::new();
    for (block, bits) in &space.kept.withheld {
        for page in (0..256).filter(|&i| bit(bits, i)).map(|i| block.page(i)) {
            match runs.last_mut() {
                Some((first, n)) if first.0 + *n == page.0 => *n += 1,
                _ => runs.push((page, 1)),
            }
        }
    }
    runs
}

/// Makes withheld pages available for allocation.
pub fn release_withheld(space: &mut Space, runs: Vec<(PageAddr, u64)>) {
    for page in runs.into_iter().flat_map(|(first, n)| (first.0..first.0 + n).map(PageAddr)) {
        space.kept.set(page, false);
        tree::give_back(space, page);
    }
}
