//! Loading the metadata that a change missed, and repeating the change.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use smallvec::smallvec;

use crate::catalog::{Catalog, Failure};
use crate::device::{Buf, Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::ordered::is_ordered;
use crate::format::{CountPage, MapEntry, Seed, decode_table, page_checksum};
use crate::map::{Entries, Stop, TableMiss};
use crate::planted::correct;
use crate::runtime::LocalFuture;
use crate::space;
use crate::space::tree;
use crate::store::{retained, view};
use crate::types::{PAGE_SIZE, PageAddr, TABLE_FANOUT, VolumeId};

use super::Store;

/// Seed level of the checksum of count pages: this plus their level.
pub const COUNT_SEED: u8 = 0xe0;
/// Seed level of the checksum of directory pages.
pub const DIRECTORY_SEED: u8 = 0xd0;

/// Hint for damaged counts.
pub const REPAIR_HINT: &str = "its data can be read all the same (`forkdisk export`, `forkdisk mount -o ro`), and \
                          `forkdisk repair` makes all counts anew from the maps";

/// After this many misses of one change nothing is evicted until it is done: it needs more pages at once than
/// the cache holds and would never end otherwise.
const PIN_AFTER_MISSES: u32 = 32;

/// Why a change of metadata failed.
pub enum EditError {
    /// No space.
    NoSpace,
    /// Any other error.
    Error(Error),
}

impl From<Error> for EditError {
    fn from(error: Error) -> EditError {
        EditError::Error(error)
    }
}

impl From<EditError> for Error {
    fn from(ended: EditError) -> Error {
        match ended {
            EditError::NoSpace => no_space_error(),
            EditError::Error(error) => error,
        }
    }
}

/// A synchronous section on the catalog that is repeated until it misses no page of metadata.
///
/// An attempt that stops must leave maps, counts and records unchanged, or must have noted its progress: see "Changes
/// of several steps" in ARCHITECTURE.md.
pub struct Retry<'a, D> {
    store: &'a Store<D>,
    /// The number of the next record when the attempt began.
    recorded: u64,
    misses: u32,
    held: Option<CachePin<'a, D>>,
}

impl<'a, D: Device> Retry<'a, D> {
    /// The first attempt follows at once.
    pub fn new(store: &'a Store<D>) -> Retry<'a, D> {
        Retry { store, recorded: store.meta.borrow().journal.next(), misses: 0, held: None }
    }

    /// After an attempt that failed: loads what it missed. The attempt is to be repeated at once.
    ///
    /// The future is boxed: loading is rare, and its state would be part of every read and write.
    pub fn missed(&mut self, failure: Failure) -> Pin<Box<impl Future<Output = std::result::Result<(), EditError>>>> {
        let is_unrecorded = self.store.meta.borrow().journal.next() == self.recorded;
        assert!(is_unrecorded, "a change of metadata stopped after it had been recorded");
        Box::pin(async move {
            let stop = match failure {
                Failure::Stop(stop) => stop,
                Failure::Nonsense(what) => return Err(Error::new(ErrorKind::Corrupt, what).into()),
                Failure::Gone => return Err(deleted_error().into()),
                Failure::Changed => return Err(changed_error().into()),
                Failure::OverQuota(folder) => return Err(over_quota_error(self.store, folder).into()),
                Failure::OverBound(folder) => return Err(over_bound_error(self.store, folder).into()),
            };
            self.misses += 1;
            if self.misses == PIN_AFTER_MISSES {
                self.held = Some(pin_caches(self.store));
            }
            // The page to be loaded must not be reused before it was read.
            let _plan = self.store.generations.enter();
            load(self.store, stop).await?;
            self.recorded = self.store.meta.borrow().journal.next();
            Ok(())
        })
    }
}

impl<D: Device> Store<D> {
    /// Repeats `attempt` until it misses nothing; see [`Retry`].
    pub async fn retry_on_miss<T>(
        &self,
        mut attempt: impl FnMut(&mut Catalog) -> std::result::Result<T, Failure>,
    ) -> std::result::Result<T, EditError> {
        let mut retry = Retry::new(self);
        loop {
            let failure = match attempt(&mut self.meta.borrow_mut()) {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            retry.missed(failure).await?;
        }
    }

    /// Like [`retry_on_miss`](Self::retry_on_miss) for an attempt that needs no space.
    pub async fn retry_no_alloc<T>(
        &self,
        attempt: impl FnMut(&mut Catalog) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        Ok(self.retry_on_miss(attempt).await?)
    }
}

/// Nothing is evicted from the caches of tables and counts while this lives.
pub struct CachePin<'a, D>(&'a Store<D>);

impl<D> Drop for CachePin<'_, D> {
    fn drop(&mut self) {
        // Still borrowed only when an attempt panics.
        let Ok(mut meta) = self.0.meta.try_borrow_mut() else { return };
        meta.tables.hold(false);
        meta.space.hold(false);
    }
}

