//! Where a server's sockets lie when nobody says otherwise.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::record::uuid_text;

/// The socket's file name in the pool's own folder.
const SOCKET: &str = "nbd.sock";

/// The folder for the sockets of one pool, which only this user may enter. Removed when dropped, if
/// nothing else is in it.
pub struct PrivateDir {
    path: PathBuf,
}

impl PrivateDir {
    /// Makes `/run/forkdisk/UUID` for root, `$XDG_RUNTIME_DIR/forkdisk/UUID` for others.
    pub fn make(uuid: &[u8; 16]) -> Result<PrivateDir> {
        let root = runtime_dir()?;
        let path = root.join("forkdisk").join(uuid_text(uuid));
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.and_then(|()| own(&path)).with_context(|| {
            format!("{}: the folder for the socket cannot be made; --socket puts it elsewhere", path.display())
        })?;
        Ok(PrivateDir { path })
    }

    /// The NBD socket's place.
    pub fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        // Somebody else's file in it is reason enough to leave it.
        let _ = fs::remove_dir(&self.path);
    }
}

fn runtime_dir() -> Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from("/run"));
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => Ok(PathBuf::from(dir)),
        None => bail!("XDG_RUNTIME_DIR is not set: --socket PATH says where the socket goes"),
    }
}

/// A folder that was there already must be ours, and is closed to others.
fn own(path: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to somebody else"));
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
}
