//! Sharing a range of one volume with another: whole tables where both sides are aligned alike, single
//! entries elsewhere.

use crate::format::{Kind, MapEntry, TableRef, VolumeRecord};
use crate::planted::correct;
use crate::types::{BLOCK_PAGES, VirtualPage, entry_span, table_span};

use super::charges::block_pages;
use super::edit::count_seams;
use super::edit::{Editor, Stop};
use super::lookup::lookup;
use super::release::Leaf;

/// Result of a step of a range clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Pages of the target that now map what the source maps.
    pub pages: u64,
    /// A table that had been exclusive to the target, and its level: nothing points to it any more, and what
    /// it points to is still counted.
    pub replaced: Option<(MapEntry, u8)>,
}

impl Shared {
    fn pages(pages: u64) -> Shared {
        Shared { pages, replaced: None }
    }
}

/// What the replaced entry pointed to.
enum Replaced {
    /// A table exclusive to the target: it continues as a dead volume.
    Table(MapEntry),
    /// A table that other entries point to as well.
    Shared(TableRef),
    /// The target of an entry of level 1.
    Leaf(Leaf),
}

/// Returns the highest level of which one entry of the source can become one entry of the target, if any.
pub fn shared_level(
    source: &VolumeRecord,
    from: VirtualPage,
    target: &VolumeRecord,
    to: VirtualPage,
    len: u64,
) -> Option<u8> {
    let fits = |level: &u8| {
        let span = entry_span(*level);
        from.0.is_multiple_of(span) && to.0.is_multiple_of(span) && span <= len
    };
    // If the source's map is lower, its root is what one entry of the target points to.
    (1..=target.level.min(source.level + 1)).rev().find(fits)
}

impl Editor<'_> {
    /// Maps `target` from `to` on as `source` is mapped from `from` on: tables and pages are shared, holes
    /// become holes. Handles one entry of the highest level at which both sides are aligned, or pages up to
    /// the end of a virtual block of either, at most `len`. All of them change at once or, on a [`Stop`],
    /// none.
    ///
    /// `shared_at` of both volumes must have been raised before.
    pub fn share_step(
        &mut self,
        source: &VolumeRecord,
        from: VirtualPage,
        target: &mut VolumeRecord,
        to: VirtualPage,
        len: u64,
    ) -> Result<Shared, Stop> {
        if let Some(level) = shared_level(source, from, target, to, len) {
            return share_entry(self, source, from, target, to, level);
        }
        let run = lookup(self.tables, source, from, len)?;
        let n = run.len.min(BLOCK_PAGES - from.index() as u64).min(BLOCK_PAGES - to.index() as u64);
        let Some((addr, birth)) = run.data else {
            return Ok(Shared::pages(self.unmap_step(target, to, VirtualPage(to.0 + n))?.0 - to.0));
        };
        let path = self.writable(target, to, 0)?;
        let &(leaf, first) = path.last().expect("a path has a table");
        let slots = first..first + n as usize;
        let freed = self.freed_in(leaf, slots.clone(), (addr, n))?;
        count_seams(target, 0, self.tables.node(leaf).entries().seams_in(slots.clone()));
        let gone = self.give_up_pages(leaf, slots.clone(), freed);
        let entry = MapEntry::page(addr, correct!(birth, Bug::RangeCloneRejuvenates => self.epoch));
        let entry = entry.charged_to(correct!(run.account, Bug::RangeCloneForgetsAccount => self.account));
        self.tables.set_run(leaf, slots.clone(), entry);
        self.space.incr_pages(addr, n);
        target.referenced = target.referenced + n - gone;
        count_seams(target, self.seams_around(leaf, slots), 0);
        Ok(Shared::pages(n))
    }

    /// Whether a step may replace a table that is exclusive to the target, which then continues as a dead
    /// volume.
    pub fn replaces_table(
        &mut self,
        source: &VolumeRecord,
        from: VirtualPage,
        target: &VolumeRecord,
        to: VirtualPage,
        len: u64,
    ) -> Result<bool, Stop> {
        let Some(level) = shared_level(source, from, target, to, len).filter(|&level| level > 1) else {
            return Ok(false);
        };
        let old = entry_at(self, target, to, level)?;
        Ok(old.kind() == Kind::Table && self.table_count(old.table_ref())? == 1)
    }

    /// Returns how many pages a step over one entry of `level` adds to the target, and how many it removes.
    pub fn difference(
        &mut self,
        source: &VolumeRecord,
        from: VirtualPage,
        target: &VolumeRecord,
        to: VirtualPage,
        level: u8,
    ) -> Result<(u64, u64), Stop> {
        let (entry, old) = (entry_at(self, source, from, level)?, entry_at(self, target, to, level)?);
        Ok((self.tables.mapped(entry, level)?, self.tables.mapped(old, level)?))
    }
}

