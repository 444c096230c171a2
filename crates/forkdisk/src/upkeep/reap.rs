//! The reaper: frees the space of dead volumes, and of the tails of volumes that shrank, in the background.
//! Works in small steps; other tasks run in between.

use std::rc::Rc;

use crate::catalog::{Catalog, SOME_CHECKPOINT_PAGES, directory, exceptions, pages_of, remove_dead, reserve_for};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{MapEntry, Record, VolumeState};
use crate::map::Editor;
use crate::planted::correct;
use crate::runtime::yield_now;
use crate::space::Need;
use crate::store::EditError;
use crate::sync::LockMode;
use crate::types::{NO_ACCOUNT, VirtualPage, VolumeId};

use super::Upkeep;

/// Pieces (of at most 256 pages) freed before other tasks run.
const PIECES_PER_TURN: usize = 16;

/// The next work of the reaper.
enum ReapWork {
    Dead(VolumeId),
    Tail(VolumeId),
}

impl<D: Device> Upkeep<D> {
    /// Starts the reaper if it does not run and there is work.
    pub fn start_reaping(&self) {
        if !self.store.opened.get() || self.store.options.read_only || next_work(&self.store.meta.borrow()).is_none() {
            return;
        }
        if self.store.reaping.replace(true) {
            return;
        }
        let Some(upkeep) = self.this.upgrade() else { return };
        self.store.runtime.spawn(Box::pin(async move {
            // A closing pool refuses the requests of the reaper; the next open continues.
            if let Err(error) = reap(&upkeep).await
                && !upkeep.store.closed.get()
            {
                upkeep.store.fail(&error);
            }
            upkeep.store.reaping.set(false);
            upkeep.store.reaped.notify();
            upkeep.store.host_enospc.retry_now();
        }));
    }

    /// Waits until all deleted space is free and reusable; returns ENOSPC when the host file system is full,
    /// though the work goes on.
    pub async fn free_deleted(self: Rc<Self>) -> Result<()> {
        self.store.unless_blocked(free_everything(self.clone())).await
    }
}

/// A full host does not stop the reaper.
pub fn ignore_no_space(error: Error) -> Result<()> {
    if error.kind() == ErrorKind::NoSpace { Ok(()) } else { Err(error) }
}

fn next_work(meta: &Catalog) -> Option<ReapWork> {
    let directory = &meta.directory;
    directory.first_dead().map(ReapWork::Dead).or_else(|| directory.first_tail().map(ReapWork::Tail))
}

/// A closing pool leaves the work to the next open, unless closing needs the space that only this frees.
fn may_reap<D: Device>(upkeep: &Upkeep<D>) -> bool {
    let goes_on = !upkeep.store.closing.get() || upkeep.store.full.get();
    goes_on && !upkeep.store.closed.get() && upkeep.store.failed.borrow().is_none()
}

async fn reap<D: Device>(upkeep: &Rc<Upkeep<D>>) -> Result<()> {
    loop {
        if !may_reap(upkeep) {
            return Ok(());
        }
        // A wait for space on the host may end by what is freed here.
        upkeep.store.unless_blocked(upkeep.store.wait_below_dirty_limit()).await.or_else(ignore_no_space)?;
        let turn = upkeep.reap_lock.lock(0..1, LockMode::Exclusive).await;
        let work = next_work(&upkeep.store.meta.borrow());
        match work {
            None => return Ok(()),
            Some(ReapWork::Dead(id)) => {
                let lacks_space = lacks_space(&upkeep.store.meta.borrow(), id);
                if lacks_space {
                    let checkpoint = upkeep.store.clone().patient_checkpoint();
                    upkeep.store.unless_blocked(checkpoint).await.or_else(ignore_no_space)?;
                }
                reap_dead(upkeep, id).await?;
            }
            // On a full pool it continues after a checkpoint has returned space.
            Some(ReapWork::Tail(id)) if !reap_tail(upkeep, id).await? => return Ok(()),
            Some(ReapWork::Tail(_)) => {}
        }
        drop(turn);
        yield_now().await;
    }
}

/// Whether the next checkpoint, which would write the record once more, may lack space, and a checkpoint now helps: its
/// deletion was admitted, but a checkpoint has written that already.
fn lacks_space(meta: &Catalog, id: VolumeId) -> bool {
    let helps = meta.changed_pages() >= SOME_CHECKPOINT_PAGES || meta.space.pending() > 0;
    // What is kept free for volumes does not keep others from being freed.
    let needs = meta.space.pages_for(Need::Step, meta.checkpoint_pages());
    helps && directory::unchanged_page_of(&meta.directory, id).is_some() && meta.space.available() < needs
}

