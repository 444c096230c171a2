//! Formatting, opening, recovering and closing a pool.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use crate::catalog::directory::{Directory, extensions, hard_links};
use crate::catalog::{Catalog, Failure, directory, has_folder_properties, open_accounts};
use crate::copier::Copier;
use crate::device::{CachedDevice, Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    CopierSettings, CountEntry, DirectorySlot, JournalStart, Kind, Layout, MapEntry, NO_VOLUME, NotSuper,
    SLOTS_PER_PAGE, SUPERBLOCK_PAGES, Seed, Superblock, VolumeRecord, count_log_page, decode_directory_page,
    page_checksum,
};
use crate::journal::Journal;
use crate::map::{Tables, lookup};
use crate::planted::correct;
use crate::runtime::Runtime;
use crate::space::{self, Space, Step, alloc, count_images, tree};
use crate::store::{checkpoint, commit, load, publish, replay, retained, takeover};
use crate::types::{BLOCK_SIZE, Block, Epoch, MAX_POOL_SIZE, PAGE_SIZE, PageAddr, VirtualPage};

use super::checkpoint_steps;
use super::load::DIRECTORY_SEED;
use super::{OpenOptions, REPAIR_HINT, Recovery, Store, heartbeat};

/// Tables that the cache holds at least, unless a test sets a smaller cache.
const MIN_CACHED_TABLES: usize = 16;

/// Smallest pool, in bytes.
const MIN_POOL_BYTES: u64 = 8 * BLOCK_SIZE;

/// Layout of a new pool.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FormatOptions {
    /// Length of the pool in bytes (8 MiB to 4 PiB; a remainder below 1 MiB is unused). The device must be at
    /// least this long.
    pub size: u64,
    /// Identity of the pool; must be unique.
    pub uuid: [u8; 16],
    /// Seconds since 1970.
    pub now: u64,
    /// Journal length in bytes, rounded up to whole MiB; `None`: 1/128 of the pool, 1 to 64 MiB.
    pub journal: Option<u64>,
    /// Every byte of the device was written before, so that no write to it has to allocate space in its host. The
    /// pool keeps it so: [`DiscardPolicy::Later`](super::DiscardPolicy) discards nothing.
    pub preallocated: bool,
}

