//! The 256 entries of a table in memory, in as little of it as they need.
//!
//! Most tables say the same everywhere (nothing, or the pages of one block) but for a few entries: those are
//! kept beside what the rest says. Where they are many the table is an array. What it is on the device does
//! not depend on it.

use std::ops::Range;

use crate::format::{Entry, Kind};
use crate::types::{FANOUT, PageAddr};

/// Most entries kept one by one: half of what an array takes.
const MAX_OWN: usize = 128;
/// Most that an array has for it to be given up.
const FEW: usize = 64;
/// Where an array is looked at to find out which block most of it follows from.
const PROBES: [usize; 5] = [0, 63, 126, 189, 252];

/// Whether both are mapped, and the second not behind the first.
fn is_seam(before: Entry, entry: Entry) -> bool {
    !before.is_absent() && !entry.is_absent() && entry.addr().0 != before.addr().0 + 1
}

/// See the module.
#[derive(Clone)]
pub struct Entries(Shape);

#[derive(Clone)]
enum Shape {
    Array(Box<[Entry; FANOUT]>),
    Sparse(Box<Sparse>),
}

#[derive(Clone)]
struct Sparse {
    /// What every other entry follows from: absent, or a block whose pages they are.
    base: Entry,
    /// Which entries are kept one by one.
    is_own: [u64; FANOUT / 64],
    /// These, in their order, as bytes: an `Entry` would be aligned to more than it needs.
    own: Vec<[u8; 16]>,
}

impl Entries {
    /// All absent.
    pub fn absent() -> Entries {
        Entries::alike(Entry::ABSENT)
    }

    /// The pages of a block, each with the block's birth.
    pub fn of_block(block: Entry) -> Entries {
        debug_assert_eq!(block.kind(), Kind::Block);
        Entries::alike(block)
    }

    fn alike(base: Entry) -> Entries {
        Entries(Shape::Sparse(Box::new(Sparse { base, is_own: Default::default(), own: Vec::new() })))
    }

    /// As an array for good: slots of an ordered map, which follow from nothing.
    pub fn whole(entries: Box<[Entry; FANOUT]>) -> Entries {
        Entries(Shape::Array(entries))
    }

    /// The array that [`whole`](Self::whole) was given.
    pub fn array(&self) -> &[Entry; FANOUT] {
        match &self.0 {
            Shape::Array(entries) => entries,
            Shape::Sparse(_) => unreachable!("a page of an ordered map is kept whole"),
        }
    }

    /// As [`array`](Self::array), to be changed.
    pub fn array_mut(&mut self) -> &mut [Entry; FANOUT] {
        match &mut self.0 {
            Shape::Array(entries) => entries,
            Shape::Sparse(_) => unreachable!("a page of an ordered map is kept whole"),
        }
    }

    /// One of them.
    pub fn get(&self, slot: usize) -> Entry {
        match &self.0 {
            Shape::Array(entries) => entries[slot],
            Shape::Sparse(sparse) => sparse.get(slot),
        }
    }

    /// Sets one of them; returns what it was.
    pub fn set(&mut self, slot: usize, entry: Entry) -> Entry {
        let sparse = match &mut self.0 {
            Shape::Array(entries) => return std::mem::replace(&mut entries[slot], entry),
            Shape::Sparse(sparse) => sparse,
        };
        let old = sparse.set(slot, entry);
        if sparse.own.len() > MAX_OWN {
            self.0 = Shape::Array(self.to_array());
        }
        old
    }

    /// Sets those in `slots` to pages that lie one behind the other, `first` and on.
    pub fn set_run(&mut self, slots: Range<usize>, first: Entry) {
        if slots.len() == 1 {
            self.set(slots.start, first);
            return;
        }
        let page = |slot: usize| Entry::page(PageAddr(first.addr().0 + (slot - slots.start) as u64), first.birth());
        let sparse = match &mut self.0 {
            Shape::Array(entries) => {
                slots.clone().for_each(|slot| entries[slot] = page(slot));
                return;
            }
            Shape::Sparse(sparse) => sparse,
        };
        let (Ok(from) | Err(from), Ok(to) | Err(to)) = (sparse.find(slots.start), sparse.find(slots.end));
        sparse.own.splice(from..to, slots.clone().map(|slot| page(slot).to_bytes()));
        slots.clone().for_each(|slot| sparse.is_own[slot / 64] |= 1 << (slot % 64));
        if sparse.own.len() > MAX_OWN {
            self.0 = Shape::Array(self.to_array());
        }
    }

