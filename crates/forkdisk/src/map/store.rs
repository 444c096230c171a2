//! The tables in memory: a bounded cache of clean ones, and those that changed since the last checkpoint.
//!
//! A changed table has a number instead of an address until a checkpoint *places* it. While a checkpoint runs
//! its tables are *frozen*: they do not change, a writer copies them first.

use std::ops::Range;

use rustc_hash::FxHashMap;
use slab::Slab;

use crate::format::ordered::{Slots, child_slots, is_ordered};
use crate::format::{Kind, MAPPED_LEVEL, MapEntry, TableRef};
use crate::planted::correct;
use crate::types::{BLOCK_PAGES, Epoch, PageAddr};

use super::entries::Entries;

/// A table that is needed and not in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableMiss {
    /// The entry that points to it.
    pub entry: MapEntry,
    /// Its level.
    pub level: u8,
}

/// Handle of a table in memory; valid until the next eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Clean,
    /// Changed since the last freeze; `refs` entries point to it.
    Dirty {
        refs: u32,
    },
    /// Belongs to the running checkpoint, which placed it.
    Frozen,
}

pub struct Node {
    key: TableRef,
    state: State,
    pub level: u8,
    birth: Epoch,
    hot: bool,
    /// Freed while a checkpoint was writing it.
    doomed: bool,
    /// The references it lost stay lost once the journal is durable up to here.
    lost_until: u64,
    entries: Entries,
}

/// Memory of a changed table beside its entries: the node, its keys in three maps, its place.
const NODE_BYTES: usize = 2 * size_of::<Node>() + 176;

impl Node {
    /// Returns its entries.
    pub fn entries(&self) -> &Entries {
        &self.entries
    }

    /// Returns the slots of a page of an ordered map.
    pub fn slots(&self) -> &Slots {
        self.entries.array()
    }

    /// Returns one of its entries.
    pub fn entry(&self, slot: usize) -> MapEntry {
        self.entries.get(slot)
    }

    fn bytes(&self) -> usize {
        NODE_BYTES + self.entries.bytes()
    }
}

/// A table that is to be written to the device.
pub struct Placed {
    pub node: NodeId,
    pub level: u8,
    pub birth: Epoch,
    pub at: PageAddr,
    /// References it had when it was frozen.
    pub refs: u32,
}

/// Where a checkpoint placed a table; once its bytes are final, its checksum and how many pages it maps (see
/// [`MapEntry::mapped`]).
type Placement = (PageAddr, Option<(u32, u32)>);

pub struct Tables {
    nodes: Slab<Node>,
    by_ref: FxHashMap<TableRef, usize>,
    /// Where the running checkpoint and the one before it placed tables with a number.
    placed: FxHashMap<TableRef, Placement>,
    before: FxHashMap<TableRef, Placement>,
    next: u64,
    dirty: usize,
    dirty_bytes: usize,
    frozen: usize,
    frozen_bytes: usize,
    /// Number of tables of the device that changes read since the last freeze; in the running checkpoint.
    read: usize,
    read_frozen: usize,
    clean_bytes: usize,
    limit: usize,
    /// Number of changes under way that need many tables at once: while there are any, no table is evicted.
    held: u32,
    hand: usize,
    hits: u64,
    /// Clean tables evicted so far.
    evicted: u64,
}

impl Tables {
    /// Creates a store that keeps at most `limit` bytes of clean tables.
    pub fn new(limit: usize) -> Tables {
        Tables {
            nodes: Slab::new(),
            by_ref: FxHashMap::default(),
            placed: FxHashMap::default(),
            before: FxHashMap::default(),
            next: 1,
            dirty: 0,
            dirty_bytes: 0,
            frozen: 0,
            frozen_bytes: 0,
            read: 0,
            read_frozen: 0,
            clean_bytes: 0,
            limit,
            held: 0,
            hand: 0,
            hits: 0,
            evicted: 0,
        }
    }

    /// Keeps clean tables beyond the limit until each `hold(true)` has had its `hold(false)`.
    pub fn hold(&mut self, held: bool) {
        self.held = if held { self.held + 1 } else { self.held - 1 };
        self.evict();
    }

