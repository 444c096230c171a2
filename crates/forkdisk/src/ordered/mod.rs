//! The ordered map: a B+tree of shadow-paged 4 KiB pages with keys and values of 16 bytes.
//!
//! Its pages live in the same store as the tables of the radix maps and follow the same rules: they have no
//! address until a checkpoint places them, a frozen page is copied before it changes, and their checksum lies
//! in the entry above and detects damage, a wrong place and a wrong age. Unlike tables they are never shared:
//! every page has one reference.
//!
//! As in `map/` everything is synchronous and works on pages in memory; if one is missing, a function returns
//! a [`TableMiss`] before it has changed anything.
//!
//! Changing an ordered map: insertion with splits, removal with merges.
//!
//! Changes that belong together form a [`Batch`]. [`Editor::tree_prepare`] looks up every page that the batch
//! touches and changes nothing; [`Editor::tree_apply`] then carries out the whole batch. It cannot fail,
//! because no lookup can miss any more:
//!
//! - Pairs are set before keys are removed. Setting a pair splits pages and removes none, so the path to
//!   every other key of the batch stays in memory: its pages are those that were looked up, copies of them,
//!   or new ones.
//! - Removing a key descends to a page that holds the key, and that page is in memory for the same reason. A
//!   page is not merged with a neighbour that is not in memory.

use smallvec::SmallVec;

use crate::format::ordered::{ORDERED_LEAF, PAIRS_PER_LEAF, Slots};
use crate::format::{MapEntry, TreeRoot, ordered};
use crate::map::{Editor, Entries, NodeId, Stop, TableMiss};
use crate::types::TABLE_FANOUT;

/// A page with fewer pairs is merged with a neighbour if possible.
const MIN_PAIRS: usize = PAIRS_PER_LEAF / 4;
/// Most pairs of a page that two were merged into.
const MAX_MERGED_PAIRS: usize = PAIRS_PER_LEAF * 3 / 4;

/// What happens to a page from which a pair is removed.
enum Shrunk {
    /// It stays.
    Stays,
    /// It has become empty and is removed.
    Goes,
    /// It is merged with its neighbour: the left of the two is child `left` of the page above.
    Merges { left: usize },
}

/// Changes of one ordered map that happen together or not at all.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    sets: SmallVec<[Pair; 2]>,
    removals: SmallVec<[u128; 2]>,
}

impl Batch {
    /// Sets the value of `key`.
    pub fn set(&mut self, key: u128, value: u128) {
        self.sets.push((key, value));
    }

    /// Removes `key`, if it is there; a key that the same batch sets is removed again.
    pub fn remove(&mut self, key: u128) {
        self.removals.push(key);
    }

    /// Moves the removals into a separate batch, for a planted bug that carries them out first.
    #[cfg(feature = "planted")]
    pub fn take_removals(&mut self) -> Batch {
        Batch { removals: std::mem::take(&mut self.removals), ..Batch::default() }
    }

    /// Sets the value of `key`, or removes the key.
    pub fn put(&mut self, key: u128, value: Option<u128>) {
        match value {
            Some(value) => self.set(key, value),
            None => self.remove(key),
        }
    }
}

/// A batch of which every page is in memory.
#[must_use = "a prepared batch changes nothing before it is applied"]
pub struct Prepared {
    batch: Batch,
    /// The map it was prepared for, and how many tables had been evicted by then.
    root: TreeRoot,
    evicted: u64,
}

impl Editor<'_> {
    /// Looks up every page that `batch` touches; changes nothing.
    pub fn tree_prepare(&mut self, root: &TreeRoot, batch: Batch) -> Result<Prepared, Stop> {
        for &(key, _) in &batch.sets {
            descend(self.tables, root, key)?;
        }
        for &key in &batch.removals {
            let path = descend(self.tables, root, key)?;
            load_neighbours(self, root, &path)?;
        }
        Ok(Prepared { batch, root: *root, evicted: self.tables.evicted() })
    }

    /// As [`tree_prepare`](Self::tree_prepare) for keys with their pages in memory; their neighbours are not looked up.
    #[cfg(test)]
    pub fn tree_prepare_without_neighbours(&mut self, root: &TreeRoot, batch: Batch) -> Prepared {
        Prepared { batch, root: *root, evicted: self.tables.evicted() }
    }

    /// Carries out a batch that was prepared for this map, with nothing changed in between.
    ///
    /// # Panics
    /// If the map was changed or tables were evicted since: half a batch would be worse.
    pub fn tree_apply(&mut self, root: &mut TreeRoot, prepared: Prepared) {
        assert_eq!(prepared.root, *root, "an ordered map changed between preparing a batch and applying it");
        assert_eq!(prepared.evicted, self.tables.evicted(), "tables were evicted before a batch was applied");
        for &(key, value) in &prepared.batch.sets {
            set_pair(self, root, key, value);
        }
        for &key in &prepared.batch.removals {
            remove_key(self, root, key);
        }
    }
}

