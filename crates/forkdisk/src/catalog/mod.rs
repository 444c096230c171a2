//! The catalog: all metadata of a pool, and the effect of each journal record on it. Pure state, without I/O: a
//! section that misses a page of metadata stops with a [`Failure`], and the store loads the page and repeats it.

mod admission;
mod apply;
mod bounds;
mod changes;
mod create;
mod delete;
pub mod directory;
pub mod exceptions;
mod expiry;
mod extension_changes;
mod folder_bounds;
mod fork;
mod info;
mod limits;
mod parts;
mod quota;
pub mod rollback;
mod source;
mod watched;
pub mod xattrs;

use crate::error::Error;
use crate::format::{CopierSettings, Kind, MovedRun, NO_VOLUME, OriginRecord, VolumeRecord, VolumeState};
use crate::journal::Journal;
use crate::map::{Editor, Member, Shared, Stop, Tables, count_seams};
use crate::planted::correct;
use crate::space::{Need, Reservation, Space};
use crate::types::{BLOCK_SIZE, Epoch, NO_ACCOUNT, PAGE_SIZE, PageAddr, VirtualPage, VolumeId, table_span};

use directory::hard_links;

pub use admission::admit;
pub use bounds::{account_of, admit_divergence, enter_charges, open_accounts, remove_dead, reserve_for};
pub use changes::Changes;
pub use create::{CreateOptions, check_new_names, creation, new_ids, new_snapshots};
pub use delete::{deletable, refuse_origin, refuse_with_snapshots};
pub use directory::{CatalogEntry, Chain, Directory, check_volume_name};
pub use exceptions::{ExceptionView, exception_run};
pub use expiry::deletable_expired;
pub use extension_changes::ExtensionChanges;
pub use folder_bounds::{
    folder_of, folders_with_properties, has_folder_properties, info_of_folder, sets_folder_property, wrong_sums,
};
pub use fork::{ForkOptions, is_folder, no_such_snapshot, plan_fork};
pub use info::{Protection, VolumeInfo};
pub use limits::{check_chunk, check_gather, check_origin_text, check_quota, check_size, writable_volume};
pub use rollback::{Rollback, refuse_during_rollback};
pub use source::PageSource;
pub use watched::WatchedPages;

/// State owned by one thread, made durable by checkpoints.
pub struct Catalog {
    pub tables: Tables,
    pub space: Space,
    pub directory: Directory,
    pub journal: Journal,
    pub epoch: Epoch,
    pub next_id: u64,
    /// The directory's own map; its pages hold the records of volumes.
    pub directory_map: VolumeRecord,
    /// Settings of the copier.
    pub copier: CopierSettings,
    /// Pages that are being moved.
    pub watched: WatchedPages,
    /// Why the counts are unknown, in a pool opened read-only; data can be read without them.
    pub uncounted: Option<Error>,
    /// Damaged count pages of such a pool, each once.
    pub lost_counts: Vec<Error>,
}

/// What every checkpoint may write, in pages.
const LEAST_CHECKPOINT_PAGES: u64 = 8;
/// On a nearly full pool a checkpoint begins when it has at least this many pages to write.
pub const DUE_CHECKPOINT_PAGES: u64 = 20;
/// Fewest pages of a checkpoint that has something to write.
pub const SOME_CHECKPOINT_PAGES: u64 = LEAST_CHECKPOINT_PAGES + 1;

/// Whether more metadata may become dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyState {
    BelowLimit,
    /// After a seal: the data that the last commit covers by checksums counts towards the limit.
    NeedsSeal,
    /// After a commit: the volatile log is nearly full.
    NeedsCommit,
    /// After a checkpoint.
    NeedsCheckpoint,
}

/// The part of `budget`, the limit of dirty metadata, for what replay reads: tables, counts, and data covered
/// by the checksums of the last commit. The other eighth is for what every open reads.
fn replay_share(budget: usize) -> usize {
    budget / 8 * 7
}

/// Pages of a volume of `bytes` bytes.
pub fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_SIZE as u64)
}