    /// Returns the number of cache hits.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Sets the limit of clean tables to `limit` bytes.
    #[cfg(test)]
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
        self.evict();
    }

    /// Returns the number of clean tables that have been evicted to stay within the limit.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the number of tables in memory.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the number of tables changed since the last freeze.
    pub fn dirty(&self) -> usize {
        self.dirty
    }

    /// Returns the number of tables changed and not yet in a finished checkpoint.
    pub fn unwritten(&self) -> usize {
        self.dirty + self.frozen
    }

    /// Returns the memory of tables changed and not yet in a finished checkpoint, in bytes.
    pub fn unwritten_bytes(&self) -> usize {
        self.dirty_bytes + self.frozen_bytes
    }

    /// Returns the number of tables that a replay of everything since the last finished checkpoint reads:
    /// copied, or released. It is independent of the memory that their copies take.
    pub fn read_by_replay(&self) -> usize {
        self.read + self.read_frozen
    }

    /// Notes that a change depends on the contents of this table: a replay of it has to read the table,
    /// unless it creates it.
    pub fn follow_from(&mut self, id: NodeId) {
        self.read += usize::from(!self.is_dirty(id));
    }

    /// Returns the current reference of a table: its own address, or the one a checkpoint gave it.
    pub fn resolve(&self, at: TableRef) -> TableRef {
        match at.page() {
            Some(_) => at,
            None => placement_of(self, at).map_or(at, |(page, _)| TableRef::on_disk(page)),
        }
    }

    /// Returns the entry with its table's address and checksum filled in, once a checkpoint wrote it.
    pub fn resolve_addr(&self, entry: MapEntry) -> MapEntry {
        match (entry.kind(), placement_of(self, entry.table_ref())) {
            (Kind::Table, Some((page, Some((sum, mapped))))) if entry.table_ref().page().is_none() => {
                MapEntry::table(TableRef::on_disk(page), entry.birth(), sum).mapping(mapped)
            }
            _ => entry,
        }
    }

    /// As [`resolve_addr`](Self::resolve_addr), but only for tables that a finished checkpoint wrote: tables
    /// of a running one are not known by their addresses yet.
    pub fn resolve_finished_addr(&self, entry: MapEntry) -> MapEntry {
        match self.placed.contains_key(&entry.table_ref()) {
            true => entry,
            false => self.resolve_addr(entry),
        }
    }

    /// Returns the table an entry points to.
    pub fn get(&mut self, entry: MapEntry, level: u8) -> Result<NodeId, TableMiss> {
        debug_assert_eq!(entry.kind(), Kind::Table);
        let at = entry.table_ref();
        let found = self.by_ref.get(&at).or_else(|| self.by_ref.get(&self.resolve(at)));
        match found {
            Some(&i) => {
                let node = &mut self.nodes[i];
                debug_assert_eq!(node.level, level);
                node.hot = true;
                self.hits += 1;
                Ok(NodeId(i))
            }
            None => Err(TableMiss { entry: self.resolve_addr(entry), level }),
        }
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0]
    }

    /// Whether the table may be changed in place.
    pub fn is_dirty(&self, id: NodeId) -> bool {
        matches!(self.nodes[id.0].state, State::Dirty { .. })
    }

    /// Sets an entry of a table that may be changed; returns the old one.
    pub fn set(&mut self, id: NodeId, slot: usize, entry: MapEntry) -> MapEntry {
        self.change(id, |entries| entries.set(slot, entry))
    }

    /// Sets some entries of a leaf that may be changed to `first` and its successors.
    pub fn set_run(&mut self, id: NodeId, slots: Range<usize>, first: MapEntry) {
        self.change(id, |entries| entries.set_run(slots, first));
    }

    fn change<T>(&mut self, id: NodeId, change: impl FnOnce(&mut Entries) -> T) -> T {
        let node = &mut self.nodes[id.0];
        assert!(matches!(node.state, State::Dirty { .. }), "only changed tables are changed");
        let before = node.entries.bytes();
        let outcome = change(&mut node.entries);
        self.dirty_bytes = self.dirty_bytes - before + node.entries.bytes();
        outcome
    }

    /// Returns the slots of a page of an ordered map that may be changed.
    pub fn slots_mut(&mut self, id: NodeId) -> &mut Slots {
        let node = &mut self.nodes[id.0];
        assert!(matches!(node.state, State::Dirty { .. }), "only changed tables are changed");
        node.entries.array_mut()
    }

    /// Adds a table read from the device.
    pub fn insert_clean(&mut self, miss: &TableMiss, entries: Entries) {
        let key = miss.entry.table_ref();
        if self.by_ref.contains_key(&key) {
            return;
        }
        let birth = miss.entry.birth();
        let (level, lost_until) = (miss.level, 0);
        let node = Node { key, state: State::Clean, level, birth, hot: true, doomed: false, lost_until, entries };
        self.clean_bytes += node.bytes();
        let i = self.nodes.insert(node);
        self.by_ref.insert(key, i);
    }

    /// Creates a table with one reference; returns it and the entry that points to it.
    pub fn create(&mut self, level: u8, birth: Epoch, entries: Entries) -> (NodeId, MapEntry) {
        let key = TableRef::in_memory(self.next);
        self.next += 1;
        self.dirty += 1;
        let i = self.nodes.insert(Node {
            key,
            state: State::Dirty { refs: 1 },
            level,
            birth,
            hot: true,
            doomed: false,
            lost_until: 0,
            entries,
        });
        self.dirty_bytes += self.nodes[i].bytes();
        self.by_ref.insert(key, i);
        (NodeId(i), MapEntry::table(key, birth, 0))
    }

    /// Returns the references of a table that has no address yet; `None`: its count is in the space map.
    pub fn refs(&self, at: TableRef) -> Option<u32> {
        match self.nodes.get(*self.by_ref.get(&at)?)?.state {
            State::Dirty { refs } => Some(refs),
            _ => None,
        }
    }

    /// Creates a changed table with `refs` references, which are known to be all of its references only once
    /// the journal is durable up to `lost_until`.
    pub fn create_shared(
        &mut self,
        level: u8,
        birth: Epoch,
        entries: Entries,
        refs: u32,
        lost_until: u64,
    ) -> (NodeId, MapEntry) {
        let (id, entry) = self.create(level, birth, entries);
        let node = &mut self.nodes[id.0];
        (node.state, node.lost_until) = (State::Dirty { refs }, lost_until);
        (id, entry)
    }

    /// Adds one reference to a table without an address; returns false if it has one.
    pub fn add_ref(&mut self, at: TableRef) -> bool {
        let Some(&i) = self.by_ref.get(&at) else { return false };
        let State::Dirty { refs } = &mut self.nodes[i].state else { return false };
        *refs += 1;
        true
    }

    /// Removes one reference (never the last; see [`remove`](Self::remove)), by a change that is durable once
    /// the journal is up to `until`; returns false if the table has an address.
    pub fn drop_ref(&mut self, at: TableRef, until: u64) -> bool {
        let Some(&i) = self.by_ref.get(&at) else { return false };
        let node = &mut self.nodes[i];
        let State::Dirty { refs } = &mut node.state else { return false };
        assert!(*refs > 1, "the last reference goes with the table");
        *refs -= 1;
        node.lost_until = node.lost_until.max(until);
        true
    }

    /// Notes that a changed table replaces one whose lost references are durable at `until`.
    pub fn note_lost(&mut self, id: NodeId, until: u64) {
        let node = &mut self.nodes[id.0];
        node.lost_until = node.lost_until.max(until);
    }

    /// Returns up to where the journal must be durable for references that a table lost while it had no
    /// address to stay lost after any crash (0: they do).
    pub fn lost_until(&self, at: TableRef) -> u64 {
        self.by_ref.get(&at).map_or(0, |&i| self.nodes[i].lost_until)
    }

    /// The same for a table in memory.
    pub fn lost_until_of(&self, id: NodeId) -> u64 {
        self.nodes[id.0].lost_until
    }

    /// Forgets a changed table that nothing points to any more.
    pub fn remove(&mut self, id: NodeId) {
        let node = self.nodes.remove(id.0);
        assert!(matches!(node.state, State::Dirty { .. }), "only changed tables are forgotten at once");
        self.by_ref.remove(&node.key);
        self.dirty -= 1;
        self.dirty_bytes -= node.bytes();
    }

    /// Freezes all changed tables for a checkpoint and returns them in the order in which they must be
    /// written (lower levels first); `places` yields an address for each.
    pub fn freeze(&mut self, mut places: impl FnMut() -> PageAddr) -> Vec<Placed> {
        assert_eq!(self.frozen, 0, "one checkpoint at a time");
        let mut changed: Vec<(u8, TableRef, usize)> = Vec::with_capacity(self.dirty);
        changed.extend(
            self.nodes.iter().filter(|(_, n)| matches!(n.state, State::Dirty { .. })).map(|(i, n)| (n.level, n.key, i)),
        );
        changed.sort_unstable();
        let mut out = Vec::with_capacity(changed.len());
        for (level, key, i) in changed {
            let node = &mut self.nodes[i];
            let State::Dirty { refs } = node.state else { unreachable!("filtered above") };
            node.state = State::Frozen;
            let at = places();
            self.placed.insert(key, (at, None));
            out.push(Placed { node: NodeId(i), level, birth: node.birth, at, refs });
        }
        self.dirty = 0;
        self.frozen = out.len();
        self.frozen_bytes = std::mem::take(&mut self.dirty_bytes);
        self.read_frozen = std::mem::take(&mut self.read);
        out
    }

    /// Returns the entries of a frozen table as they must be written, with the places of the tables below.
    /// Tables of lower levels must have been [`written`](Self::written) before.
    ///
    /// In memory they stay unchanged until [`finish`](Self::finish): until then the tables below are known by
    /// their numbers only, and a second copy of one must not be loaded.
    pub fn on_disk_entries(&self, id: NodeId) -> Entries {
        let node = &self.nodes[id.0];
        let mut entries = node.entries.clone();
        // Pages of an ordered map hold values where they have no children; those can have any bit pattern.
        match is_ordered(node.level) {
            false if node.level > 0 => entries.change_tables(|e| self.on_disk_entry(e)),
            true => child_slots(node.level).for_each(|slot| {
                entries.set(slot, self.on_disk_entry(entries.get(slot)));
            }),
            false => {}
        }
        entries
    }

    fn on_disk_entry(&self, entry: MapEntry) -> MapEntry {
        let resolved = self.resolve_addr(entry);
        if resolved.kind() == Kind::Table && resolved.table_ref().page().is_none() {
            // A table of a dead volume that has been released already; its cursor is past it.
            debug_assert!(!self.by_ref.contains_key(&entry.table_ref()));
            return MapEntry::ABSENT;
        }
        resolved
    }

    /// Sets the checksum of directory pages in a frozen table of level 0.
    pub fn set_frozen_checksum(&mut self, id: NodeId, slot: usize, checksum: u32) {
        let node = &mut self.nodes[id.0];
        assert!(matches!(node.state, State::Frozen));
        let e = node.entries.get(slot);
        node.entries.set(slot, MapEntry::checked_page(e.addr(), e.birth(), checksum));
    }

    /// Notes the checksum of a frozen table's bytes and how many pages its `entries` map.
    pub fn written(&mut self, id: NodeId, entries: &Entries, checksum: u32) {
        let node = &self.nodes[id.0];
        let mapped = match node.level {
            0 => entries.mapped(),
            1 => entries.iter().map(mapped_at_once).sum(),
            _ => 0,
        };
        let mapped = correct!(mapped as u32, Bug::TableCountsOneShort => mapped.saturating_sub(1) as u32);
        let resolved = (checksum, mapped);
        self.placed.get_mut(&node.key).expect("placed when it was frozen").1 = Some(resolved);
    }

    /// Returns how many pages an entry of a table of `level` maps. Only entries above level 2 need tables in
    /// memory.
    pub fn mapped(&mut self, entry: MapEntry, level: u8) -> Result<u64, TableMiss> {
        let entry = self.resolve_addr(entry);
        if entry.kind() != Kind::Table || entry.table_ref().page().is_some() && level <= MAPPED_LEVEL + 1 {
            return Ok(mapped_at_once(entry));
        }
        let id = self.get(entry, level - 1)?;
        if level == 1 {
            return Ok(self.node(id).entries().mapped());
        }
        let below: Vec<MapEntry> = self.node(id).entries().iter().filter(|e| !e.is_absent()).collect();
        below.into_iter().try_fold(0, |sum, e| Ok(sum + self.mapped(e, level - 1)?))
    }

    /// Notes that the checkpoint is durable: its tables are clean and known by their addresses.
    pub fn finish(&mut self) {
        let frozen: Vec<usize> =
            self.nodes.iter().filter(|(_, n)| matches!(n.state, State::Frozen)).map(|(i, _)| i).collect();
        for &i in &frozen {
            let node = &mut self.nodes[i];
            self.by_ref.remove(&node.key);
            if node.doomed {
                self.nodes.remove(i);
                continue;
            }
            node.state = State::Clean;
            node.lost_until = 0;
            node.key = TableRef::on_disk(self.placed[&node.key].0);
            self.by_ref.insert(node.key, i);
        }
        for &i in &frozen {
            if self.nodes.contains(i) && self.nodes[i].level > 0 {
                self.nodes[i].entries = self.on_disk_entries(NodeId(i));
            }
            self.clean_bytes += self.nodes.get(i).map_or(0, Node::bytes);
        }
        (self.frozen, self.frozen_bytes, self.read_frozen) = (0, 0, 0);
        self.before = std::mem::take(&mut self.placed);
    }

    /// Evicts clean tables beyond the limit, least recently used first.
    pub fn evict(&mut self) {
        if self.held > 0 {
            return;
        }
        let mut over = self.clean_bytes.saturating_sub(self.limit);
        let mut steps = self.nodes.capacity() * 2;
        while over > 0 && steps > 0 {
            steps -= 1;
            self.hand = (self.hand + 1) % self.nodes.capacity().max(1);
            let Some(node) = self.nodes.get_mut(self.hand) else { continue };
            if node.state != State::Clean {
                continue;
            }
            if std::mem::take(&mut node.hot) {
                continue;
            }
            let node = self.nodes.remove(self.hand);
            self.by_ref.remove(&node.key);
            self.clean_bytes -= node.bytes();
            self.evicted += 1;
            over = over.saturating_sub(node.bytes());
        }
    }

    /// Forgets the contents of a table whose last reference is gone and whose page will be reused.
    pub fn forget(&mut self, id: NodeId) {
        let node = &mut self.nodes[id.0];
        match node.state {
            State::Clean => {
                let node = self.nodes.remove(id.0);
                self.by_ref.remove(&node.key);
                self.clean_bytes -= node.bytes();
            }
            State::Frozen => node.doomed = true,
            State::Dirty { .. } => unreachable!("a changed table is removed, not forgotten"),
        }
    }
}

