//! The exceptions of an origin: pieces of chunks in its ordered map, and the snapshots that they belong to.
//!
//! A piece stands for pages. A lookup takes, of the pieces that contain a page, that of the first snapshot
//! not older than its own. So a piece can be handed to an older snapshot, or freed, without a visible change
//! for living snapshots.

use crate::format::ordered::{CHUNKS_PER_LIST, Piece, piece};
use crate::format::{ExceptionKey, ExceptionKind, NO_VOLUME, OriginRecord, TreeRoot, VolumeState};
use crate::map::{Editor, Stop, TableMiss, Tables};
use crate::ordered::{self, Batch};
use crate::planted::correct;
use crate::types::{NO_ACCOUNT, PAGE_SIZE, PageAddr, VirtualPage, VolumeId};

use super::rollback::Rollback;
use super::{Catalog, Failure};

/// Pairs looked up or freed at once.
const PAIRS_PER_STEP: usize = 32;

/// Which exceptions a snapshot sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExceptionView {
    /// Those of the chain's snapshots from `from` on and before `below`.
    Chained { from: VolumeId, below: VolumeId },
    /// Those of one independent snapshot.
    Independent(VolumeId),
}

impl ExceptionView {
    /// The view of a chained snapshot.
    pub fn chained(from: VolumeId) -> ExceptionView {
        ExceptionView::Chained { from, below: VolumeId(u64::MAX) }
    }

    fn first_key(self, chunk: u64) -> ExceptionKey {
        match self {
            ExceptionView::Chained { from, .. } => ExceptionKey::chained(chunk, from, 0),
            ExceptionView::Independent(id) => ExceptionKey::independent(id, chunk, 0),
        }
    }

    /// Chunk, first page and snapshot of a piece that the view includes.
    fn locate(self, key: u128) -> Option<(u64, u64, VolumeId)> {
        match (self, ExceptionKey(key).kind()?) {
            (ExceptionView::Chained { .. }, ExceptionKind::Chained { chunk, page, sequence }) => {
                Some((chunk, page, sequence))
            }
            (ExceptionView::Independent(id), ExceptionKind::Independent { sequence, chunk, page })
                if sequence == id =>
            {
                Some((chunk, page, id))
            }
            _ => None,
        }
    }

    fn includes(self, sequence: VolumeId) -> bool {
        match self {
            ExceptionView::Chained { from, below } => (from..below).contains(&sequence),
            ExceptionView::Independent(_) => true,
        }
    }
}

/// Pages of a view from one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExceptionRun {
    /// Address in the pool; `None`: on the device of the origin.
    pub at: Option<PageAddr>,
    /// Number of pages.
    pub len: u64,
}

/// Where `view` finds page `at` and those behind it, at most `max` (> 0). One search, however many snapshots
/// there are.
pub fn exception_run(
    tables: &mut Tables,
    kept: &TreeRoot,
    chunk_pages: u64,
    view: ExceptionView,
    at: VirtualPage,
    max: u64,
) -> Result<ExceptionRun, TableMiss> {
    let (chunk, within) = (at.0 / chunk_pages, at.0 % chunk_pages);
    let mut limit = max;
    let mut key = view.first_key(chunk);
    loop {
        let pairs = ordered::scan(tables, kept, key.0, ExceptionKey::END.0, PAIRS_PER_STEP)?;
        let Some(&(last, _)) = pairs.last() else { return Ok(ExceptionRun { at: None, len: limit }) };
        for (key, value) in pairs {
            let Some((c, page, sequence)) = view.locate(key) else { return Ok(ExceptionRun { at: None, len: limit }) };
            if c > chunk {
                return Ok(ExceptionRun { at: None, len: limit.min(c * chunk_pages - at.0) });
            }
            let Piece { to, pages } = piece(value);
            if !view.includes(sequence) || page + pages <= within {
                continue;
            }
            if page <= within {
                let len = limit.min(page + pages - within);
                return Ok(ExceptionRun { at: Some(PageAddr(to.0 + within - page)), len });
            }
            // A piece with precedence over those behind it begins here.
            limit = limit.min(page - within);
        }
        key = ExceptionKey(last).next();
    }
}

