//! The steps of a checkpoint: all metadata, durable at new places, without stopping writers.
//!
//! 1. Freeze (synchronous): every changed table gets an address, changed directory pages get new ones, the
//!    deltas of counts are set aside. Later writers work on copies.
//! 2. Write tables bottom-up, then directory pages and the directory's tables, then count pages to their
//!    other slots. Flush.
//! 3. Superblock to one slot, flush, to the other, flush.
//! 4. What only the old state held is free: plans made before the freeze end, then the space is discarded,
//!    then it may be reused.
//!
//! A crash before 3 leaves the old superblock and all it points to; replay starts where it says.

use std::collections::BTreeSet;
use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use crate::catalog::{Catalog, Failure, enter_charges};
use crate::device::{Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    CopierSettings, DirectorySlot, JournalStart, MapEntry, SLOTS_PER_PAGE, SUPERBLOCK_PAGES, Seed, Superblock,
    encode_directory_page, encode_table, page_checksum,
};
use crate::map::{Editor, NodeId, Placed, Stop, lookup};
use crate::planted::correct;
use crate::runtime::yield_now;
use crate::space::{Refusal, Step, WrittenCounts, alloc, count_images, delta, view_counts};
use crate::store::{checkpoint, host_enospc, publish, retained, view};
use crate::sync::LockMode;
use crate::types::{CHECKSUMS, PAGE_SIZE, PageAddr, VirtualPage};

use super::load::DIRECTORY_SEED;
use super::{Root, Store};

/// Most pages written by one request.
const BATCH_PAGES: usize = 256;

/// A directory page to be written, and the slot of the leaf that points to it.
struct DirectoryPage {
    at: PageAddr,
    leaf: NodeId,
    slot: usize,
    records: [Option<DirectorySlot>; SLOTS_PER_PAGE],
}

/// What a freeze sets aside.
struct Frozen {
    /// Tables of volumes, lower levels first.
    tables: Vec<Placed>,
    pages: Vec<DirectoryPage>,
    /// Tables of the directory's own map, lower levels first.
    directory_tables: Vec<Placed>,
    directory: MapEntry,
    directory_level: u8,
    directory_pages: u64,
    start: JournalStart,
    epoch: u64,
    next_id: u64,
    size: u64,
    copier: CopierSettings,
}

/// The slot, for a record with its root's address and checksum.
fn on_disk_slot(meta: &Catalog, slot: &Option<DirectorySlot>) -> Option<DirectorySlot> {
    let mut slot = slot.clone()?;
    if let DirectorySlot::Volume(record) = &mut slot {
        record.root = meta.tables.resolve_addr(record.root);
        if let Some(protects) = &mut record.origin_record {
            protects.exceptions.entry = meta.tables.resolve_addr(protects.exceptions.entry);
        }
    }
    Some(slot)
}

