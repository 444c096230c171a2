//! Where a server's sockets lie and how clients are told.

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

/// The URI of an export, after the NBD project's uri.md. Only characters that may stand in names
/// and paths unescaped stay as they are.
pub fn uri(export: &str, socket: &Path) -> String {
    format!("nbd+unix:///{}?socket={}", escape(export), escape(&socket.to_string_lossy()))
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b'@' => {
                escaped.push(char::from(byte));
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_escaped() {
        let socket = Path::new("/run/user/1000/a b&c.sock");
        assert_eq!(uri("vm/root@x-1", socket), "nbd+unix:///vm/root@x-1?socket=/run/user/1000/a%20b%26c.sock");
    }

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