/// A part of a piece of a deleted snapshot, and whether the next older snapshot takes it over.
struct PiecePart {
    page: u64,
    piece: Piece,
    /// The next older snapshot needs it.
    needed: bool,
}

impl Catalog {
    /// The origin's record, and the pages of a chunk.
    pub fn protects(&self, origin: VolumeId) -> Option<(OriginRecord, u64)> {
        let record = &self.directory.get(origin)?.record;
        Some((*record.origin_record.as_deref()?, record.chunk / PAGE_SIZE as u64))
    }

    /// The running rollback of an origin.
    pub fn rollback(&self, origin: VolumeId) -> Option<Rollback> {
        let record = &self.directory.get(origin)?.record;
        let snapshot = record.origin_record.as_ref()?.rollback_to;
        let (_, view) = self.view_of(snapshot)?;
        Some(Rollback { snapshot, view, cursor: record.cursor })
    }

    /// For a snapshot of an origin or a clone of one: the origin, and the exceptions that it sees.
    pub fn view_of(&self, id: VolumeId) -> Option<(VolumeId, ExceptionView)> {
        let record = &self.directory.get(id)?.record;
        if record.base != NO_VOLUME {
            return self.view_of(record.base);
        }
        let parent = self.directory.get(record.parent)?;
        let states = (record.state, parent.record.state);
        let of_origin = matches!(states, (VolumeState::Snapshot, VolumeState::Origin));
        let view = if record.flags.independent { ExceptionView::Independent(id) } else { ExceptionView::chained(id) };
        of_origin.then_some((parent.record.id, view))
    }

    /// Bytes of the origin's snapshot that is the backing of `id`.
    pub fn backing_size(&self, id: VolumeId) -> Option<u64> {
        let record = &self.directory.get(id)?.record;
        if record.base == NO_VOLUME { Some(record.size) } else { self.backing_size(record.base) }
    }

    /// Whether `id` is a snapshot of an origin (not of a clone).
    pub fn is_origin_snapshot(&self, id: VolumeId) -> bool {
        let base = |id| self.directory.get(id).is_some_and(|v| v.record.base == NO_VOLUME);
        self.view_of(id).is_some() && base(id)
    }
}

/// Exceptions of `chunk`, in pages, that belong to `id` and that `heir`, the next older snapshot that
/// stays, does not need.
pub fn freed_of(
    catalog: &mut Catalog,
    protects: &OriginRecord,
    chunk_pages: u64,
    chunk: u64,
    id: VolumeId,
    heir: Option<VolumeId>,
) -> Result<u64, Failure> {
    let parts = parts_of(catalog, protects, chunk_pages, chunk, id, heir)?;
    Ok(parts.iter().filter(|part| heir.is_none() || !part.needed).map(|part| part.piece.pages).sum())
}

/// The views that need the old contents of whatever is written: the newest snapshot of the chain, and
/// every independent one.
pub fn copy_out_views(catalog: &Catalog, origin: VolumeId) -> Vec<ExceptionView> {
    let Some(chain) = catalog.directory.chain(origin) else { return Vec::new() };
    let newest = chain.chained.last().map(|&id| ExceptionView::chained(id));
    newest.into_iter().chain(chain.independent.iter().map(|&id| ExceptionView::Independent(id))).collect()
}