/// Step 1. Loads everything it may need first; the rest cannot fail.
fn freeze(meta: &mut Catalog) -> std::result::Result<Frozen, Failure> {
    correct!(enter_charges(meta), Bug::ChargesNotCheckpointed => ());
    let changed = meta.directory.changed_entries();
    let mut leaves = Vec::with_capacity(changed.len());
    let mut directory_nodes: BTreeSet<NodeId> = BTreeSet::new();
    // These losses belong to the checkpoint.
    let (until, confirmed) = (0, 0);
    let (tables, space, epoch, account) = (&mut meta.tables, &mut meta.space, meta.epoch, CHECKSUMS);
    let mut editor = Editor { tables, space, epoch, until, confirmed, account };
    for (number, records) in &changed {
        let at = VirtualPage(*number);
        editor.raise(&mut meta.directory_map, number + 1);
        if records.iter().all(Option::is_none) {
            if let Some((page, _)) = lookup(editor.tables, &meta.directory_map, at, 1).map_err(Stop::from)?.data {
                delta::mark_table(editor.space, page);
            }
            editor.unmap_step(&mut meta.directory_map, at, VirtualPage(number + 1))?;
        } else {
            editor.writable(&mut meta.directory_map, at, 0)?;
        }
    }
    // Look up the paths again after all are writable: a later path may have replaced a table of an earlier
    // one.
    for (number, records) in &changed {
        if records.iter().any(Option::is_some) {
            let path = editor.writable(&mut meta.directory_map, VirtualPage(*number), 0)?;
            directory_nodes.extend(path.iter().map(|&(id, _)| id));
            leaves.push((*number, *path.last().expect("a path has a table"), records.clone()));
        } else {
            directory_nodes.extend(editor.changed_on_path(&meta.directory_map, VirtualPage(*number))?);
        }
    }
    let need = (meta.tables.dirty() + leaves.len()) as u64;
    alloc::prepare_meta(&mut meta.space, need).map_err(|m| Failure::Stop(Refusal::from(m).into()))?;
    alloc::ensure_known(&mut meta.space, need).map_err(|r| Failure::Stop(r.into()))?;
    let runs = alloc::alloc_meta(&mut meta.space, need).ok_or(Failure::Stop(Stop::NoSpace))?;
    let mut places = runs.into_iter().flat_map(|(first, n)| (first.0..first.0 + n).map(PageAddr));
    let mut next = || places.next().expect("as many pages as were asked for");

    meta.directory.take_changed();
    meta.space.accounts.take_changed();
    let mut pages = Vec::with_capacity(leaves.len());
    let (tables, directory_tables): (Vec<Placed>, Vec<Placed>) = {
        for (number, (leaf, slot), records) in leaves {
            let at = next();
            let old = meta.tables.set(leaf, slot, MapEntry::checked_page(at, meta.epoch, 0));
            match old.is_absent() {
                true => meta.directory_map.referenced += 1,
                false => delta::decr_table(&mut meta.space, old.addr(), until),
            }
            meta.space.incr_page(at);
            pages.push(DirectoryPage { at, leaf, slot, records });
            let _ = number;
        }
        meta.tables.freeze(next).into_iter().partition(|t| !directory_nodes.contains(&t.node))
    };
    for table in tables.iter().chain(&directory_tables) {
        for _ in 0..table.refs {
            meta.space.incr_page(table.at);
        }
    }
    count_images::freeze(&mut meta.space);
    Ok(Frozen {
        tables,
        pages,
        directory_tables,
        directory: meta.directory_map.root,
        directory_level: meta.directory_map.level,
        directory_pages: meta.directory.pages(),
        start: meta.journal.mark(),
        epoch: meta.epoch.0,
        next_id: meta.next_id,
        size: meta.size(),
        copier: meta.copier,
    })
}

/// Runs all steps.
pub async fn checkpoint_once<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    checkpoint::wait_count_log_flush(store).await;
    store.check_failed()?;
    activate(store).await?;
    let (frozen, seen) = loop {
        store.hooks.flush_snapshotted_origins().await?;
        let frozen = store.retry_no_alloc(|meta| {
            if store.hooks.has_unflushed_snapshots() {
                return Ok(None);
            }
            let frozen = freeze(meta)?;
            Ok(Some((frozen, view::roots_for_view(store, meta))))
        });
        if let Some(frozen) = frozen.await? {
            break frozen;
        }
    };
    correct!(write_maps(store, &frozen).await?, Bug::SuperblockBeforePages => write_maps_late(store, &frozen).await?);
    let counts = write_counts(store).await?;
    let superblock = next_superblock(store, &frozen, counts);
    let flushed = store.flush_device().await;
    correct!(flushed?, Bug::SuperblockAfterFailedFlush => ());
    write_superblock(store, &superblock).await?;
    finish(store, frozen.start, seen).await
}

/// Writes the superblock, then the maps that it points to.
#[cfg(feature = "planted")]
async fn write_maps_late<D: Device>(store: &Rc<Store<D>>, frozen: &Frozen) -> Result<()> {
    let counted = {
        let old = store.superblock.borrow();
        WrittenCounts { roots: old.counts.clone(), log: old.count_log, large: old.large_counts }
    };
    let early = next_superblock(store, frozen, counted);
    write_superblock_slot(store, &early, 0).await?;
    write_maps(store, frozen).await
}

