//! The 256 entries of a table in memory, in as little memory as they need.
//!
//! Most tables are uniform (nothing, or the pages of one block) except for some runs of entries, each of
//! which maps contiguous pages: those runs are stored beside the uniform base. If there are many runs, the
//! table is an array. The form on the device does not depend on this.

use std::ops::Range;

use smallvec::{Array, SmallVec};

use crate::format::{Kind, MapEntry};
use crate::planted::correct;
use crate::types::{Epoch, PageAddr, TABLE_FANOUT, replace};

/// Most runs: half of the memory of an array.
const MAX_OWN_ENTRIES: usize = 113;
/// Most entries that differ from the base for an array to be replaced by runs.
const MAX_SPARSE_ENTRIES: usize = 64;
/// Slots that are sampled to find out which block most of an array follows from.
const PROBES: [usize; 5] = [0, 63, 126, 189, 252];

/// Whether both are mapped, and the second is not contiguous with the first.
fn is_seam(before: MapEntry, entry: MapEntry) -> bool {
    !before.is_absent() && !entry.is_absent() && entry.addr().0 != before.addr().0 + 1
}

/// See the module.
#[derive(Clone)]
pub struct Entries(Shape);

#[derive(Clone)]
enum Shape {
    Array(Box<[MapEntry; TABLE_FANOUT]>),
    Sparse(Box<Sparse>),
}

#[derive(Clone)]
struct Sparse {
    /// What every other entry follows from: absent, or a block whose pages they are.
    base: MapEntry,
    /// The other entries, in ascending order; no two of them could be merged.
    own: Vec<Run>,
}

/// Entries each of which is contiguous with the one before.
#[derive(Clone, Copy)]
struct Run {
    first: u8,
    last: u8,
    /// The first entry, as bytes: an `Entry` would need a larger alignment.
    entry: [u8; 16],
}

impl Run {
    fn new(slots: Range<usize>, entry: MapEntry) -> Run {
        debug_assert!(!slots.is_empty() && (slots.len() == 1 || entry.can_go_on()));
        Run { first: slots.start as u8, last: (slots.end - 1) as u8, entry: entry.to_bytes() }
    }

    fn start(&self) -> usize {
        self.first.into()
    }

    fn end(&self) -> usize {
        usize::from(self.last) + 1
    }

    fn get(&self, slot: usize) -> MapEntry {
        MapEntry::from_bytes(self.entry).behind(slot - self.start())
    }

    /// Whether `next` continues this run.
    fn goes_on_with(&self, next: &Run) -> bool {
        let entry = MapEntry::from_bytes(self.entry);
        self.end() == next.start() && entry.can_go_on() && self.get(self.end()) == MapEntry::from_bytes(next.entry)
    }
}

impl Entries {
    /// Creates a table of absent entries.
    pub fn absent() -> Entries {
        Entries::alike(MapEntry::ABSENT)
    }

    /// Creates the entries of a block's pages, each with the block's birth.
    pub fn of_block(block: MapEntry) -> Entries {
        debug_assert_eq!(block.kind(), Kind::Block);
        Entries::alike(block)
    }

    fn alike(base: MapEntry) -> Entries {
        Entries(Shape::Sparse(Box::new(Sparse { base, own: Vec::new() })))
    }

    /// Creates a permanent array: slots of an ordered map, which follow from nothing.
    pub fn whole(entries: Box<[MapEntry; TABLE_FANOUT]>) -> Entries {
        Entries(Shape::Array(entries))
    }

    /// Returns the array that was passed to [`whole`](Self::whole).
    pub fn array(&self) -> &[MapEntry; TABLE_FANOUT] {
        match &self.0 {
            Shape::Array(entries) => entries,
            Shape::Sparse(_) => unreachable!("a page of an ordered map is kept whole"),
        }
    }

    /// As [`array`](Self::array), mutable.
    pub fn array_mut(&mut self) -> &mut [MapEntry; TABLE_FANOUT] {
        match &mut self.0 {
            Shape::Array(entries) => entries,
            Shape::Sparse(_) => unreachable!("a page of an ordered map is kept whole"),
        }
    }

    /// Returns one entry.
    pub fn get(&self, slot: usize) -> MapEntry {
        match &self.0 {
            Shape::Array(entries) => entries[slot],
            Shape::Sparse(sparse) => sparse.get(slot),
        }
    }

    /// Sets one entry; returns the old one.
    pub fn set(&mut self, slot: usize, entry: MapEntry) -> MapEntry {
        let old = self.get(slot);
        self.set_run(slot..slot + 1, entry);
        old
    }

