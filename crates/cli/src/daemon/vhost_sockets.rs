//! Sockets of single disks of virtual machines, at paths that a user chose.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forkdisk::{ErrorKind, Pool, VolumeId};
use forkdisk_control::{Failure, params};
use forkdisk_uring::{JoinHandle, Rt, SocketAccess, UnixListener, UringDevice};
use forkdisk_vhost_user::Server;

use super::exports::Served;
use super::outlets::{Door, Outlets};
use crate::volume_sockets;

/// All such sockets. Clones share their state.
#[derive(Clone)]
pub struct VhostSockets(Rc<Inner>);

struct Inner {
    runtime: Rt,
    pool: Pool<UringDevice>,
    server: Server<Served>,
    outlets: Outlets,
    sockets: RefCell<BTreeMap<PathBuf, Socket>>,
}

struct Socket {
    id: VolumeId,
    /// How it was requested.
    disk: params::VhostUser,
    listening: JoinHandle<()>,
}

impl VhostSockets {
    pub fn new(runtime: &Rt, exports: &Served, server: &Server<Served>) -> VhostSockets {
        let (runtime, pool, server) = (runtime.clone(), exports.pool.clone(), server.clone());
        let outlets = exports.outlets.clone();
        VhostSockets(Rc::new(Inner { runtime, pool, server, outlets, sockets: RefCell::default() }))
    }

    /// Returns the volume or snapshot that a socket was made for; `None` if there is no such socket.
    pub fn made_for(&self, path: &Path) -> Option<VolumeId> {
        self.0.sockets.borrow().get(path).map(|socket| socket.id)
    }

    /// Makes or removes a socket.
    pub async fn apply(&self, disk: params::VhostUser) -> Result<(), Failure> {
        let path = Path::new(&disk.socket);
        if !path.is_absolute() {
            let text = format!("{}: the path of a socket is absolute here", disk.socket);
            return Err(Failure::new(ErrorKind::Invalid, text));
        }
        if disk.remove { self.remove(path, &disk.object).await } else { self.add(path, &disk) }
    }

    fn add(&self, path: &Path, disk: &params::VhostUser) -> Result<(), Failure> {
        let inner = &self.0;
        let id = inner.pool.find(&disk.object)?.id;
        let invalid = |error: anyhow::Error| Failure::new(ErrorKind::Invalid, format!("{error:#}"));
        let mode = disk.mode.as_deref().map(volume_sockets::mode).transpose().map_err(invalid)?;
        let usual = if disk.group.is_some() { 0o660 } else { SocketAccess::OWNER.mode };
        let access = SocketAccess { mode: mode.unwrap_or(usual), group: disk.group };
        let listener = UnixListener::bind_for(&inner.runtime, path, access)?;
        let (server, pool, outlets) = (inner.server.clone(), inner.pool.clone(), inner.outlets.clone());
        let (place, door) = (disk.socket.clone(), Door::Socket(disk.socket.clone()));
        // The disk keeps its socket when it is renamed.
        let name = move || name_of(&pool, outlets.switched(&door).unwrap_or(id)).unwrap_or_default();
        let listening = inner.runtime.spawn(async move { server.listen_at(listener, &place, name).await });
        inner.sockets.borrow_mut().insert(path.to_path_buf(), Socket { id, disk: disk.clone(), listening });
        tracing::info!(socket = %path.display(), object = %disk.object, "a disk of virtual machines");
        Ok(())
    }

    async fn remove(&self, path: &Path, object: &str) -> Result<(), Failure> {
        let shown = path.display();
        let found = self.0.sockets.borrow().get(path).map(|socket| socket.id);
        let Some(id) = found else {
            let text = format!("{shown} is no socket that `forkdisk vhost-user` made in this daemon");
            return Err(Failure::new(ErrorKind::NotFound, text));
        };
        let name = name_of(&self.0.pool, id);
        if name.as_deref().is_some_and(|name| name != object) {
            let text = format!("{shown} is the socket of {}", name.unwrap_or_default());
            return Err(Failure::new(ErrorKind::Invalid, text));
        }
        let forgotten = self.0.outlets.record(&Door::Socket(path.display().to_string()), None);
        forgotten.map_err(|error| Failure::file("forgetting what the socket was switched to", error))?;
        let removed = self.0.sockets.borrow_mut().remove(path);
        if let Some(socket) = removed {
            socket.listening.cancel().await;
        }
        Ok(())
    }

    /// Stops to listen on all sockets; returns how to make them again, for the same volumes.
    pub async fn pass_on(&self) -> Vec<params::VhostUser> {
        let mut disks = Vec::new();
        for socket in self.0.sockets.take().into_values() {
            socket.listening.cancel().await;
            let Some(object) = name_of(&self.0.pool, socket.id) else { continue };
            disks.push(params::VhostUser { object, ..socket.disk });
        }
        disks
    }

    /// Removes all sockets.
    pub async fn close(&self) {
        let sockets = self.0.sockets.take();
        for socket in sockets.into_values() {
            socket.listening.cancel().await;
        }
    }
}

/// Returns the current name of a volume or snapshot; `None` if it was deleted.
pub fn name_of(pool: &Pool<UringDevice>, id: VolumeId) -> Option<String> {
    pool.volume_by_id(id).ok().map(|volume| volume.name())
}
