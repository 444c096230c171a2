//! What only some volumes refer to, found by walking their maps.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::catalog::directory::hard_links;
use crate::catalog::directory::names::named;
use crate::device::Device;
use crate::error::Result;
use crate::format::{Kind, MapEntry, TableRef};
use crate::runtime::yield_now;
use crate::space::Counts;
use crate::store::{changed_error, deleted_error};
use crate::types::{BLOCK_PAGES, Block, PAGE_SIZE, VolumeId};

use super::Upkeep;
use super::walk::Walk;

/// What a volume refers to, and how much of it is exclusive. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Mapped.
    pub referenced: u64,
    /// What deleting only this one would free, tables included.
    pub exclusive: u64,
}

/// References that a walk has subtracted, by block in a tree: nothing is ever moved as a whole, so every step
/// is short.
#[derive(Default)]
struct ReleasedRefs {
    tables: BTreeMap<TableRef, u32>,
    blocks: BTreeMap<Block, Counts>,
    freed: u64,
    /// The block used last, and its counts.
    last: Option<(Block, Counts)>,
}

impl<D: Device> Upkeep<D> {
    /// How much a volume or snapshot refers to, and how much of it is exclusive.
    pub async fn usage(self: &Rc<Self>, name: &str) -> Result<Usage> {
        let referenced = self.store.find(name)?.referenced;
        Ok(Usage { referenced, exclusive: self.freed_by(&[name]).await? })
    }

    /// Bytes that deleting all of `names` together would free, data and tables.
    pub async fn freed_by(self: &Rc<Self>, names: &[&str]) -> Result<u64> {
        Ok(self.freed_by_each(&[names.to_vec()]).await?[0])
    }

    /// Like [`freed_by`](Self::freed_by) for each of several lists of names, at one instant. Writers do not
    /// wait; see [`check`](Self::check).
    pub async fn freed_by_each(self: &Rc<Self>, lists: &[Vec<&str>]) -> Result<Vec<u64>> {
        let upkeep = self;
        let ids_of = |names: &Vec<&str>| -> Result<BTreeSet<VolumeId>> {
            let meta = upkeep.store.meta.borrow();
            let ids = names.iter().map(|name| named(&meta.directory, name)).collect::<Result<_>>()?;
            Ok(hard_links::gone_with(&meta.directory, &ids))
        };
        let lists: Vec<BTreeSet<VolumeId>> = lists.iter().map(ids_of).collect::<Result<_>>()?;
        let count = async |walk: &Walk| {
            let mut freed = Vec::with_capacity(lists.len());
            for ids in &lists {
                freed.push(release_all(upkeep, walk, ids).await?);
            }
            Ok(freed)
        };
        upkeep.walk(count).await
    }
}

impl ReleasedRefs {
    /// Whether every reference to a page of the loaded block, its own and its block's, was subtracted.
    fn is_free(&self, block: Block, index: usize) -> bool {
        let counted = self.last.as_ref().filter(|(last, _)| *last == block).map(|(_, counts)| counts);
        let (Some(counted), Some(given)) = (counted, self.blocks.get(&block)) else { return false };
        given.whole == counted.whole && given.pages[index] == counted.pages[index]
    }
}

async fn release_all<D: Device>(upkeep: &Upkeep<D>, walk: &Walk, ids: &BTreeSet<VolumeId>) -> Result<u64> {
    let mut given = ReleasedRefs::default();
    let mut todo: Vec<(MapEntry, u8)> = Vec::new();
    let mut missing = ids.clone();
    for root in walk.roots.iter().filter(|root| !root.is_dead && ids.contains(&root.id)) {
        missing.remove(&root.id);
        if !root.entry.is_absent() {
            todo.push((root.entry, root.level));
        }
    }
    if !missing.is_empty() {
        return Err(deleted_error());
    }
    while let Some((entry, level)) = todo.pop() {
        release_table(upkeep, walk, entry, level, &mut given, &mut todo).await?;
    }
    Ok((given.freed + upkeep.origins.exceptions_freed_by(ids).await?) * PAGE_SIZE as u64)
}

/// Subtracts a reference to a table; with the last one, its entries are released, too.
async fn release_table<D: Device>(
    upkeep: &Upkeep<D>,
    walk: &Walk,
    entry: MapEntry,
    level: u8,
    given: &mut ReleasedRefs,
    todo: &mut Vec<(MapEntry, u8)>,
) -> Result<()> {
    let at = upkeep.store.meta.borrow().tables.resolve(entry.table_ref());
    let count = references_to(upkeep, walk, at, given).await?;
    let gone = given.tables.entry(at).or_default();
    *gone += 1;
    if *gone < count {
        return Ok(());
    }
    given.freed += 1;
    for &child in upkeep.table_of(walk, entry, level).await?.iter() {
        match child.kind() {
            Kind::Table => todo.push((child, level - 1)),
            Kind::Page => {
                let (page, block) = (child.addr(), child.addr().block());
                loaded_counts(upkeep, walk, block, given).await?;
                given.blocks.entry(block).or_default().pages[page.index()] += 1;
                given.freed += u64::from(given.is_free(block, page.index()));
            }
            Kind::Block => {
                let block = child.addr().block();
                loaded_counts(upkeep, walk, block, given).await?;
                given.blocks.entry(block).or_default().whole += 1;
                given.freed += (0..BLOCK_PAGES as usize).filter(|&i| given.is_free(block, i)).count() as u64;
            }
            Kind::Absent | Kind::Unknown(_) => {}
        }
    }
    Ok(())
}

/// References to a table.
async fn references_to<D: Device>(
    upkeep: &Upkeep<D>,
    walk: &Walk,
    at: TableRef,
    given: &mut ReleasedRefs,
) -> Result<u32> {
    let unplaced = upkeep.store.meta.borrow().tables.refs(at);
    match (at.page(), unplaced) {
        (_, Some(refs)) if walk.is_of_memory() => Ok(refs),
        (Some(page), _) => {
            let counts = loaded_counts(upkeep, walk, page.block(), given).await?;
            Ok(counts.pages[page.index()])
        }
        (None, _) => Err(changed_error()),
    }
}

/// Loads the counts of a block. After scattered writes each entry may be in another block: then other
/// tasks run in between.
async fn loaded_counts<'g, D: Device>(
    upkeep: &Upkeep<D>,
    walk: &Walk,
    block: Block,
    given: &'g mut ReleasedRefs,
) -> Result<&'g Counts> {
    if given.last.as_ref().is_none_or(|(last, _)| *last != block) {
        yield_now().await;
        given.last = Some((block, upkeep.counts_of(walk, block).await?));
    }
    Ok(given.last.as_ref().map(|(_, counts)| counts).expect("brought"))
}