impl FormatOptions {
    /// Checks the options before any device is touched (`Invalid`).
    ///
    /// # Errors
    /// `Invalid` for a size or journal out of its bounds.
    pub fn check(&self) -> Result<()> {
        if self.size < MIN_POOL_BYTES || self.size > MAX_POOL_SIZE {
            let why = format!("a pool of {} bytes cannot be made; its size must be 8 MiB to 4 PiB", self.size);
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let blocks = self.journal_blocks();
        if blocks == 0 || blocks + 6 > Layout::new(self.size).blocks() || blocks > 800 {
            let why =
                format!("a journal of {blocks} MiB does not fit; choose 1 MiB to 800 MiB, well below the pool's size");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        Ok(())
    }

    fn journal_blocks(&self) -> u64 {
        self.journal.unwrap_or((self.size / 128).clamp(1 << 20, 64 << 20)).div_ceil(BLOCK_SIZE)
    }
}

/// Formats the device as an empty pool. Its contents are lost.
pub async fn format<D: Device>(device: &D, options: &FormatOptions) -> Result<()> {
    options.check()?;
    if device.len() < options.size {
        let why = format!("the device has {} bytes, fewer than the {} asked for", device.len(), options.size);
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    let (layout, blocks) = (Layout::new(options.size), options.journal_blocks());
    let none = CountEntry::default();
    let mut space = Space::new(layout, options.uuid, vec![none; layout.count_nodes(3) as usize]);
    let first = Block(2);
    (0..blocks).for_each(|i| space.incr_block(Block(first.0 + i)));
    count_images::freeze(&mut space);
    let io = |e| Error::io("writing a new pool", e);
    // Flushes succeed while the host file system is full, since the journal is allocated.
    device.allocate(first.first_page().offset(), blocks * BLOCK_SIZE).await.map_err(io)?;
    let counted = loop {
        let step = count_images::checkpoint_step(&mut space, 64)
            .map_err(|_| Error::new(ErrorKind::Corrupt, "a new pool has counts"))?;
        match step {
            Step::Done(counted) => break counted,
            Step::Write(pages) => {
                for (at, bytes) in pages {
                    let mut buf = device.buffer(PAGE_SIZE);
                    buf.copy_from_slice(&bytes[..]);
                    let segment = Segment { offset: at.offset(), at: 0, len: PAGE_SIZE };
                    device.write(buf, smallvec![segment], false).await.0.map_err(io)?;
                }
            }
        }
    };
    let superblock = Superblock {
        uuid: options.uuid,
        checksum_uuid: options.uuid,
        heartbeat: 0,
        generation: 1,
        incarnation: 0,
        clean: true,
        size: layout.blocks() * BLOCK_SIZE,
        created: options.now,
        epoch: 1,
        next_id: 1,
        directory_level: 1,
        directory: MapEntry::ABSENT,
        directory_pages: 0,
        journal: vec![(first.first_page(), (blocks * 256) as u32)],
        start: JournalStart::default(),
        counts: counted.roots,
        count_log: counted.log,
        large_counts: counted.large,
        transactions: false,
        special_files: false,
        extensions: false,
        bounds: false,
        folder_bounds: false,
        links_or_xattrs: false,
        preallocated: options.preallocated,
        copier: CopierSettings::default(),
    };
    device.flush().await.map_err(io)?;
    for at in SUPERBLOCK_PAGES {
        let mut buf = device.buffer(PAGE_SIZE);
        superblock.encode(at, &mut buf);
        let segment = Segment { offset: at.offset(), at: 0, len: PAGE_SIZE };
        device.write(buf, smallvec![segment], false).await.0.map_err(io)?;
        device.flush().await.map_err(io)?;
    }
    Ok(())
}

impl<D: Device> Store<D> {
    /// The store on `device`, in the state of its last checkpoint. [`recover`](Self::recover) is to follow.
    pub async fn open(device: D, runtime: Rc<dyn Runtime>, options: OpenOptions) -> Result<Rc<Store<D>>> {
        let mut found = read_superblock(&device).await?;
        if found.superblock.heartbeat > 0 {
            heartbeat::claim(&device, &runtime, &options, &found.superblock).await?;
            // The previous owner may have written until then.
            found = read_superblock(&device).await?;
        }
        let (superblock, cache) = (&found.superblock, options.cache / 4);
        let layout = Layout::new(superblock.size);
        let mut space = Space::with_cache(layout, superblock.checksum_uuid, superblock.counts.clone(), cache);
        space.set_large_counts(superblock.large_counts);
        let log = read_count_log(&device, superblock).await;
        let log = log
            .and_then(|log| tree::use_log(&mut space, superblock.count_log, &log).map_err(|e| damaged_count_log(&e)));
        let uncounted = match log {
            Err(flaw) if options.read_only => Some(flaw),
            outcome => outcome.map(|()| None)?,
        };
        let store = Store::assemble(device, runtime, options, found, space)?;
        store.meta.borrow_mut().uncounted = uncounted;
        Ok(store)
    }

    /// A store in the state of its checkpoint with these counts: nothing loaded, nothing replayed.
    pub fn assemble(
        device: D,
        runtime: Rc<dyn Runtime>,
        options: OpenOptions,
        found: OpenedPool,
        space: Space,
    ) -> Result<Rc<Store<D>>> {
        let OpenedPool { superblock, slot, flaw, other_differs } = found;
        if device.len() < superblock.size {
            let why = format!(
                "the pool is {} bytes long, but its device or file only {}: it was truncated; restore it to its full \
                 length",
                superblock.size,
                device.len()
            );
            return Err(Error::new(ErrorKind::Corrupt, why));
        }
        let discard = options.discard.in_pool(superblock.preallocated);
        let options = OpenOptions { discard, ..options };
        let mut meta = Catalog {
            tables: Tables::new((options.cache * 3 / 4).max(options.cache.min(MIN_CACHED_TABLES * PAGE_SIZE))),
            space,
            directory: Default::default(),
            journal: Journal::new(
                superblock.checksum_uuid,
                superblock.journal.clone(),
                superblock.incarnation,
                superblock.start,
            ),
            epoch: Epoch(superblock.epoch),
            next_id: superblock.next_id,
            watched: Default::default(),
            uncounted: None,
            lost_counts: Vec::new(),
            directory_map: directory_map(&superblock),
            copier: superblock.copier,
        };
        meta.dirty_state(options.dirty);
        if let Some(stripe) = device.stripe() {
            alloc::set_stripe(&mut meta.space, stripe);
        }
        space::retained::set_limit(&mut meta.space, options.discard.retained_bytes() / PAGE_SIZE as u64);
        let device = CachedDevice::new(device, options.shared_cache);
        let copier = Copier::new(device.clone(), runtime.clone(), superblock.copier);
        Ok(Rc::new(Store {
            device,
            runtime,
            options,
            meta: RefCell::new(meta),
            live: Default::default(),
            hooks: Default::default(),
            unflushed_snapshots: Cell::new(false),
            orphans_left: Cell::new(false),
            superblock: RefCell::new(superblock),
            copier,
            generations: Default::default(),
            commits: Default::default(),
            interval: Default::default(),
            times: Default::default(),
            flushes: Default::default(),
            checkpoints: Default::default(),
            count_log_flush: Default::default(),
            host_enospc: Default::default(),
            retained: Default::default(),
            failed: RefCell::new(None),
            space_changed: Default::default(),
            reaping: Cell::new(false),
            reaped: Default::default(),
            views: Default::default(),
            loading: Default::default(),
            loaded: Default::default(),
            superblock_slot: Cell::new(slot),
            superblock_lock: Default::default(),
            active: Cell::new(false),
            full: Cell::new(false),
            closing: Cell::new(false),
            closed: Cell::new(false),
            counters: Default::default(),
            observer: Default::default(),
            recovery: Cell::default(),
            opened: Cell::new(false),
            superblock_flaw: RefCell::new(flaw),
            superblocks_differ: Cell::new(other_differs),
            beats: Default::default(),
        }))
    }
}

/// The map of the directory, in the form of a volume's.
fn directory_map(superblock: &Superblock) -> VolumeRecord {
    VolumeRecord {
        chunk: PAGE_SIZE as u64,
        referenced: superblock.directory_pages,
        estimated: true,
        level: superblock.directory_level,
        root: superblock.directory,
        ..VolumeRecord::empty(NO_VOLUME, "", 0)
    }
}

/// The superblock that a pool is opened by.
pub struct OpenedPool {
    pub superblock: Superblock,
    /// Its slot.
    pub slot: usize,
    /// Damage of the other slot.
    pub flaw: Option<String>,
    /// The other slot has an older superblock.
    pub other_differs: bool,
}

fn damaged_count_log(flaw: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the pool's log of counts is damaged: {flaw}; {REPAIR_HINT}"))
}

/// The newer of the valid superblocks.
pub async fn read_superblock<D: Device>(device: &D) -> Result<OpenedPool> {
    if device.len() < MIN_POOL_BYTES {
        let why = format!("not a forkdisk pool: it has only {} bytes", device.len());
        return Err(Error::new(ErrorKind::NotAPool, why));
    }
    let mut found: Vec<(Superblock, usize)> = Vec::new();
    let (mut flaws, mut flawed) = (Vec::new(), None);
    for (slot, at) in SUPERBLOCK_PAGES.into_iter().enumerate() {
        let segment = Segment { offset: at.offset(), at: 0, len: PAGE_SIZE };
        let (result, buf) = device.read(device.buffer(PAGE_SIZE), smallvec![segment]).await;
        let flaw = match result {
            Err(e) => NotSuper::Damaged(format!("at {at:?} it cannot be read: {e}")),
            Ok(()) => match Superblock::decode(at, &buf) {
                Ok(superblock) => {
                    found.push((superblock, slot));
                    continue;
                }
                Err(flaw) => flaw,
            },
        };
        let what = match &flaw {
            NotSuper::Foreign => "it is not one",
            NotSuper::Newer(what) | NotSuper::Damaged(what) => what,
        };
        flawed = Some(format!(
            "the superblock at {at:?} is damaged: {what}; the other one is whole, and the next open for writing writes \
             both"
        ));
        flaws.push(flaw);
    }
    found.sort_by_key(|(s, _)| correct!(s.generation, Bug::OlderSuperblockChosen => u64::MAX - s.generation));
    if let Some((superblock, slot)) = found.pop() {
        let other_differs = found.first().is_some_and(|(other, _)| *other != superblock);
        return Ok(OpenedPool { superblock, slot, flaw: flawed, other_differs });
    }
    let newer = flaws.iter().find_map(|f| if let NotSuper::Newer(what) = f { Some(what) } else { None });
    let damaged = flaws.iter().find_map(|f| if let NotSuper::Damaged(what) = f { Some(what) } else { None });
    Err(match (newer, damaged) {
        (Some(what), _) => Error::new(
            ErrorKind::Unsupported,
            format!("this pool was made by a newer forkdisk ({what}); open it with that version"),
        ),
        (None, Some(what)) => Error::new(
            ErrorKind::Corrupt,
            format!("both superblocks of this pool are damaged: {what}; restore it from a copy"),
        ),
        (None, None) => Error::new(ErrorKind::NotAPool, "not a forkdisk pool: it has no superblock"),
    })
}

async fn read_count_log<D: Device>(device: &D, superblock: &Superblock) -> Result<Vec<u8>> {
    let pages = superblock.count_log.pages;
    if pages == 0 {
        return Ok(Vec::new());
    }
    let mut segments: SmallVec<[Segment; 2]> = SmallVec::new();
    for i in 0..pages {
        let (at, offset) = (i as usize * PAGE_SIZE, count_log_page(i).offset());
        match segments.last_mut() {
            Some(s) if s.offset + s.len as u64 == offset => s.len += PAGE_SIZE,
            _ => segments.push(Segment { offset, at, len: PAGE_SIZE }),
        }
    }
    let (result, buf) = device.read(device.buffer(pages as usize * PAGE_SIZE), segments).await;
    result.map_err(|e| Error::io("reading the log of counts", e))?;
    Ok(buf.to_vec())
}

/// Checksum in the leaf of the directory map that refers to page `at`.
fn leaf_checksum(catalog: &mut Catalog, at: VirtualPage, slot: usize) -> std::result::Result<u32, Failure> {
    let (mut entry, mut level) = (catalog.directory_map.root, catalog.directory_map.level);
    loop {
        debug_assert_eq!(entry.kind(), Kind::Table);
        let id = catalog.tables.get(entry, level).map_err(|m| Failure::Stop(m.into()))?;
        if level == 0 {
            return Ok(catalog.tables.node(id).entry(slot).checksum());
        }
        entry = catalog.tables.node(id).entry(at.slot(level));
        level -= 1;
    }
}

/// Loads the directory of the last checkpoint and replays the journal and the volatile log.
pub async fn recover<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    // Recovery may take long.
    heartbeat::begin_heartbeat(store);
    let clean = store.superblock.borrow().clean;
    load_directory(store).await?;
    let mut recovery = Recovery { clean, ..Recovery::default() };
    let mut unsealed = false;
    let start = store.meta.borrow().journal.next();
    if !clean {
        unsealed = replay::replay(store).await?;
    }
    let replayed = store.meta.borrow().journal.next();
    recovery.journal = replayed.saturating_sub(start);
    if !clean {
        recovery.volatile = takeover::replay_volatile(store).await?;
        store.copier.set(store.meta.borrow().copier);
    }
    store.meta.borrow_mut().journal.end_replay();
    if !store.options.read_only {
        // After a kill of the last owner data may be in a volatile cache only: make durable what reads
        // return from now on.
        store.flush_device().await?;
        if correct!(store.superblocks_differ.take(), Bug::SuperblocksLeftDifferent => false) {
            checkpoint_steps::repeat_superblock(store).await?;
        }
        store.meta.borrow_mut().journal.set_durable(replayed);
        if recovery.volatile > 0 {
            // Its group states that the groups before it are durable.
            takeover::commit_left_behind(store).await?;
        } else if correct!(unsealed, Bug::RecoveryLeavesUnsealed => false) {
            // The next recovery must accept the same groups, whatever their pages hold then.
            checkpoint_steps::activate(store).await?;
            commit::seal(store).await?;
        }
        if store.superblock_flaw.borrow().is_some() {
            // Writes both.
            checkpoint_steps::activate(store).await?;
            store.superblock_flaw.take();
        }
        takeover::begin_volatile(store).await?;
    }
    store.recovery.set(recovery);
    store.opened.set(true);
    match store.options.keep_removed {
        true => store.orphans_left.set(true),
        false => publish::delete_orphans(store)?,
    }
    store.hooks.reap_soon();
    store.hooks.gather_soon();
    Ok(())
}

/// Waits for requests in flight, writes a checkpoint and marks the pool clean. Later requests are
/// refused.
pub async fn close<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    if store.options.read_only {
        store.closed.set(true);
        return Ok(());
    }
    store.check_alive()?;
    // Ends the wait for a full host, which requests in flight may be part of.
    store.closing.set(true);
    store.generations.barrier().await;
    while store.reaping.get() && !store.full.get() {
        store.reaped.wait().await;
    }
    checkpoint::wait_count_log_flush(store).await;
    if store.commits.early().is_any() {
        // Not on the device when the pool is opened next.
        store.clone().commit().await?;
    }
    commit::record_times(store);
    let nothing_to_do = !store.active.get() && store.superblock.borrow().clean && !has_changes(store);
    if !nothing_to_do {
        store.clone().patient_checkpoint().await?;
        retained::give_back(store, false).await;
        store.closed.set(true);
        store.generations.barrier().await;
        let old = store.superblock.borrow().clone();
        let clean = !has_changes(store);
        // Nothing is left to replay, so versions that know no transactions can open the pool.
        let transactions = old.transactions && !clean;
        let special_files =
            old.special_files && (!clean || directory::has_special_files(&store.meta.borrow().directory));
        let extensions = old.extensions && (!clean || extensions::has_some(&store.meta.borrow().directory));
        let bounds = old.bounds && (!clean || extensions::has_bounds(&store.meta.borrow().directory));
        let folder_bounds = old.folder_bounds && (!clean || has_folder_properties(&store.meta.borrow().directory));
        let links_or_xattrs = old.links_or_xattrs && (!clean || has_links_or_xattrs(&store.meta.borrow().directory));
        let generation = old.generation + 1;
        let features =
            Superblock { transactions, special_files, extensions, bounds, folder_bounds, links_or_xattrs, ..old };
        let clean = Superblock { generation, clean, ..features };
        checkpoint_steps::write_superblock(store, &clean).await?;
    } else {
        // Data written in place changed no metadata.
        store.flush_device().await?;
    }
    store.closed.set(true);
    // Not earlier: until the superblock is marked clean, recovery after a kill needs it.
    super::end_volatile(store);
    heartbeat::end_heartbeat(store).await
}

fn has_links_or_xattrs(directory: &Directory) -> bool {
    hard_links::has_some(directory) || extensions::has_xattrs(directory)
}

/// Whether memory has changes that the last superblock does not lead to.
fn has_changes<D: Device>(store: &Store<D>) -> bool {
    let meta = store.meta.borrow();
    (meta.tables.unwritten() > 0 || meta.directory.changed_pages() > 0 || meta.space.dirty_bytes() > 0)
        || meta.copier != store.superblock.borrow().copier
}

async fn read_directory_page<D: Device>(
    store: &Store<D>,
    uuid: [u8; 16],
    page: PageAddr,
    sum: u32,
    pool_pages: u64,
) -> Result<Vec<Option<DirectorySlot>>> {
    let damaged = |what: &str| Error::new(ErrorKind::Corrupt, format!("directory page at {page:?} is damaged: {what}"));
    let bytes = load::read_page(store, page).await?;
    if page_checksum(&Seed { pool: uuid, page, level: DIRECTORY_SEED, birth: 0 }, &bytes) != sum {
        return Err(damaged("its checksum does not match"));
    }
    decode_directory_page(&bytes, pool_pages).map_err(|e| damaged(&e))
}

/// Loads the directory.
pub async fn load_directory<D: Device>(store: &Store<D>) -> Result<()> {
    let pages = store.superblock.borrow().directory_pages;
    let uuid = store.superblock.borrow().checksum_uuid;
    let pool_pages = store.meta.borrow().space.layout().pages();
    for number in 0..pages {
        let entry = store
            .retry_no_alloc(|meta| {
                let at = VirtualPage(number);
                let run = lookup(&mut meta.tables, &meta.directory_map, at, 1).map_err(|m| Failure::Stop(m.into()))?;
                let slot = at.index();
                let Some((page, _)) = run.data else { return Ok(None) };
                let leaf = leaf_checksum(meta, at, slot)?;
                Ok(Some((page, leaf)))
            })
            .await?;
        let records = match entry {
            None => vec![None; SLOTS_PER_PAGE],
            Some((page, sum)) => read_directory_page(store, uuid, page, sum, pool_pages).await?,
        };
        let loaded = store.meta.borrow_mut().directory.load_page(number, records);
        loaded.map_err(|e| Error::new(ErrorKind::Corrupt, format!("the directory of volumes is damaged: {e}")))?;
    }
    let mut meta = store.meta.borrow_mut();
    let strays = extensions::refuse_strays(&meta.directory).and_then(|()| hard_links::refuse_strays(&meta.directory));
    strays.map_err(|e| Error::new(ErrorKind::Corrupt, format!("the directory of volumes is damaged: {e}")))?;
    meta.directory.take_changed();
    open_accounts(&mut meta);
    Ok(())
}
