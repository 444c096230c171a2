//! The reaper: frees the space of dead volumes, and of the tails of volumes that shrank, in the background.
//! Works in small steps; other tasks run in between.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{MapEntry, Record, VolumeState};
use crate::map::Editor;
use crate::planted::{Bug, planted};
use crate::sync::LockMode;
use crate::types::{VirtualPage, VolumeId};

use crate::space::Need;

use super::{EditError, Inner, Meta, pages_of};

/// Pieces (of at most 256 pages) freed before other tasks run.
const PIECES_PER_TURN: usize = 16;

/// The next work of the reaper.
enum ReapWork {
    Dead(VolumeId),
    Tail(VolumeId),
}

impl<D: Device> Inner<D> {
    /// Starts the reaper if it does not run and there is work.
    pub fn reap_soon(self: &Rc<Self>) {
        if !self.opened.get() || self.options.read_only || next_work(&self.meta.borrow()).is_none() {
            return;
        }
        if self.reaping.replace(true) {
            return;
        }
        let inner = self.clone();
        self.runtime.spawn(Box::pin(async move {
            // A closing pool refuses the requests of the reaper; the next open continues.
            if let Err(error) = inner.reap().await
                && !inner.closed.get()
            {
                inner.fail(&error);
            }
            inner.reaping.set(false);
            inner.reaped.notify();
            inner.host_enospc.retry_now();
        }));
    }

    /// A closing pool leaves the work to the next open, unless closing needs the space that only this frees.
    fn may_reap(&self) -> bool {
        let goes_on = !self.closing.get() || self.full.get();
        goes_on && !self.closed.get() && self.failed.borrow().is_none()
    }

    async fn reap(self: &Rc<Self>) -> Result<()> {
        loop {
            if !self.may_reap() {
                return Ok(());
            }
            // A wait for space on the host may end by what is freed here.
            self.unless_blocked(self.wait_below_dirty_limit()).await.or_else(ignore_no_space)?;
            let turn = self.reap_lock.lock(0..1, LockMode::Exclusive).await;
            let work = next_work(&self.meta.borrow());
            match work {
                None => return Ok(()),
                Some(ReapWork::Dead(id)) => self.reap_dead(id).await?,
                // On a full pool it continues after a checkpoint has returned space.
                Some(ReapWork::Tail(id)) if !self.reap_tail(id).await? => return Ok(()),
                Some(ReapWork::Tail(_)) => {}
            }
            drop(turn);
            yield_now().await;
        }
    }

    async fn reap_dead(&self, id: VolumeId) -> Result<()> {
        for _ in 0..PIECES_PER_TURN {
            let done = self
                .retry_no_alloc(|meta| {
                    let Some(volume) = meta.directory.change(id) else { return Ok(true) };
                    if planted(Bug::DeleteKeepsCounts) {
                        return Ok(true);
                    }
                    // The record of the deletion was published before.
                    let (until, confirmed) = (meta.journal.next(), meta.journal.durable_seq());
                    let mut editor = Editor {
                        tables: &mut meta.tables,
                        space: &mut meta.space,
                        epoch: meta.epoch,
                        until,
                        confirmed,
                    };
                    let of_origin = volume.record.origin_record.is_some();
                    let done = editor.reap_step(&mut volume.record)?;
                    if done && !planted(Bug::ReapedRootStays) {
                        // Exceptions may take more steps: a checkpoint in between must not point to freed
                        // tables.
                        volume.record.root = MapEntry::ABSENT;
                    }
                    match done {
                        true if of_origin => meta.release_origin(id),
                        true => meta.release_exceptions(id),
                        false => Ok(false),
                    }
                })
                .await?;
            if done {
                let mut meta = self.meta.borrow_mut();
                if meta.directory.get(id).is_some() {
                    meta.directory.remove(id);
                    self.counters.reaped.add(1);
                    self.gathering.forget(id);
                }
                return Ok(());
            }
        }
        Ok(())
    }

    /// Unmaps from the new end to the old one. Holes are skipped as a whole without a record, so a turn can
    /// restart at the new end: no cursor is stored. False if there is no space for the tables that have to be
    /// changed.
    async fn reap_tail(self: &Rc<Self>, id: VolumeId) -> Result<bool> {
        let (mut seen, mut at, mut tried) = (None, 0, false);
        for _ in 0..PIECES_PER_TURN {
            let step = self
                .retry_on_miss(|meta| {
                    let _ = meta.reserve(Need::Step)?;
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
                    self.unless_blocked(self.clone().patient_checkpoint()).await.or_else(ignore_no_space)?;
                }
                Err(EditError::Error(e)) => return Err(e),
            }
        }
        Ok(true)
    }

    /// Waits until all deleted space is free and reusable; returns ENOSPC when the host file system is full,
    /// though the work goes on.
    pub async fn wait_freed(self: Rc<Self>) -> Result<()> {
        self.unless_blocked(self.clone().free_everything()).await
    }

    async fn free_everything(self: Rc<Self>) -> Result<()> {
        self.reap_soon();
        while self.reaping.get() {
            self.reaped.wait().await;
        }
        self.check_writable()?;
        self.clone().checkpoint().await?;
        // The first may have been frozen before the last piece was freed; tables it replaced come with the
        // next.
        self.checkpoint().await
    }
}

/// A full host does not stop the reaper.
pub(super) fn ignore_no_space(error: Error) -> Result<()> {
    if error.kind() == ErrorKind::NoSpace { Ok(()) } else { Err(error) }
}

fn next_work(meta: &Meta) -> Option<ReapWork> {
    let directory = &meta.directory;
    directory.first_dead().map(ReapWork::Dead).or_else(|| directory.first_tail().map(ReapWork::Tail))
}

/// Lets every other ready task run first.
pub async fn yield_now() {
    struct Yield(bool);
    impl Future for Yield {
        type Output = ();
        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            if std::mem::replace(&mut self.0, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    }
    Yield(false).await;
}
