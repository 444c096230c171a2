//! Verbs of many volumes: each checks everything before it changes anything, and is one transaction.

use crate::catalog::{
    Catalog, CreateOptions, VolumeInfo, check_chunk, check_gather, check_new_names, check_quota, check_size, creation,
    new_ids,
};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Record, VolumeState};
use crate::store::transaction::retry_after_checkpoint;
use crate::types::VolumeId;

use super::Pool;

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
