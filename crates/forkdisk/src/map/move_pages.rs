//! Moving pages for all maps that refer to them: what is shared stays shared.
//!
//! A page that has been copied to a new place is replaced in every leaf of a [`Family`] that refers to it; a
//! table that several maps share is replaced once, for all of them. Entries keep their births: exclusive
//! entries stay exclusive, and shared ones stay shared. The arithmetic is exact even if the family is not
//! complete: maps outside it keep the old page.

use crate::format::{Kind, MapEntry, MovedRun};
use crate::planted::correct;
use crate::space::delta;
use crate::types::{BLOCK_PAGES, PageAddr, TABLE_FANOUT, VolumeId};

use super::charges::charges_of_move;
use super::edit::{Editor, Stop};
use super::family::{Family, Referrer, SubMap};
use super::store::NodeId;

/// Changes in the records of volumes.
#[derive(Default)]
pub struct Gathered {
    /// New roots.
    pub roots: Vec<(VolumeId, MapEntry)>,
    /// Seams of each volume before and after.
    pub seams: Vec<(VolumeId, u64, u64)>,
}

/// Where the family's maps place the pages that may be moved.
pub struct Movable {
    /// The page of each slot of the volume to be gathered, if all references to it are known.
    pub pages: Vec<Option<PageAddr>>,
    /// The page of every slot, movable or not.
    pub all: Vec<Option<PageAddr>>,
    /// The pages of each leaf, with the weight of its seams.
    leaves: Vec<(Vec<Option<PageAddr>>, u64)>,
    /// The weight of the volume's own seams.
    mine: u64,
    /// Tables that a move would have to change.
    pub tables: u64,
}

fn pages_of(entries: impl Iterator<Item = MapEntry>) -> Vec<Option<PageAddr>> {
    entries.map(|e| (!e.is_absent()).then(|| e.addr())).collect()
}

/// Returns the number of pages that are not contiguous with the page before them.
pub fn seams_of(pages: &[Option<PageAddr>]) -> u64 {
    let is_seam = |pair: &&[Option<PageAddr>]| matches!(pair, [Some(a), Some(b)] if b.0 != a.0 + 1);
    pages.windows(2).filter(is_seam).count() as u64
}

/// The same if each page lies where `now` places it.
pub fn seams_if(pages: &[Option<PageAddr>], now: impl Fn(usize, PageAddr) -> PageAddr) -> u64 {
    let placed: Vec<_> = pages.iter().enumerate().map(|(slot, page)| page.map(|page| now(slot, page))).collect();
    seams_of(&placed)
}

impl Movable {
    /// Returns the first leaf that would have more seams if each page lay where `now` places it, of those
    /// with at least the weight of the volume's own leaf.
    pub fn burdened(&self, now: impl Fn(usize, PageAddr) -> PageAddr) -> Option<&[Option<PageAddr>]> {
        let mut peers = self.leaves.iter().filter(|(_, weight)| *weight >= self.mine);
        peers.find(|(pages, _)| seams_if(pages, &now) > seams_of(pages)).map(|(pages, _)| &pages[..])
    }

    /// Returns the weight of the seams in all leaves together if each page lies where `now` places it.
    pub fn weight(&self, now: impl Fn(usize, PageAddr) -> PageAddr) -> u64 {
        self.leaves.iter().map(|(pages, weight)| seams_if(pages, &now) * weight).sum()
    }
}