fn next_superblock<D: Device>(store: &Store<D>, frozen: &Frozen, counted: WrittenCounts) -> Superblock {
    let old = store.superblock.borrow();
    Superblock {
        generation: old.generation + 1,
        clean: false,
        epoch: frozen.epoch,
        next_id: frozen.next_id,
        size: frozen.size,
        directory: store.meta.borrow().tables.resolve_addr(frozen.directory),
        directory_level: frozen.directory_level,
        directory_pages: frozen.directory_pages,
        start: correct!(frozen.start, Bug::ReplayStartsTooLate => store.meta.borrow_mut().journal.mark()),
        counts: counted.roots,
        count_log: counted.log,
        large_counts: counted.large,
        transactions: true,
        special_files: true,
        extensions: true,
        bounds: true,
        folder_bounds: true,
        links_or_xattrs: true,
        copier: frozen.copier,
        ..old.clone()
    }
}

/// Writes the tables of volumes, the directory and its tables, in this order: each holds checksums of
/// those before it. They are contiguous as far as space allows.
async fn write_maps<D: Device>(store: &Rc<Store<D>>, frozen: &Frozen) -> Result<()> {
    let mut out = Vec::new();
    for tables in frozen.tables.chunks(BATCH_PAGES) {
        encode_tables(store, tables, &mut out);
        write_full_batch(store, &mut out).await?;
    }
    for pages in frozen.pages.chunks(BATCH_PAGES) {
        encode_directory(store, pages, &mut out);
        write_full_batch(store, &mut out).await?;
    }
    for tables in frozen.directory_tables.chunks(BATCH_PAGES) {
        encode_tables(store, tables, &mut out);
        write_full_batch(store, &mut out).await?;
    }
    write_pages(store, out).await
}

/// Writes full requests and leaves the rest in `out`.
async fn write_full_batch<D: Device>(store: &Rc<Store<D>>, out: &mut Vec<(PageAddr, Vec<u8>)>) -> Result<()> {
    if out.len() < BATCH_PAGES {
        return Ok(());
    }
    let rest = out.split_off(BATCH_PAGES);
    write_pages(store, std::mem::replace(out, rest)).await
}

/// Adds map tables and notes their checksums.
fn encode_tables<D: Device>(store: &Store<D>, tables: &[Placed], out: &mut Vec<(PageAddr, Vec<u8>)>) {
    let uuid = store.superblock.borrow().checksum_uuid;
    let mut meta = store.meta.borrow_mut();
    for table in tables {
        let mut bytes = vec![0; PAGE_SIZE];
        let entries = meta.tables.on_disk_entries(table.node);
        encode_table(&entries.to_array(), &mut bytes);
        let seed = Seed { pool: uuid, page: table.at, level: table.level, birth: table.birth.0 };
        meta.tables.written(table.node, &entries, page_checksum(&seed, &bytes));
        out.push((table.at, bytes));
    }
}

/// Adds directory pages and notes their checksums in the tables above them.
fn encode_directory<D: Device>(store: &Store<D>, pages: &[DirectoryPage], out: &mut Vec<(PageAddr, Vec<u8>)>) {
    let uuid = store.superblock.borrow().checksum_uuid;
    let mut meta = store.meta.borrow_mut();
    for page in pages {
        let resolved: Vec<Option<DirectorySlot>> = page.records.iter().map(|slot| on_disk_slot(&meta, slot)).collect();
        let mut bytes = vec![0; PAGE_SIZE];
        encode_directory_page(&std::array::from_fn(|i| resolved[i].as_ref()), &mut bytes);
        let seed = Seed { pool: uuid, page: page.at, level: DIRECTORY_SEED, birth: 0 };
        let sum = page_checksum(&seed, &bytes);
        meta.tables.set_frozen_checksum(page.leaf, page.slot, sum);
        out.push((page.at, bytes));
    }
}