impl<D: Device> Store<D> {
    /// Like [`retry_no_alloc`](Self::retry_no_alloc) for an attempt that needs more tables and counts at once
    /// than the cache may hold: those of a family and of 256 pages.
    pub async fn retry_pinned<T>(
        &self,
        attempt: impl FnMut(&mut Catalog) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        let _held = pin_caches(self);
        self.retry_no_alloc(attempt).await
    }
}

/// The volume was deleted meanwhile.
pub fn deleted_error() -> Error {
    Error::new(ErrorKind::NotFound, "it has been deleted meanwhile")
}

/// The maps changed during a walk.
pub fn changed_error() -> Error {
    let text = "the pool changes too fast for this and has too little free space to hold on to what it was; try again \
                when there is less to do, or delete something";
    Error::new(ErrorKind::Busy, text)
}

/// A table does not match its entry.
pub fn damaged_table_error(level: u8, page: PageAddr, what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("map table of level {level} at {page:?} is damaged: {what}"))
}

/// A write found no space.
pub fn no_space_error() -> Error {
    Error::new(ErrorKind::NoSpace, "the pool is full; delete volumes or snapshots, discard, or grow the pool")
}

/// A write would exceed the quota of its volume or of a folder.
fn over_quota_error<D: Device>(store: &Store<D>, folder: VolumeId) -> Error {
    let why = match folder_name(store, folder) {
        None => "the volume has reached its quota; discard what is not needed or raise the quota".to_string(),
        Some(name) => format!(
            "the volumes in the folder {name:?} have reached its quota; discard what they do not need, delete some or \
             raise the quota of {name:?}"
        ),
    };
    Error::new(ErrorKind::NoSpace, why)
}

/// A write would exceed the bound of its volume or of a folder.
fn over_bound_error<D: Device>(store: &Store<D>, folder: VolumeId) -> Error {
    let why = match folder_name(store, folder) {
        None => "the volume has diverged as far as its bound allows; discard what it wrote, delete snapshots of it or \
                 raise diverge"
            .to_string(),
        Some(name) => format!(
            "the volumes in the folder {name:?} have diverged as far as its bound allows; delete some of them or \
             snapshots of them, discard what they wrote, or raise diverge of {name:?}"
        ),
    };
    Error::new(ErrorKind::NoSpace, why)
}

fn folder_name<D: Device>(store: &Store<D>, folder: VolumeId) -> Option<String> {
    store.meta.borrow().directory.get(folder).map(|entry| entry.record.name.to_string())
}

impl<D: Device> Store<D> {
    /// Whether a checkpoint would return space.
    pub fn has_pending_space(&self) -> bool {
        self.meta.borrow().space.pending() > 0 || self.reaping.get()
    }

    /// Waits until space was freed; false if `patience` ended first.
    pub async fn wait_for_space(&self, patience: &mut LocalFuture<()>) -> bool {
        let mut changed = std::pin::pin!(self.space_changed.wait());
        std::future::poll_fn(|cx| {
            if changed.as_mut().poll(cx).is_ready() {
                return Poll::Ready(true);
            }
            patience.as_mut().poll(cx).map(|()| false)
        })
        .await
    }
}

/// Reads one page of metadata.
pub async fn read_page<D: Device>(store: &Store<D>, page: PageAddr) -> Result<Buf> {
    store.counters.metadata_reads.add_one(PAGE_SIZE as u64);
    let segment = Segment { offset: page.offset(), at: 0, len: PAGE_SIZE };
    let (result, buf) = store.device.read(store.device.buffer(PAGE_SIZE), smallvec![segment]).await;
    result.map_err(|e| Error::io(format!("reading metadata at {page:?}"), e))?;
    Ok(buf)
}

