//! Changing a volume's map: which tables may be changed, mapping runs, demotion and promotion.

use std::ops::Range;

use smallvec::SmallVec;

use crate::format::{Kind, MapEntry, TableRef, VolumeRecord};
use crate::planted::correct;
use crate::space::{self, Credits, Space, delta};
use crate::types::{AccountId, BLOCK_PAGES, Epoch, PageAddr, TABLE_FANOUT, VirtualPage, table_span};

use super::charges::NO_PAGES;
use super::entries::Entries;
use super::store::{NodeId, TableMiss, Tables};

/// Why a change of metadata has to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A table must be loaded first.
    Table(TableMiss),
    /// A count page must be loaded first.
    Count(space::Miss),
    /// There is no free space.
    NoSpace,
}

impl From<TableMiss> for Stop {
    fn from(miss: TableMiss) -> Stop {
        Stop::Table(miss)
    }
}

impl From<space::Miss> for Stop {
    fn from(miss: space::Miss) -> Stop {
        Stop::Count(miss)
    }
}

impl From<space::Refusal> for Stop {
    fn from(refusal: space::Refusal) -> Stop {
        match refusal {
            space::Refusal::Miss(miss) => Stop::Count(miss),
            space::Refusal::NoSpace => Stop::NoSpace,
        }
    }
}

/// As [`Entries::as_block`], but examines only the first and the last entry.
#[cfg(feature = "planted")]
fn ends_of_block(entries: &Entries) -> Option<(MapEntry, Epoch)> {
    let (first, last) = (entries.get(0), entries.get(TABLE_FANOUT - 1));
    let fits = !first.is_absent() && first.addr().index() == 0 && !last.is_absent();
    let birth = first.birth().min(last.birth());
    (fits && last.addr().0 == first.addr().0 + 255).then(|| (MapEntry::block(first.addr().block(), birth), birth))
}

/// Tables from the root down to the target, with the slot taken in each.
pub type Path = SmallVec<[(NodeId, usize); 6]>;

/// What a change of a map works on: tables, counts and the epoch in which it happens.
pub struct Editor<'a> {
    pub tables: &'a mut Tables,
    pub space: &'a mut Space,
    pub epoch: Epoch,
    /// The change is durable once the journal is up to this sequence number.
    pub until: u64,
    /// Up to where the journal is durable.
    pub confirmed: u64,
    /// The account that new pages are charged to.
    pub account: AccountId,
}

/// Adds and subtracts seams of a volume. An estimate does not go below 0.
pub fn count_seams(record: &mut VolumeRecord, came: u64, went: u64) {
    debug_assert!(record.estimated || record.seams + came >= went);
    record.seams = (record.seams + came).saturating_sub(went);
}