fn leaf_of(path: &Path) -> NodeId {
    path.last().expect("the map is not empty").0
}

/// Returns the path to `key`, every page of which is in memory.
fn descend_prepared(editor: &mut Editor<'_>, root: &TreeRoot, key: u128) -> Path {
    let missed = |miss| panic!("an applied batch of an ordered map misses a page: {miss:?}");
    descend(editor.tables, root, key).unwrap_or_else(missed)
}

fn set_pair(editor: &mut Editor<'_>, root: &mut TreeRoot, key: u128, value: u128) {
    let value = MapEntry::from_bits(value);
    if root.height == 0 {
        let mut page = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
        ordered::insert(&mut page, 0, key, value);
        *root = TreeRoot { entry: editor.tables.create(ORDERED_LEAF, editor.epoch, Entries::whole(page)).1, height: 1 };
        return;
    }
    let path = descend_prepared(editor, root, key);
    let path = own_path(editor, root, &path);
    // Once its left neighbour is gone a page gets keys below its first bound.
    for &(id, at) in path.iter().take(path.len() - 1) {
        let page = editor.tables.slots_mut(id);
        if at == 0 && key < ordered::key(page, 0) {
            ordered::set_key(page, 0, key);
        }
    }
    let &(leaf, at) = path.last().expect("the map is not empty");
    let page = editor.tables.slots_mut(leaf);
    if at < ordered::pairs(page) && ordered::key(page, at) == key {
        return ordered::set_value(page, at, value);
    }
    add_pair(editor, root, &path, key, value);
}

/// Inserts a pair into the leaf at the end of `path`; full pages are split, up to the root.
fn add_pair(editor: &mut Editor<'_>, root: &mut TreeRoot, path: &Path, mut key: u128, mut value: MapEntry) {
    for (depth, &(id, at)) in path.iter().enumerate().rev() {
        // In a leaf `at` is where the pair goes, above it is the child that was split.
        let at = if depth + 1 == path.len() { at } else { at + 1 };
        let page = editor.tables.slots_mut(id);
        if ordered::pairs(page) < PAIRS_PER_LEAF {
            return ordered::insert(page, at, key, value);
        }
        // Appending in ascending order leaves full pages behind.
        let middle = if at == PAIRS_PER_LEAF { PAIRS_PER_LEAF } else { PAIRS_PER_LEAF / 2 };
        let mut right = ordered::split(page, middle);
        match at < middle {
            true => ordered::insert(page, at, key, value),
            false => ordered::insert(&mut right, at - middle, key, value),
        }
        key = ordered::key(&right, 0);
        value = editor.tables.create(root_level(root.height) - depth as u8, editor.epoch, Entries::whole(right)).1;
    }
    let mut top = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
    ordered::insert(&mut top, 0, 0, root.entry);
    ordered::insert(&mut top, 1, key, value);
    root.height += 1;
    root.entry = editor.tables.create(root_level(root.height), editor.epoch, Entries::whole(top)).1;
}

/// Removes `key`, if it is there.
fn remove_key(editor: &mut Editor<'_>, root: &mut TreeRoot, key: u128) {
    let path = descend_prepared(editor, root, key);
    let Some(&(leaf, at)) = path.last() else { return };
    let page = editor.tables.node(leaf).slots();
    if at == ordered::pairs(page) || ordered::key(page, at) != key {
        return;
    }
    let plan = plan_removal(editor, root, &path);
    let path = own_path(editor, root, &path);
    let mut depth = path.len() - 1;
    ordered::remove(editor.tables.slots_mut(leaf_of(&path)), at);
    for shrunk in plan {
        match shrunk {
            Shrunk::Stays => break,
            Shrunk::Goes => editor.tables.remove(path[depth].0),
            Shrunk::Merges { left } => merge(editor, root, &path, depth, left),
        }
        if depth == 0 {
            *root = TreeRoot::default();
            return;
        }
        depth -= 1;
        let (parent, child) = path[depth];
        let gone = if let Shrunk::Merges { left } = shrunk { left + 1 } else { child };
        ordered::remove(editor.tables.slots_mut(parent), gone);
    }
    lower(editor, root);
}

