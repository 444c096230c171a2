//! Everything by which the pool is used: opened together, closed together, and passed on together.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use forkdisk_control::{PassedPeer, ServerHandle as ControlHandle, params};
use forkdisk_nbd::{PassedClient, Server};
use forkdisk_uring::{JoinHandle, Rt};
use forkdisk_vhost_user::{PassedSession, Server as VhostServer};

use super::devices::Devices;
use super::exports::Served;
use super::hand_over::{PassedListener, PassedMount};
use super::host::Clients;
use super::mounts::Mounts;
use super::socket_dir::SocketDir;
use super::vhost_sockets::VhostSockets;

/// Everything by which the pool is used.
pub struct Doors {
    pub devices: Devices,
    pub socket_dirs: Vec<SocketDir>,
    pub vhost_sockets: VhostSockets,
    /// Tasks that keep the sockets in step with the volumes.
    pub following: Vec<JoinHandle<()>>,
    pub clients: Clients,
    pub control: ControlHandle,
    pub mounts: Mounts,
    /// The data server and that of virtual machines.
    pub data: Server<Served>,
    pub disks: VhostServer<Served>,
    /// Tasks of the data server.
    pub serving: Vec<JoinHandle<()>>,
    /// The task of the control server.
    pub controlling: JoinHandle<()>,
}

impl Doors {
    /// Accepts nothing new and lets requests in flight end.
    pub async fn close(self) {
        self.devices.stop().await;
        for following in self.following {
            following.cancel().await;
        }
        for sockets in self.socket_dirs {
            sockets.close().await;
        }
        self.clients.data.stop();
        self.vhost_sockets.close().await;
        self.clients.disks.stop().await;
        self.control.stop();
        for server in self.serving {
            server.await;
        }
        self.controlling.await;
        self.control.idle().await;
        self.mounts.stop().await;
        self.mounts.guard(None);
    }

    /// Stops everything between two requests, and returns it for another process. The listening sockets are being
    /// passed on already. The mounts keep what is open until they are dropped, after the pool was closed. `encrypted`:
    /// the other process continues encrypted clients.
    pub async fn pass_on(self, runtime: &Rt, encrypted: bool) -> Result<Passed> {
        // A verb that has begun meanwhile ends first.
        let peers = self.control.pass_on().await;
        let (began_ns, connected) = (now_ns(), self.clients.data.connections());
        for following in self.following {
            following.cancel().await;
        }
        let disks = self.vhost_sockets.pass_on().await;
        for sockets in self.socket_dirs {
            sockets.close().await;
        }
        let mut clients = self.data.pass_on(encrypted).await;
        let mut sessions = self.clients.disks.pass_on().await;
        for task in self.serving {
            task.cancel().await;
        }
        self.controlling.cancel().await;
        let disconnected = connected.saturating_sub(clients.len());
        // Those that have connected meanwhile.
        clients.extend(self.data.pass_on(encrypted).await);
        sessions.extend(self.clients.disks.pass_on().await);
        self.devices.pause().await;
        let mounts = self.mounts.pass_on().await.context("passing on the mounts")?;
        let listeners = runtime.pass_listeners().await.into_iter().map(|passed| {
            let forkdisk_uring::PassedListener { place, socket, accepted, .. } = passed;
            PassedListener { place, socket, accepted }
        });
        let listeners = listeners.collect();
        let devices = self.devices.count();
        Ok(Passed { began_ns, listeners, clients, disconnected, sessions, disks, mounts, peers, devices })
    }
}

/// What the doors pass on.
pub struct Passed {
    pub began_ns: u64,
    pub listeners: Vec<PassedListener<OwnedFd>>,
    pub clients: Vec<PassedClient>,
    pub disconnected: usize,
    pub sessions: Vec<PassedSession>,
    pub disks: Vec<params::VhostUser>,
    pub mounts: Vec<PassedMount<OwnedFd>>,
    pub peers: Vec<PassedPeer>,
    pub devices: usize,
}

/// Returns the time of the clock that all processes share.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
