//! Verbs of many volumes: each checks everything before it changes anything, and is one transaction.

use std::collections::BTreeSet;

use crate::catalog::directory::Directory;
use crate::catalog::{Catalog, VolumeInfo, check_chunk, check_gather, check_quota, check_size};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BreakPolicy, GatherPolicy, NO_VOLUME, Record, Throttle, VolumeState};
use crate::store::transaction::retry_after_checkpoint;
use crate::types::VolumeId;

use super::{CreateOptions, Pool};

impl<D: Device> Pool<D> {
    /// Creates empty volumes with the same options, all or none.
    ///
    /// # Errors
    /// `Exists` if a name is taken or given twice, `Invalid` for a bad name or option; and those of
    /// [changing](crate#errors).
    pub async fn create_all(&self, names: &[&str], options: &CreateOptions) -> Result<Vec<VolumeInfo>> {
        check_size(options.size)?;
        check_chunk(options.chunk)?;
        check_quota(options.quota)?;
        check_gather(options.gather)?;
        let ids = self
            .store
            .verb_of_parts(|meta| {
                check_new_names(&meta.directory, names)?;
                let ids = new_ids(meta, names.len());
                let parts = names.iter().zip(&ids).flat_map(|(name, &id)| creation(id, name, options)).collect();
                Ok((parts, ids))
            })
            .await?;
        ids.into_iter().map(|id| self.store.info(id)).collect()
    }

    /// Creates writable volumes with the contents of a volume or snapshot, all or none, all of one instant, in a
    /// time that does not depend on its size.
    ///
    /// # Errors
    /// `NotFound` if there is no such source, `Exists` if a name is taken or given twice, `Invalid` for an origin or a
    /// bad name; and those of [changing](crate#errors).
    pub async fn clone_all(&self, source: &str, names: &[&str], now: u64) -> Result<Vec<VolumeInfo>> {
        let new_clones = |meta: &mut Catalog| {
            let record = &meta.directory.find(source)?.record;
            let from = record.id;
            if record.state == VolumeState::Origin {
                let why = format!("{source:?} is an origin; take a snapshot of it and clone that");
                return Err(Error::new(ErrorKind::Invalid, why));
            }
            check_new_names(&meta.directory, names)?;
            let ids = new_ids(meta, names.len());
            let clone =
                |(name, &id): (&&str, &VolumeId)| Record::Clone { source: from, id, name: name.to_string(), now };
            self.store.publish_parts(meta, names.iter().zip(&ids).map(clone).collect())?;
            for &id in &ids {
                meta.directory.get_mut(id).expect("just made").pending = true;
                self.store.hooks.note_cloned(meta, from, id);
            }
            Ok(ids)
        };
        let ids = retry_after_checkpoint(&self.store, new_clones).await?;
        self.store.generations.barrier().await;
        let committed = self.store.clone().commit().await;
        for &id in &ids {
            self.store.meta.borrow_mut().directory.show(id);
        }
        committed?;
        ids.into_iter().map(|id| self.store.info(id)).collect()
    }
}

/// The numbers of the next `count` volumes.
fn new_ids(meta: &Catalog, count: usize) -> Vec<VolumeId> {
    (meta.next_id..).take(count).map(VolumeId).collect()
}

/// The records that create a volume with these options.
fn creation(id: VolumeId, name: &str, options: &CreateOptions) -> impl Iterator<Item = Record> {
    let CreateOptions { size, chunk, now, break_policy, quota, gather } = *options;
    let throttle = Throttle::NONE;
    let create = Record::Create { id, name: name.to_string(), size, chunk, now };
    let copying = (break_policy != BreakPolicy::Split).then_some(Record::SetCopying { id, break_policy, throttle });
    let limit = (quota != 0).then_some(Record::SetQuota { id, quota });
    let gather = (gather != GatherPolicy::Off).then_some(Record::SetGather { id, gather });
    [Some(create), copying, limit, gather].into_iter().flatten()
}

/// Checks whether all of these names may be given to new volumes together.
fn check_new_names(directory: &Directory, names: &[&str]) -> Result<()> {
    let mut new = BTreeSet::new();
    for &name in names {
        directory.check_new(NO_VOLUME, name)?;
        if !new.insert(name) {
            return Err(Error::new(ErrorKind::Exists, format!("{name:?} is named twice; choose another name")));
        }
    }
    for &name in names {
        let mut above = name.match_indices('/').map(|(i, _)| &name[..i]);
        if let Some(volume) = above.find(|above| new.contains(above)) {
            let why = format!("{name:?} would lie in {volume:?}, which is to be a volume and not a folder");
            return Err(Error::new(ErrorKind::Exists, format!("{why}; choose another name")));
        }
    }
    Ok(())
}
