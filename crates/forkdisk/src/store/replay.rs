//! Recovery: replays the journal behind the last checkpoint in memory.
//!
//! A group with checksums of data counts only if a later group states that it was durable, or if its data is
//! there. Since a later group may follow, it is held until the journal ends.

use std::collections::VecDeque;

use smallvec::smallvec;

use crate::catalog::{Failure, sets_folder_property};
use crate::device::{Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    DataChecksum, Decoded, JournalGroup, Record, data_checksum, decode_group, find_group, length_of_group,
};
use crate::planted::correct;
use crate::space::alloc;
use crate::types::{PAGE_SIZE, PageAddr};

use super::{Store, takeover};

/// Bytes read at once during replay.
const REPLAY_WINDOW_BYTES: u64 = 1 << 20;
/// Bytes of a window that are examined again with the next one: more than most groups have.
const REPLAY_OVERLAP_BYTES: usize = 256 << 10;
/// How often replay continues at a place that read differently the second time.
const MAX_REREADS: usize = 8;
/// Most pages that one checksum may cover.
const MAX_VERIFIED_PAGES: u32 = 8192;

/// A group held until it is decided.
struct ReplayedData {
    group: JournalGroup,
    records: Vec<Record>,
    checksums: Vec<DataChecksum>,
}

impl ReplayedData {
    /// Sequence number behind its last record.
    fn next(&self) -> u64 {
        self.group.first + u64::from(self.group.count)
    }
}

/// Where the next group is expected.
struct Cursor {
    head: u64,
    chain: u64,
    /// Bytes of the ring from there on.
    limit: u64,
}

/// Replays what was committed after the checkpoint. True if data had to be verified to decide on groups:
/// then a seal must follow.
pub(super) async fn replay<D: Device>(store: &Store<D>) -> Result<bool> {
    let (uuid, newest, start) = {
        let superblock = store.superblock.borrow();
        (superblock.checksum_uuid, superblock.incarnation, superblock.start)
    };
    let mut cursor = {
        let journal = &store.meta.borrow().journal;
        Cursor { head: journal.head(), chain: journal.chain(), limit: journal.length() - journal.used() }
    };
    let mut held: VecDeque<ReplayedData> = VecDeque::new();
    let mut incarnation = 0;
    let mut window: Vec<u8> = Vec::new();
    let mut window_at = start.position;
    let mut rereads = 0;
    let last = correct!(takeover::last_taken(store), Bug::EarlyGroupOutrunsLog => None);
    let mut is_cut = false;
    loop {
        let Cursor { head, chain, limit } = cursor;
        if last.is_some_and(|last| last.position == head && last.chain == chain) {
            is_cut = true;
            window.drain(..(head - window_at) as usize);
            break;
        }
        let have = window.get((head - window_at) as usize..).unwrap_or(&[]);
        let next = match decode_group(&uuid, chain, have, limit) {
            Decoded::Group(group, records, checksums) => ReplayedData { group, records, checksums },
            other => {
                // A group may be longer than the window.
                let least = if let Decoded::Needs(length) = other { length } else { 0 };
                let enough = limit.min(REPLAY_WINDOW_BYTES).max(least);
                let missing = enough.saturating_sub(have.len() as u64);
                window.drain(..(head - window_at) as usize);
                window_at = head;
                if missing == 0 {
                    if rereads < MAX_REREADS && reads_otherwise(store, &window, head).await? {
                        rereads += 1;
                        window.clear();
                        continue;
                    }
                    break;
                }
                window.extend(read_journal(store, head + window.len() as u64, missing).await?);
                continue;
            }
        };
        let stale = next.group.incarnation < incarnation || next.group.incarnation > newest;
        if correct!(stale, Bug::StaleIncarnationReplayed => false) {
            window.drain(..(head - window_at) as usize);
            break;
        }
        incarnation = next.group.incarnation;
        let length = JournalGroup::length(next.group.bytes as usize);
        cursor = Cursor { head: head + length, chain: next.group.chain, limit: limit - length };
        while held.front().is_some_and(|before| before.next() <= next.group.confirmed) {
            let before = held.pop_front().expect("just seen");
            apply_group(store, &before, start.sequence).await?;
        }
        if held.is_empty() && next.checksums.is_empty() {
            apply_group(store, &next, start.sequence).await?;
        } else {
            held.push_back(next);
        }
    }
    // What lies behind the cut must not be found by the next recovery, which has no log.
    let unsealed = !held.is_empty() || is_cut;
    for group in held {
        // Records before the start of the checkpoint were durable when it was; their pages may have been
        // written in place since.
        let is_said = group.next() <= start.sequence;
        let is_lost = correct!(
            !is_said && !is_there(store, &group.checksums).await?,
            Bug::VouchedNotVerified => false
        );
        if is_lost {
            break;
        }
        apply_group(store, &group, start.sequence).await?;
    }
    refuse_damaged_journal(store, window, cursor.head, cursor.limit).await?;
    Ok(unsealed)
}