    /// All of them in order.
    pub fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        self.iter_in(0..FANOUT)
    }

    /// Those in `slots`, in order.
    pub fn iter_in(&self, slots: Range<usize>) -> impl Iterator<Item = Entry> + '_ {
        let mut own = match &self.0 {
            Shape::Array(_) => [].iter(),
            Shape::Sparse(sparse) => sparse.own_from(slots.start).iter(),
        };
        slots.map(move |slot| match &self.0 {
            Shape::Array(entries) => entries[slot],
            Shape::Sparse(sparse) if sparse.has_own(slot) => {
                Entry::from_bytes(*own.next().expect("a bit is set for each"))
            }
            Shape::Sparse(sparse) => follows(sparse.base, slot),
        })
    }

    /// How many entries from `slot` on are known without a look at each to be all absent, or pages one behind the
    /// other with one birth.
    pub fn alike_from(&self, slot: usize) -> usize {
        match &self.0 {
            Shape::Array(_) => 0,
            Shape::Sparse(sparse) => sparse.next_own(slot) - slot,
        }
    }

    /// The pages that those in `slots` refer to, together those that lie one behind the other, and how many.
    pub fn page_runs(&self, slots: Range<usize>) -> impl Iterator<Item = (PageAddr, u64)> + '_ {
        debug_assert!(!slots.is_empty());
        let first = self.get(slots.start);
        let is_one = slots.len() == 1 || self.alike_from(slots.start) >= slots.len();
        let one = (is_one && !first.is_absent()).then_some((first.addr(), slots.len() as u64));
        let each = if is_one { slots.end..slots.end } else { slots };
        let mut pages = self.iter_in(each).filter(|e| !e.is_absent()).map(|e| e.addr()).peekable();
        one.into_iter().chain(std::iter::from_fn(move || {
            let first = pages.next()?;
            let mut n = 1;
            while pages.next_if(|page| page.0 == first.0 + n).is_some() {
                n += 1;
            }
            Some((first, n))
        }))
    }

    /// How many map pages that do not lie behind the page before them.
    pub fn seams(&self) -> u64 {
        match &self.0 {
            // Absent, or the pages of a block.
            Shape::Sparse(sparse) if sparse.own.is_empty() => 0,
            _ => self.seams_in(0..FANOUT),
        }
    }

    /// Of the entries in `slots` and the one behind them, how many map pages that do not lie behind the page
    /// before them.
    pub fn seams_in(&self, slots: Range<usize>) -> u64 {
        let (from, end) = (slots.start.saturating_sub(1), (slots.end + 1).min(FANOUT));
        if slots.len() <= 1 {
            return (from + 1..end).filter(|&slot| is_seam(self.get(slot - 1), self.get(slot))).count() as u64;
        }
        if self.alike_from(from) >= end - from {
            return 0;
        }
        let mut before = self.get(from);
        let mut seams = 0;
        for entry in self.iter_in(from + 1..end) {
            seams += u64::from(is_seam(before, entry));
            before = entry;
        }
        seams
    }

    /// How many are not absent.
    pub fn mapped(&self) -> u64 {
        self.iter().filter(|e| !e.is_absent()).count() as u64
    }

    /// As an array.
    pub fn to_array(&self) -> Box<[Entry; FANOUT]> {
        match &self.0 {
            Shape::Array(entries) => entries.clone(),
            Shape::Sparse(_) => {
                let mut all = self.iter();
                Box::new(std::array::from_fn(|_| all.next().expect("there is one for each slot")))
            }
        }
    }

    /// Replaces each entry that points to a table by what `change` makes of it.
    pub fn change_tables(&mut self, change: impl Fn(Entry) -> Entry) {
        let is_table = |e: Entry| e.kind() == Kind::Table;
        match &mut self.0 {
            Shape::Array(entries) => entries.iter_mut().filter(|e| is_table(**e)).for_each(|e| *e = change(*e)),
            Shape::Sparse(sparse) => {
                for bytes in &mut sparse.own {
                    let entry = Entry::from_bytes(*bytes);
                    if is_table(entry) {
                        *bytes = change(entry).to_bytes();
                    }
                }
            }
        }
    }

    /// Memory they take beside `self`, in bytes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Shape::Array(_) => size_of::<[Entry; FANOUT]>(),
            Shape::Sparse(sparse) => size_of::<Sparse>() + sparse.own.capacity() * 16,
        }
    }
}

