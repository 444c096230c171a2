//! Changes of many records: one transaction, so that a crash leaves all of it or nothing, and it costs one commit.
//!
//! The records are one record in the journal ([`Record::Transaction`]), applied and appended in one synchronous
//! section. A transaction that does not fit into the journal is made durable by a checkpoint, which begins after all
//! of it was applied.

use std::rc::Rc;

use crate::catalog::Catalog;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Record;
use crate::planted::correct;

use super::Store;

impl<D: Device> Store<D> {
    /// Runs one verb: `decide` checks and returns the records, which are applied together and made durable.
    pub async fn verb_of_parts<T>(
        self: &Rc<Self>,
        mut decide: impl FnMut(&mut Catalog) -> Result<(Vec<Record>, T)>,
    ) -> Result<T> {
        let value = retry_after_checkpoint(self, |meta| {
            let (parts, value) = decide(meta)?;
            self.publish_parts(meta, parts)?;
            Ok(value)
        })
        .await?;
        self.clone().commit().await?;
        Ok(value)
    }

    /// Applies `parts` and appends them to the journal as one record; the caller commits.
    pub fn publish_parts(&self, meta: &mut Catalog, parts: Vec<Record>) -> Result<()> {
        match &parts[..] {
            [] => Ok(()),
            [only] => self.publish(meta, only),
            _ => correct!(
                self.publish(meta, &Record::Transaction { parts }),
                Bug::TransactionSplitInVolatileLog => parts.iter().try_for_each(|part| self.publish(meta, part)),
                Bug::TransactionSplitOverGroups => parts.iter().try_for_each(|part| publish_apart(self, meta, part))
            ),
        }
    }
}

/// Publishes a part in a group of its own.
#[cfg(feature = "planted")]
fn publish_apart<D: Device>(store: &Store<D>, meta: &mut Catalog, part: &Record) -> Result<()> {
    meta.journal.mark();
    store.publish(meta, part)
}

/// Runs `change`, a synchronous section that publishes. If that finds no space, once more after a checkpoint:
/// what the checkpoint has written needs no space any more, and what it released is free.
pub async fn retry_after_checkpoint<D: Device, T>(
    store: &Rc<Store<D>>,
    mut change: impl FnMut(&mut Catalog) -> Result<T>,
) -> Result<T> {
    store.check_writable()?;
    let refused = match change(&mut store.meta.borrow_mut()) {
        Err(error) if error.kind() == ErrorKind::NoSpace => error,
        done => return done,
    };
    checkpoint_for_space(store, refused).await?;
    store.check_writable()?;
    change(&mut store.meta.borrow_mut())
}

/// After a change was `refused` for lack of space: a checkpoint, which may make it possible. Does not wait for a full
/// host file system: the change may be what ends the shortage.
pub async fn checkpoint_for_space<D: Device>(store: &Rc<Store<D>>, refused: Error) -> Result<()> {
    match store.unless_blocked(store.clone().patient_checkpoint()).await {
        Err(error) if error.kind() == ErrorKind::NoSpace => Err(refused),
        ended => ended,
    }
}

/// Before a change that cannot wait: on a pool with little free space, and at least `pages` to be written by the next
/// checkpoint, a checkpoint.
pub async fn prepare_change<D: Device>(store: &Rc<Store<D>>, pages: u64) {
    if store.check_writable().is_ok() && store.meta.borrow().is_short_of_space(pages) {
        // The change itself tells what is wrong.
        let _ = store.unless_blocked(store.clone().patient_checkpoint()).await;
    }
}
