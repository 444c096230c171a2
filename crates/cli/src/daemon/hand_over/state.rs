//! Everything that the new process needs besides the pool's path and its own configuration.

use forkdisk_control::{PassedPeer, params};
use forkdisk_nbd::PassedClient;
use forkdisk_vhost_user::PassedSession;
use serde::{Deserialize, Serialize};

/// The state of a daemon between two requests. `F` stands for descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State<F> {
    /// When the clients were stopped, in nanoseconds of the clock `CLOCK_MONOTONIC`.
    pub began_ns: u64,
    /// The pool's file or device, with its lock.
    pub device: F,
    /// The lock of the pool by its UUID.
    pub lock: Option<F>,
    pub listeners: Vec<PassedListener<F>>,
    /// Clients by NBD.
    pub clients: Vec<PassedClient<F>>,
    /// Encrypted clients, which cannot be continued.
    pub disconnected: usize,
    /// Disks of virtual machines.
    pub sessions: Vec<PassedSession<F>>,
    /// Sockets that `forkdisk vhost-user` made.
    pub disks: Vec<params::VhostUser>,
    pub mounts: Vec<PassedMount<F>>,
    /// Control connections.
    pub peers: Vec<PassedPeer<F>>,
    /// Number of devices of the ublk driver. They are taken over when the old process has ended.
    pub devices: usize,
}

/// A listening socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedListener<F> {
    pub place: String,
    pub socket: F,
    pub accepted: Vec<F>,
}

/// A mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedMount<F> {
    /// How it was requested.
    pub mount: params::Mount,
    /// The connection to the kernel.
    pub connection: F,
    /// What the kernel holds.
    pub held: forkdisk_fuse::PassedMount,
}

impl<F> State<F> {
    /// Converts all descriptors.
    pub fn map<G>(self, mut convert: impl FnMut(F) -> G) -> State<G> {
        let convert = &mut convert;
        let listener = |PassedListener { place, socket, accepted }, convert: &mut dyn FnMut(F) -> G| {
            let socket = convert(socket);
            PassedListener { place, socket, accepted: accepted.into_iter().map(convert).collect() }
        };
        let mount = |PassedMount { mount, connection, held }, convert: &mut dyn FnMut(F) -> G| {
            let connection = convert(connection);
            PassedMount { mount, connection, held }
        };
        State {
            began_ns: self.began_ns,
            device: convert(self.device),
            lock: self.lock.map(&mut *convert),
            listeners: self.listeners.into_iter().map(|passed| listener(passed, convert)).collect(),
            clients: self.clients.into_iter().map(|client| client.map(&mut *convert)).collect(),
            disconnected: self.disconnected,
            sessions: self.sessions.into_iter().map(|session| session.map(convert)).collect(),
            disks: self.disks,
            mounts: self.mounts.into_iter().map(|passed| mount(passed, convert)).collect(),
            peers: self.peers.into_iter().map(|peer| peer.map(convert)).collect(),
            devices: self.devices,
        }
    }

    /// Separates the descriptors from the rest, which has their positions.
    pub fn split(self) -> (State<usize>, Vec<F>) {
        let mut files = Vec::new();
        let state = self.map(|file| {
            files.push(file);
            files.len() - 1
        });
        (state, files)
    }
}

impl State<usize> {
    /// Puts the descriptors back; `None` if one is missing.
    pub fn join<F>(self, files: Vec<F>) -> Option<State<F>> {
        let mut files: Vec<Option<F>> = files.into_iter().map(Some).collect();
        let mut is_whole = true;
        let state = self.map(|at| {
            let file = files.get_mut(at).and_then(Option::take);
            is_whole &= file.is_some();
            file
        });
        // Every descriptor is there, so none is replaced here.
        is_whole.then(|| state.map(|file| file.expect("looked at above")))
    }
}
