//! Verbs of many volumes: each checks everything before it changes anything, and is one transaction.

use crate::catalog::{
    CreateOptions, ForkOptions, VolumeInfo, check_chunk, check_gather, check_new_names, check_quota, check_size,
    creation, new_ids,
};
use crate::device::Device;
use crate::error::Result;

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
        options.extension.check()?;
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
        self.store.meta.borrow().directory.find(source)?;
        self.fork(source, names, &ForkOptions::new(now)).await
    }
}