    /// Sets the entries in `slots` to `first` and its successors.
    pub fn set_run(&mut self, slots: Range<usize>, first: MapEntry) {
        debug_assert!(!slots.is_empty());
        match &mut self.0 {
            Shape::Array(entries) => {
                entries[slots].iter_mut().enumerate().for_each(|(n, entry)| *entry = first.behind(n));
            }
            Shape::Sparse(sparse) => {
                sparse.set_run(slots, first);
                if sparse.own.len() > MAX_OWN_ENTRIES {
                    self.0 = Shape::Array(self.to_array());
                }
            }
        }
    }

    /// Returns the entries in `slots` as runs: the slots of each, and its first entry, which the others
    /// succeed.
    pub fn runs(&self, slots: Range<usize>) -> impl Iterator<Item = (Range<usize>, MapEntry)> + '_ {
        let mut own = match &self.0 {
            Shape::Array(_) => [].iter(),
            Shape::Sparse(sparse) => sparse.own[sparse.first_from(slots.start)..].iter(),
        };
        let (mut at, end) = (slots.start, slots.end);
        std::iter::from_fn(move || {
            if at == end {
                return None;
            }
            let (stop, entry) = match &self.0 {
                Shape::Array(entries) => (at + length(&entries[at..end]), entries[at]),
                Shape::Sparse(sparse) => match own.as_slice().first() {
                    Some(run) if run.start() <= at => {
                        own.next();
                        (run.end().min(end), run.get(at))
                    }
                    next => (next.map_or(end, |run| run.start().min(end)), follows(sparse.base, at)),
                },
            };
            Some((std::mem::replace(&mut at, stop)..stop, entry))
        })
    }

    /// Iterates over all entries in order.
    pub fn iter(&self) -> impl Iterator<Item = MapEntry> + '_ {
        self.runs(0..TABLE_FANOUT).flat_map(|(slots, entry)| (0..slots.len()).map(move |n| entry.behind(n)))
    }

    /// Returns the pages that the entries in `slots` refer to, contiguous ones as one run with its length.
    pub fn page_runs(&self, slots: Range<usize>) -> impl Iterator<Item = (PageAddr, u64)> + '_ {
        let pages = self.runs(slots).filter(|(_, e)| !e.is_absent()).map(|(slots, e)| (e.addr(), slots.len() as u64));
        let mut pages = pages.peekable();
        std::iter::from_fn(move || {
            let (first, mut n) = pages.next()?;
            while let Some((_, more)) = pages.next_if(|(page, _)| page.0 == first.0 + n) {
                n += more;
            }
            Some((first, n))
        })
    }

    /// Returns the number of entries that map pages not contiguous with the page before them.
    pub fn seams(&self) -> u64 {
        self.seams_in(0..TABLE_FANOUT)
    }

    /// Of the entries in `slots` and the one behind them, returns how many map pages that are not contiguous
    /// with the page before them.
    pub fn seams_in(&self, slots: Range<usize>) -> u64 {
        if slots.len() == 1 {
            return self.seams_beside(slots);
        }
        let mut before = MapEntry::ABSENT;
        let mut seams = 0;
        for (slots, entry) in self.runs(slots.start.saturating_sub(1)..(slots.end + 1).min(TABLE_FANOUT)) {
            seams += u64::from(is_seam(before, entry));
            before = entry.behind(slots.len() - 1);
        }
        seams
    }

    /// The same for two entries: the first of `slots` and the one behind them.
    pub fn seams_beside(&self, slots: Range<usize>) -> u64 {
        let seam = |slot: usize| slot > 0 && slot < TABLE_FANOUT && is_seam(self.get(slot - 1), self.get(slot));
        u64::from(seam(slots.start)) + u64::from(seam(slots.end))
    }

    /// Returns the number of entries that are not absent.
    pub fn mapped(&self) -> u64 {
        self.runs(0..TABLE_FANOUT).filter(|(_, e)| !e.is_absent()).map(|(slots, _)| slots.len() as u64).sum()
    }

    /// If all are pages of one block, each at its place in the block, and charged to the same account: returns the
    /// entry of the block with the oldest birth, and the youngest birth.
    pub fn as_block(&self) -> Option<(MapEntry, Epoch)> {
        let first = self.get(0);
        if first.is_absent() || first.addr().index() != 0 {
            return None;
        }
        let (mut oldest, mut youngest) = (first.birth(), first.birth());
        for (slots, entry) in self.runs(0..TABLE_FANOUT) {
            if entry.is_absent() || entry.addr().0 != first.addr().0 + slots.start as u64 {
                return None;
            }
            if correct!(entry.account() != first.account(), Bug::PromotionMergesAccounts => false) {
                return None;
            }
            (oldest, youngest) = (oldest.min(entry.birth()), youngest.max(entry.birth()));
        }
        Some((MapEntry::block(first.addr().block(), oldest).charged_to(first.account()), youngest))
    }

    /// Returns the entries as an array.
    pub fn to_array(&self) -> Box<[MapEntry; TABLE_FANOUT]> {
        match &self.0 {
            Shape::Array(entries) => entries.clone(),
            Shape::Sparse(_) => {
                let mut all = self.iter();
                Box::new(std::array::from_fn(|_| all.next().expect("there is one for each slot")))
            }
        }
    }

    /// Replaces each entry that points to a table by the result of `change`.
    pub fn change_tables(&mut self, change: impl Fn(MapEntry) -> MapEntry) {
        let is_table = |e: MapEntry| e.kind() == Kind::Table;
        match &mut self.0 {
            Shape::Array(entries) => entries.iter_mut().filter(|e| is_table(**e)).for_each(|e| *e = change(*e)),
            Shape::Sparse(sparse) => {
                for run in &mut sparse.own {
                    let entry = MapEntry::from_bytes(run.entry);
                    if is_table(entry) {
                        run.entry = change(entry).to_bytes();
                    }
                }
            }
        }
    }

    /// Returns the memory they take beside `self`, in bytes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Shape::Array(_) => size_of::<[MapEntry; TABLE_FANOUT]>(),
            Shape::Sparse(sparse) => size_of::<Sparse>() + sparse.own.capacity() * size_of::<Run>(),
        }
    }
}