/// Moves `at` to the next page before `end` that `view` would lose by a write; returns the number of such
/// pages from there on. A repeated attempt continues where the last one stopped, so it needs few pages in
/// memory.
pub fn missing_exception(
    catalog: &mut Catalog,
    origin: VolumeId,
    view: ExceptionView,
    at: &mut VirtualPage,
    end: VirtualPage,
) -> Result<Option<u64>, Failure> {
    let (protects, chunk_pages) = catalog.protects(origin).ok_or(Failure::Gone)?;
    while *at < end {
        let run = exception_run(&mut catalog.tables, &protects.exceptions, chunk_pages, view, *at, end.0 - at.0);
        let run = run.map_err(Stop::from)?;
        if run.at.is_none() {
            return Ok(Some(run.len));
        }
        at.0 += run.len;
    }
    Ok(None)
}

fn edit_exceptions(catalog: &mut Catalog, origin: VolumeId, until: u64) -> Option<(Editor<'_>, &mut OriginRecord)> {
    let (confirmed, account) = (catalog.journal.durable_seq(), NO_ACCOUNT);
    let protects = catalog.directory.change(origin)?.record.origin_record.as_mut()?;
    let (tables, space, epoch) = (&mut catalog.tables, &mut catalog.space, catalog.epoch);
    Some((Editor { tables, space, epoch, until, confirmed, account }, protects))
}

fn count_referenced(catalog: &mut Catalog, id: VolumeId, by: i64) {
    if let Some(volume) = catalog.directory.change(id) {
        let record = &mut volume.record;
        record.referenced = record.referenced.saturating_add_signed(by);
        if matches!(record.state, VolumeState::Snapshot) {
            record.cursor = record.cursor.saturating_add_signed(by);
        }
    }
}

/// Adds exceptions for `len` pages of one chunk from `at` on for `sequence`: all of them or, on a stop,
/// none.
pub fn add_exceptions(
    catalog: &mut Catalog,
    origin: VolumeId,
    sequence: VolumeId,
    at: VirtualPage,
    len: u64,
    to: PageAddr,
) -> Result<(), Failure> {
    let nonsense = || Failure::Nonsense(format!("chunks are kept for snapshot {}, which does not exist", sequence.0));
    let snapshot = &catalog.directory.get(sequence).ok_or_else(nonsense)?.record;
    let independent = snapshot.flags.independent;
    let (_, chunk_pages) = catalog.protects(origin).ok_or_else(nonsense)?;
    let (chunk, page) = (at.0 / chunk_pages, at.0 % chunk_pages);
    debug_assert!(page + len <= chunk_pages);
    let until = catalog.journal.next() + 1;
    let (mut editor, protects) = edit_exceptions(catalog, origin, until).ok_or_else(nonsense)?;
    let mut batch = Batch::default();
    let value = Piece { to, pages: len }.to_bits();
    match independent {
        true => batch.set(ExceptionKey::independent(sequence, chunk, page).0, value),
        false => {
            batch.set(ExceptionKey::chained(chunk, sequence, page).0, value);
            list_chunk(&mut editor, &protects.exceptions, ExceptionKey::list(sequence, chunk), chunk, &mut batch)?;
        }
    }
    let prepared = editor.tree_prepare(&protects.exceptions, batch)?;
    editor.tree_apply(&mut protects.exceptions, prepared);
    editor.space.incr_pages(to, len);
    count_referenced(catalog, sequence, len as i64);
    Ok(())
}

/// Which of the chunks listed together with `chunk` are rolled back, a bit each.
pub fn rolled_back_chunks(catalog: &mut Catalog, kept: &TreeRoot, chunk: u64) -> Result<u128, Failure> {
    let bits = ordered::get(&mut catalog.tables, kept, ExceptionKey::back(chunk).0).map_err(Stop::from)?;
    Ok(bits.unwrap_or(0))
}

/// First chunk of the first list of rolled-back chunks that begins before `end`.
pub fn first_rolled_back_list(catalog: &mut Catalog, origin: VolumeId, end: u64) -> Result<Option<u64>, Failure> {
    let (protects, _) = catalog.protects(origin).ok_or(Failure::Gone)?;
    let to = ExceptionKey::back(end.next_multiple_of(CHUNKS_PER_LIST)).0;
    let found =
        ordered::scan(&mut catalog.tables, &protects.exceptions, ExceptionKey::back(0).0, to, 1).map_err(Stop::from)?;
    Ok(found.first().and_then(|&(key, _)| match ExceptionKey(key).kind()? {
        ExceptionKind::Back { first } => Some(first),
        _ => None,
    }))
}

