//! Verification: every reference counted again, independent of the counts kept, and compared.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::device::Device;
use crate::error::{ErrorKind, Result};
use crate::format::{Entry, Kind, TableRef, VolumeState};
use crate::space::PINNED;
use crate::types::{BLOCK_PAGES, Block, PageAddr, table_span};

use super::walk::Walk;
use super::{Failure, Inner, Pool};

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// What is damaged, and where.
    pub damage: Vec<String>,
    /// Pages counted as used that nothing refers to.
    pub leaked: u64,
    /// Pages referred to.
    pub pages: u64,
    /// Volumes and snapshots looked at.
    pub volumes: u64,
}

#[derive(Default)]
struct Tally {
    whole: FxHashMap<Block, u32>,
    pages: FxHashMap<PageAddr, u32>,
    unplaced: FxHashMap<TableRef, u32>,
    seen: FxHashSet<TableRef>,
    report: CheckReport,
}

/// A table still to be visited.
struct Visit {
    entry: Entry,
    level: u8,
    /// First virtual page of the table, and the first that counts (for dead volumes).
    base: u64,
    from: u64,
    directory: bool,
}

impl<D: Device> Pool<D> {
    /// Counts every reference again and compares. If the map changes meanwhile the count begins
    /// again, a few times; after that nothing is said about it (`Busy`).
    pub async fn check(&self) -> Result<CheckReport> {
        self.0.walk(async |walk| self.check_once(walk).await).await
    }

    async fn check_once(&self, walk: Walk) -> Result<CheckReport> {
        let inner = &self.0;
        let mut tally = Tally::default();
        let mut todo = Vec::new();
        {
            let meta = inner.meta.borrow();
            for volume in meta.directory.iter() {
                let r = &volume.record;
                let from = if r.state == VolumeState::Dead { r.cursor } else { 0 };
                tally.report.volumes += u64::from(r.state != VolumeState::Dead);
                if from < table_span(r.level) {
                    todo.push(Visit { entry: r.root, level: r.level, base: 0, from, directory: false });
                }
            }
            let map = &meta.directory_map;
            todo.push(Visit { entry: map.root, level: map.level, base: 0, from: 0, directory: true });
        }
        while let Some(visit) = todo.pop() {
            inner.visit(walk, visit, &mut tally, &mut todo).await?;
        }
        for &(first, pages) in &inner.superblock.borrow().journal {
            for block in first.block().0..first.block().0 + u64::from(pages) / BLOCK_PAGES {
                *tally.whole.entry(Block(block)).or_default() += 1;
            }
        }
        inner.compare_counts(walk, &mut tally).await?;
        Ok(tally.report)
    }
}

impl<D: Device> Inner<D> {
    async fn visit(&self, walk: Walk, visit: Visit, tally: &mut Tally, todo: &mut Vec<Visit>) -> Result<()> {
        let Visit { entry, level, base, from, directory } = visit;
        if entry.is_absent() {
            return Ok(());
        }
        let at = {
            let meta = self.meta.borrow();
            let at = meta.tables.resolve(entry.table_ref());
            match at.page() {
                Some(page) => *tally.pages.entry(page).or_default() += 1,
                None => *tally.unplaced.entry(at).or_default() += 1,
            }
            at
        };
        // A table of a dead volume that is half given back belongs to it alone.
        if !tally.seen.insert(at) {
            return Ok(());
        }
        let table = self
            .look(|meta| {
                self.still(meta, walk)?;
                let id = meta.tables.get(entry, level).map_err(|m| Failure::Stop(m.into()))?;
                Ok(meta.tables.node(id).entries().to_array())
            })
            .await;
        let entries = match table {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::Corrupt || e.kind() == ErrorKind::Io => {
                tally.report.damage.push(e.to_string());
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let span = table_span(level) / 256;
        for (i, &child) in entries.iter().enumerate() {
            let start = base + i as u64 * span;
            if start + span <= from {
                continue;
            }
            match child.kind() {
                Kind::Table => todo.push(Visit { entry: child, level: level - 1, base: start, from, directory }),
                Kind::Page => *tally.pages.entry(child.addr()).or_default() += 1,
                Kind::Block => *tally.whole.entry(child.addr().block()).or_default() += 1,
                Kind::Absent | Kind::Unknown(_) => {}
            }
        }
        Ok(())
    }

    async fn compare_counts(&self, walk: Walk, tally: &mut Tally) -> Result<()> {
        let layout = self.meta.borrow().space.layout();
        let mut free = 0;
        for block in (1..layout.blocks()).map(Block).filter(|&b| !layout.is_reserved(b)) {
            let counts = self
                .look(|meta| {
                    self.still(meta, walk)?;
                    meta.space.block_counts(block).map_err(|m| Failure::Stop(m.into()))
                })
                .await;
            let (whole, pages) = match counts {
                Ok(counts) => counts,
                Err(e) if e.kind() == ErrorKind::Corrupt || e.kind() == ErrorKind::Io => {
                    tally.report.damage.push(e.to_string());
                    continue;
                }
                Err(e) => return Err(e),
            };
            let expected_whole = tally.whole.remove(&block).unwrap_or(0);
            if whole < expected_whole {
                let what =
                    format!("block {} is referred to {expected_whole} times as a whole but counted {whole}", block.0);
                tally.report.damage.push(what);
            }
            for i in 0..BLOCK_PAGES as usize {
                let page = block.page(i);
                let expected = tally.pages.remove(&page).unwrap_or(0);
                let counted = pages.as_ref().map_or(0, |p| p[i]);
                if counted < expected && counted != PINNED {
                    let what = format!("{page:?} is referred to {expected} times but counted {counted}");
                    tally.report.damage.push(what);
                }
                let (used, referred) = (counted > 0 || whole > 0, expected > 0 || expected_whole > 0);
                let excess = counted > expected || whole > expected_whole;
                tally.report.leaked += u64::from(excess);
                tally.report.pages += u64::from(referred);
                free += u64::from(!used);
            }
        }
        let stray =
            tally.pages.keys().next().map(|p| format!("{p:?}")).or(tally.whole.keys().next().map(|b| format!("{b:?}")));
        if let Some(stray) = stray {
            tally.report.damage.push(format!("a map refers to {stray}, which cannot hold data"));
        }
        let meta = self.meta.borrow();
        for (&at, &expected) in &tally.unplaced {
            let counted = meta.tables.refs(at).unwrap_or(0);
            if counted != expected {
                tally.report.damage.push(format!("{at:?} is referred to {expected} times but counted {counted}"));
            }
        }
        if meta.space.available() > free {
            let what = format!("{} pages are free but {} are counted as available", free, meta.space.available());
            tally.report.damage.push(what);
        }
        Ok(())
    }
}