/// Shares one entry of a table of `level`, with everything below it.
fn share_entry(
    editor: &mut Editor<'_>,
    source: &VolumeRecord,
    from: VirtualPage,
    target: &mut VolumeRecord,
    to: VirtualPage,
    level: u8,
) -> Result<Shared, Stop> {
    let entry = entry_at(editor, source, from, level)?;
    let old = entry_at(editor, target, to, level)?;
    let mut shared = Shared::pages(entry_span(level));
    if is_same(editor, entry, old) {
        return Ok(shared);
    }
    let (comes, goes) = (editor.tables.mapped(entry, level)?, editor.tables.mapped(old, level)?);
    let is_alone = old.kind() == Kind::Table && editor.table_count(old.table_ref())? == 1;
    if is_alone && level == 1 {
        editor.tables.get(old, 0)?;
    }
    // The tables read above may have been copied since, but their contents have not changed. Tables that
    // were shared on the path have given each of their entries one more reference.
    let mut path = editor.writable(target, to, level)?;
    let &(id, slot) = path.last().expect("a path has a table");
    let old = editor.tables.resolve_finished_addr(editor.tables.node(id).entry(slot));
    let is_alone = is_alone && editor.table_count(old.table_ref())? == 1;
    let gone = match old.kind() {
        Kind::Table if is_alone && level > 1 => Replaced::Table(old),
        Kind::Table if !is_alone => Replaced::Shared(old.table_ref()),
        _ => Replaced::Leaf(editor.find_leaf(old, block_pages(entry))?),
    };
    // From here on no lookup can miss. The new reference first: the old one may be to something below the
    // same table.
    correct!(editor.share(entry), Bug::SharedTableUncounted => if level == 1 { editor.share(entry) });
    match gone {
        Replaced::Table(table) => shared.replaced = Some((table, level - 1)),
        Replaced::Shared(table) => editor.unshare_table(table),
        Replaced::Leaf(leaf) => _ = editor.drop_leaf(leaf),
    }
    let copy = correct!(
        entry,
        Bug::SharedTableRejuvenates => match entry.kind() {
            Kind::Table => {
                MapEntry::table(entry.table_ref(), editor.epoch, entry.checksum()).mapping(entry.mapped())
            }
            _ => entry,
        }
    );
    editor.tables.set(id, slot, copy);
    if entry.kind() == Kind::Table || old.kind() == Kind::Table {
        target.estimated = true;
        count_seams(target, source.seams_among(comes), target.seams_among(goes));
    }
    target.referenced = target.referenced + comes - goes;
    if entry.is_absent() {
        editor.prune(target, &mut path);
    }
    Ok(shared)
}

/// Returns the entry of a volume at `at` in a table of `level`, or the one it would have there.
fn entry_at(editor: &mut Editor<'_>, volume: &VolumeRecord, at: VirtualPage, level: u8) -> Result<MapEntry, Stop> {
    if at.0 >= table_span(volume.level) {
        return Ok(MapEntry::ABSENT);
    }
    let (mut entry, mut here) = (volume.root, volume.level);
    while !entry.is_absent() && here >= level {
        let id = editor.tables.get(entry, here)?;
        entry = editor.tables.node(id).entry(at.slot(here));
        here -= 1;
    }
    Ok(editor.tables.resolve_finished_addr(entry))
}

fn is_same(editor: &Editor<'_>, a: MapEntry, b: MapEntry) -> bool {
    match (a.kind(), b.kind()) {
        (Kind::Table, Kind::Table) => editor.tables.resolve(a.table_ref()) == editor.tables.resolve(b.table_ref()),
        (Kind::Table, _) | (_, Kind::Table) => false,
        _ => a.is_absent() && b.is_absent() || !a.is_absent() && !b.is_absent() && a.addr() == b.addr(),
    }
}
