//! Default places of a daemon's sockets, and the search for them.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forkdisk::{PAGE_SIZE, Recorded, SUPERBLOCK_AT};

use forkdisk::uuid_text;

/// File name of the data socket in the pool's private folder.
const DATA: &str = "nbd.sock";
/// File name of the control socket in that folder.
const CONTROL: &str = "control.sock";

/// The folder for the sockets of one pool, accessible to this user only. Dropping it removes the
/// folder if it is empty.
pub struct PrivateDir {
    path: PathBuf,
}

impl PrivateDir {
    /// Creates `/run/forkdisk/UUID` for root, `$XDG_RUNTIME_DIR/forkdisk/UUID` (or
    /// `/run/user/UID/forkdisk/UUID`) for others.
    ///
    /// # Errors
    /// The folder cannot be created, or belongs to another user.
    pub fn make(uuid: &[u8; 16]) -> io::Result<PrivateDir> {
        let root = own_root().ok_or_else(|| {
            let text = "there is no folder for the sockets: XDG_RUNTIME_DIR is not set and /run/user has none for \
                        this user; --socket and --control put them elsewhere";
            io::Error::new(io::ErrorKind::NotFound, text)
        })?;
        let path = root.join("forkdisk").join(uuid_text(uuid));
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.and_then(|()| own(&path)).map_err(|e| {
            let text = format!(
                "{}: the folder for the sockets cannot be made ({e}); --socket and --control put them elsewhere",
                path.display()
            );
            io::Error::new(e.kind(), text)
        })?;
        Ok(PrivateDir { path })
    }

    /// Returns the path of the data socket.
    pub fn data(&self) -> PathBuf {
        self.path.join(DATA)
    }

    /// Returns the path of the control socket.
    pub fn control(&self) -> PathBuf {
        self.path.join(CONTROL)
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        // Fails if other files are in it; the folder stays then.
        let _ = fs::remove_dir(&self.path);
    }
}

/// Returns folders of this pool that may be in memory, the default first: its run-time folder, and
/// one below `/dev/shm`.
pub fn folders_in_memory(uuid: &[u8; 16]) -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let shared = PathBuf::from(format!("/dev/shm/forkdisk-{user}"));
    own_root().map(|root| root.join("forkdisk")).into_iter().chain([shared]).map(|f| f.join(uuid_text(uuid))).collect()
}

/// Creates a folder and its parents, accessible to this user only.
///
/// # Errors
/// A folder cannot be created, or its mode cannot be set.
pub fn make_private(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    path.parent().map_or(Ok(()), |above| if above.starts_with("/dev/shm") { own(above) } else { Ok(()) })?;
    own(path)
}

/// Returns the path of the pool's control socket in this user's run-time folder, whether it exists or not.
pub fn own_control(uuid: &[u8; 16]) -> Option<PathBuf> {
    Some(control_in(&own_root()?, uuid))
}

/// Returns existing paths where the control socket of pool `uuid` may be, most likely first.
/// For root that includes other users' folders.
pub fn control_candidates(uuid: &[u8; 16]) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = own_root().into_iter().chain([PathBuf::from("/run")]).collect();
    if is_root() {
        roots.extend(xdg_runtime_dir());
        let users = fs::read_dir("/run/user").into_iter().flatten().flatten();
        roots.extend(users.map(|user| user.path()));
    }
    let mut found: Vec<PathBuf> = Vec::new();
    for path in roots.iter().map(|root| control_in(root, uuid)) {
        if fs::symlink_metadata(&path).is_ok() && !found.contains(&path) {
            found.push(path);
        }
    }
    found
}

fn control_in(root: &Path, uuid: &[u8; 16]) -> PathBuf {
    root.join("forkdisk").join(uuid_text(uuid)).join(CONTROL)
}

/// Reads the identity of the pool at `path` without opening it as a pool. `None` if it cannot be
/// read or is not a pool.
pub fn pool_identity(path: &Path) -> Option<[u8; 16]> {
    recorded(path).map(|recorded| recorded.uuid)
}

/// Reads the newest superblock of the pool at `path`, as [`pool_identity`] does.
pub fn recorded(path: &Path) -> Option<Recorded> {
    superblocks(path, forkdisk::recorded)?.into_iter().max_by_key(|recorded| recorded.generation)
}

/// Applies `look` to the superblocks of the pool at `path`.
fn superblocks<T>(path: &Path, look: fn(usize, &[u8]) -> Option<T>) -> Option<Vec<T>> {
    // Opening a pipe would block.
    let kind = fs::metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let file = File::open(path).ok()?;
    let mut page = vec![0; PAGE_SIZE];
    let found = SUPERBLOCK_AT.iter().enumerate().filter_map(|(slot, &at)| {
        file.read_exact_at(&mut page, at).ok()?;
        look(slot, &page)
    });
    Some(found.collect())
}

/// Returns a text that identifies the file or block device at `path` on this machine, whatever its path.
///
/// # Errors
/// The file does not exist or cannot be examined.
pub fn file_identity(path: &Path) -> io::Result<String> {
    let found = fs::metadata(path)?;
    Ok(match found.file_type().is_block_device() {
        true => format!("block:{}", found.rdev()),
        false => format!("file:{}:{}", found.dev(), found.ino()),
    })
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn xdg_runtime_dir() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()).map(PathBuf::from)
}

fn own_root() -> Option<PathBuf> {
    if is_root() {
        return Some(PathBuf::from("/run"));
    }
    let usual = || Some(PathBuf::from(format!("/run/user/{}", rustix::process::geteuid().as_raw())));
    xdg_runtime_dir().or_else(|| usual().filter(|dir| dir.is_dir()))
}

/// Closes a folder to other users; fails if it existed and belongs to another user.
fn own(path: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to another user"));
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_was_open_to_others_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        own(dir.path()).unwrap();
        assert_eq!(fs::metadata(dir.path()).unwrap().mode() & 0o777, 0o700);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        assert!(own(&link).is_err(), "a link is not a folder of ours");
    }

    #[test]
    fn what_is_no_pool_has_no_identity() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(pool_identity(dir.path()), None);
        let path = dir.path().join("file");
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        assert_eq!(pool_identity(&path), None);
    }
}
