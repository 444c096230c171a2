//! Listening on a unix socket that is restricted to its owner or to the group of its file.

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forkdisk::{Error, ErrorKind};

use super::listeners::{Listening, PassedListener};
use super::stream::Stream;
use crate::executor::Rt;
use crate::sys::{self, SockAddr};

/// Connections that the kernel queues until they are accepted.
const BACKLOG_CONNECTIONS: i32 = 128;

/// A unix socket that accepts connections. Its file is removed when this is dropped, unless
/// another socket has taken its place.
pub struct UnixListener {
    listening: Rc<Listening>,
}

/// Prefixes of the place of a socket with a path, and of one that a service manager opened.
pub(super) const AT_PATH: &str = "unix:";
pub(super) const NAMED: &str = "passed:";

/// Mode and group of a socket's file: connecting needs write permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// Mode of the file.
    pub mode: u32,
    /// Group of the file; `None`: the process's own.
    pub group: Option<u32>,
}

impl SocketAccess {
    /// The owner only.
    pub const OWNER: SocketAccess = SocketAccess { mode: 0o600, group: None };
}

/// The file of a socket; removed when this is dropped.
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode of the bound socket, whatever the path leads to later.
    identity: (u64, u64),
    is_kept: Cell<bool>,
}

impl UnixListener {
    /// Listens on `path`; only this user may connect (mode 0600 from the beginning).
    /// Its folder must exist. A stale socket is
    /// replaced; one with a listener is `Busy`, any other file `Exists`.
    ///
    /// # Errors
    /// `Busy` if another process listens there, `Exists` if another file is there, `NotFound` if the folder
    /// does not exist, `Invalid` for a path that is too long.
    pub fn bind(rt: &Rt, path: impl AsRef<Path>) -> forkdisk::Result<UnixListener> {
        UnixListener::bind_for(rt, path, SocketAccess::OWNER)
    }

    /// As [`bind`](Self::bind), with other mode and group, which the file has before a client can connect.
    ///
    /// # Errors
    /// Those of [`bind`](Self::bind), and `Invalid` if mode or group cannot be set.
    pub fn bind_for(rt: &Rt, path: impl AsRef<Path>, access: SocketAccess) -> forkdisk::Result<UnixListener> {
        let path = path.as_ref();
        let failed = |e: io::Error| Error::io(format!("cannot listen on {}", path.display()), e);
        let addr = SockAddr::unix(path)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("cannot listen on {}: {e}", path.display())))?;
        check_parent(path)?;
        let shown = std::path::absolute(path).map_err(failed)?;
        let place = format!("{AT_PATH}{}", shown.display());
        if let Some(passed) = rt.driver().listeners.take(&place) {
            // Its file may have been removed meanwhile: then it is bound anew.
            if let Some(file) = SocketFile::at(path).ok().filter(|_| is_socket(path)) {
                file.give(access).map_err(failed)?;
                return Ok(UnixListener { listening: Listening::of(rt.driver(), passed, Some(file)) });
            }
        }
        remove_stale(path)?;
        let socket = sys::stream_socket(libc::AF_UNIX).map_err(failed)?;
        // The file is created with the socket's own mode.
        sys::set_mode(socket.as_fd(), 0o600).map_err(failed)?;
        sys::bind(socket.as_fd(), &addr).map_err(failed)?;
        let file = SocketFile::at(path).map_err(failed)?;
        if access != SocketAccess::OWNER {
            file.give(access).map_err(failed)?;
        }
        sys::listen(socket.as_fd(), BACKLOG_CONNECTIONS).map_err(failed)?;
        Ok(UnixListener { listening: Listening::new(rt.driver(), place, socket, Some(file)) })
    }

    /// Wraps a listening socket that a service manager opened; its file is left alone.
    pub fn activated(rt: &Rt, passed: PassedListener) -> UnixListener {
        UnixListener { listening: Listening::of(rt.driver(), passed, None) }
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub async fn accept(&self) -> io::Result<Stream> {
        self.listening.accept().await
    }
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<SocketFile> {
        let meta = fs::symlink_metadata(path)?;
        let (identity, is_kept) = ((meta.dev(), meta.ino()), Cell::new(false));
        Ok(SocketFile { path: path.to_path_buf(), identity, is_kept })
    }

    /// Leaves the file when this is dropped: another process has the socket, too.
    pub(super) fn keep(&self) {
        self.is_kept.set(true);
    }

    /// Removes the file of a socket that was closed.
    pub(super) fn remove_unused(path: &Path) {
        if is_socket(path) {
            // A failure is harmless: the next bind replaces a stale socket.
            let _ = fs::remove_file(path);
        }
    }

    /// Sets the group first, since the mode is meant for it.
    fn give(&self, access: SocketAccess) -> io::Result<()> {
        if access.group.is_some() {
            std::os::unix::fs::lchown(&self.path, None, access.group)?;
        }
        if SocketFile::identity_of(&self.path) != Some(self.identity) {
            return Err(io::Error::other("another file has replaced it"));
        }
        fs::set_permissions(&self.path, fs::Permissions::from_mode(access.mode))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.is_kept.get() && SocketFile::identity_of(&self.path) == Some(self.identity) {
            // A failure is harmless: the next bind replaces a stale socket.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl SocketFile {
    fn identity_of(path: &Path) -> Option<(u64, u64)> {
        fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
    }
}

/// Requires the folder to exist: creating it could hide a mistake in the path, and it would stay.
fn check_parent(path: &Path) -> forkdisk::Result<()> {
    let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty() && !p.exists()) else {
        return Ok(());
    };
    let text = format!("cannot listen on {}: the folder {} does not exist", path.display(), parent.display());
    Err(Error::new(ErrorKind::NotFound, text))
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

fn remove_stale(path: &Path) -> forkdisk::Result<()> {
    let failed = |e: io::Error| Error::io(format!("cannot replace {}", path.display()), e);
    let meta = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        meta => meta.map_err(failed)?,
    };
    if !meta.file_type().is_socket() {
        let text = format!("cannot listen on {}: a file that is not a socket is in the way", path.display());
        return Err(Error::new(ErrorKind::Exists, text));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(failed),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(failed(e)),
        Ok(_) => {
            let text = format!("another process listens on {} already", path.display());
            Err(Error::new(ErrorKind::Busy, text))
        }
    }
}
