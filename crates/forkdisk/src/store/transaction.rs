//! Changes of many records: one transaction, so that a crash leaves all of it or nothing, and it costs one commit.
//!
//! The records are one record in the journal ([`Record::Transaction`]), applied and appended in one synchronous
//! section. A transaction that does not fit into the journal is made durable by a checkpoint, which begins after all
//! of it was applied.

use std::rc::Rc;

use crate::catalog::Catalog;
use crate::device::Device;
use crate::error::{ErrorKind, Result};
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
    store
        .clone()
        .checkpoint()
        .await
        .map_err(|error| if error.kind() == ErrorKind::NoSpace { refused } else { error })?;
    store.check_writable()?;
    change(&mut store.meta.borrow_mut())
}
