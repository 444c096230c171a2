//! Verification: counts every reference again, independent of the stored counts, and compares.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use rustc_hash::FxHashMap;

use crate::catalog::wrong_sums;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::ordered::piece;
use crate::format::ordered::{ORDERED_LEAF, Slots, is_ordered, key, pairs, value};
use crate::format::{ExceptionKey, ExceptionKind, Kind, MAPPED_LEVEL, MapEntry, PINNED, TableRef};
use crate::map::{Entries, Stop};
use crate::ordered;
use crate::runtime::yield_now;
use crate::space::{Counts, tree};
use crate::store::Root;
use crate::types::{BLOCK_PAGES, Block, PageAddr, TABLE_FANOUT, table_span};

use super::Upkeep;
use super::charged::ChargedPages;
use super::walk::Walk;

/// Blocks compared before other tasks run.
const BLOCKS_PER_TURN: u64 = 16;

/// Result of a check.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CheckReport {
    /// Each damaged place.
    pub damage: Vec<String>,
    /// Pages counted as used that nothing refers to.
    pub leaked: u64,
    /// Pages referred to.
    pub pages: u64,
    /// Volumes and snapshots examined.
    pub volumes: u64,
}

/// References found, by block in a tree: nothing is ever moved as a whole, so every step is short.
#[derive(Default)]
pub(super) struct Tally {
    pub blocks: BTreeMap<Block, Counts>,
    unplaced: BTreeMap<TableRef, u32>,
    /// Tables seen: the seams in each, and the tables below it.
    seen: FxHashMap<TableRef, (u64, Vec<TableRef>)>,
    charges: ChargedPages,
    pub report: CheckReport,
}

impl Tally {
    /// Counts the pieces in a leaf of an origin's ordered map.
    fn kept(&mut self, leaf: &Slots) {
        for i in 0..pairs(leaf) {
            if let Some(ExceptionKind::Chained { .. } | ExceptionKind::Independent { .. }) =
                ExceptionKey(key(leaf, i)).kind()
            {
                let piece = piece(value(leaf, i).bits());
                (0..piece.pages).for_each(|p| self.page(PageAddr(piece.to.0 + p)));
            }
        }
    }

    fn page(&mut self, page: PageAddr) {
        self.blocks.entry(page.block()).or_default().pages[page.index()] += 1;
    }

    fn whole(&mut self, block: Block) {
        self.blocks.entry(block).or_default().whole += 1;
    }
}

/// A table still to be visited.
struct Visit {
    entry: MapEntry,
    level: u8,
    /// First virtual page of the table, and the first that is valid (for dead volumes).
    base: u64,
    from: u64,
    directory: bool,
}

impl<D: Device> Upkeep<D> {
    /// Counts every reference again and compares with the counts: in memory, or, if writers are active, in a
    /// view of the next checkpoint. Writers and checkpoints do not wait. `Busy` if the free space is too
    /// small to hold the view.
    pub async fn check(self: &Rc<Self>) -> Result<CheckReport> {
        self.walk(async |walk| check_once(self, walk).await).await
    }
}

/// Pages that an entry of a table of level 0 or 1 maps.
fn mapped_by(entry: &MapEntry) -> u64 {
    match entry.kind() {
        Kind::Page => 1,
        Kind::Block => BLOCK_PAGES,
        Kind::Table => entry.mapped().into(),
        Kind::Absent | Kind::Unknown(_) => 0,
    }
}

impl Tally {
    /// Seams in a table and all below it; `sums` holds the known ones.
    fn seams_under(&self, at: TableRef, sums: &mut FxHashMap<TableRef, u64>) -> u64 {
        if let Some(&sum) = sums.get(&at) {
            return sum;
        }
        let Some((own, below)) = self.seen.get(&at) else { return 0 };
        let sum = own + below.iter().map(|&table| self.seams_under(table, sums)).sum::<u64>();
        sums.insert(at, sum);
        sum
    }

    /// Adds the mapped pages of a block whose counts cannot be read.
    fn count_uncounted(&mut self, block: Block) {
        let Some(found) = self.blocks.remove(&block) else { return };
        let pages = found.pages.iter().filter(|&&n| n > 0 || found.whole > 0).count();
        self.report.pages += pages as u64;
    }

