//! The service manager's store of descriptors as keeper (`FileDescriptorStoreMax=`). The manager starts the daemon
//! again and hands over what was stored.
//!
//! Each mount has four descriptors: how it was requested, as JSON in a file in memory, its connection to the
//! kernel, and the two files of its record; and a fifth one if it has a request log. Their names are a hash of the
//! mount point and a number.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use forkdisk_control::params;
use forkdisk_uring::Inherited;
use rustix::fs::{MemfdFlags, memfd_create};
use xxhash_rust::xxh3::xxh3_64;

use super::{Descriptors, Left};
use crate::daemon::notify::Notifier;

/// Prefix of the names.
const PREFIX: &str = "forkdisk-mount-";
/// Most descriptors of a mount.
const DESCRIPTORS_COUNT: usize = 5;
/// Number of the request log.
const LOG_INDEX: usize = 4;

/// Returns whether a descriptor of this name comes from the store.
pub fn is_of_store(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// The store.
pub struct Store(Rc<Notifier>);

impl Store {
    pub fn new(notifier: Rc<Notifier>) -> Store {
        Store(notifier)
    }

    pub fn hold(&self, mount: &params::Mount, descriptors: Descriptors<'_>) -> Result<()> {
        let mut request = File::from(memfd_create("forkdisk-mount", MemfdFlags::CLOEXEC)?);
        request.write_all(&serde_json::to_vec(mount)?)?;
        self.release(Path::new(&mount.dir))?;
        let Descriptors { connection, record: [a, b], log } = descriptors;
        // Before the record, without which the mount is incomplete.
        let log = log.map(|log| (LOG_INDEX, log));
        let others = [request.as_fd(), connection, a, b].into_iter().enumerate();
        for (number, fd) in log.into_iter().chain(others) {
            // The manager would poll the connection, and be woken by each request on it.
            let text = format!("FDSTORE=1\nFDNAME={}\nFDPOLL=0", name_of(Path::new(&mount.dir), number));
            self.0.send(&text, fd).context("storing a mount with the service manager")?;
        }
        Ok(())
    }

    pub fn release(&self, dir: &Path) -> Result<()> {
        for number in 0..DESCRIPTORS_COUNT {
            self.0.say(&format!("FDSTOREREMOVE=1\nFDNAME={}", name_of(dir, number)));
        }
        Ok(())
    }
}

fn name_of(dir: &Path, number: usize) -> String {
    format!("{PREFIX}{:016x}-{number}", xxh3_64(dir.as_os_str().as_encoded_bytes()))
}

/// Returns the mounts among the descriptors that the manager handed over. Incomplete ones are left out: the daemon was
/// killed while it stored them.
pub fn left(handed: Vec<Inherited>) -> Vec<Left> {
    let mut groups: BTreeMap<String, BTreeMap<String, OwnedFd>> = BTreeMap::new();
    for Inherited { name, fd } in handed {
        let Some((group, number)) = name.rsplit_once('-') else { continue };
        groups.entry(group.to_string()).or_default().insert(number.to_string(), fd);
    }
    let whole = |(_, group): (String, BTreeMap<String, OwnedFd>)| {
        let mut fds = group.into_values();
        // In the order of their numbers.
        let (request, connection, a, b) = (fds.next()?, fds.next()?, fds.next()?, fds.next()?);
        let (mut request, mut text) = (File::from(request), Vec::new());
        request.rewind().and_then(|()| request.read_to_end(&mut text)).ok()?;
        Some(Left { mount: serde_json::from_slice(&text).ok()?, connection, record: [a, b], log: fds.next() })
    };
    groups.into_iter().filter_map(whole).collect()
}