/// Loads the neighbours that pages of `path` are merged with once a pair is removed from each.
fn load_neighbours(editor: &mut Editor<'_>, root: &TreeRoot, path: &Path) -> Result<(), TableMiss> {
    for depth in (1..path.len()).rev() {
        let left = pairs_left(editor, path, depth);
        if left >= MIN_PAIRS || neighbour(editor, root, path, depth, left)?.is_none() && left > 0 {
            break;
        }
    }
    Ok(())
}

/// Returns what happens to the pages of `path`, from the leaf up, until one stays. A neighbour that is
/// not in memory is left alone.
fn plan_removal(editor: &mut Editor<'_>, root: &TreeRoot, path: &Path) -> Vec<Shrunk> {
    let mut plan = Vec::new();
    for depth in (0..path.len()).rev() {
        let left = pairs_left(editor, path, depth);
        if left == 0 {
            plan.push(Shrunk::Goes);
            continue;
        }
        match (depth, left < MIN_PAIRS) {
            (1.., true) => match neighbour(editor, root, path, depth, left) {
                Ok(Some(left)) => plan.push(Shrunk::Merges { left }),
                Ok(None) | Err(_) => break,
            },
            _ => break,
        }
    }
    plan.push(Shrunk::Stays);
    plan
}

/// Returns how many pairs a page of `path` has left once one is removed.
fn pairs_left(editor: &Editor<'_>, path: &Path, depth: usize) -> usize {
    ordered::pairs(editor.tables.node(path[depth].0).slots()) - 1
}

/// Returns the neighbour that a page with `left` pairs is merged with, as the index of the left one of
/// the two.
fn neighbour(
    editor: &mut Editor<'_>,
    root: &TreeRoot,
    path: &Path,
    depth: usize,
    left: usize,
) -> Result<Option<usize>, TableMiss> {
    let (parent, at) = path[depth - 1];
    let n = ordered::pairs(editor.tables.node(parent).slots());
    let other = match at {
        _ if n < 2 => return Ok(None),
        at if at + 1 < n => at + 1,
        at => at - 1,
    };
    let entry = ordered::value(editor.tables.node(parent).slots(), other);
    let id = editor.tables.get(entry, root_level(root.height) - depth as u8)?;
    let fits = left + ordered::pairs(editor.tables.node(id).slots()) <= MAX_MERGED_PAIRS;
    Ok(fits.then_some(at.min(other)))
}

/// Moves the pairs of child `left + 1` of the page above `depth` into child `left`.
fn merge(editor: &mut Editor<'_>, root: &TreeRoot, path: &Path, depth: usize, left: usize) {
    let (parent, _) = path[depth - 1];
    let level = root_level(root.height) - depth as u8;
    let page = editor.tables.node(parent).slots();
    let (a, b) = (ordered::value(page, left), ordered::value(page, left + 1));
    let bound = ordered::key(page, left + 1);
    let (into, entry) = own_page(editor, a, level);
    ordered::set_value(editor.tables.slots_mut(parent), left, entry);
    let (from, _) = own_page(editor, b, level);
    let right: Box<Slots> = Box::new(*editor.tables.node(from).slots());
    let first = if level == ORDERED_LEAF { ordered::key(&right, 0) } else { bound };
    ordered::append(editor.tables.slots_mut(into), &right, first);
    editor.tables.remove(from);
}

/// Replaces a root that has a single child by that child.
fn lower(editor: &mut Editor<'_>, root: &mut TreeRoot) {
    while root.height > 1 {
        let id = editor.tables.get(root.entry, root_level(root.height)).expect("changed just now");
        let page = editor.tables.node(id).slots();
        if ordered::pairs(page) > 1 {
            return;
        }
        *root = TreeRoot { entry: ordered::value(page, 0), height: root.height - 1 };
        editor.tables.remove(id);
        // If the child is not in memory, the root stays.
        if editor.tables.get(root.entry, root_level(root.height)).is_err() {
            return;
        }
    }
}

/// Makes all pages of `path` changeable and returns their path.
fn own_path(editor: &mut Editor<'_>, root: &mut TreeRoot, path: &Path) -> Path {
    let mut owned = Path::new();
    for (depth, &(_, at)) in path.iter().enumerate() {
        let entry = match owned.last() {
            None => root.entry,
            Some(&(parent, child)) => ordered::value(editor.tables.node(parent).slots(), child),
        };
        let (id, new) = own_page(editor, entry, root_level(root.height) - depth as u8);
        match owned.last() {
            None => root.entry = new,
            Some(&(parent, child)) => ordered::set_value(editor.tables.slots_mut(parent), child, new),
        }
        owned.push((id, at));
    }
    owned
}