    /// Compares the references found for a block with its counts; returns its free pages.
    fn compare(&mut self, block: Block, counted: &Counts) -> u64 {
        let expected = self.blocks.remove(&block).unwrap_or_default();
        let whole = counted.whole;
        if whole < expected.whole {
            let what =
                format!("block {} is referred to {} times as a whole but counted {whole}", block.0, expected.whole);
            self.report.damage.push(what);
        }
        let mut free = 0;
        for (i, (&counted, &found)) in counted.pages.iter().zip(expected.pages.iter()).enumerate() {
            if counted < found && counted != PINNED {
                let page = block.page(i);
                self.report.damage.push(format!("{page:?} is referred to {found} times but counted {counted}"));
            }
            let excess = counted > found || whole > expected.whole;
            self.report.leaked += u64::from(excess);
            self.report.pages += u64::from(found > 0 || expected.whole > 0);
            free += u64::from(counted == 0 && whole == 0);
        }
        free
    }
}

async fn check_once<D: Device>(upkeep: &Upkeep<D>, walk: &Walk) -> Result<CheckReport> {
    let mut tally = tally(upkeep, walk).await?;
    compare_counts(upkeep, walk, &mut tally).await?;
    compare_seams(upkeep, walk, &mut tally).await;
    if tally.report.damage.is_empty() {
        tally.report.damage =
            tally.charges.compare(walk.roots.iter().filter_map(|root| Some((root.id, root.charged?))));
        tally.report.damage.extend(wrong_sums(&mut upkeep.store.meta.borrow_mut()));
    }
    tally.report.damage.extend(upkeep.store.superblock_flaw.borrow().clone());
    Ok(tally.report)
}

/// Counts all references of the maps.
pub(super) async fn tally<D: Device>(upkeep: &Upkeep<D>, walk: &Walk) -> Result<Tally> {
    let mut tally = Tally::default();
    let mut todo = Vec::new();
    for root in &walk.roots {
        tally.report.volumes += u64::from(!root.is_dead);
        if root.kept.height > 0 {
            let (entry, level) = (root.kept.entry, ORDERED_LEAF + root.kept.height - 1);
            todo.push(Visit { entry, level, base: 0, from: 0, directory: false });
        }
        if root.from < table_span(root.level) {
            let (entry, level, from) = (root.entry, root.level, root.from);
            todo.push(Visit { entry, level, base: 0, from, directory: false });
        }
        if let Some(referenced) = root.referenced.filter(|_| walk.is_of_memory() && !root.is_dead) {
            compare_mapped(upkeep, walk, root, referenced, &mut tally).await?;
        }
    }
    let (entry, level) = walk.directory;
    todo.push(Visit { entry, level, base: 0, from: 0, directory: true });
    while let Some(next) = todo.pop() {
        visit(upkeep, walk, next, &mut tally, &mut todo).await?;
    }
    for &(first, pages) in &walk.journal {
        let (first, blocks) = (first.block().0, u64::from(pages) / BLOCK_PAGES);
        (first..first + blocks).for_each(|block| tally.whole(Block(block)));
    }
    Ok(tally)
}

async fn visit<D: Device>(
    upkeep: &Upkeep<D>,
    walk: &Walk,
    visit: Visit,
    tally: &mut Tally,
    todo: &mut Vec<Visit>,
) -> Result<()> {
    let Visit { entry, level, base, from, directory } = visit;
    if entry.is_absent() {
        return Ok(());
    }
    let at = {
        let meta = upkeep.store.meta.borrow();
        let at = meta.tables.resolve(entry.table_ref());
        match at.page() {
            Some(page) => tally.page(page),
            None => *tally.unplaced.entry(at).or_default() += 1,
        }
        at
    };
    // A table of a partly released dead volume is exclusive to it.
    if tally.seen.contains_key(&at) {
        return Ok(());
    }
    tally.seen.insert(at, Default::default());
    let entries = match upkeep.table_of(walk, entry, level).await {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::Corrupt || e.kind() == ErrorKind::Io => {
            tally.report.damage.push(e.to_string());
            return Ok(());
        }
        Err(e) => return Err(e),
    };
    if is_ordered(level) {
        let below = ordered::children(&entries, level);
        todo.extend(below.into_iter().map(|entry| Visit { entry, level: level - 1, base, from, directory }));
        if level == ORDERED_LEAF {
            tally.kept(&entries);
        }
        return Ok(());
    }
    // Tables of a dead volume have holes where entries were released.
    if entry.table_ref().page().is_some() && level <= MAPPED_LEVEL && from == 0 && !directory {
        let found: u64 = entries.iter().map(mapped_by).sum();
        if found != u64::from(entry.mapped()) {
            let (at, said) = (entry.addr(), entry.mapped());
            let what = format!("map table of level {level} at {at:?} maps {found} pages, the entry above says {said}");
            tally.report.damage.push(what);
        }
    }
    let said = outline(upkeep, &entries, level);
    tally.seen.insert(at, said);
    let span = table_span(level) / 256;
    for (i, &child) in entries.iter().enumerate() {
        let start = base + i as u64 * span;
        if start + span <= from {
            continue;
        }
        match child.kind() {
            Kind::Table => todo.push(Visit { entry: child, level: level - 1, base: start, from, directory }),
            Kind::Page => {
                tally.page(child.addr());
                if !directory {
                    tally.charges.add(child, 1);
                }
            }
            Kind::Block => {
                tally.whole(child.addr().block());
                tally.charges.add(child, BLOCK_PAGES);
            }
            Kind::Absent | Kind::Unknown(_) => {}
        }
    }
    Ok(())
}

