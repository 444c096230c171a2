//! Walks over all of several maps, which must not change meanwhile.
//!
//! A walk holds entries while it waits for the device. On an idle pool it walks the maps in memory: each step
//! first checks whether anything changed, and if so the whole walk begins again. If that fails repeatedly it
//! walks a view (`view.rs`), which stays the same whatever writers do. In both cases other tasks run after a
//! few steps.

use std::rc::Rc;

use crate::catalog::{Catalog, Failure};
use crate::device::Device;
use crate::error::{ErrorKind, Result};
use crate::format::{Layout, MapEntry};
use crate::planted::correct;
use crate::runtime::yield_now;
use crate::space::{Counts, view_counts};
use crate::store::{Root, View, changed_error, damaged_table_error, load, roots_of, view};
use crate::sync::LockMode;
use crate::types::{Block, PageAddr, TABLE_FANOUT};

use super::Upkeep;

/// Attempts in memory.
const MAX_MEMORY_WALKS: usize = 2;
/// Attempts on views after that.
const MAX_VIEWS: usize = 8;

/// Version of the metadata in memory: changes with every reference.
#[derive(Clone, Copy, PartialEq, Eq)]
struct MetadataVersion {
    records: u64,
    checkpoint: u64,
    unwritten: usize,
    dirty: usize,
}

enum WalkSource {
    /// The metadata in memory, while it stays unchanged.
    Memory(MetadataVersion),
    /// The view of this number.
    View(u64),
}

/// The state that a walk runs on.
pub struct Walk {
    source: WalkSource,
    /// The maps of volumes.
    pub roots: Vec<Root>,
    /// The map of the directory.
    pub directory: (MapEntry, u8),
    /// Extents of the journal, in pages.
    pub journal: Vec<(PageAddr, u32)>,
    pub layout: Layout,
    /// Pages that count as free.
    pub available: u64,
    pool: [u8; 16],
}

impl Walk {
    /// A walk over a view.
    fn over_view(view: View) -> Walk {
        let View { number, roots, superblock, used } = view;
        let layout = Layout::new(superblock.size);
        Walk {
            source: WalkSource::View(number),
            roots,
            directory: (superblock.directory, superblock.directory_level),
            layout,
            available: layout.pages() - layout.reserved_pages() - used,
            pool: superblock.checksum_uuid,
            journal: superblock.journal,
        }
    }

    /// Whether tables may have no address yet.
    pub fn is_of_memory(&self) -> bool {
        matches!(self.source, WalkSource::Memory(_))
    }
}

impl<D: Device> Upkeep<D> {
    /// Runs `walk` over all metadata at one instant not before this call. The reaper pauses while it runs in
    /// memory. `Busy` if there is too little space to hold a view for that long.
    pub async fn walk<T>(self: &Rc<Self>, walk: impl AsyncFn(&Walk) -> Result<T>) -> Result<T> {
        for _ in 0..MAX_MEMORY_WALKS {
            let _still = self.reap_lock.lock(0..1, LockMode::Exclusive).await;
            let over = self.over_memory();
            match walk(&over).await {
                Err(e) if e.kind() == ErrorKind::Busy => {}
                outcome if self.check_unchanged(&self.store.meta.borrow(), &over).is_ok() => return outcome,
                _ => {}
            }
        }
        if self.store.options.read_only {
            return Err(changed_error());
        }
        let _mine = self.store.views.lock.lock(0..1, LockMode::Exclusive).await;
        for _ in 0..MAX_VIEWS {
            let over = Walk::over_view(view::begin_view(&self.store).await?);
            let outcome = walk(&over).await;
            let is_whole = self.check_unchanged(&self.store.meta.borrow(), &over).is_ok();
            view::end_view(&self.store).await;
            match outcome {
                Err(e) if e.kind() == ErrorKind::Busy => {}
                outcome if is_whole => return outcome,
                _ => {}
            }
        }
        Err(changed_error())
    }

    fn over_memory(&self) -> Walk {
        let (meta, superblock) = (self.store.meta.borrow(), self.store.superblock.borrow());
        Walk {
            source: WalkSource::Memory(self.moment(&meta)),
            roots: roots_of(&meta),
            directory: (meta.directory_map.root, meta.directory_map.level),
            journal: superblock.journal.clone(),
            layout: meta.space.layout(),
            available: meta.space.available(),
            pool: superblock.checksum_uuid,
        }
    }

    /// Refuses a step of a walk whose state is gone.
    pub fn check_unchanged(&self, meta: &Catalog, walk: &Walk) -> std::result::Result<(), Failure> {
        let is_same = match &walk.source {
            WalkSource::Memory(then) => self.moment(meta) == *then,
            WalkSource::View(number) => view_counts::view(&meta.space) == Some(*number),
        };
        if is_same { Ok(()) } else { Err(Failure::Changed) }
    }

    fn moment(&self, meta: &Catalog) -> MetadataVersion {
        MetadataVersion {
            records: meta.journal.appended(),
            checkpoint: self.store.superblock.borrow().generation,
            unwritten: meta.tables.unwritten(),
            dirty: meta.tables.dirty(),
        }
    }

    /// The entries of a table. Lets other tasks run.
    pub async fn table_of(&self, walk: &Walk, entry: MapEntry, level: u8) -> Result<Box<[MapEntry; TABLE_FANOUT]>> {
        yield_now().await;
        if walk.is_of_memory() {
            return self
                .store
                .retry_no_alloc(|meta| {
                    self.check_unchanged(meta, walk)?;
                    let id = meta.tables.get(entry, level).map_err(|m| Failure::Stop(m.into()))?;
                    Ok(meta.tables.node(id).entries().to_array())
                })
                .await;
        }
        let Some(page) = entry.table_ref().page() else {
            return Err(damaged_table_error(level, PageAddr(0), "it was never written"));
        };
        // Not through the cache: the page may be free by now, and must not be found there when another table
        // gets it.
        let entries = load::read_table(&self.store, walk.pool, page, entry, level).await;
        self.store.retry_no_alloc(|meta| self.check_unchanged(meta, walk)).await?;
        entries
    }

    /// All counts of a block.
    pub async fn counts_of(&self, walk: &Walk, block: Block) -> Result<Counts> {
        let uncounted = self.store.meta.borrow().uncounted.clone();
        uncounted.map_or(Ok(()), Err)?;
        self.store
            .retry_no_alloc(|meta| {
                self.check_unchanged(meta, walk)?;
                let counts = match walk.source {
                    WalkSource::View(_) => correct!(
                        view_counts::view_counts(&mut meta.space, block),
                        Bug::ViewTakesNewCounts => meta.space.block_counts(block)
                    ),
                    _ => meta.space.block_counts(block),
                };
                counts.map_err(|m| Failure::Stop(m.into()))
            })
            .await
    }
}