/// Lowest level whose table covers `bytes` bytes.
pub fn level_for(bytes: u64) -> u8 {
    (1..4).find(|&level| table_span(level) >= pages_of(bytes)).unwrap_or(4)
}

impl Catalog {
    /// An editor together with the record of `id`, which is marked as changed.
    pub fn editor_for(&mut self, id: VolumeId) -> Option<(Editor<'_>, &mut VolumeRecord)> {
        let volume = self.directory.change(id)?;
        // The record of this change follows all others.
        let (until, confirmed) = (self.journal.next() + 1, self.journal.durable_seq());
        let (tables, space, epoch, account) = (&mut self.tables, &mut self.space, self.epoch, volume.account());
        Some((Editor { tables, space, epoch, until, confirmed, account }, &mut volume.record))
    }

    /// Like [`editor_for`](Self::editor_for) for reading: the record is not marked.
    pub fn read_editor(&mut self, id: VolumeId) -> Option<(Editor<'_>, &VolumeRecord)> {
        let volume = self.directory.get(id)?;
        let (until, confirmed) = (self.journal.next() + 1, self.journal.durable_seq());
        let (tables, space, epoch, account) = (&mut self.tables, &mut self.space, self.epoch, NO_ACCOUNT);
        Some((Editor { tables, space, epoch, until, confirmed, account }, &volume.record))
    }

    /// An editor together with the record of `id`, which has a handle.
    pub fn handle_editor(&mut self, id: VolumeId) -> (Editor<'_>, &VolumeRecord) {
        let record = self.directory.of_handle(id);
        let (until, confirmed) = (self.journal.next() + 1, self.journal.durable_seq());
        let (tables, space, epoch, account) = (&mut self.tables, &mut self.space, self.epoch, NO_ACCOUNT);
        (Editor { tables, space, epoch, until, confirmed, account }, record)
    }