/// Writes the count pages that this checkpoint changes, or a segment of their log.
pub(super) async fn write_counts<D: Device>(store: &Rc<Store<D>>) -> Result<WrittenCounts> {
    loop {
        let step = store
            .retry_no_alloc(|meta| {
                count_images::checkpoint_step(&mut meta.space, BATCH_PAGES).map_err(|m| Failure::Stop(Stop::Count(m)))
            })
            .await?;
        match step {
            Step::Write(pages) if pages.is_empty() => yield_now().await,
            Step::Write(pages) => {
                write_pages(store, pages.into_iter().map(|(at, bytes)| (at, bytes.to_vec())).collect()).await?;
            }
            Step::Done(counted) => return Ok(counted),
        }
    }
}

/// Writes pages; contiguous ones in one request.
async fn write_pages<D: Device>(store: &Rc<Store<D>>, mut pages: Vec<(PageAddr, Vec<u8>)>) -> Result<()> {
    pages.sort_by_key(|&(at, _)| at);
    assert!(pages.windows(2).all(|two| two[0].0 < two[1].0), "a page of metadata is written once at a time");
    let end = store.meta.borrow().space.layout().pages();
    let is_inside = |at: &PageAddr| at.0 < end && !SUPERBLOCK_PAGES.contains(at);
    assert!(pages.iter().all(|(at, _)| is_inside(at)), "metadata is written inside of the pool");
    let mut buf = store.device.buffer(pages.len() * PAGE_SIZE);
    let mut segments: SmallVec<[Segment; 2]> = SmallVec::new();
    for (i, (page, bytes)) in pages.iter().enumerate() {
        let at = i * PAGE_SIZE;
        buf[at..at + PAGE_SIZE].copy_from_slice(bytes);
        match segments.last_mut() {
            Some(s) if s.offset + s.len as u64 == page.offset() => s.len += PAGE_SIZE,
            _ => segments.push(Segment { offset: page.offset(), at, len: PAGE_SIZE }),
        }
    }
    if segments.is_empty() {
        return Ok(());
    }
    loop {
        store.counters.metadata_writes.add(&segments);
        let (result, again) = store.device.write(buf, segments.clone(), false).await;
        match result.map_err(|e| Error::io("writing metadata", e)) {
            // Nothing refers to these places yet.
            Err(e) if e.kind() == ErrorKind::NoSpace && !checkpoint::is_flushing_count_log(store) => {
                host_enospc::retry_until_space(store, e).await?;
            }
            outcome => return outcome,
        }
        buf = again;
    }
}

async fn write_superblock_slot<D: Device>(store: &Rc<Store<D>>, superblock: &Superblock, slot: usize) -> Result<()> {
    let at = SUPERBLOCK_PAGES[slot];
    let mut buf = store.device.buffer(PAGE_SIZE);
    superblock.encode(at, &mut buf);
    assert!(Superblock::decode(at, &buf).as_ref() == Ok(superblock), "a superblock is read as it was written");
    loop {
        store.counters.metadata_writes.add_one(PAGE_SIZE as u64);
        let segment = Segment { offset: at.offset(), at: 0, len: PAGE_SIZE };
        let (result, again) = store.device.write(buf, smallvec![segment], false).await;
        match result.map_err(|e| Error::io("writing the superblock", e)) {
            // Writes in place need space on some file systems, too.
            Err(e) if e.kind() == ErrorKind::NoSpace => host_enospc::retry_until_space(store, e).await?,
            outcome => return outcome,
        }
        buf = again;
    }
}

/// Writes both slots, one after the other, each durable before the next step. The slot that the last open
/// did not choose comes first: the other may be the only valid one.
pub async fn write_superblock<D: Device>(store: &Rc<Store<D>>, superblock: &Superblock) -> Result<()> {
    let slot = store.superblock_slot.get();
    let chosen = correct!(slot, Bug::ChosenSuperblockFirst => 1 - slot);
    for slot in [1 - chosen, chosen] {
        correct!(
            write_superblock_slot(store, superblock, slot).await?,
            Bug::OlderSuperblockChosen => if slot as u64 != superblock.generation % 2 {
                write_superblock_slot(store, superblock, slot).await?
            }
        );
        store.flush_device().await?;
    }
    *store.superblock.borrow_mut() = superblock.clone();
    Ok(())
}

