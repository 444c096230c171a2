//! The ordered map: a B+tree of shadow-paged 4 KiB pages with keys and values of 16 bytes.
//!
//! Its pages live in the same store as the tables of the radix maps and follow the same rules: they have no
//! address until a checkpoint places them, a frozen page is copied before it changes, and their checksum lies
//! in the entry above and detects damage, a wrong place and a wrong age. Unlike tables they are never shared:
//! every page has one reference.
//!
//! As in `map/` everything is synchronous and works on pages in memory; if one is missing, a function returns
//! a [`TableMiss`] before it has changed anything.

mod edit;

pub use edit::Batch;

#[cfg(test)]
mod tests;

use smallvec::SmallVec;

use crate::format::ordered::{self, ORDERED_LEAF};
use crate::format::{MapEntry, TreeRoot};
use crate::map::{NodeId, TableMiss, Tables};

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