impl From<Box<[Entry; FANOUT]>> for Entries {
    fn from(entries: Box<[Entry; FANOUT]>) -> Entries {
        match Sparse::of(&entries) {
            Some(sparse) => Entries(Shape::Sparse(Box::new(sparse))),
            None => Entries(Shape::Array(entries)),
        }
    }
}

/// What an entry is that follows from what the others are.
fn follows(base: Entry, slot: usize) -> Entry {
    match base.is_absent() {
        true => Entry::ABSENT,
        false => Entry::page(base.addr().block().page(slot), base.birth()),
    }
}

/// The block that an entry is a page of, if it lies where that has it.
fn block_behind(entry: Entry, slot: usize) -> Option<Entry> {
    (entry.kind() == Kind::Page && entry.addr().index() == slot)
        .then(|| Entry::block(entry.addr().block(), entry.birth()))
}

impl Sparse {
    /// The same as an array, if it is an array that says mostly the same.
    fn of(entries: &[Entry; FANOUT]) -> Option<Sparse> {
        let probed = PROBES.into_iter().filter_map(|slot| block_behind(entries[slot], slot));
        let mut bases = std::iter::once(Entry::ABSENT).chain(probed);
        let differ = |base: Entry| (0..FANOUT).filter(move |&slot| entries[slot] != follows(base, slot));
        let base = bases.find(|&base| differ(base).nth(FEW).is_none())?;
        let mut sparse = Sparse { base, is_own: Default::default(), own: Vec::new() };
        for slot in differ(base) {
            sparse.is_own[slot / 64] |= 1 << (slot % 64);
            sparse.own.push(entries[slot].to_bytes());
        }
        Some(sparse)
    }

    fn get(&self, slot: usize) -> Entry {
        match self.find(slot) {
            Ok(at) => Entry::from_bytes(self.own[at]),
            Err(_) => follows(self.base, slot),
        }
    }

    fn set(&mut self, slot: usize, entry: Entry) -> Entry {
        let old = self.get(slot);
        match self.find(slot) {
            Ok(at) => self.own[at] = entry.to_bytes(),
            Err(at) => {
                self.own.insert(at, entry.to_bytes());
                self.is_own[slot / 64] |= 1 << (slot % 64);
            }
        }
        old
    }

    /// Where an entry is among those kept one by one, or would be; also for the slot behind the last.
    fn find(&self, slot: usize) -> Result<usize, usize> {
        if slot == FANOUT {
            return Err(self.own.len());
        }
        let (word, bit) = (slot / 64, slot % 64);
        let before: u32 = self.is_own[..word].iter().map(|w| w.count_ones()).sum();
        let at = (before + (self.is_own[word] & ((1 << bit) - 1)).count_ones()) as usize;
        if self.has_own(slot) { Ok(at) } else { Err(at) }
    }

    fn has_own(&self, slot: usize) -> bool {
        self.is_own[slot / 64] >> (slot % 64) & 1 == 1
    }

    /// The first slot from `slot` on that is kept by itself, or the one behind the last.
    fn next_own(&self, slot: usize) -> usize {
        let words = self.is_own.iter().enumerate().skip(slot / 64);
        let masked =
            words.map(|(word, &bits)| (word, if word == slot / 64 { bits & (u64::MAX << (slot % 64)) } else { bits }));
        let mut with_own = masked.filter(|&(_, bits)| bits != 0);
        with_own.next().map_or(FANOUT, |(word, bits)| word * 64 + bits.trailing_zeros() as usize)
    }