impl Editor<'_> {
    /// Returns the references to a table.
    pub fn table_count(&mut self, at: TableRef) -> Result<u32, Stop> {
        match self.tables.refs(at) {
            Some(refs) => Ok(refs),
            None => {
                let page = self.tables.resolve(at).page().expect("a table is dirty or has a place");
                Ok(self.space.page_count(page)?)
            }
        }
    }

    /// As [`table_count`](Self::table_count) for a table whose count was looked up before, in the same change.
    ///
    /// # Panics
    /// If the count is not in memory: the change has begun and must not stop half way.
    pub(super) fn known_count(&mut self, at: TableRef) -> u32 {
        self.table_count(at).unwrap_or_else(|stop| panic!("a change of maps that has begun misses a count: {stop:?}"))
    }

    /// Adds one reference to the target of `entry`.
    pub fn share(&mut self, entry: MapEntry) {
        match entry.kind() {
            Kind::Absent => {}
            Kind::Page => self.space.incr_page(entry.addr()),
            Kind::Block => self.space.incr_block(entry.addr().block()),
            Kind::Table => {
                if !self.tables.add_ref(entry.table_ref()) {
                    let page = self.tables.resolve(entry.table_ref()).page().expect("placed");
                    self.space.incr_page(page);
                }
            }
            Kind::Unknown(_) => unreachable!("checked when the table was read"),
        }
    }

    /// Removes one reference from a table that has more than one.
    pub(super) fn unshare_table(&mut self, at: TableRef) {
        if !self.tables.drop_ref(at, self.until) {
            let page = self.tables.resolve(at).page().expect("placed");
            delta::decr_table(self.space, page, self.until);
        }
    }

    /// Releases a table that nothing points to any more; the caller handles the targets of its entries.
    pub(crate) fn free_table(&mut self, id: NodeId, at: TableRef) {
        if self.tables.is_dirty(id) {
            self.tables.remove(id);
        } else {
            let page = self.tables.resolve(at).page().expect("placed");
            delta::decr_table(self.space, page, self.until);
            self.tables.forget(id);
        }
    }

    /// Returns a table that may be changed, to replace the one that `entry` points to.
    fn own(&mut self, entry: MapEntry, level: u8, exclusive: bool) -> Result<(NodeId, MapEntry), Stop> {
        let id = self.tables.get(entry, level)?;
        if exclusive && self.tables.is_dirty(id) {
            return Ok((id, entry));
        }
        self.tables.follow_from(id);
        let mut entries = self.tables.node(id).entries().clone();
        if level > 0 {
            entries.change_tables(|e| self.tables.resolve_finished_addr(e));
        }
        // Exclusive now, but a crash may undo that: the same holds for the copy.
        let until = if exclusive { self.table_lost_until(entry.table_ref()) } else { 0 };
        if exclusive {
            self.free_table(id, entry.table_ref());
        } else {
            match level {
                0 => entries.page_runs(0..TABLE_FANOUT).for_each(|(first, n)| self.space.incr_pages(first, n)),
                _ => entries.iter().filter(|e| !e.is_absent()).for_each(|e| self.share(e)),
            }
            self.unshare_table(entry.table_ref());
        }
        let (id, entry) = self.tables.create(level, self.epoch, entries);
        self.tables.note_lost(id, until);
        Ok((id, entry))
    }

    /// Returns up to where the journal must be durable for a table's lost references to stay lost.
    fn table_lost_until(&self, at: TableRef) -> u64 {
        let place = self.tables.resolve(at).page();
        place.map_or(0, |page| self.space.page_lost_until(page)).max(self.tables.lost_until(at))
    }

    fn is_exclusive(&mut self, volume: &VolumeRecord, entry: MapEntry) -> Result<bool, Stop> {
        Ok(entry.birth() > volume.shared_at || self.table_count(entry.table_ref())? == 1)
    }

    /// Returns the tables down to `level` over `at`, all of which may be changed. Creates missing tables.
    pub fn writable(&mut self, volume: &mut VolumeRecord, at: VirtualPage, level: u8) -> Result<Path, Stop> {
        debug_assert!(at.0 < table_span(volume.level) && level <= volume.level);
        let mut path = Path::new();
        let mut here = volume.level;
        loop {
            let entry = match path.last() {
                None => volume.root,
                Some(&(id, slot)) => self.tables.node(id).entry(slot),
            };
            let (id, new) = match entry.kind() {
                Kind::Absent => self.tables.create(here, self.epoch, Entries::absent()),
                Kind::Block => self.demote(entry),
                _ => {
                    let exclusive = self.is_exclusive(volume, entry)?;
                    self.own(entry, here, exclusive)?
                }
            };
            if new != entry {
                match path.last() {
                    None => volume.root = new,
                    Some(&(parent, slot)) => drop(self.tables.set(parent, slot, new)),
                }
            }
            path.push((id, at.slot(here)));
            if here == level {
                return Ok(path);
            }
            here -= 1;
        }
    }

    /// Returns the changed tables on the path to `at`.
    pub fn changed_on_path(&mut self, volume: &VolumeRecord, at: VirtualPage) -> Result<Vec<NodeId>, Stop> {
        let (mut entry, mut level, mut out) = (volume.root, volume.level, Vec::new());
        while entry.kind() == Kind::Table {
            let id = self.tables.get(entry, level)?;
            if self.tables.is_dirty(id) {
                out.push(id);
            }
            if level == 0 {
                break;
            }
            entry = self.tables.node(id).entry(at.slot(level));
            level -= 1;
        }
        Ok(out)
    }

    /// Creates a leaf with the mapping of a block entry; the reference moves from the block to its pages.
    fn demote(&mut self, entry: MapEntry) -> (NodeId, MapEntry) {
        let block = entry.addr().block();
        correct!(
            self.space.demote(block),
            Bug::DemotionKeepsPageCounts => self.space.decr_block(block, self.until)
        );
        self.tables.create(0, self.epoch, Entries::of_block(entry))
    }

    /// Maps `len` pages from `at`, all in one virtual block, to the pool's pages from `to` on.
    pub fn map_run(&mut self, volume: &mut VolumeRecord, at: VirtualPage, len: u64, to: PageAddr) -> Result<(), Stop> {
        debug_assert!(len > 0 && at.index() as u64 + len <= BLOCK_PAGES);
        let covers_block = len == BLOCK_PAGES && to.index() == 0;
        if covers_block {
            let path = self.writable(volume, at, 1)?;
            let &(id, slot) = path.last().expect("a path has a table");
            let old = self.find_leaf(self.tables.node(id).entry(slot), NO_PAGES)?;
            let gone = self.drop_leaf(old);
            self.space.incr_block(to.block());
            self.space.accounts.charge(self.account, BLOCK_PAGES);
            count_seams(volume, 0, gone.seams);
            self.tables.set(id, slot, MapEntry::block(to.block(), self.epoch).charged_to(self.account));
            volume.referenced = volume.referenced + BLOCK_PAGES - gone.pages;
            return Ok(());
        }
        let path = self.writable(volume, at, 0)?;
        let &(leaf, first) = path.last().expect("a path has a table");
        let slots = first..first + len as usize;
        let freed = self.freed_in(leaf, slots.clone(), NO_PAGES)?;
        count_seams(volume, 0, self.tables.node(leaf).entries().seams_in(slots.clone()));
        let gone = self.give_up_pages(leaf, slots.clone(), freed);
        self.tables.set_run(leaf, slots.clone(), MapEntry::page(to, self.epoch).charged_to(self.account));
        self.space.incr_pages(to, len);
        self.space.accounts.charge(self.account, len);
        volume.referenced = volume.referenced + len - gone;
        count_seams(volume, self.seams_around(leaf, slots), 0);
        self.promote(volume, &path);
        Ok(())
    }

    /// Removes one reference from the targets of the `slots` of a leaf, which are about to be set; returns
    /// how many pages that is. `freed` is credited.
    pub(super) fn give_up_pages(&mut self, leaf: NodeId, slots: Range<usize>, freed: Credits) -> u64 {
        self.space.accounts.credit(freed);
        let entries = self.tables.node(leaf).entries();
        let mut gone = 0;
        for (first, n) in entries.page_runs(slots) {
            self.space.decr_pages(first, n, self.until);
            gone += n;
        }
        gone
    }

    /// Returns the seams at both ends of `slots`, which are contiguous.
    pub(super) fn seams_around(&self, leaf: NodeId, slots: Range<usize>) -> u64 {
        self.tables.node(leaf).entries().seams_beside(slots)
    }

    /// Turns a leaf whose pages lie in one block, in place, and are exclusive to this volume into a block
    /// entry.
    fn promote(&mut self, volume: &VolumeRecord, path: &Path) {
        let &(leaf, _) = path.last().expect("a path has a table");
        let entries = self.tables.node(leaf).entries();
        let block = correct!(entries.as_block(), Bug::PromotesIncompleteRun => ends_of_block(entries));
        let Some((block, _)) = block.filter(|(block, _)| block.birth() > volume.shared_at) else { return };
        self.space.promote(block.addr().block());
        self.tables.remove(leaf);
        let &(parent, slot) = &path[path.len() - 2];
        self.tables.set(parent, slot, block);
    }

    /// Whether the data at `at` is exclusive to this volume, by the counts (slow).
    pub fn is_alone(&mut self, volume: &VolumeRecord, at: VirtualPage) -> Result<bool, Stop> {
        Ok(self.alone_after(volume, at)?.is_some())
    }

    /// As [`is_alone`](Self::is_alone), and what made it exclusive is durable, so that no crash can make
    /// another volume refer to it again. Until then the data must not be written in place.
    pub fn is_alone_for_good(&mut self, volume: &VolumeRecord, at: VirtualPage) -> Result<bool, Stop> {
        Ok(self
            .alone_after(volume, at)?
            .is_some_and(|until| correct!(until <= self.confirmed, Bug::WritesInPlaceTooEarly => true)))
    }

    /// If the data at `at` is exclusive to this volume: returns up to where the journal must be durable for
    /// that to last.
    fn alone_after(&mut self, volume: &VolumeRecord, at: VirtualPage) -> Result<Option<u64>, Stop> {
        let (mut entry, mut level, mut until) = (volume.root, volume.level, 0);
        loop {
            match entry.kind() {
                Kind::Absent => return Ok(None),
                Kind::Page | Kind::Block => {
                    let within = if entry.kind() == Kind::Block { at.index() as u64 } else { 0 };
                    let page = PageAddr(entry.addr().0 + within);
                    let exclusive = self.space.data_is_exclusive(page)?;
                    return Ok(exclusive.then(|| until.max(self.space.page_lost_until(page))));
                }
                Kind::Table => {
                    if !self.is_exclusive(volume, entry)? {
                        return Ok(None);
                    }
                    until = until.max(self.table_lost_until(entry.table_ref()));
                    let id = self.tables.get(entry, level)?;
                    entry = self.tables.node(id).entry(at.slot(level));
                    level = level.saturating_sub(1);
                }
                Kind::Unknown(_) => unreachable!("checked when the table was read"),
            }
        }
    }

    /// Raises the map to the height that a volume of `pages` pages needs.
    pub fn raise(&mut self, volume: &mut VolumeRecord, pages: u64) {
        while table_span(volume.level) < pages {
            volume.level += 1;
            if !volume.root.is_absent() {
                let mut entries = Entries::absent();
                entries.set(0, volume.root);
                volume.root = self.tables.create(volume.level, self.epoch, entries).1;
            }
        }
    }
}
