//! A folder with a socket for each volume, kept in step with the names of the pool's volumes.
//!
//! A connection to a socket opens that volume and no other, by the protocol of the folder; modes and groups of the
//! files say which users can connect.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use forkdisk::{LocalFuture, Pool};
use forkdisk_uring::{JoinHandle, Rt, UnixListener, UringDevice};

use super::mounts::Mounts;
use crate::patterns::Patterns;
use crate::volume_sockets::VolumeSockets;

/// Interval at which names are checked that change without a verb: files of a mount. Without a mount all changes come
/// by verbs, and an idle daemon sleeps.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_WITHOUT_MOUNT: Duration = Duration::from_secs(2);
const TURN: Duration = Duration::from_millis(1);
/// Names that are processed before other tasks run.
const BATCH_COUNT: usize = 256;
/// Suffix of a socket's file name; the volume's name precedes it.
const SUFFIX: &str = ".sock";

/// Serves the connections to the socket of the volume with this name, until it is cancelled.
pub type Listen = Box<dyn Fn(UnixListener, &str) -> LocalFuture<()>>;

/// What a folder has.
pub struct Contents {
    pub dir: PathBuf,
    /// Mode and group of each socket.
    pub access: VolumeSockets,
    /// Volumes that have a socket.
    pub volumes: Patterns,
    /// Its sockets offer NBD exports, and not disks of virtual machines.
    pub offers_exports: bool,
    /// The server behind the sockets.
    pub listen: Listen,
}

/// All sockets of a folder. Clones share their state.
#[derive(Clone)]
pub struct SocketDir(Rc<Inner>);

struct Inner {
    contents: Contents,
    runtime: Rt,
    pool: Pool<UringDevice>,
    /// Most sockets.
    most: usize,
    /// Sockets by volume name.
    sockets: RefCell<BTreeMap<String, JoinHandle<()>>>,
    /// Volumes without a socket, for which that was logged.
    without: RefCell<BTreeSet<String>>,
    /// Version of the pool's names that the sockets match.
    seen: Cell<Option<u64>>,
    is_busy: Cell<bool>,
    has_ended: Cell<bool>,
}

impl SocketDir {
    /// Creates the folder and a socket for each volume.
    pub async fn open(runtime: &Rt, pool: &Pool<UringDevice>, contents: Contents, most: usize) -> Result<SocketDir> {
        make(&contents.dir, &contents.access)?;
        let (runtime, pool) = (runtime.clone(), pool.clone());
        let (sockets, without, seen, is_busy, has_ended) = Default::default();
        let inner = Inner { contents, runtime, pool, most, sockets, without, seen, is_busy, has_ended };
        let sockets = SocketDir(Rc::new(inner));
        sockets.follow().await;
        sockets.0.remove_stale();
        Ok(sockets)
    }

    /// Returns the volume of the socket at this path.
    pub fn volume_at(&self, path: &Path) -> Option<String> {
        let file = path.strip_prefix(&self.0.contents.dir).ok()?.to_str()?;
        self.0.sockets.borrow().keys().find(|name| file_name(name) == file).cloned()
    }

    /// Returns whether its sockets offer NBD exports, and not disks of virtual machines.
    pub fn offers_exports(&self) -> bool {
        self.0.contents.offers_exports
    }

    /// Follows changes of names; never returns.
    pub async fn watch(self, mounts: Mounts) {
        loop {
            let interval = if mounts.dirs().is_empty() { LOOK_WITHOUT_MOUNT } else { LOOK };
            self.0.runtime.sleep_for(interval).await;
            self.follow().await;
        }
    }

    /// Opens and closes sockets, so that each volume has one.
    pub async fn follow(&self) {
        let inner = &*self.0;
        while inner.is_busy.get() {
            inner.runtime.sleep_for(TURN).await;
        }
        let version = inner.pool.names_version();
        if inner.has_ended.get() || inner.seen.get() == Some(version) {
            return;
        }
        let _busy = Busy::new(&inner.is_busy);
        let names = inner.names().await;
        let gone: Vec<String> = inner.sockets.borrow().keys().filter(|name| !names.contains(*name)).cloned().collect();
        for name in gone {
            let socket = inner.sockets.borrow_mut().remove(&name);
            if let Some(socket) = socket {
                socket.cancel().await;
            }
        }
        inner.without.borrow_mut().retain(|name| names.contains(name));
        for name in names {
            inner.offer(name);
        }
        // Changes since `version` was read are handled by the next call.
        inner.seen.set(Some(version));
    }