/// Lists `count` chunks, which share a list, as rolled back.
pub fn note_rolled_back(catalog: &mut Catalog, origin: VolumeId, first: u64, count: u64) -> Result<(), Failure> {
    let until = catalog.journal.next() + 1;
    let nonsense = || Failure::Nonsense(format!("chunks of volume {}, which is no origin, are back", origin.0));
    let inside = count > 0 && first % CHUNKS_PER_LIST + count <= CHUNKS_PER_LIST;
    let (mut editor, protects) = edit_exceptions(catalog, origin, until).filter(|_| inside).ok_or_else(nonsense)?;
    let key = ExceptionKey::back(first).0;
    let bits = ordered::get(editor.tables, &protects.exceptions, key).map_err(Stop::from)?.unwrap_or(0);
    let mut batch = Batch::default();
    batch.set(key, (first..first + count).fold(bits, |bits, chunk| bits | 1 << (chunk % CHUNKS_PER_LIST)));
    let prepared = editor.tree_prepare(&protects.exceptions, batch)?;
    editor.tree_apply(&mut protects.exceptions, prepared);
    Ok(())
}

/// A rollback of an origin to `snapshot` is done for all chunks before `cursor`; without a snapshot it
/// has ended. Removes the list of rolled-back chunks that ends before there; there is at most one.
pub fn advance_rollback(
    catalog: &mut Catalog,
    origin: VolumeId,
    snapshot: VolumeId,
    cursor: u64,
) -> Result<(), Failure> {
    let nonsense = || Failure::Nonsense(format!("volume {}, which is no origin, is rolled back", origin.0));
    let record = &catalog.directory.get(origin).ok_or_else(nonsense)?.record;
    let ended = snapshot == NO_VOLUME;
    let end = if ended { record.size.div_ceil(record.chunk).next_multiple_of(CHUNKS_PER_LIST) } else { cursor };
    if !ended && catalog.directory.get(snapshot).is_none_or(|v| v.record.parent != origin) {
        return Err(Failure::Nonsense(format!("origin {} is rolled back to another's snapshot", origin.0)));
    }
    // At its start there is no list, and the record is that of a verb, which loads no tables.
    let list = match cursor {
        0 => None,
        _ => first_rolled_back_list(catalog, origin, end)?.filter(|first| first + CHUNKS_PER_LIST <= end),
    };
    let until = catalog.journal.next() + 1;
    let (mut editor, protects) = edit_exceptions(catalog, origin, until).ok_or_else(nonsense)?;
    let mut batch = Batch::default();
    if let Some(first) = correct!(list, Bug::BackListStays => None) {
        batch.remove(ExceptionKey::back(first).0);
    }
    let prepared = editor.tree_prepare(&protects.exceptions, batch)?;
    editor.tree_apply(&mut protects.exceptions, prepared);
    protects.rollback_to = snapshot;
    if !ended && cursor == 0 {
        catalog.directory.rollback_begins(origin, until);
    }
    let volume = catalog.directory.change(origin).expect("changed just now");
    volume.record.cursor = if ended { 0 } else { cursor };
    Ok(())
}

/// Name of the snapshot that an origin is being rolled back to.
pub fn rollback_snapshot(catalog: &Catalog, origin: VolumeId) -> Option<String> {
    let rollback = catalog.rollback(origin)?;
    Some(catalog.directory.full_name(&catalog.directory.get(rollback.snapshot)?.record))
}

