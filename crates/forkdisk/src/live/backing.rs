//! Whether an open volume still reads its backing.

use std::cell::Cell;

use crate::sync::Event;

/// State of the separation of a volume from its backing.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum BackingStage {
    /// Reads of unmapped pages go to the backing.
    #[default]
    InUse,
    /// The volume has pages for everything: the backing is not read any more. A hole would still show it
    /// after a crash.
    Unused,
    /// The volume has no backing.
    Removed,
}

/// Whether a volume still has a backing, and the number of its readers.
#[derive(Default)]
pub struct BackingState {
    stage: Cell<BackingStage>,
    lookers: Cell<usize>,
    left: Event,
}

/// A read of the backing under way.
pub struct BackingReader<'a>(&'a BackingState);

impl Drop for BackingReader<'_> {
    fn drop(&mut self) {
        self.0.lookers.set(self.0.lookers.get() - 1);
        if self.0.lookers.get() == 0 {
            self.0.left.notify();
        }
    }
}

impl BackingState {
    /// A read of the backing begins.
    pub fn reader(&self) -> BackingReader<'_> {
        self.lookers.set(self.lookers.get() + 1);
        BackingReader(self)
    }

    /// Stops new reads of the backing and waits for those under way.
    pub async fn stop_readers(&self) {
        self.stage.set(BackingStage::Unused);
        while self.lookers.get() > 0 {
            self.left.wait().await;
        }
    }

    /// The change could not be made durable: reads go to the backing again.
    pub fn reopen(&self) {
        self.stage.set(BackingStage::InUse);
    }

    /// The volume has no backing from now on.
    pub fn remove(&self) {
        self.stage.set(BackingStage::Removed);
    }

    /// The volume gets another backing; it must have no handle.
    pub fn reset(&self) {
        debug_assert_eq!(self.lookers.get(), 0);
        self.stage.set(BackingStage::InUse);
    }

    /// Whether reads of unmapped pages go to the backing.
    pub fn is_read(&self) -> bool {
        self.stage.get() == BackingStage::InUse
    }

    /// Whether the volume has no backing any more.
    pub fn is_removed(&self) -> bool {
        self.stage.get() == BackingStage::Removed
    }
}
