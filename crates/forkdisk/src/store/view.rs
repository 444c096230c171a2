//! Views: all metadata as one checkpoint left it, for walks that cannot keep up with writers.
//!
//! A view begins at the end of a checkpoint; nothing has to stop for it. Its tables lie on the device; what
//! later checkpoints free is withheld until the view ends, and the counts that they change are kept
//! ([`space::view_counts`](crate::space)). Checkpoints and writers never wait for a view: one that holds too
//! much is ended, which its walk notices at the next step. There is one view at a time; further ones wait.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::catalog::Catalog;
use crate::device::Device;
use crate::error::Result;
use crate::format::{MapEntry, Superblock, TreeRoot, VolumeState};
use crate::space::view_counts;
use crate::store::{checkpoint, retained};
use crate::sync::RangeLocks;
use crate::types::{AccountId, VolumeId};

use super::Store;

/// Requests for a view, and the live one.
#[derive(Default)]
pub struct Views {
    wanted: Cell<bool>,
    begun: RefCell<Option<View>>,
    /// Held during the walk of a view.
    pub lock: Rc<RangeLocks>,
    /// Space withheld by a view is being released.
    releasing: Cell<bool>,
}

/// The root of a map to be walked.
#[derive(Clone, Copy)]
pub struct Root {
    pub id: VolumeId,
    pub entry: MapEntry,
    pub level: u8,
    /// The first valid virtual page: everything before it was released.
    pub from: u64,
    pub is_dead: bool,
    /// The ordered map of an origin.
    pub kept: TreeRoot,
    /// Mapped pages according to the record; not for a snapshot of an origin.
    pub referenced: Option<u64>,
    /// Seams according to the record, unless they are an estimate.
    pub seams: Option<u64>,
    /// Account of a volume with a bound, and the pages charged to it.
    pub charged: Option<(AccountId, u64)>,
}

/// A state of the metadata that one checkpoint left on the device.
pub struct View {
    /// Its number.
    pub number: u64,
    /// All maps.
    pub roots: Vec<Root>,
    /// The superblock of the checkpoint.
    pub superblock: Superblock,
    /// Pages in use, besides reserved ones.
    pub used: u64,
}

/// All maps: those of volumes, of dead ones from their cursors on. Folders and hard links have none; folders with an
/// account are there for what is charged to it.
pub fn roots_of(meta: &Catalog) -> Vec<Root> {
    let root = |record: &crate::format::VolumeRecord| {
        let from = if record.state == VolumeState::Dead { record.cursor } else { 0 };
        // A folder has no map, either.
        let is_dead = matches!(record.state, VolumeState::Dead | VolumeState::Folder);
        let kept = record.origin_record.as_ref().map_or_else(Default::default, |protects| protects.exceptions);
        let (id, entry, level) = (record.id, record.root, record.level);
        let referenced = (!meta.is_origin_snapshot(id)).then_some(record.referenced);
        let seams = (!record.estimated).then_some(record.seams);
        let account = meta.directory.get(id).and_then(|volume| volume.bound()).map(|bound| bound.account);
        let charged = account.map(|account| (account, meta.space.accounts.pages(account)));
        Root { id, entry, level, from, is_dead, kept, referenced, seams, charged }
    };
    let records = meta.directory.iter().map(|volume| &volume.record);
    let has_root = |record: &&crate::format::VolumeRecord| match record.state {
        VolumeState::Folder => meta.directory.get(record.id).is_some_and(|folder| folder.bound().is_some()),
        state => state != VolumeState::HardLink,
    };
    records.filter(has_root).map(root).collect()
}

/// A view of everything published before this call: of the next checkpoint, which this starts. The caller
/// holds the lock and ends the view with [`end_view`](Self::end_view).
pub async fn begin_view<D: Device>(store: &Rc<Store<D>>) -> Result<View> {
    store.views.wanted.set(true);
    loop {
        if let Some(walk) = store.views.begun.take() {
            return Ok(walk);
        }
        let next = async {
            store.check_writable()?;
            checkpoint::next_checkpoint(store).await;
            Ok(())
        };
        store.unless_full(next).await.inspect_err(|_| store.views.wanted.set(false))?;
    }
}

/// The roots that a view will show, taken while a checkpoint freezes the same state; `None` if no view is
/// requested.
pub fn roots_for_view<D: Device>(store: &Store<D>, meta: &Catalog) -> Option<Vec<Root>> {
    store.views.wanted.get().then(|| roots_of(meta))
}

/// Begins the view: the checkpoint that froze `roots` is durable, and nothing was frozen since.
pub fn show<D: Device>(store: &Store<D>, meta: &mut Catalog, mut roots: Vec<Root>) {
    for root in &mut roots {
        root.entry = meta.tables.resolve_addr(root.entry);
        root.kept.entry = meta.tables.resolve_addr(root.kept.entry);
    }
    let superblock = store.superblock.borrow();
    let number = view_counts::begin_view(&mut meta.space);
    store.views.wanted.set(false);
    *store.views.begun.borrow_mut() =
        Some(View { number, roots, superblock: superblock.clone(), used: meta.space.used_by_checkpoint() });
}

/// Ends the live view, if any, and releases what it withheld. False if there was nothing.
pub async fn end_view<D: Device>(store: &Store<D>) -> bool {
    if store.views.releasing.get() {
        while store.views.releasing.get() {
            store.space_changed.wait().await;
        }
        return true;
    }
    let runs = view_counts::end_view(&mut store.meta.borrow_mut().space);
    if runs.is_empty() {
        return false;
    }
    store.views.releasing.set(true);
    retained::discard_freed(store, &runs).await;
    view_counts::release_withheld(&mut store.meta.borrow_mut().space, runs);
    store.views.releasing.set(false);
    store.space_changed.notify();
    true
}

/// Ends the live view if that frees space.
pub async fn take_space_of_view<D: Device>(store: &Store<D>) -> bool {
    let is_of_use = store.views.releasing.get() || store.meta.borrow().space.withheld() > 0;
    is_of_use && end_view(store).await
}