/// Frees the exceptions of the dead snapshot `id` or hands them to the next older one, in small steps;
/// true when nothing is left.
pub fn release_exceptions(catalog: &mut Catalog, id: VolumeId) -> Result<bool, Failure> {
    let Some(dead) = catalog.directory.get(id).map(|v| &v.record) else { return Ok(true) };
    let (origin, independent) = (dead.parent, dead.flags.independent);
    let alive = catalog.directory.get(origin).is_some_and(|v| matches!(v.record.state, VolumeState::Origin));
    match (alive, independent) {
        (false, _) => Ok(true),
        (true, true) => {
            let (from, end) =
                (ExceptionKey::independent(id, 0, 0), ExceptionKey::independent(VolumeId(id.0 + 1), 0, 0));
            free_exceptions(catalog, origin, from, end)
        }
        (true, false) => release_chunk(catalog, origin, id),
    }
}

/// Frees all exceptions of a dead origin in small steps; true when nothing is left.
pub fn release_origin(catalog: &mut Catalog, id: VolumeId) -> Result<bool, Failure> {
    free_exceptions(catalog, id, ExceptionKey(0), ExceptionKey::END)
}

fn free_exceptions(
    catalog: &mut Catalog,
    origin: VolumeId,
    from: ExceptionKey,
    end: ExceptionKey,
) -> Result<bool, Failure> {
    let until = catalog.journal.next();
    let Some((mut editor, protects)) = edit_exceptions(catalog, origin, until) else { return Ok(true) };
    let pairs =
        ordered::scan(editor.tables, &protects.exceptions, from.0, end.0, PAIRS_PER_STEP).map_err(Stop::from)?;
    let mut batch = Batch::default();
    pairs.iter().for_each(|&(key, _)| batch.remove(key));
    let prepared = editor.tree_prepare(&protects.exceptions, batch)?;
    editor.tree_apply(&mut protects.exceptions, prepared);
    pairs.iter().for_each(|&(key, value)| free_piece(&mut editor, ExceptionKey(key), value));
    Ok(pairs.is_empty())
}

/// Carries out the removals of a batch; returns the rest of it.
#[cfg(feature = "planted")]
fn remove_first(editor: &mut Editor<'_>, root: &mut TreeRoot, mut batch: Batch) -> Result<Batch, Stop> {
    drop(editor.tree_prepare(root, batch.clone())?);
    let removals = editor.tree_prepare(root, batch.take_removals())?;
    editor.tree_apply(root, removals);
    Ok(batch)
}

/// Handles the next chunk listed for the dead snapshot `id` of the chain.
fn release_chunk(catalog: &mut Catalog, origin: VolumeId, id: VolumeId) -> Result<bool, Failure> {
    let (protects, chunk_pages) = catalog.protects(origin).ok_or(Failure::Gone)?;
    let (from, end) = (ExceptionKey::list(id, 0), ExceptionKey::list(VolumeId(id.0 + 1), 0));
    let listed = ordered::scan(&mut catalog.tables, &protects.exceptions, from.0, end.0, 1).map_err(Stop::from)?;
    let Some(&(key, bits)) = listed.first() else { return Ok(true) };
    let Some(ExceptionKind::List { first, .. }) = ExceptionKey(key).kind() else { return Ok(true) };
    let chunk = first + u64::from(bits.trailing_zeros());
    let heir = catalog.directory.chain(origin).and_then(|chain| {
        let mut older = chain.chained.range(..id);
        correct!(older.next_back(), Bug::RelabelToOldest => older.next()).copied()
    });
    let parts = parts_of(catalog, &protects, chunk_pages, chunk, id, heir)?;
    let until = catalog.journal.next();
    let Some((mut editor, protects)) = edit_exceptions(catalog, origin, until) else { return Ok(true) };
    let kept = &mut protects.exceptions;
    let mut batch = Batch::default();
    let inherits = |part: &PiecePart| heir.filter(|_| part.needed);
    for part in &parts {
        batch.remove(ExceptionKey::chained(chunk, id, part.page).0);
        if let Some(heir) = inherits(part) {
            batch.set(ExceptionKey::chained(chunk, heir, part.page).0, part.piece.to_bits());
        }
    }
    if let Some(heir) = parts.iter().find_map(inherits) {
        list_chunk(&mut editor, kept, ExceptionKey::list(heir, chunk), chunk, &mut batch)?;
    }
    let rest = bits & (bits - 1);
    batch.put(key, (rest != 0).then_some(rest));
    let prepared = correct!(
        editor.tree_prepare(kept, batch),
        Bug::ReleasedInSteps => remove_first(&mut editor, kept, batch).and_then(|rest| editor.tree_prepare(kept, rest))
    )?;
    editor.tree_apply(kept, prepared);
    let (mut handed, mut gone) = (0, 0);
    for part in &parts {
        gone += part.piece.pages;
        match inherits(part) {
            Some(_) => handed += part.piece.pages,
            None => free_piece(&mut editor, ExceptionKey::chained(chunk, id, part.page), part.piece.to_bits()),
        }
    }
    count_referenced(catalog, id, -(gone as i64));
    if let Some(heir) = heir.filter(|_| handed > 0) {
        count_referenced(catalog, heir, handed as i64);
    }
    Ok(false)
}