/// Returns the pages that an entry maps without looking at tables below it.
fn mapped_at_once(entry: MapEntry) -> u64 {
    match entry.kind() {
        Kind::Table => entry.mapped().into(),
        Kind::Block => BLOCK_PAGES,
        Kind::Page => 1,
        Kind::Absent | Kind::Unknown(_) => 0,
    }
}

fn placement_of(tables: &Tables, at: TableRef) -> Option<Placement> {
    tables.placed.get(&at).or_else(|| tables.before.get(&at)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Block;

    #[test]
    fn a_table_is_found_by_number_and_by_address() {
        let mut t = Tables::new(1 << 20);
        let (leaf_id, leaf) = t.create(0, Epoch(1), Entries::absent());
        t.set(leaf_id, 9, MapEntry::page(PageAddr(7), Epoch(1)));
        let (root_id, root) = t.create(1, Epoch(1), Entries::absent());
        t.set(root_id, 3, leaf);
        t.set(root_id, 4, MapEntry::block(Block(9), Epoch(1)));
        assert_eq!(t.mapped(root, 2), Ok(257), "from what is in memory");
        let mut next = 100;
        let placed = t.freeze(|| {
            next += 1;
            PageAddr(next)
        });
        assert_eq!(placed.iter().map(|p| p.level).collect::<Vec<_>>(), [0, 1], "lower levels first");
        for p in &placed {
            let entries = t.on_disk_entries(p.node);
            t.written(p.node, &entries, 7);
        }
        t.finish();
        let old = t.get(root, 1).expect("by its number");
        assert_eq!(t.get(t.resolve_addr(root), 1), Ok(old), "by its address");
        assert_eq!(t.node(old).entry(3), MapEntry::table(TableRef::on_disk(PageAddr(101)), Epoch(1), 7).mapping(1));
        assert_eq!(t.resolve_addr(root).mapped(), 257, "what is written says how much it maps");
        assert_eq!(t.mapped(root, 2), Ok(257));
        assert_eq!(t.unwritten(), 0);
    }

    #[test]
    fn only_clean_tables_are_evicted() {
        let mut t = Tables::new(2 * (NODE_BYTES + Entries::absent().bytes()));
        let (_, dirty) = t.create(0, Epoch(1), Entries::absent());
        for page in 0..10 {
            let entry = MapEntry::table(TableRef::on_disk(PageAddr(page)), Epoch(1), 0);
            t.insert_clean(&TableMiss { entry, level: 0 }, Entries::absent());
        }
        t.evict();
        assert!(t.get(dirty, 0).is_ok());
        assert_eq!(t.nodes.len(), 3);
    }
}