impl Editor<'_> {
    /// Returns which pages of `id` can be moved because the family knows all references to them. `None`: it
    /// has none there.
    pub fn movable(&mut self, family: &Family, id: VolumeId) -> Result<Option<Movable>, Stop> {
        let Some(mine) = family.leaf_of(id) else { return Ok(None) };
        let known = self.known_wholly(family)?;
        let said: Vec<(usize, Vec<Option<PageAddr>>)> =
            family.leaves().map(|(i, part)| (i, pages_of(self.said(part).iter()))).collect();
        let all = said.iter().find(|(i, _)| *i == mine).map(|(_, pages)| pages.clone()).unwrap_or_default();
        let mut pages = vec![None; TABLE_FANOUT];
        let block = |&slot: &usize| all[slot].map(PageAddr::block);
        let slots: Vec<usize> = (0..TABLE_FANOUT).collect();
        for row in slots.chunk_by(|a, b| block(a) == block(b)) {
            let Some(block) = block(&row[0]) else { continue };
            let counts = self.space.in_block(block)?;
            for &slot in row {
                let (mut as_page, mut as_block, mut everybody) = (0, 0, true);
                for (i, _) in said.iter().filter(|(_, leaf)| leaf[slot] == all[slot]) {
                    everybody &= known[*i];
                    match family.parts[*i].node {
                        Some(_) => as_page += 1,
                        None => as_block += family.parts[*i].by.len() as u32,
                    }
                }
                // Block entries with another birth may refer to the same block.
                let page = all[slot].filter(|page| counts.page(page.index()) == as_page && counts.whole() == as_block);
                pages[slot] = page.filter(|_| everybody);
            }
        }
        let leaves = said.into_iter().map(|(i, pages)| (pages, family.weight(&family.parts[i]))).collect();
        let mine = family.weight(&family.parts[mine]);
        Ok(Some(Movable { pages, all, leaves, mine, tables: family.parts.len() as u64 }))
    }

    /// Replaces the pages in `moved` wherever the family refers to them. All of it happens or, on a [`Stop`],
    /// nothing.
    pub fn move_pages(&mut self, family: &Family, moved: &[MovedRun]) -> Result<Gathered, Stop> {
        let referring = self.who_refers(family, moved);
        let mut changes = vec![false; family.parts.len()];
        referring.iter().for_each(|&leaf| mark(family, leaf, &mut changes));
        for (_, part) in family.parts.iter().enumerate().filter(|&(i, part)| changes[i] && part.node.is_some()) {
            self.table_count(part.entry.table_ref())?;
        }
        let (charges, credits) = charges_of_move(self, family, moved, &referring)?;
        // From here on no lookup can miss: the counts above are in memory.
        charges.iter().for_each(|&(account, pages)| self.space.accounts.charge(account, pages));
        self.space.accounts.credit(credits);
        let mut out = Gathered::default();
        let mut nodes: Vec<Option<NodeId>> = family.parts.iter().map(|part| part.node).collect();
        for i in family.downwards().into_iter().filter(|&i| changes[i]) {
            let part = &family.parts[i];
            let (node, entry) = match part.node {
                Some(node) => own_shared(self, part, node),
                None => demote_shared(self, part),
            };
            nodes[i] = Some(node);
            if entry != part.entry {
                refer(self, family, part, entry, &nodes, &mut out);
            }
            if part.level == 0 {
                correct!(
                    replace(self, family, part, node, moved, &mut out),
                    Bug::GatherFreesShared => match referring.first() == Some(&i) {
                        true => replace(self, family, part, node, moved, &mut out),
                        false => lose(self, part, node, moved),
                    }
                );
                promote_shared(self, family, part, node, &nodes);
            }
        }
        Ok(out)
    }

    /// Returns the leaves and blocks that referring to pages in `moved`.
    pub fn who_refers(&self, family: &Family, moved: &[MovedRun]) -> Vec<usize> {
        let refers = |part: &SubMap| {
            let said = self.said(part);
            let hit = |run: &MovedRun| run.slots().any(|slot| is_moved(said.get(slot), slot, run).is_some());
            moved.iter().any(hit)
        };
        family.leaves().filter(|(_, part)| refers(part)).map(|(i, _)| i).collect()
    }
}

/// Returns the new place of the page of a slot, if it was moved.
pub(super) fn is_moved(entry: MapEntry, slot: usize, run: &MovedRun) -> Option<PageAddr> {
    let (from, to) = run.of(slot)?;
    (entry.kind() == Kind::Page && entry.addr() == from).then_some(to)
}

/// Marks a part as changing, and the tables above it.
fn mark(family: &Family, part: usize, changes: &mut [bool]) {
    if std::mem::replace(&mut changes[part], true) {
        return;
    }
    for by in &family.parts[part].by {
        if let Referrer::Table(above) = *by {
            mark(family, above, changes);
        }
    }
}

const _: () = assert!(BLOCK_PAGES as usize == TABLE_FANOUT);

/// For the planted bug: releases the pages that a leaf refers to, while it continues to refer to them.
#[cfg(feature = "planted")]
fn lose(editor: &mut Editor<'_>, part: &SubMap, node: NodeId, moved: &[MovedRun]) {
    debug_assert_eq!(part.level, 0);
    for run in moved {
        for slot in run.slots() {
            let old = editor.tables.node(node).entry(slot);
            if is_moved(old, slot, run).is_some() {
                editor.space.decr_page(old.addr(), editor.until);
            }
        }
    }
}

