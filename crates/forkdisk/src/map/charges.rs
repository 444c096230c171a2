//! Charges of a change of maps: which pages become free, and to which accounts they are charged.
//!
//! This is looked up before anything changes, from the exact counts. Pages without an account cost one comparison.

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::SmallVec;

use crate::format::{Kind, MapEntry, MovedRun};
use crate::planted::correct;
use crate::space::{Credits, credit};
use crate::types::{AccountId, BLOCK_PAGES, CHECKSUMS, PageAddr};

use super::edit::{Editor, Stop};
use super::family::Family;
use super::move_pages::is_moved;
use super::store::NodeId;

/// A run of pages: the first, and how many.
type PageRun = (PageAddr, u64);

/// No page.
pub(super) const NO_PAGES: PageRun = (PageAddr(0), 0);

/// The pages of a block entry; none of any other entry.
pub(super) fn block_pages(entry: MapEntry) -> PageRun {
    if entry.kind() == Kind::Block { (entry.addr(), BLOCK_PAGES) } else { NO_PAGES }
}

fn has((first, n): PageRun, page: PageAddr) -> bool {
    (first.0..first.0 + n).contains(&page.0)
}

impl Editor<'_> {
    /// Returns what has to be credited if these slots of a leaf lose their pages, while the pages of `kept` get one
    /// reference more.
    pub(super) fn freed_in(&mut self, leaf: NodeId, slots: Range<usize>, kept: PageRun) -> Result<Credits, Stop> {
        let mut credits = Credits::new();
        if self.space.accounts.is_empty() || self.account == CHECKSUMS {
            return Ok(credits);
        }
        let mut pages: SmallVec<[(PageAddr, AccountId); 4]> = SmallVec::new();
        for (slots, first) in self.tables.node(leaf).entries().runs(slots) {
            if !first.is_absent() && self.space.accounts.has(first.account()) {
                pages.extend((0..slots.len() as u64).map(|n| (PageAddr(first.addr().0 + n), first.account())));
            }
        }
        // A page may be there twice.
        pages.sort_unstable();
        for block in pages.chunk_by(|a, b| a.0.block() == b.0.block()) {
            let counts = self.space.in_block(block[0].0.block())?;
            for same in block.chunk_by(|a, b| a.0 == b.0) {
                let (page, account) = same[0];
                let references = counts.whole() + counts.page(page.index());
                if references == same.len() as u32 && !has(kept, page) {
                    credit(&mut credits, account, 1);
                }
            }
        }
        Ok(correct!(credits, Bug::FreedPagesStayCharged => Credits::new()))
    }

    /// The same if an entry of a block is removed.
    pub(super) fn freed_with_block(&mut self, entry: MapEntry, kept: PageRun) -> Result<Credits, Stop> {
        let mut credits = Credits::new();
        if !self.space.accounts.has(entry.account()) {
            return Ok(credits);
        }
        let block = entry.addr().block();
        let counts = self.space.in_block(block)?;
        if correct!(counts.whole() == 1, Bug::SharedBlockCredited => true) {
            let free = (0..BLOCK_PAGES as usize).filter(|&i| counts.page(i) == 0 && !has(kept, block.page(i)));
            credit(&mut credits, entry.account(), free.count() as u64);
        }
        Ok(credits)
    }
}

/// Returns what has to be charged and credited if the pages in `moved` are replaced wherever these leaves of a
/// family refer to them.
pub(super) fn charges_of_move(
    editor: &mut Editor<'_>,
    family: &Family,
    moved: &[MovedRun],
    referring: &[usize],
) -> Result<(Credits, Credits), Stop> {
    let (mut charges, mut credits) = (Credits::new(), Credits::new());
    if editor.space.accounts.is_empty() {
        return Ok((charges, credits));
    }
    let known = editor.known_wholly(family)?;
    // Each old page with its account, and the references to it that go.
    let mut old: BTreeMap<PageAddr, (AccountId, u32)> = BTreeMap::new();
    for &leaf in referring {
        let part = &family.parts[leaf];
        let goes = match part.node {
            _ if !known[leaf] => 0,
            Some(_) => 1,
            None => part.by.len() as u32,
        };
        let said = editor.said(part);
        for run in moved {
            for (entry, slot) in run.slots().map(|slot| (said.get(slot), slot)) {
                if is_moved(entry, slot, run).is_some() && editor.space.accounts.has(entry.account()) {
                    old.entry(entry.addr()).or_insert((entry.account(), 0)).1 += goes;
                }
            }
        }
    }
    for (page, (account, goes)) in old {
        credit(&mut charges, account, 1);
        let counts = editor.space.in_block(page.block())?;
        if counts.whole() + counts.page(page.index()) == goes {
            credit(&mut credits, account, 1);
        }
    }
    Ok((charges, correct!(credits, Bug::GatherChargesTwice => Credits::new())))
}