/// Compares the pages that a volume maps with its record.
async fn compare_mapped<D: Device>(
    upkeep: &Upkeep<D>,
    walk: &Walk,
    root: &Root,
    referenced: u64,
    tally: &mut Tally,
) -> Result<()> {
    let found = upkeep
        .store
        .retry_no_alloc(|meta| {
            upkeep.check_unchanged(meta, walk)?;
            Ok(meta.tables.mapped(root.entry, root.level + 1).map_err(Stop::from)?)
        })
        .await;
    match found {
        Ok(found) if found == referenced => {}
        Ok(found) => {
            let what = format!("volume {} maps {found} pages, but {referenced} are counted", root.id.0);
            tally.report.damage.push(what);
        }
        // The walk that follows reports it.
        Err(e) if e.kind() == ErrorKind::Corrupt || e.kind() == ErrorKind::Io => {}
        Err(e) => return Err(e),
    }
    Ok(())
}

/// Seams of a table, and the tables below it.
fn outline<D: Device>(upkeep: &Upkeep<D>, entries: &[MapEntry; TABLE_FANOUT], level: u8) -> (u64, Vec<TableRef>) {
    if level == 0 {
        return (Entries::from(Box::new(*entries)).seams(), Vec::new());
    }
    let meta = upkeep.store.meta.borrow();
    let below = entries.iter().filter(|e| e.kind() == Kind::Table);
    (0, below.map(|e| meta.tables.resolve(e.table_ref())).collect())
}

async fn compare_counts<D: Device>(upkeep: &Upkeep<D>, walk: &Walk, tally: &mut Tally) -> Result<()> {
    let (mut free, mut lost, mut unread) = (0, false, BTreeSet::new());
    for block in (1..walk.layout.blocks()).map(Block).filter(|&b| !walk.layout.is_reserved(b)) {
        if block.0.is_multiple_of(BLOCKS_PER_TURN) {
            yield_now().await;
        }
        match upkeep.counts_of(walk, block).await {
            Ok(_) if tree::is_lost(&upkeep.store.meta.borrow().space, block) => {
                lost = true;
                tally.count_uncounted(block);
            }
            Ok(counted) => free += tally.compare(block, &counted),
            Err(e) if e.kind() == ErrorKind::Corrupt || e.kind() == ErrorKind::Io => {
                lost = true;
                tally.count_uncounted(block);
                unread.insert(e.to_string());
            }
            Err(e) => return Err(e),
        }
    }
    // One unreadable page stands for many blocks.
    tally.report.damage.extend(unread);
    tally.report.damage.extend(upkeep.store.meta.borrow().lost_counts.iter().map(Error::to_string));
    if let Some(stray) = tally.blocks.keys().find(|&&b| b.0 >= walk.layout.blocks() || walk.layout.is_reserved(b)) {
        tally.report.damage.push(format!("a map refers to {stray:?}, which cannot hold data"));
    }
    if walk.is_of_memory() {
        let meta = upkeep.store.meta.borrow();
        for (&at, &expected) in &tally.unplaced {
            let counted = meta.tables.refs(at).unwrap_or(0);
            if counted != expected {
                tally.report.damage.push(format!("{at:?} is referred to {expected} times but counted {counted}"));
            }
        }
    }
    if walk.available > free && !lost {
        let what = format!("{} pages are free but {} are counted as available", free, walk.available);
        tally.report.damage.push(what);
    }
    Ok(())
}

/// Compares the seams of each volume with its record.
async fn compare_seams<D: Device>(upkeep: &Upkeep<D>, walk: &Walk, tally: &mut Tally) {
    let mut sums: FxHashMap<TableRef, u64> = FxHashMap::default();
    for root in walk.roots.iter().filter(|root| !root.is_dead && root.entry.kind() == Kind::Table) {
        yield_now().await;
        let at = upkeep.store.meta.borrow().tables.resolve(root.entry.table_ref());
        let found = tally.seams_under(at, &mut sums);
        // Unreadable tables are damage by themselves.
        if let Some(seams) = root.seams.filter(|&seams| seams != found && tally.report.damage.is_empty()) {
            let id = root.id.0;
            let what = format!(
                "volume {id} has {found} pages that do not lie behind the one before them, and {seams} are counted"
            );
            tally.report.damage.push(what);
        }
    }
}