impl From<Box<[MapEntry; TABLE_FANOUT]>> for Entries {
    fn from(entries: Box<[MapEntry; TABLE_FANOUT]>) -> Entries {
        match Sparse::of(&entries) {
            Some(sparse) => Entries(Shape::Sparse(Box::new(sparse))),
            None => Entries(Shape::Array(entries)),
        }
    }
}

/// Returns how many of the entries, at least one, are contiguous from the first on.
fn length(entries: &[MapEntry]) -> usize {
    let first = entries[0];
    let goes_on = |&(n, entry): &(usize, &MapEntry)| n == 0 || first.can_go_on() && *entry == first.behind(n);
    entries.iter().enumerate().take_while(goes_on).count()
}

/// Returns the entry of a slot that follows from the base.
fn follows(base: MapEntry, slot: usize) -> MapEntry {
    match base.is_absent() {
        true => MapEntry::ABSENT,
        false => MapEntry::page(base.addr().block().page(slot), base.birth()).charged_to(base.account()),
    }
}

/// Returns the block that an entry is a page of, if the page lies at its place in it.
fn block_behind(entry: MapEntry, slot: usize) -> Option<MapEntry> {
    (entry.kind() == Kind::Page && entry.addr().index() == slot)
        .then(|| MapEntry::block(entry.addr().block(), entry.birth()).charged_to(entry.account()))
}

impl Sparse {
    /// Returns the sparse form of an array, if the array is mostly uniform.
    fn of(entries: &[MapEntry; TABLE_FANOUT]) -> Option<Sparse> {
        let mut bases: SmallVec<[MapEntry; 6]> = SmallVec::from_slice(&[MapEntry::ABSENT]);
        let probed = PROBES.into_iter().filter_map(|slot| block_behind(entries[slot], slot));
        probed.for_each(|base| {
            if !bases.contains(&base) {
                bases.push(base)
            }
        });
        let sparse = bases.into_iter().filter_map(|base| Some(Sparse { base, own: own_of(entries, base)? }));
        sparse.min_by_key(|sparse| sparse.own.len())
    }

    fn get(&self, slot: usize) -> MapEntry {
        match self.own.get(self.first_from(slot)) {
            Some(run) if run.start() <= slot => run.get(slot),
            _ => follows(self.base, slot),
        }
    }

    /// Returns the first run that does not end before `slot`.
    fn first_from(&self, slot: usize) -> usize {
        self.own.partition_point(|run| run.end() <= slot)
    }

