//! Changes of many records: one transaction, so that a crash leaves all of it or nothing, and it costs one commit.
//!
//! The records are one record in the journal ([`Record::Transaction`]), applied and appended in one synchronous
//! section. A transaction that does not fit into the journal is made durable by a checkpoint, which begins after all
//! of it was applied.

use std::rc::Rc;

use crate::catalog::{Catalog, directory};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Record;
use crate::planted::{Bug, planted};
use crate::space::Need;
use crate::types::PAGE_SIZE;

use super::Store;

impl<D: Device> Store<D> {
    /// Runs one verb: `decide` checks and returns the records, which are applied together and made durable.
    pub async fn verb_of_parts<T>(
        self: &Rc<Self>,
        decide: impl FnOnce(&mut Catalog) -> Result<(Vec<Record>, T)>,
    ) -> Result<T> {
        self.check_writable()?;
        let value = {
            let mut meta = self.meta.borrow_mut();
            let (parts, value) = decide(&mut meta)?;
            self.publish_parts(&mut meta, parts)?;
            value
        };
        self.clone().commit().await?;
        Ok(value)
    }

    /// Applies `parts` and appends them to the journal as one record; the caller commits.
    pub fn publish_parts(&self, meta: &mut Catalog, parts: Vec<Record>) -> Result<()> {
        match &parts[..] {
            [] => Ok(()),
            [only] => self.publish(meta, only),
            _ if planted(Bug::TransactionSplitInVolatileLog) || planted(Bug::TransactionSplitOverGroups) => {
                parts.iter().try_for_each(|part| {
                    if planted(Bug::TransactionSplitOverGroups) {
                        meta.journal.mark();
                    }
                    self.publish(meta, part)
                })
            }
            _ => {
                admit_volumes(meta, &parts)?;
                self.publish(meta, &Record::Transaction { parts })
            }
        }
    }
}

/// Refuses a transaction of new volumes for which the next checkpoint would find no space.
fn admit_volumes(meta: &Catalog, parts: &[Record]) -> Result<()> {
    let is_new = |part: &&Record| matches!(part, Record::Create { .. } | Record::Clone { .. } | Record::Protect { .. });
    let volumes = parts.iter().filter(is_new).count();
    if volumes == 0 {
        return Ok(());
    }
    // Each page of the directory that changes, that of the source among them, with a table above it.
    let pages = meta.checkpoint_pages() + 2 * (directory::pages_for(&meta.directory, volumes) + 1);
    match meta.space.reserve(Need::Step, pages) {
        Ok(_) => Ok(()),
        Err(_) => {
            let [needs, has] = [pages, meta.space.available()].map(|pages| pages * PAGE_SIZE as u64);
            let new = if volumes == 1 { "1 new volume needs" } else { &format!("{volumes} new volumes need") };
            let why = format!("{new} {needs} bytes of free space at once, and the pool has {has}");
            Err(Error::new(ErrorKind::NoSpace, format!("{why}; free some, grow the pool, or name fewer")))
        }
    }
}