/// Returns the table of a part, changeable, with as many references as the family knows; other maps keep
/// the old one.
fn own_shared(editor: &mut Editor<'_>, part: &SubMap, node: NodeId) -> (NodeId, MapEntry) {
    let (known, at) = (part.by.len() as u32, part.entry.table_ref());
    // It differs from the earlier lookup if a table above, which other maps keep as well, was copied
    // since.
    let count = editor.known_count(at);
    let is_dirty = editor.tables.is_dirty(node);
    if is_dirty && count == known {
        return (node, part.entry);
    }
    let place = editor.tables.resolve(at).page();
    let lost = place.map_or(0, |page| editor.space.page_lost_until(page)).max(editor.tables.lost_until(at));
    let mut entries = editor.tables.node(node).entries().clone();
    if part.level > 0 {
        entries.change_tables(|e| editor.tables.resolve_finished_addr(e));
    }
    if count <= known {
        if let Some(page) = place {
            (1..count).for_each(|_| delta::decr_table(editor.space, page, editor.until));
        }
        editor.free_table(node, at);
    } else {
        for e in entries.iter().filter(|e| !e.is_absent()) {
            editor.share(e);
        }
        (0..known).for_each(|_| editor.unshare_table(at));
    }
    let birth = correct!(part.entry.birth(), Bug::GatherMakesTablesYoung => editor.epoch);
    editor.tables.create_shared(part.level, birth, entries, known, lost)
}

/// Creates a leaf to replace a block entry that several tables have.
fn demote_shared(editor: &mut Editor<'_>, part: &SubMap) -> (NodeId, MapEntry) {
    let block = part.entry.addr().block();
    editor.space.demote(block);
    (1..part.by.len()).for_each(|_| editor.space.decr_block(block, editor.until));
    let said = editor.said(part);
    editor.tables.create_shared(0, part.entry.birth(), said, part.by.len() as u32, editor.space.lost_until(block))
}

/// Makes everything that referred to a part refer to `entry`.
fn refer(
    editor: &mut Editor<'_>,
    family: &Family,
    part: &SubMap,
    entry: MapEntry,
    nodes: &[Option<NodeId>],
    out: &mut Gathered,
) {
    for by in &part.by {
        match *by {
            Referrer::Root(member) => out.roots.push((family.members[member].id, entry)),
            Referrer::Table(above) => {
                let node = nodes[above].expect("what is above a leaf is a table");
                editor.tables.set(node, family.at.slot(part.level + 1), entry);
            }
        }
    }
}

fn replace(
    editor: &mut Editor<'_>,
    family: &Family,
    part: &SubMap,
    node: NodeId,
    moved: &[MovedRun],
    out: &mut Gathered,
) {
    let before = editor.tables.node(node).entries().seams();
    for run in moved {
        for slot in run.slots() {
            let old = editor.tables.node(node).entry(slot);
            let Some(to) = is_moved(old, slot, run) else { continue };
            let birth = correct!(old.birth(), Bug::GatherRejuvenates => editor.epoch);
            editor.tables.set(node, slot, MapEntry::page(to, birth).charged_to(old.account()));
            editor.space.decr_page(old.addr(), editor.until);
            editor.space.incr_page(to);
        }
    }
    let now = editor.tables.node(node).entries().seams();
    out.seams.extend(part.members.iter().map(|&m| (family.members[m].id, before, now)));
}

/// Turns a leaf whose pages lie in one block, in place, into a block entry of everything that refers to
/// it.
fn promote_shared(editor: &mut Editor<'_>, family: &Family, part: &SubMap, node: NodeId, nodes: &[Option<NodeId>]) {
    let Some((entry, youngest)) = editor.tables.node(node).entries().as_block() else { return };
    let (block, oldest) = (entry.addr().block(), entry.birth());
    // One birth stands for all pages: no volume may take exclusive pages for shared, or shared ones for
    // exclusive.
    let alike = |&m: &usize| {
        let shared_at = family.members[m].shared_at;
        oldest > shared_at || youngest <= shared_at
    };
    if !part.members.iter().all(alike) {
        return;
    }
    editor.space.promote(block);
    (1..part.by.len()).for_each(|_| editor.space.incr_block(block));
    // What makes the table exclusive to the family may not be durable yet, and makes the block exclusive
    // from here on.
    let until = editor.tables.lost_until_of(node);
    correct!(editor.space.note_lost(block, until), Bug::GatherForgetsLosses => ());
    editor.tables.remove(node);
    refer(editor, family, part, entry, nodes, &mut Gathered::default());
}