async fn apply_group<D: Device>(store: &Store<D>, taken: &ReplayedData, start: u64) -> Result<()> {
    for (i, record) in taken.records.iter().enumerate() {
        if correct!(taken.group.first + i as u64 >= start, Bug::RecoveryReplaysTwice => true) {
            replay_record(store, record).await?;
        }
    }
    store.meta.borrow_mut().journal.replayed(&taken.group);
    Ok(())
}

/// Whether the pages match their checksums.
async fn is_there<D: Device>(store: &Store<D>, checksums: &[DataChecksum]) -> Result<bool> {
    let pages = store.meta.borrow().space.layout().pages();
    for checksum in checksums {
        let inside = checksum.to.0.checked_add(u64::from(checksum.pages)).is_some_and(|end| end <= pages);
        if !inside || checksum.pages > MAX_VERIFIED_PAGES {
            return Err(Error::new(ErrorKind::Corrupt, "a journal group vouches for pages outside the pool"));
        }
        let len = checksum.pages as usize * PAGE_SIZE;
        let segment = Segment { offset: checksum.to.offset(), at: 0, len };
        let (result, buf) = store.device.read(store.device.buffer(len), smallvec![segment]).await;
        result.map_err(|e| Error::io("reading data that was written last, for recovery", e))?;
        if data_checksum(checksum.to, &buf) != checksum.sum {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the beginning of `window`, read from `position`, reads differently now: then a read went
/// wrong, and the journal does not end there.
async fn reads_otherwise<D: Device>(store: &Store<D>, window: &[u8], position: u64) -> Result<bool> {
    let group = length_of_group(window).unwrap_or(0) as usize;
    let seen = &window[..window.len().min(group.max(REPLAY_OVERLAP_BYTES))];
    Ok(!seen.is_empty() && read_journal(store, position, seen.len() as u64).await? != seen)
}

/// Replay ended at `head`; `window` was read from there on. The journal is damaged if any group behind
/// states that records were durable which were not found.
async fn refuse_damaged_journal<D: Device>(store: &Store<D>, mut window: Vec<u8>, head: u64, limit: u64) -> Result<()> {
    let (uuid, next) = (store.superblock.borrow().checksum_uuid, store.meta.borrow().journal.next());
    let mut window_at = head;
    loop {
        let groups = window.chunks(PAGE_SIZE).enumerate().map(|(i, _)| &window[i * PAGE_SIZE..]);
        let mut found = groups.filter_map(|bytes| find_group(&uuid, bytes)).find(|g| g.confirmed > next);
        if found.is_none() {
            found = find_long_group(store, &window, window_at, head + limit, next).await?;
        }
        if let Some(group) = found {
            let place = store.meta.borrow().journal.segments(head, PAGE_SIZE)[0].offset;
            let why = format!(
                "the journal is damaged at {:?}: {} of its records are missing, and a later one says that they \
                 were durable; restore the pool from a copy",
                PageAddr(place / PAGE_SIZE as u64),
                group.confirmed - next
            );
            return Err(Error::new(ErrorKind::Corrupt, why));
        }
        let at = window_at + window.len() as u64;
        if at == head + limit {
            return Ok(());
        }
        // Keep what may be the beginning of a group, so that it is seen whole and nothing is read twice.
        let seen = window.len().saturating_sub(REPLAY_OVERLAP_BYTES);
        window.drain(..seen);
        window_at += seen as u64;
        window.extend(read_journal(store, at, (head + limit - at).min(REPLAY_WINDOW_BYTES)).await?);
    }
}

/// As [`find_group`], for groups that are longer than what two windows have in common, so that no window need
/// show one as a whole.
async fn find_long_group<D: Device>(
    store: &Store<D>,
    window: &[u8],
    window_at: u64,
    end: u64,
    next: u64,
) -> Result<Option<JournalGroup>> {
    let uuid = store.superblock.borrow().checksum_uuid;
    for at in (0..window.len()).step_by(PAGE_SIZE) {
        let (from, rest) = (window_at + at as u64, &window[at..]);
        let is_cut_off = |&length: &u64| length > rest.len() as u64 && length <= end - from;
        let long = length_of_group(rest).filter(|&length| length > REPLAY_OVERLAP_BYTES as u64);
        let Some(length) = long.filter(is_cut_off) else { continue };
        let group = find_group(&uuid, &read_journal(store, from, length).await?);
        if group.as_ref().is_some_and(|group| group.confirmed > next) {
            return Ok(group);
        }
    }
    Ok(None)
}

pub(super) async fn replay_record<D: Device>(store: &Store<D>, record: &Record) -> Result<()> {
    if matches!(record, Record::Transaction { .. }) && !store.superblock.borrow().transactions {
        let why = "the journal has a transaction, and the superblock says that it has none";
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    if sets_extension(record) && !store.superblock.borrow().extensions {
        let why = "the journal sets the extension of a volume, and the superblock says that there are none";
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    if sets_bound(record) && !store.superblock.borrow().bounds {
        let why = "the journal sets the bound of a volume, and the superblock says that there are none";
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    if !store.superblock.borrow().folder_bounds && sets_folder_property(&store.meta.borrow(), record) {
        let why = "the journal sets the bound of a folder, and the superblock says that there are none";
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    if has_links_or_xattrs(record) && !store.superblock.borrow().links_or_xattrs {
        let why = "the journal has hard links or extended attributes, and the superblock says that there are none";
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    if let Record::Map { to, len, .. } | Record::CopyOut { to, len, .. } = record {
        take_place(store, *to, u64::from(*len)).await?;
    }
    if let Record::Gather { moved, .. } = record {
        for run in moved {
            take_place(store, run.to, u64::from(run.len)).await?;
        }
        return store.retry_pinned(|meta| meta.apply(record, &mut 0)).await;
    }
    let mut done = 0;
    store.retry_no_alloc(|meta| meta.apply(record, &mut done)).await
}

fn sets_extension(record: &Record) -> bool {
    match record {
        Record::Transaction { parts } => parts.iter().any(sets_extension),
        record => matches!(record, Record::SetExtension { .. }),
    }
}

fn sets_bound(record: &Record) -> bool {
    match record {
        Record::Transaction { parts } => parts.iter().any(sets_bound),
        Record::SetExtension { extension, .. } => extension.bound.is_some(),
        _ => false,
    }
}

fn has_links_or_xattrs(record: &Record) -> bool {
    match record {
        Record::Transaction { parts } => parts.iter().any(has_links_or_xattrs),
        Record::SetExtension { extension, .. } => !extension.xattrs.is_empty(),
        record => matches!(record, Record::MakeHardLink { .. }),
    }
}

/// Marks pages as allocated before the crash.
async fn take_place<D: Device>(store: &Store<D>, to: PageAddr, len: u64) -> Result<()> {
    let inside = to.0.checked_add(len).is_some_and(|e| e <= store.meta.borrow().space.layout().pages());
    if !inside {
        return Err(Error::new(ErrorKind::Corrupt, "a journal record maps pages outside the pool"));
    }
    store
        .retry_no_alloc(|meta| alloc::mark_allocated(&mut meta.space, to, len).map_err(|m| Failure::Stop(m.into())))
        .await
}

async fn read_journal<D: Device>(store: &Store<D>, position: u64, len: u64) -> Result<Vec<u8>> {
    let segments = store.meta.borrow().journal.segments(position, len as usize);
    let (result, buf) = store.device.read(store.device.buffer(len as usize), segments.into()).await;
    result.map_err(|e| Error::io("reading the journal", e))?;
    Ok(buf.to_vec())
}