/// Returns a page that may be changed, to replace the one that `entry` points to, which is in memory.
fn own_page(editor: &mut Editor<'_>, entry: MapEntry, level: u8) -> (NodeId, MapEntry) {
    let id = editor.tables.get(entry, level).expect("looked up before");
    if editor.tables.is_dirty(id) {
        return (id, entry);
    }
    let mut page = Box::new(*editor.tables.node(id).slots());
    for slot in ordered::child_slots(level) {
        page[slot] = editor.tables.resolve_finished_addr(page[slot]);
    }
    editor.free_table(id, entry.table_ref());
    editor.tables.create(level, editor.epoch, Entries::whole(page))
}

#[cfg(test)]
mod tests;

use crate::map::Tables;

/// A key and its value.
pub type Pair = (u128, u128);

/// Pages from the root down to a leaf, with the pair taken in each.
type Path = SmallVec<[(NodeId, usize); 6]>;

/// Returns the level of the root page of a map that has `height` levels.
fn root_level(height: u8) -> u8 {
    ORDERED_LEAF + height - 1
}

/// Returns the child of an upper page under which `key` belongs.
fn child_of(page: &ordered::Slots, key: u128) -> usize {
    let at = ordered::position(page, key);
    let exact = at < ordered::pairs(page) && ordered::key(page, at) == key;
    if exact { at } else { at.saturating_sub(1) }
}

/// Returns the path to where `key` is or would be; empty for an empty map.
fn descend(tables: &mut Tables, root: &TreeRoot, key: u128) -> Result<Path, TableMiss> {
    let mut path = Path::new();
    let mut entry = root.entry;
    for level in (0..root.height).map(|down| root_level(root.height - down)) {
        let id = tables.get(entry, level)?;
        let page = tables.node(id).slots();
        if level == ORDERED_LEAF {
            path.push((id, ordered::position(page, key)));
        } else {
            let at = child_of(page, key);
            entry = ordered::value(page, at);
            path.push((id, at));
        }
    }
    Ok(path)
}

/// Returns the leftmost leaf behind the leaf at the end of `path`, if there is one.
fn next_leaf(tables: &mut Tables, height: u8, path: &Path) -> Result<Option<NodeId>, TableMiss> {
    for (depth, &(id, at)) in path.iter().enumerate().rev().skip(1) {
        let page = tables.node(id).slots();
        if at + 1 >= ordered::pairs(page) {
            continue;
        }
        let (mut entry, mut level) = (ordered::value(page, at + 1), root_level(height) - depth as u8 - 1);
        loop {
            let id = tables.get(entry, level)?;
            if level == ORDERED_LEAF {
                return Ok(Some(id));
            }
            entry = ordered::value(tables.node(id).slots(), 0);
            level -= 1;
        }
    }
    Ok(None)
}

/// Returns the value of `key`.
pub fn get(tables: &mut Tables, root: &TreeRoot, key: u128) -> Result<Option<u128>, TableMiss> {
    Ok(lower_bound(tables, root, key)?.filter(|&(found, _)| found == key).map(|(_, value)| value))
}

/// Returns the pair with the smallest key that is not below `key`.
pub fn lower_bound(tables: &mut Tables, root: &TreeRoot, key: u128) -> Result<Option<Pair>, TableMiss> {
    Ok(scan(tables, root, key, u128::MAX, 1)?.first().copied())
}

/// Returns pairs from `from` on whose keys are below `end`, in ascending order: at most `max`, and no more
/// than one leaf holds. Empty only if there are none.
pub fn scan(tables: &mut Tables, root: &TreeRoot, from: u128, end: u128, max: usize) -> Result<Vec<Pair>, TableMiss> {
    let path = descend(tables, root, from)?;
    let Some(&(mut leaf, mut at)) = path.last() else { return Ok(Vec::new()) };
    if at == ordered::pairs(tables.node(leaf).slots()) {
        match next_leaf(tables, root.height, &path)? {
            Some(next) => (leaf, at) = (next, 0),
            None => return Ok(Vec::new()),
        }
    }
    let page = tables.node(leaf).slots();
    let pairs = (at..ordered::pairs(page)).map(|i| (ordered::key(page, i), ordered::value(page, i).bits()));
    Ok(pairs.take_while(|&(key, _)| key < end).take(max).collect())
}

/// Returns the pages directly below a page of `level`.
pub fn children(page: &ordered::Slots, level: u8) -> Vec<MapEntry> {
    let n = if level > ORDERED_LEAF { ordered::pairs(page) } else { 0 };
    (0..n).map(|i| ordered::value(page, i)).collect()
}