    /// Those kept one by one from a slot on.
    fn own_from(&self, slot: usize) -> &[[u8; 16]] {
        let (Ok(at) | Err(at)) = self.find(slot);
        &self.own[at..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::TableRef;
    use crate::types::{Block, Epoch};

    fn page(at: u64) -> Entry {
        Entry::page(PageAddr(at), Epoch(9))
    }

    /// Sets entries in an order that looks random and compares with an array after each.
    fn compare(mut entries: Entries) {
        let mut array = entries.to_array();
        for i in 0..600_u64 {
            let slot = (i * 89 % 256) as usize;
            let new = if i % 5 == 4 { Entry::ABSENT } else { page(1000 + i) };
            assert_eq!(entries.set(slot, new), std::mem::replace(&mut array[slot], new));
            assert!(entries.iter().eq(array.iter().copied()), "after {i}");
        }
        for i in 0..300_u64 {
            let (first, len) = ((i * 89 % 256) as usize, (i * 31 % 97) as usize);
            let slots = first..(first + len).min(FANOUT);
            entries.set_run(slots.clone(), page(5000 + 300 * i));
            slots.clone().enumerate().for_each(|(n, slot)| array[slot] = page(5000 + 300 * i + n as u64));
            assert!(entries.iter_in(slots.start..FANOUT).eq(array[slots.start..].iter().copied()), "from {slots:?}");
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
        compare(Entries::of_block(Entry::block(Block(3), Epoch(4))));
        compare(Entries::from(Box::new([page(5); FANOUT])));
    }

    #[test]
    fn a_block_stands_for_its_pages() {
        let mut entries = Entries::of_block(Entry::block(Block(3), Epoch(4)));
        entries.set(7, page(9));
        assert_eq!(entries.get(6), Entry::page(Block(3).page(6), Epoch(4)));
        assert_eq!(entries.get(7), page(9));
        assert_eq!(entries.get(255), Entry::page(Block(3).page(255), Epoch(4)));
    }

    #[test]
    fn few_entries_take_little_and_many_no_more_than_an_array() {
        let mut entries = Entries::absent();
        assert!(entries.bytes() <= 80, "{}", entries.bytes());
        entries.set(200, page(1));
        assert!(entries.bytes() <= 144, "{}", entries.bytes());
        for slot in 0..FANOUT {
            entries.set(slot, page(slot as u64));
            assert!(entries.bytes() <= 4096 + 80);
        }
        assert_eq!(entries.bytes(), 4096);
    }

    #[test]
    fn an_array_that_says_mostly_the_same_takes_little() {
        for mut entries in [Entries::absent(), Entries::of_block(Entry::block(Block(3), Epoch(4)))] {
            for i in 0..FEW {
                entries.set(i * 3, page(i as u64 * 1000));
            }
            let array = entries.to_array();
            let again = Entries::from(array.clone());
            assert!(again.bytes() < 2048 && again.to_array() == array, "{}", again.bytes());
            entries.set(255, page(7));
            assert_eq!(Entries::from(entries.to_array()).bytes(), 4096, "one too many");
        }
        let mut checked = [Entry::ABSENT; FANOUT];
        checked[9] = Entry::checked_page(PageAddr(9), Epoch(1), 77);
        assert_eq!(Entries::from(Box::new(checked)).get(9), checked[9]);
    }

    #[test]
    fn only_tables_are_changed() {
        let table = |at| Entry::table(TableRef::on_disk(PageAddr(at)), Epoch(1), 0);
        let mut sparse = Entries::absent();
        sparse.set(3, table(1));
        sparse.set(4, Entry::block(Block(1), Epoch(1)));
        for mut entries in [sparse.clone(), Entries(Shape::Array(sparse.to_array()))] {
            entries.change_tables(|e| if e == table(1) { table(2) } else { Entry::ABSENT });
            assert_eq!(entries.get(3), table(2));
            assert_eq!((entries.get(4), entries.get(5)), (Entry::block(Block(1), Epoch(1)), Entry::ABSENT));
        }
    }
}
