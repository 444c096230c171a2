//! Lifetimes: volumes and snapshots that are deleted by themselves.

use std::collections::BTreeSet;

use crate::catalog::directory::{extensions, hard_links, remnants};
use crate::catalog::{Catalog, deletable_expired};
use crate::device::Device;
use crate::error::Result;
use crate::format::{Lease, Record};
use crate::types::VolumeId;

use super::Pool;

/// A volume or snapshot that was deleted because it had expired.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Expired {
    /// Its number.
    pub id: VolumeId,
    /// The name that it had.
    pub name: String,
    /// When it expired, in seconds since 1970; 0: it had no such time.
    pub expires: u64,
    /// The lease that has ended, or none.
    pub lease: Option<Lease>,
}

impl<D: Device> Pool<D> {
    /// Deletes the volumes and snapshots that have expired at `now` (seconds since 1970), and those with a lease that
    /// `has_ended`: all that nothing needs, in one transaction. What is in use stays, a volume with a snapshot that has
    /// not expired, and a snapshot of an origin that a volume shows; a later call deletes them. Whether something has
    /// expired is decided when it loses its name, so that what was renewed before stays. Returns what was deleted,
    /// durably.
    ///
    /// # Errors
    /// Those of [changing](crate#errors).
    pub async fn delete_expired(&self, now: u64, has_ended: impl Fn(&Lease) -> bool) -> Result<Vec<Expired>> {
        let is_in_use = |id: VolumeId| self.store.handles(id) > 0;
        let decide = |meta: &Catalog| deletable_expired(meta, now, &has_ended, is_in_use);
        self.store.check_writable()?;
        if decide(&self.store.meta.borrow()).is_empty() {
            return Ok(Vec::new());
        }
        let verb = self.store.verb_of_parts(|meta| {
            let mut ids = decide(meta);
            if ids.is_empty() {
                return Ok((Vec::new(), Vec::new()));
            }
            let gone = ids.iter().map(|&id| expired_of(meta, id, now)).collect();
            let mut idle = remnants::idle_remnants(&meta.directory, &ids);
            idle.retain(|id| !ids.contains(id) && !is_in_use(*id));
            ids.extend(idle);
            let ids = hard_links::with_links(&meta.directory, ids);
            Ok((vec![Record::Delete { ids }], gone))
        });
        let gone = verb.await?;
        self.upkeep.start_reaping();
        Ok(gone)
    }

    /// When the next volume or snapshot expires that has not at `now`, in seconds since 1970.
    pub fn next_expiry(&self, now: u64) -> Option<u64> {
        extensions::next_expiry(&self.store.meta.borrow().directory, now)
    }

    /// Whether anything has expired at `now` that is still there, because something needs it.
    pub fn has_expired(&self, now: u64, has_ended: impl Fn(&Lease) -> bool) -> bool {
        !extensions::expired(&self.store.meta.borrow().directory, now, has_ended).is_empty()
    }

    /// The leases of all volumes and snapshots, each once.
    pub fn leases(&self) -> BTreeSet<Lease> {
        extensions::leases(&self.store.meta.borrow().directory).collect()
    }
}

fn expired_of(meta: &Catalog, id: VolumeId, now: u64) -> Expired {
    let volume = meta.directory.get(id).expect("found just now");
    let extension = volume.extension().cloned().unwrap_or_default();
    let is_due = extension.expires != 0 && extension.expires <= now;
    let (expires, lease) = (extension.expires, extension.lease.filter(|_| !is_due));
    Expired { id, name: meta.directory.full_name(&volume.record), expires, lease }
}