/// The pieces of `chunk` that belong to `id`, split where the next older snapshot begins or ceases to
/// need them.
fn parts_of(
    catalog: &mut Catalog,
    protects: &OriginRecord,
    chunk_pages: u64,
    chunk: u64,
    id: VolumeId,
    heir: Option<VolumeId>,
) -> Result<Vec<PiecePart>, Failure> {
    let (mut key, end) = (ExceptionKey::chained(chunk, id, 0), ExceptionKey::chained(chunk, VolumeId(id.0 + 1), 0));
    let mut parts = Vec::new();
    loop {
        let pairs = ordered::scan(&mut catalog.tables, &protects.exceptions, key.0, end.0, PAIRS_PER_STEP)
            .map_err(Stop::from)?;
        let Some(&(last, _)) = pairs.last() else { return Ok(parts) };
        for (found, value) in pairs {
            let Some(ExceptionKind::Chained { page, .. }) = ExceptionKey(found).kind() else { return Ok(parts) };
            let whole = piece(value);
            let mut done = 0;
            while done < whole.pages {
                let left = whole.pages - done;
                let at = VirtualPage(chunk * chunk_pages + page + done);
                let run = match heir {
                    None => ExceptionRun { at: Some(PageAddr(0)), len: left },
                    Some(from) => {
                        let view = ExceptionView::Chained { from, below: id };
                        exception_run(&mut catalog.tables, &protects.exceptions, chunk_pages, view, at, left)
                            .map_err(Stop::from)?
                    }
                };
                let piece = Piece { to: PageAddr(whole.to.0 + done), pages: run.len };
                let needed = correct!(run.at.is_none(), Bug::KeptLostOnDelete => false);
                parts.push(PiecePart { page: page + done, piece, needed });
                done += run.len;
            }
        }
        key = ExceptionKey(last).next();
    }
}

/// Adds to `batch` the note that `list` has an exception of `chunk`.
fn list_chunk(
    editor: &mut Editor<'_>,
    kept: &TreeRoot,
    list: ExceptionKey,
    chunk: u64,
    batch: &mut Batch,
) -> Result<(), Stop> {
    let bit = 1 << (chunk % CHUNKS_PER_LIST);
    let bits = ordered::get(editor.tables, kept, list.0)?.unwrap_or(0);
    if bits & bit == 0 {
        batch.set(list.0, bits | bit);
    }
    Ok(())
}

fn free_piece(editor: &mut Editor<'_>, key: ExceptionKey, value: u128) {
    if let Some(ExceptionKind::Chained { .. } | ExceptionKind::Independent { .. }) = key.kind() {
        let Piece { to, pages } = piece(value);
        editor.space.decr_pages(to, pages, editor.until);
    }
}
