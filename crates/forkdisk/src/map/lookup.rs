//! Finding what a run of pages is mapped to.

use std::ops::Range;

use crate::format::{Kind, MapEntry, VolumeRecord};
use crate::types::{
    AccountId, BLOCK_PAGES, Block, Epoch, NO_ACCOUNT, PageAddr, TABLE_FANOUT, VirtualPage, entry_span, table_span,
};

use super::edit::Editor;
use super::entries::Entries;
use super::store::{TableMiss, Tables};

/// A run of pages of a volume: all holes, or contiguous in the pool, born in one epoch and charged to one account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where the first page lies and the oldest birth among the run's entries; `None`: a hole.
    pub data: Option<(PageAddr, Epoch)>,
    /// The account that the pages are charged to.
    pub account: AccountId,
    /// Number of pages.
    pub len: u64,
}

/// Home of a virtual block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// Most of it lies in this block, each page as in the volume.
    Block(Block),
    /// No block has more than half of it.
    None,
}

impl Home {
    /// Whether it lies behind `before`.
    pub fn follows(self, before: Home) -> bool {
        matches!((before, self), (Home::Block(before), Home::Block(block)) if block.0 == before.0 + 1)
    }
}

/// Returns the run that starts at `at`, at most `max` pages (`max` > 0).
pub fn lookup(tables: &mut Tables, volume: &VolumeRecord, at: VirtualPage, max: u64) -> Result<Run, TableMiss> {
    let hole = |len: u64| Ok(Run { data: None, account: NO_ACCOUNT, len: len.min(max) });
    let mut entry = volume.root;
    let mut level = volume.level;
    if at.0 >= table_span(level) {
        return hole(u64::MAX);
    }
    // `span` is what `entry` covers; the table it may point to has level `level`.
    let mut span = table_span(level);
    loop {
        let left = span - at.0 % span;
        match entry.kind() {
            Kind::Absent => return hole(left),
            Kind::Block => {
                let first = PageAddr(entry.addr().0 + at.0 % BLOCK_PAGES);
                let data = Some((first, entry.birth()));
                return Ok(Run { data, account: entry.account(), len: left.min(max) });
            }
            Kind::Table => {
                let id = tables.get(entry, level)?;
                if level == 0 {
                    return Ok(leaf_run(tables.node(id).entries(), at.index(), max));
                }
                entry = tables.node(id).entry(at.slot(level));
                span = entry_span(level);
                level -= 1;
            }
            Kind::Page | Kind::Unknown(_) => unreachable!("checked when the table was read"),
        }
    }
}

/// The caller compares the birth with `shared_at`, so a run ends where the birth changes.
fn leaf_run(entries: &Entries, from: usize, max: u64) -> Run {
    let limit = (TABLE_FANOUT - from).min(usize::try_from(max).unwrap_or(TABLE_FANOUT));
    let first = entries.get(from);
    let mut len = 1;
    if limit > 1 {
        let goes_on = |(slots, entry): &(Range<usize>, MapEntry)| *entry == first.behind(slots.start - from);
        len = entries.runs(from..from + limit).take_while(goes_on).map(|(slots, _)| slots.len()).sum();
    }
    let data = (!first.is_absent()).then_some((first.addr(), first.birth()));
    Run { data, account: first.account(), len: len as u64 }
}

/// Returns the entry of level 1 that covers `at`: absent, a block, or a leaf.
pub fn leaf_entry(tables: &mut Tables, volume: &VolumeRecord, at: VirtualPage) -> Result<MapEntry, TableMiss> {
    let (mut entry, mut level) = (volume.root, volume.level);
    while !entry.is_absent() && level >= 1 {
        let id = tables.get(entry, level)?;
        entry = tables.node(id).entry(at.slot(level));
        level -= 1;
    }
    Ok(entry)
}

impl Editor<'_> {
    /// Returns the first virtual block from `at` on, among the next `looks`, whose pages are not contiguous
    /// (true), else where to continue (past the end of the map when there is nothing more).
    pub fn next_scattered(
        &mut self,
        volume: &VolumeRecord,
        at: VirtualPage,
        looks: u64,
    ) -> Result<(VirtualPage, bool), TableMiss> {
        let mut at = VirtualPage(at.0 / BLOCK_PAGES * BLOCK_PAGES);
        for _ in 0..looks {
            let run = lookup(self.tables, volume, at, u64::MAX)?;
            if run.data.is_none() && run.len >= BLOCK_PAGES {
                at = VirtualPage(at.0.saturating_add(run.len) / BLOCK_PAGES * BLOCK_PAGES);
                continue;
            }
            let entry = leaf_entry(self.tables, volume, at)?;
            if entry.kind() == Kind::Table {
                let leaf = self.tables.get(entry, 0)?;
                if self.tables.node(leaf).entries().seams() > 0 {
                    return Ok((at, true));
                }
            }
            at = VirtualPage(at.0 + BLOCK_PAGES);
        }
        Ok((at, false))
    }

    /// Returns the home of the virtual block that begins at `at`, if more than half of it is mapped, and
    /// where to continue: at the next one, or behind a hole.
    pub fn home_of(
        &mut self,
        volume: &VolumeRecord,
        at: VirtualPage,
    ) -> Result<(Option<Home>, VirtualPage), TableMiss> {
        let run = lookup(self.tables, volume, at, u64::MAX)?;
        if run.data.is_none() && run.len >= BLOCK_PAGES {
            return Ok((None, VirtualPage(at.0.saturating_add(run.len) / BLOCK_PAGES * BLOCK_PAGES)));
        }
        let next = VirtualPage(at.0 + BLOCK_PAGES);
        let (mut places, mut mapped): (Vec<(Block, u64)>, u64) = (Vec::new(), 0);
        let mut page = at;
        while page < next {
            let run = lookup(self.tables, volume, page, next.0 - page.0)?;
            let first = run.data.map(|(first, _)| first);
            mapped += if first.is_some() { run.len } else { 0 };
            if let Some(first) = first.filter(|first| first.index() == page.index()) {
                match places.iter_mut().find(|(block, _)| *block == first.block()) {
                    Some((_, pages)) => *pages += run.len,
                    None => places.push((first.block(), run.len)),
                }
            }
            page = VirtualPage(page.0 + run.len);
        }
        let most = places.into_iter().max_by_key(|&(_, pages)| pages).filter(|&(_, pages)| 2 * pages > BLOCK_PAGES);
        let home = most.map_or(Home::None, |(block, _)| Home::Block(block));
        Ok(((2 * mapped > BLOCK_PAGES).then_some(home), next))
    }
}