async fn load_table<D: Device>(store: &Store<D>, page: PageAddr, miss: TableMiss) -> Result<()> {
    let pool = store.superblock.borrow().checksum_uuid;
    let entries = read_table(store, pool, page, miss.entry, miss.level).await?;
    let mut meta = store.meta.borrow_mut();
    meta.tables.insert_clean(
        &miss,
        match is_ordered(miss.level) {
            true => Entries::whole(entries),
            false => entries.into(),
        },
    );
    meta.tables.evict();
    Ok(())
}

async fn load_counts<D: Device>(store: &Store<D>, miss: space::Miss) -> Result<()> {
    match read_counts(store, miss).await {
        // Reading data needs no counts: without them nothing is allocated or freed.
        Err(flaw) if store.options.read_only && matches!(flaw.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
            let meta = &mut *store.meta.borrow_mut();
            tree::lose(&mut meta.space, miss);
            meta.lost_counts.push(flaw);
            Ok(())
        }
        outcome => outcome,
    }
}

async fn read_counts<D: Device>(store: &Store<D>, miss: space::Miss) -> Result<()> {
    let space::Miss::Count { node, page, checksum } = miss;
    let bytes = read_page(store, page).await?;
    let pool = store.superblock.borrow().checksum_uuid;
    let damaged = |what: &str| {
        let why = format!("count page {node:?} at {page:?} is damaged: {what}; {REPAIR_HINT}");
        Error::new(ErrorKind::Corrupt, why)
    };
    let seed = Seed { pool, page, level: COUNT_SEED + node.level, birth: 0 };
    if correct!(page_checksum(&seed, &bytes) != checksum, Bug::OrphanedCountSlotTaken => false) {
        return Err(damaged("its checksum does not match"));
    }
    let counts = CountPage::from_bytes(node.level, &bytes).ok_or_else(|| damaged("its large counts make no sense"))?;
    tree::loaded(&mut store.meta.borrow_mut().space, miss, counts).map_err(|e| damaged(&e))
}

/// Loads the page that `stop` names; waits if it is being loaded already.
pub async fn load<D: Device>(store: &Store<D>, stop: Stop) -> std::result::Result<(), EditError> {
    let page = match stop {
        Stop::Table(miss) => miss.entry.table_ref().page().expect("what is not in memory has an address"),
        Stop::Count(space::Miss::Count { page, .. }) => page,
        // A view ends before a request fails for the space that it holds.
        Stop::NoSpace if view::take_space_of_view(store).await => return Ok(()),
        Stop::NoSpace if retained::wait_given_back(store).await => return Ok(()),
        Stop::NoSpace => return Err(EditError::NoSpace),
    };
    if !store.loading.borrow_mut().insert(page) {
        store.loaded.wait().await;
        return Ok(());
    }
    store.counters.cache_misses.add(1);
    let outcome = match stop {
        Stop::Table(miss) => load_table(store, page, miss).await,
        Stop::Count(miss) => load_counts(store, miss).await,
        Stop::NoSpace => unreachable!("nothing to load"),
    };
    store.loading.borrow_mut().remove(&page);
    store.loaded.notify();
    outcome.map_err(EditError::Error)
}

/// Lets the caches of tables and counts exceed their limits for a change that needs many pages at once.
fn pin_caches<D: Device>(store: &Store<D>) -> CachePin<'_, D> {
    let mut meta = store.meta.borrow_mut();
    meta.tables.hold(true);
    meta.space.hold(true);
    CachePin(store)
}

/// Reads a map table and verifies it.
pub async fn read_table<D: Device>(
    store: &Store<D>,
    pool: [u8; 16],
    page: PageAddr,
    entry: MapEntry,
    level: u8,
) -> Result<Box<[MapEntry; TABLE_FANOUT]>> {
    let bytes = read_page(store, page).await?;
    let seed = Seed { pool, page, level, birth: entry.birth().0 };
    if correct!(page_checksum(&seed, &bytes) != entry.checksum(), Bug::TableChecksumIgnored => false) {
        return Err(damaged_table_error(level, page, "its checksum does not match"));
    }
    let pages = store.meta.borrow().space.layout().pages();
    decode_table(&bytes, level, pages).map_err(|e| damaged_table_error(level, page, &e))
}