    /// Closes all sockets permanently.
    pub async fn close(&self) {
        let inner = &*self.0;
        inner.has_ended.set(true);
        while inner.is_busy.get() {
            inner.runtime.sleep_for(TURN).await;
        }
        let sockets = inner.sockets.take();
        for socket in sockets.into_values() {
            socket.cancel().await;
        }
    }
}

/// Lets one task at a time open and close sockets; released even if the task is dropped while it waits.
struct Busy<'a>(&'a Cell<bool>);

impl Busy<'_> {
    fn new(is_busy: &Cell<bool>) -> Busy<'_> {
        is_busy.set(true);
        Busy(is_busy)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Inner {
    async fn names(&self) -> BTreeSet<String> {
        let (mut names, mut after) = (BTreeSet::new(), String::new());
        loop {
            let piece = self.pool.volume_names_after(&after, BATCH_COUNT);
            let Some(last) = piece.last() else { return names };
            after.clone_from(last);
            names.extend(piece.into_iter().filter(|name| self.contents.volumes.include(name)));
            self.runtime.yield_now().await;
        }
    }

    fn offer(&self, name: String) {
        if self.sockets.borrow().contains_key(&name) {
            return;
        }
        match self.listen(&name) {
            Ok(socket) => {
                self.without.borrow_mut().remove(&name);
                self.sockets.borrow_mut().insert(name, socket);
            }
            Err(error) => {
                if self.without.borrow_mut().insert(name.clone()) {
                    tracing::warn!("the volume {name} has no socket of its own: {error:#}");
                }
            }
        }
    }

    fn listen(&self, name: &str) -> Result<JoinHandle<()>> {
        let most = self.most;
        ensure!(self.sockets.borrow().len() < most, "no more than {most} have a file descriptor (LimitNOFILE)");
        let contents = &self.contents;
        let path = contents.dir.join(file_name(name));
        let listener = UnixListener::bind_for(&self.runtime, path, contents.access.of(name))?;
        Ok(self.runtime.spawn((contents.listen)(listener, name)))
    }

    /// Removes sockets that an earlier daemon left behind and whose volumes are gone.
    fn remove_stale(&self) {
        let Ok(entries) = fs::read_dir(&self.contents.dir) else { return };
        let ours: BTreeSet<String> = self.sockets.borrow().keys().map(|name| file_name(name)).collect();
        for entry in entries.flatten() {
            let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
            let named = |name: &str| name.ends_with(SUFFIX) && !ours.contains(name);
            let is_left = entry.file_name().to_str().is_some_and(named);
            let is_refused = |e: std::io::Error| e.kind() == std::io::ErrorKind::ConnectionRefused;
            if is_socket && is_left && UnixStream::connect(entry.path()).is_err_and(is_refused) {
                // A failure is harmless.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Creates the folder with search permission for the users of its sockets.
fn make(dir: &Path, sockets: &VolumeSockets) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let access = sockets.usual();
    let shown = || format!("cannot make the folder {} for sockets", dir.display());
    fs::DirBuilder::new().mode(0o700).create(dir).with_context(shown)?;
    if access.group.is_some() {
        std::os::unix::fs::chown(dir, None, access.group).with_context(shown)?;
    }
    let enter = |may_connect: u32, bits: u32| if access.mode & may_connect != 0 { bits } else { 0 };
    let mode = 0o700 | enter(0o020, 0o050) | enter(0o002, 0o005) | if sockets.has_others() { 0o001 } else { 0 };
    fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(mode)).with_context(shown)
}

/// Returns the name of a volume's socket: keeps letters, digits, `.`, `_` and `-`, writes other
/// bytes as `%` and two digits.
pub fn file_name(volume: &str) -> String {
    let mut name = String::with_capacity(volume.len() + SUFFIX.len());
    for &byte in volume.as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => name.push(byte.into()),
            _ => name.push_str(&format!("%{byte:02X}")),
        }
    }
    name + SUFFIX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sockets_are_names_of_files() {
        assert_eq!(file_name("vm-1_a.b"), "vm-1_a.b.sock");
        assert_eq!(file_name("lab/vm1"), "lab%2Fvm1.sock");
        assert_eq!(file_name("a@b%"), "a%40b%25.sock");
    }
}