    fn set_run(&mut self, slots: Range<usize>, first: MapEntry) {
        let from = self.first_from(slots.start);
        let to = from + self.own[from..].iter().take_while(|run| run.start() < slots.end).count();
        // Includes the adjacent runs, which may merge with what is set.
        let (left, right) = (from.saturating_sub(1), (to + 1).min(self.own.len()));
        let mut now: SmallVec<[Run; 5]> = SmallVec::new();
        now.extend_from_slice(&self.own[left..from]);
        if let Some(run) = self.own[from..to].first().filter(|run| run.start() < slots.start) {
            push(&mut now, Run { last: (slots.start - 1) as u8, ..*run });
        }
        if first != follows(self.base, slots.start) {
            push(&mut now, Run::new(slots.clone(), first));
        }
        if let Some(run) = self.own[from..to].last().filter(|run| run.end() > slots.end) {
            push(&mut now, Run::new(slots.end..run.end(), run.get(slots.end)));
        }
        self.own[to..right].iter().for_each(|run| push(&mut now, *run));
        replace(&mut self.own, left..right, &now);
    }
}

/// Adds a run; extends the last one if the two are contiguous.
fn push(runs: &mut SmallVec<impl Array<Item = Run>>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.goes_on_with(&run) => last.last = run.last,
        _ => runs.push(run),
    }
}