/// Writes the superblock that was chosen to the other slot, which has an older one: what this open shows is not to
/// depend on one slot. If that one could not be read at the next open, the older state would come back.
pub async fn repeat_superblock<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    let _alone = store.superblock_lock.lock(0..1, LockMode::Exclusive).await;
    let superblock = store.superblock.borrow().clone();
    write_superblock_slot(store, &superblock, 1 - store.superblock_slot.get()).await?;
    store.flush_device().await
}

/// Step 4: frees what only the old state held.
async fn finish<D: Device>(store: &Rc<Store<D>>, start: JournalStart, seen: Option<Vec<Root>>) -> Result<()> {
    let (freed, is_held) = {
        let mut meta = store.meta.borrow_mut();
        meta.tables.finish();
        meta.tables.evict();
        meta.journal.released(start);
        meta.journal.set_durable(start.sequence);
        meta.resolve_roots();
        let freed = count_images::finish(&mut meta.space);
        if store.superblock.borrow().count_log.pages == 0 {
            checkpoint::postpone_count_log(store);
        }
        let is_held = view_counts::view(&meta.space).is_some();
        if let Some(roots) = seen.filter(|_| !is_held) {
            view::show(store, &mut meta, roots);
        }
        (freed, is_held)
    };
    correct!(store.generations.barrier().await, Bug::PlanOutlivesPage => ());
    // A plan made before the freeze may have published one of these pages since.
    let freed = correct!(
        count_images::still_free(&store.meta.borrow().space, freed),
        Bug::DiscardAfterReuse => freed
    );
    let pages: u64 = freed.iter().map(|&(_, pages)| pages).sum();
    store.counters.freed_bytes.add(pages * PAGE_SIZE as u64);
    store.counters.checkpoints.add(1);
    // A view of an older checkpoint may still read them.
    let freed = if is_held { view_counts::withhold(&mut store.meta.borrow_mut().space, freed) } else { freed };
    let kept = retained::discard_excess(store, &freed).await;
    count_images::release(&mut store.meta.borrow_mut().space, freed);
    retained::retain(store, &kept);
    let holds_too_much = {
        let space = &store.meta.borrow().space;
        space.withheld() > space.available()
    };
    if holds_too_much {
        view::end_view(store).await;
    }
    store.full.set(false);
    store.space_changed.notify();
    if store.orphans_left.get() && !store.closing.get() {
        publish::delete_orphans(store)?;
    }
    store.hooks.reap_soon();
    store.hooks.gather_soon();
    Ok(())
}

/// The first write of this open: a superblock with a new incarnation, so that recovery rejects journal
/// groups of earlier opens.
pub async fn activate<D: Device>(store: &Rc<Store<D>>) -> Result<()> {
    if store.active.get() {
        return Ok(());
    }
    let _alone = store.superblock_lock.lock(0..1, LockMode::Exclusive).await;
    if store.active.get() {
        return Ok(());
    }
    let next = {
        let old = store.superblock.borrow();
        let (generation, incarnation) = (old.generation + 1, old.incarnation + 1);
        // Before the first record of this open, in the journal or in the volatile log.
        let transactions = correct!(true, Bug::FeatureBitAfterTransaction => old.transactions);
        Superblock {
            generation,
            incarnation,
            clean: false,
            transactions,
            special_files: true,
            extensions: correct!(true, Bug::FeatureBitAfterExtension => old.extensions),
            bounds: true,
            folder_bounds: true,
            links_or_xattrs: true,
            ..old.clone()
        }
    };
    // What recovery read may be in a volatile cache only.
    store.flush_device().await?;
    store.meta.borrow_mut().journal.incarnation = next.incarnation;
    write_superblock(store, &next).await?;
    store.active.set(true);
    // It may have waited for space, and no checkpoint did.
    store.host_enospc.unblock();
    Ok(())
}
