//! Place of a pool's volatile log: a file in memory that outlives the daemon, in the pool's
//! run-time folder, or below `/dev/shm` if that folder is not in memory.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forkdisk::{VolatileLog, VolatileMemory};
use forkdisk_control::runtime_dir;
use forkdisk_uring::SharedMemory;

use crate::host;

/// Default commit interval: how long an acknowledged write waits at most before it is committed.
pub const COMMIT_INTERVAL: Duration = Duration::from_secs(5);
/// Size of the file: a page and two areas of 1 MiB, each for about 20,000 records. A commit begins
/// when an area is half full.
const SPARE_BYTES: usize = 4096 + (2 << 20);
/// Prefix of its name; the rest identifies the file or device of the pool, since a copy of a pool
/// has the same UUID.
const NAME: &str = "volatile";

/// The file of a pool's volatile log; empty if there is none.
#[derive(Default)]
pub struct VolatileFile {
    log: Option<VolatileLog>,
    path: PathBuf,
}

impl VolatileFile {
    /// Opens the volatile log for the pool at `path`; creates it if `write` is set. Empty if none
    /// was left and `write` is not set, or if no folder is in memory: a crash of the process then
    /// loses what a crash of the machine would.
    pub fn of(path: &Path, write: bool) -> VolatileFile {
        // A file that is not a pool is refused when it is opened.
        let (Some(uuid), Ok(identity)) = (runtime_dir::pool_identity(path), identity(path)) else {
            return VolatileFile::default();
        };
        let mut folders = runtime_dir::folders_in_memory(&uuid).into_iter();
        let volatile_file = folders.find_map(|folder| open(&folder, identity, write)).unwrap_or_default();
        if write && volatile_file.log.is_none() {
            tracing::warn!(
                "there is no folder in memory for the pool's volatile log: a crash of this process may lose what was \
                 acknowledged since the last flush, as a crash of the machine does"
            );
        }
        volatile_file
    }

    /// Returns the log for the pool's options.
    pub fn log(&self) -> Option<VolatileLog> {
        self.log.clone()
    }

    /// Removes the file. Called after a clean close, while the pool's device is still locked: no
    /// other process can have created a new file for the pool by then.
    pub fn remove(&self) {
        if self.log.is_some() {
            let _ = fs::remove_file(&self.path);
            let _ = self.path.parent().map(fs::remove_dir);
        }
    }
}

fn open(folder: &Path, identity: [u8; 32], write: bool) -> Option<VolatileFile> {
    let number = |from: usize| u64::from_le_bytes(identity[from..from + 8].try_into().expect("eight bytes"));
    let path = folder.join(format!("{NAME}-{:x}-{:x}", number(16), number(24)));
    let made = if write { runtime_dir::make_private(folder) } else { Ok(()) };
    match made.and_then(|()| SharedMemory::open(&path, SPARE_BYTES, write)) {
        Ok(memory) => {
            let log = VolatileLog::new(VolatileMemory::new(memory?), identity).with_write(write);
            Some(VolatileFile { log: Some(log), path })
        }
        Err(error) => {
            tracing::debug!(folder = %folder.display(), %error, "no volatile log");
            None
        }
    }
}

/// Returns what the log belongs to besides the pool: this boot, and the pool's file or device.
fn identity(path: &Path) -> io::Result<[u8; 32]> {
    let mut out = [0; 32];
    out[..16].copy_from_slice(&host::boot_id()?);
    let found = fs::metadata(path)?;
    let found = if found.file_type().is_block_device() { behind_loop(&found).unwrap_or(found) } else { found };
    let device = found.file_type().is_block_device();
    let (a, b) = if device { (found.rdev(), 0) } else { (found.dev(), found.ino()) };
    out[16..24].copy_from_slice(&a.to_le_bytes());
    out[24..].copy_from_slice(&b.to_le_bytes());
    Ok(out)
}

/// Returns the file behind a loop device that shows all of it: both are the same pool.
fn behind_loop(device: &fs::Metadata) -> Option<fs::Metadata> {
    let (major, minor) = (rustix::fs::major(device.rdev()), rustix::fs::minor(device.rdev()));
    let read = |file: &str| fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/loop/{file}")).ok();
    let backing = read("backing_file").filter(|_| read("offset").is_some_and(|offset| offset.trim() == "0"))?;
    fs::metadata(backing.trim_end_matches('\n')).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_files_have_two_identities_and_one_has_one() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&a, "1").unwrap();
        fs::write(&b, "1").unwrap();
        let link: PathBuf = dir.path().join("c");
        fs::hard_link(&a, &link).unwrap();
        assert_ne!(identity(&a).unwrap(), identity(&b).unwrap());
        assert_eq!(identity(&a).unwrap(), identity(&link).unwrap());
        assert_ne!(identity(&a).unwrap()[..16], [0; 16]);
    }
}