/// Returns the runs of entries that do not follow from `base`, unless there are too many.
fn own_of(entries: &[MapEntry; TABLE_FANOUT], base: MapEntry) -> Option<Vec<Run>> {
    let mut own: SmallVec<[Run; MAX_SPARSE_ENTRIES]> = SmallVec::new();
    for (slot, &entry) in entries.iter().enumerate() {
        if entry == follows(base, slot) {
            continue;
        }
        push(&mut own, Run::new(slot..slot + 1, entry));
        if own.len() > MAX_SPARSE_ENTRIES {
            return None;
        }
    }
    Some(own.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::TableRef;
    use crate::types::{Block, Epoch};

    fn page(at: u64) -> MapEntry {
        MapEntry::page(PageAddr(at), Epoch(9))
    }

    /// Sets entries in a pseudo-random order and compares with an array after each.
    fn compare(mut entries: Entries) {
        let mut array = entries.to_array();
        for i in 0..600_u64 {
            let slot = (i * 89 % 256) as usize;
            let new = if i % 5 == 4 { MapEntry::ABSENT } else { page(1000 + i) };
            assert_eq!(entries.set(slot, new), std::mem::replace(&mut array[slot], new));
            assert!(entries.iter().eq(array.iter().copied()), "after {i}");
        }
        for i in 0..300_u64 {
            let (first, len) = ((i * 89 % 256) as usize, (1 + i * 31 % 97) as usize);
            let slots = first..(first + len).min(TABLE_FANOUT);
            entries.set_run(slots.clone(), page(5000 + 300 * i));
            slots.clone().enumerate().for_each(|(n, slot)| array[slot] = page(5000 + 300 * i + n as u64));
            let hole = (i * 53 % 256) as usize..((i * 53 % 256) as usize + (i % 7) as usize + 1).min(TABLE_FANOUT);
            entries.set_run(hole.clone(), MapEntry::ABSENT);
            array[hole].fill(MapEntry::ABSENT);
            assert!(entries.iter().eq(array.iter().copied()), "after run {i}");
            let plain = Entries::whole(array.clone());
            for (from, to) in [(0, 256), (first, 256), (first, first), (first, slots.end), (256, 256)] {
                assert_eq!(entries.seams_in(from..to), plain.seams_in(from..to), "{from} to {to} after run {i}");
                let runs = |of: &Entries| of.page_runs(from..to).collect::<Vec<_>>();
                assert!(from == to || runs(&entries) == runs(&plain), "{from} to {to} after run {i}");
            }
            if i % 7 == 6 {
                // As when it is written and read again.
                entries = Entries::from(array.clone());
            }
        }
        assert_eq!(entries.to_array(), array);
        assert_eq!(entries.mapped(), array.iter().filter(|e| !e.is_absent()).count() as u64);
    }

    #[test]
    fn they_say_what_an_array_would_say() {
        compare(Entries::absent());
        compare(Entries::of_block(MapEntry::block(Block(3), Epoch(4))));
        compare(Entries::from(Box::new([page(5); TABLE_FANOUT])));
    }

    #[test]
    fn a_block_stands_for_its_pages() {
        let mut entries = Entries::of_block(MapEntry::block(Block(3), Epoch(4)));
        entries.set(7, page(9));
        assert_eq!(entries.get(6), MapEntry::page(Block(3).page(6), Epoch(4)));
        assert_eq!(entries.get(7), page(9));
        assert_eq!(entries.get(255), MapEntry::page(Block(3).page(255), Epoch(4)));
    }

    #[test]
    fn few_entries_take_little_and_many_no_more_than_an_array() {
        let mut entries = Entries::absent();
        assert!(entries.bytes() <= 80, "{}", entries.bytes());
        entries.set(200, page(1));
        assert!(entries.bytes() <= 144, "{}", entries.bytes());
        for slot in 0..TABLE_FANOUT {
            entries.set(slot, page(2 * slot as u64));
            assert!(entries.bytes() <= 4096 + 80);
        }
        assert_eq!(entries.bytes(), 4096);
    }

    /// Sets the slots one by one, in a pseudo-random order, to contiguous pages.
    fn filled(base: MapEntry) -> Entries {
        let mut entries = if base.is_absent() { Entries::absent() } else { Entries::of_block(base) };
        (0..TABLE_FANOUT)
            .map(|i| i * 89 % TABLE_FANOUT)
            .for_each(|slot| _ = entries.set(slot, page(512 + slot as u64)));
        entries
    }

    #[test]
    fn runs_that_meet_are_one() {
        for base in [MapEntry::ABSENT, MapEntry::block(Block(3), Epoch(4)), MapEntry::block(Block(2), Epoch(9))] {
            let mut entries = Entries::absent();
            entries.set_run(0..100, page(512));
            entries.set_run(200..256, page(712));
            entries.set_run(100..200, page(612));
            assert!(entries.bytes() <= 144, "{}", entries.bytes());
            for entries in [filled(base), entries] {
                assert_eq!(entries.runs(0..TABLE_FANOUT).collect::<Vec<_>>(), [(0..TABLE_FANOUT, page(512))]);
                assert_eq!(entries.as_block(), Some((MapEntry::block(Block(2), Epoch(9)), Epoch(9))));
            }
        }
    }

    #[test]
    fn what_the_rest_says_is_not_kept() {
        let block = MapEntry::block(Block(3), Epoch(4));
        let mut entries = Entries::of_block(block);
        entries.set_run(10..200, page(5000));
        entries.set_run(10..200, MapEntry::page(Block(3).page(10), Epoch(4)));
        assert_eq!(entries.runs(0..TABLE_FANOUT).count(), 1);
        assert_eq!(entries.as_block(), Some((block, Epoch(4))));
        entries.set(7, MapEntry::page(Block(3).page(7), Epoch(6)));
        assert_eq!(entries.as_block(), Some((block, Epoch(6))));
        entries.set(8, MapEntry::page(Block(3).page(9), Epoch(6)));
        assert_eq!(entries.as_block(), None, "not where the block has it");
        entries.set(8, MapEntry::ABSENT);
        assert_eq!(entries.as_block(), None);
    }

    #[test]
    fn tables_one_behind_the_other_are_no_run() {
        let table = |at| MapEntry::table(TableRef::in_memory(at), Epoch(1), 0);
        let mut entries = Entries::absent();
        (0..4).for_each(|i| _ = entries.set(i, table(i as u64)));
        entries.change_tables(|e| if e == table(2) { table(9) } else { e });
        assert_eq!((entries.get(1), entries.get(2), entries.get(3)), (table(1), table(9), table(3)));
    }

    #[test]
    fn an_array_that_says_mostly_the_same_takes_little() {
        for mut entries in [Entries::absent(), Entries::of_block(MapEntry::block(Block(3), Epoch(4)))] {
            for i in 0..MAX_SPARSE_ENTRIES {
                entries.set(i * 3, page(i as u64 * 1000));
            }
            let array = entries.to_array();
            let again = Entries::from(array.clone());
            assert!(again.bytes() < 2048 && again.to_array() == array, "{}", again.bytes());
            entries.set(255, page(7));
            assert_eq!(Entries::from(entries.to_array()).bytes(), 4096, "one too many");
        }
        let mut checked = [MapEntry::ABSENT; TABLE_FANOUT];
        checked[9] = MapEntry::checked_page(PageAddr(9), Epoch(1), 77);
        assert_eq!(Entries::from(Box::new(checked)).get(9), checked[9]);
    }

    #[test]
    fn only_tables_are_changed() {
        let table = |at| MapEntry::table(TableRef::on_disk(PageAddr(at)), Epoch(1), 0);
        let mut sparse = Entries::absent();
        sparse.set(3, table(1));
        sparse.set(4, MapEntry::block(Block(1), Epoch(1)));
        for mut entries in [sparse.clone(), Entries(Shape::Array(sparse.to_array()))] {
            entries.change_tables(|e| if e == table(1) { table(2) } else { MapEntry::ABSENT });
            assert_eq!(entries.get(3), table(2));
            assert_eq!((entries.get(4), entries.get(5)), (MapEntry::block(Block(1), Epoch(1)), MapEntry::ABSENT));
        }
    }
}