    /// An editor of tables and counts.
    pub fn editor(&mut self) -> Editor<'_> {
        let (until, confirmed) = (self.journal.next() + 1, self.journal.durable_seq());
        let (tables, space, epoch, account) = (&mut self.tables, &mut self.space, self.epoch, NO_ACCOUNT);
        Editor { tables, space, epoch, until, confirmed, account }
    }

    /// Length of the pool in bytes.
    pub fn size(&self) -> u64 {
        self.space.layout().blocks() * BLOCK_SIZE
    }

    /// Bytes of metadata not yet in a finished checkpoint.
    pub fn dirty_bytes(&self) -> usize {
        self.tables.unwritten_bytes() + self.directory.changed_pages() * PAGE_SIZE + self.space.dirty_bytes()
    }

    /// Bytes of tables and counts that replay would read after a crash now.
    pub fn replay_bytes(&self) -> usize {
        (self.tables.read_by_replay() + self.space.read_by_replay()) * PAGE_SIZE
    }

    /// Whether it is time for a checkpoint, with at most `budget` bytes dirty.
    pub fn is_filling(&self, budget: usize) -> bool {
        self.dirty_bytes() > budget / 2 || self.replay_bytes() > replay_share(budget) / 4 * 3
    }

    /// Whether more may become dirty, with a limit of `budget` bytes. Data covered by checksums of commits
    /// uses what replay leaves of its part.
    pub fn dirty_state(&mut self, budget: usize) -> DirtyState {
        let (share, replay) = (replay_share(budget), self.replay_bytes());
        self.journal.checksums.limit((share.saturating_sub(replay) / PAGE_SIZE) as u64);
        if self.dirty_bytes() > budget || replay > share {
            DirtyState::NeedsCheckpoint
        } else if replay + self.journal.checksums.written_pages() as usize * PAGE_SIZE > share {
            DirtyState::NeedsSeal
        } else if self.journal.volatile_is_nearly_full() {
            DirtyState::NeedsCommit
        } else {
            DirtyState::BelowLimit
        }
    }

    /// Pages that the next checkpoint writes, at most, also if pages of every account become free before it.
    pub fn checkpoint_pages(&self) -> u64 {
        self.changed_pages() + 2 * self.space.accounts.len() as u64
    }

    /// Pages that a checkpoint now would write, at most.
    pub fn changed_pages(&self) -> u64 {
        // Directory pages need tables of their own map: at most one path per page.
        (self.tables.dirty() + self.directory.changed_pages() * 2) as u64 + LEAST_CHECKPOINT_PAGES
    }

    /// Whether the pool is nearly full, and a checkpoint now, which would write at least `pages`, would leave more
    /// space to the next verbs.
    pub fn is_short_of_space(&self, pages: u64) -> bool {
        self.changed_pages() >= pages && self.space.unreserved(self.checkpoint_pages()) == 0
    }

    /// Admits what takes free pages; see [`Space::reserve`].
    pub fn reserve(&self, need: Need) -> Result<Reservation, Stop> {
        self.space.reserve(need, self.checkpoint_pages(), NO_ACCOUNT).map_err(Stop::from)
    }

    /// Replaces the numbers of root tables by their addresses once those are durable.
    pub fn resolve_roots(&mut self) {
        for id in self.directory.moved_roots() {
            let volume = self.directory.get_mut(id).expect("listed");
            volume.record.root = self.tables.resolve_addr(volume.record.root);
            if let Some(protects) = &mut volume.record.origin_record {
                protects.exceptions.entry = self.tables.resolve_addr(protects.exceptions.entry);
            }
        }
        debug_assert!(
            self.directory.iter().all(|v| self.tables.resolve_addr(v.record.root) == v.record.root),
            "a root can only have moved on a page that changed"
        );
        self.directory_map.root = self.tables.resolve_addr(self.directory_map.root);
    }

    fn advance(&mut self) {
        self.epoch = Epoch(self.epoch.0 + 1);
    }

    /// Everything mapped in `id` may be shared from now on. Snapshots never change, so theirs stays.
    fn raise_shared(&mut self, id: VolumeId) {
        let epoch = self.epoch;
        // A volume removed while open can still be written.
        let changes = |v: &CatalogEntry| {
            matches!(v.record.state, VolumeState::Volume | VolumeState::Orphan) || v.record.flags.writable
        };
        if self.directory.get(id).is_some_and(changes)
            && let Some(volume) = self.directory.change(id)
        {
            volume.record.shared_at = epoch;
        }
    }

    fn unknown(id: VolumeId) -> String {
        format!("a journal record names volume {}, which does not exist", id.0)
    }

    fn refuse_unknown(&self, id: VolumeId) -> Result<(), Failure> {
        self.directory.get(id).map(drop).ok_or_else(|| Failure::Nonsense(Catalog::unknown(id)))
    }

    /// Refuses what is no hard link of this file.
    fn refuse_no_link(&self, file: VolumeId, link: VolumeId) -> Result<(), Failure> {
        match hard_links::links_of(&self.directory, file).any(|other| other == link) {
            true => Ok(()),
            false => Err(Failure::Nonsense(format!("a journal record names {}, no hard link of {}", link.0, file.0))),
        }
    }

    fn record_of(&self, id: VolumeId) -> Result<VolumeRecord, Failure> {
        self.directory.get(id).map(|v| v.record.clone()).ok_or_else(|| Failure::Nonsense(Catalog::unknown(id)))
    }

    fn protects_mut(&mut self, id: VolumeId) -> Result<&mut OriginRecord, Failure> {
        let protects = self.directory.change(id).and_then(|v| v.record.origin_record.as_deref_mut());
        protects.ok_or_else(|| Failure::Nonsense(Catalog::unknown(id)))
    }

    /// Maps pages within one virtual block.
    pub fn map(&mut self, volume: VolumeId, at: VirtualPage, len: u64, to: PageAddr) -> Result<(), Failure> {
        let (mut editor, record) =
            self.editor_for(volume).ok_or_else(|| Failure::Nonsense(Catalog::unknown(volume)))?;
        Ok(editor.map_run(record, at, len, to)?)
    }

    /// Shares pages of one volume with another; see [`Editor::share_step`]. `dead` gets what was replaced;
    /// its number is used in any case.
    pub fn share_step(
        &mut self,
        source: VolumeId,
        from: VirtualPage,
        target: VolumeId,
        to: VirtualPage,
        max: u64,
        dead: VolumeId,
    ) -> Result<u64, Failure> {
        self.refuse_unknown(source)?;
        self.refuse_unknown(target)?;
        // Harmless if the step is repeated: a higher `shared_at` only relocates later writes.
        correct!(self.raise_shared(source), Bug::RangeCloneKeepsSharedAt => ());
        self.raise_shared(target);
        self.advance();
        let source = self.record_of(source)?;
        let is_usable = dead != NO_VOLUME && self.directory.get(dead).is_none();
        let (mut editor, record) = self.editor_for(target).expect("it was there above");
        if !is_usable && editor.replaces_table(&source, from, record, to, max)? {
            return Err(Failure::Nonsense(format!("a journal record makes volume {} a second time", dead.0)));
        }
        let Shared { pages, replaced } = editor.share_step(&source, from, record, to, max)?;
        self.next_id = self.next_id.max(dead.0 + 1);
        if let Some((root, level)) = correct!(replaced, Bug::ReplacedTableForgotten => None) {
            self.add(VolumeRecord { state: VolumeState::Dead, level, root, ..VolumeRecord::empty(dead, "", 0) });
        }
        Ok(pages)
    }

    fn add(&mut self, record: VolumeRecord) {
        self.next_id = self.next_id.max(record.id.0 + 1);
        self.directory.add(record);
    }

    /// The maps of those of these volumes that still have pages from `at` on.
    pub fn members(&self, ids: impl Iterator<Item = VolumeId>, at: VirtualPage) -> Vec<Member> {
        let member = |record: &VolumeRecord| {
            let VolumeRecord { id, root, level, shared_at, .. } = *record;
            let (has_map, weight) = match record.state {
                VolumeState::Volume | VolumeState::Orphan => (true, 2),
                VolumeState::Snapshot => (true, 1),
                VolumeState::Dead => (record.cursor <= at.0, 0),
                VolumeState::Folder | VolumeState::Origin | VolumeState::HardLink => (false, 0),
            };
            has_map.then_some(Member { id, root, level, shared_at, weight })
        };
        ids.filter_map(|id| member(&self.directory.get(id)?.record)).collect()
    }

    /// Replaces moved pages in the maps of these volumes.
    fn move_pages(&mut self, volumes: &[VolumeId], at: VirtualPage, moved: &[MovedRun]) -> Result<(), Failure> {
        let members = self.members(volumes.iter().copied(), at);
        let mut editor = self.editor();
        let family = editor.family(members, at)?;
        let done = editor.move_pages(&family, moved)?;
        for (id, root) in done.roots {
            self.directory.change(id).expect("a member").record.root = root;
        }
        for (id, before, now) in correct!(done.seams, Bug::GatherKeepsSeams => Vec::new()) {
            let record = &mut self.directory.change(id).expect("a member").record;
            count_seams(record, now, before);
        }
        Ok(())
    }

    fn add_shared(&mut self, record: VolumeRecord) {
        self.share_root(&record);
        self.add(record);
    }

    fn share_root(&mut self, record: &VolumeRecord) {
        if record.root.kind() == Kind::Table {
            self.editor().share(record.root);
        }
    }
}

/// Why a step on the metadata failed.
#[derive(Debug)]
pub enum Failure {
    /// Something has to be loaded first, or there is no space.
    Stop(Stop),
    /// The record contradicts the metadata: damage.
    Nonsense(String),
    /// The volume was deleted.
    Gone,
    /// The maps changed since a walk began.
    Changed,
    /// The volume would exceed its quota, or that of this folder.
    OverQuota(VolumeId),
    /// More would be charged to the volume than its bound, or that of this folder, allows.
    OverBound(VolumeId),
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Failure {
        Failure::Stop(stop)
    }
}
