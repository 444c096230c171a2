//! Walks over all of several maps, which must not change meanwhile.
//!
//! A walk holds entries while it waits for the device. On a pool where nothing happens it goes over
//! what is in memory: every step looks first whether something has changed, and if so the whole walk
//! begins again. If that is to no avail it goes over a view (`view.rs`) instead, which stays as it is
//! whatever writers do. Either way others have their turn after a few steps.

use std::rc::Rc;

use crate::device::Device;
use crate::error::{ErrorKind, Result};
use crate::format::{Layout, MapEntry, Superblock, TreeRoot};
use crate::planted::{Bug, planted};
use crate::space::Counts;
use crate::sync::LockMode;
use crate::types::{Block, FANOUT, PageAddr, VolumeId};

use super::load::{changed_error, damaged_table_error};
use super::reap::yield_now;
use super::view::roots_of;
use super::{Failure, Inner, Meta};

/// How often a walk over what is in memory begins again.
const MAX_MEMORY_WALKS: usize = 2;
/// How many views it tries after that.
const MAX_VIEWS: usize = 8;

/// A map to be walked.
#[derive(Clone, Copy)]
pub struct Root {
    pub id: VolumeId,
    pub entry: MapEntry,
    pub level: u8,
    /// The first virtual page that counts: what lies before it has been given back.
    pub from: u64,
    pub is_dead: bool,
    /// The ordered map of an origin.
    pub kept: TreeRoot,
    /// Pages that it is said to map; a snapshot of an origin is counted otherwise.
    pub referenced: Option<u64>,
    /// Seams that are counted, unless they are an estimate.
    pub seams: Option<u64>,
}

/// What the metadata in memory was when a walk began: different whenever a reference is.
#[derive(Clone, Copy, PartialEq, Eq)]
struct MetadataVersion {
    records: u64,
    checkpoint: u64,
    unwritten: usize,
    dirty: usize,
}

enum WalkSource {
    /// What is in memory, as long as nothing changes.
    Memory(MetadataVersion),
    /// The view of this number.
    View(u64),
}

/// What a walk goes over.
pub struct Walk {
    source: WalkSource,
    /// The maps of volumes.
    pub roots: Vec<Root>,
    /// The directory's own.
    pub directory: (MapEntry, u8),
    /// Where the journal lies, in pages.
    pub journal: Vec<(PageAddr, u32)>,
    pub layout: Layout,
    /// Pages that count as free.
    pub available: u64,
    pool: [u8; 16],
}

impl Walk {
    /// Over the view that begins with `superblock`, when so many pages are in use that are not reserved.
    pub fn over_view(number: u64, roots: Vec<Root>, superblock: &Superblock, used: u64) -> Walk {
        let layout = Layout::new(superblock.size);
        Walk {
            source: WalkSource::View(number),
            roots,
            directory: (superblock.directory, superblock.directory_level),
            journal: superblock.journal.clone(),
            layout,
            available: layout.pages() - layout.reserved_pages() - used,
            pool: superblock.checksum_uuid,
        }
    }

    /// Whether tables may have no address yet.
    pub fn is_of_memory(&self) -> bool {
        matches!(self.source, WalkSource::Memory(_))
    }
}

impl<D: Device> Inner<D> {
    /// Runs `walk` over all metadata of one moment not before this call. Nothing is reaped while it
    /// goes over memory. `Busy` if there is too little room to hold a view as long as it takes.
    pub async fn walk<T>(self: &Rc<Self>, walk: impl AsyncFn(&Walk) -> Result<T>) -> Result<T> {
        for _ in 0..MAX_MEMORY_WALKS {
            let _still = self.reap_lock.lock(0..1, LockMode::Exclusive).await;
            let over = self.over_memory();
            match walk(&over).await {
                Err(e) if e.kind() == ErrorKind::Busy => {}
                outcome if self.check_unchanged(&self.meta.borrow(), &over).is_ok() => return outcome,
                _ => {}
            }
        }
        if self.options.read_only {
            return Err(changed_error());
        }
        let _mine = self.views.lock.lock(0..1, LockMode::Exclusive).await;
        for _ in 0..MAX_VIEWS {
            let over = self.begin_view().await?;
            let outcome = walk(&over).await;
            let is_whole = self.check_unchanged(&self.meta.borrow(), &over).is_ok();
            self.end_view().await;
            match outcome {
                Err(e) if e.kind() == ErrorKind::Busy => {}
                outcome if is_whole => return outcome,
                _ => {}
            }
        }
        Err(changed_error())
    }

    fn over_memory(&self) -> Walk {
        let (meta, superblock) = (self.meta.borrow(), self.superblock.borrow());
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

    /// Refuses a step of a walk that no longer goes over what it began with.
    pub fn check_unchanged(&self, meta: &Meta, walk: &Walk) -> std::result::Result<(), Failure> {
        let is_same = match &walk.source {
            WalkSource::Memory(then) => self.moment(meta) == *then,
            WalkSource::View(number) => meta.space.view() == Some(*number),
        };
        if is_same { Ok(()) } else { Err(Failure::Changed) }
    }

    fn moment(&self, meta: &Meta) -> MetadataVersion {
        MetadataVersion {
            records: meta.journal.appended(),
            checkpoint: self.superblock.borrow().generation,
            unwritten: meta.tables.unwritten(),
            dirty: meta.tables.dirty(),
        }
    }

    /// The entries of a table. Lets others have their turn.
    pub async fn table_of(&self, walk: &Walk, entry: MapEntry, level: u8) -> Result<Box<[MapEntry; FANOUT]>> {
        yield_now().await;
        if walk.is_of_memory() {
            return self
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
        // Not through the cache: the page may be free by now, and must not be found there when
        // another table takes it.
        let entries = self.read_table(walk.pool, page, entry, level).await;
        self.retry_no_alloc(|meta| self.check_unchanged(meta, walk)).await?;
        entries
    }

    /// All counts of a block.
    pub async fn counts_of(&self, walk: &Walk, block: Block) -> Result<Counts> {
        let uncounted = self.meta.borrow().uncounted.clone();
        uncounted.map_or(Ok(()), Err)?;
        self.retry_no_alloc(|meta| {
            self.check_unchanged(meta, walk)?;
            let counts = match walk.source {
                WalkSource::View(_) if !planted(Bug::ViewTakesNewCounts) => meta.space.view_counts(block),
                _ => meta.space.block_counts(block),
            };
            counts.map_err(|m| Failure::Stop(m.into()))
        })
        .await
    }
}