async fn reap_dead<D: Device>(upkeep: &Upkeep<D>, id: VolumeId) -> Result<()> {
    for _ in 0..PIECES_PER_TURN {
        let done = upkeep
            .store
            .retry_no_alloc(|meta| {
                let volume = correct!(meta.directory.change(id), Bug::DeleteKeepsCounts => None);
                let Some(volume) = volume else { return Ok(true) };
                // The record of the deletion was published before.
                let (until, confirmed) = (meta.journal.next(), meta.journal.durable_seq());
                let (tables, space, epoch, account) = (&mut meta.tables, &mut meta.space, meta.epoch, NO_ACCOUNT);
                let mut editor = Editor { tables, space, epoch, until, confirmed, account };
                let of_origin = volume.record.origin_record.is_some();
                let done = editor.reap_step(&mut volume.record)?;
                if correct!(done, Bug::ReapedRootStays => false) {
                    // Exceptions may take more steps: a checkpoint in between must not point to freed
                    // tables.
                    volume.record.root = MapEntry::ABSENT;
                }
                match done {
                    true if of_origin => exceptions::release_origin(meta, id),
                    true => exceptions::release_exceptions(meta, id),
                    false => Ok(false),
                }
            })
            .await?;
        if done {
            let mut meta = upkeep.store.meta.borrow_mut();
            if meta.directory.get(id).is_some() {
                remove_dead(&mut meta, id);
                upkeep.store.counters.reaped.add(1);
                upkeep.store.reaped.notify();
                upkeep.gathering.forget(id);
            }
            return Ok(());
        }
    }
    Ok(())
}

/// Unmaps from the new end to the old one. Holes are skipped as a whole without a record, so a turn can
/// restart at the new end: no cursor is stored. False if there is no space for the tables that have to be
/// changed.
async fn reap_tail<D: Device>(upkeep: &Rc<Upkeep<D>>, id: VolumeId) -> Result<bool> {
    let (mut seen, mut at, mut tried) = (None, 0, false);
    for _ in 0..PIECES_PER_TURN {
        let step = upkeep
            .store
            .retry_on_miss(|meta| {
                let _ = reserve_for(meta, id, Need::Step)?;
                let Some((mut editor, record)) = meta.editor_for(id) else { return Ok(true) };
                if !matches!(record.state, VolumeState::Volume | VolumeState::Orphan) {
                    return Ok(true);
                }
                if seen != Some((record.size, record.shared_at)) {
                    // Shrunk again, or replaced, meanwhile.
                    seen = Some((record.size, record.shared_at));
                    at = pages_of(record.size);
                }
                let (end, mapped) = (pages_of(record.trim_end), record.referenced);
                let mut from = at;
                while at < end && record.referenced == mapped {
                    from = at;
                    at = editor.unmap_step(record, VirtualPage(at), VirtualPage(end))?.0;
                }
                if record.referenced == mapped {
                    record.trim_end = 0;
                    meta.directory.update_tail(id);
                    return Ok(true);
                }
                meta.journal.append(&Record::Unmap { volume: id, at: VirtualPage(from), len: at - from });
                Ok(false)
            })
            .await;
        match step {
            Ok(true) => return Ok(true),
            Ok(false) => tried = false,
            Err(EditError::NoSpace) if tried => return Ok(false),
            Err(EditError::NoSpace) => {
                tried = true;
                upkeep
                    .store
                    .unless_blocked(upkeep.store.clone().patient_checkpoint())
                    .await
                    .or_else(ignore_no_space)?;
            }
            Err(EditError::Error(e)) => return Err(e),
        }
    }
    Ok(true)
}

async fn free_everything<D: Device>(upkeep: Rc<Upkeep<D>>) -> Result<()> {
    upkeep.start_reaping();
    while upkeep.store.reaping.get() {
        upkeep.store.reaped.wait().await;
    }
    upkeep.store.check_writable()?;
    upkeep.store.clone().checkpoint().await?;
    // The first may have been frozen before the last piece was freed; tables it replaced come with the
    // next.
    upkeep.store.clone().checkpoint().await
}
