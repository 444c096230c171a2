//! Everything that the new process needs besides the pool's path and its own configuration.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use forkdisk_control::{PassedPeer, params};
use forkdisk_fuse::PassedQueues;
use forkdisk_nbd::PassedClient;
use forkdisk_vhost_user::PassedSession;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

/// Bytes of a client from which they are passed in a file.
const LARGE_BYTES: usize = 64 << 10;

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
    /// Bytes of clients that are too many for a text.
    #[serde(default = "Vec::new")]
    pub large: Vec<LargeBytes<F>>,
    /// Clients that are not continued: encrypted ones, if this program could not, and those with requests without end.
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

/// Bytes that a client has sent, then those that it has not fetched, in a file in memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LargeBytes<F> {
    /// Position of the client.
    pub client: usize,
    pub file: F,
    pub received: u64,
    pub unsent: u64,
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
    /// Whether the kernel can send its requests again.
    #[serde(default)]
    pub survives: bool,
    /// Its queues of io_uring.
    #[serde(default = "no_queues")]
    pub queues: Option<PassedQueues<F>>,
}

fn no_queues<F>() -> Option<PassedQueues<F>> {
    None
}

impl<F> State<F> {
    /// Converts all descriptors.
    pub fn map<G>(self, mut convert: impl FnMut(F) -> G) -> State<G> {
        let convert = &mut convert;
        let listener = |PassedListener { place, socket, accepted }, convert: &mut dyn FnMut(F) -> G| {
            let socket = convert(socket);
            PassedListener { place, socket, accepted: accepted.into_iter().map(convert).collect() }
        };
        let mount = |PassedMount { mount, connection, held, survives, queues }, convert: &mut dyn FnMut(F) -> G| {
            let connection = convert(connection);
            let queues = queues.map(|queues: PassedQueues<F>| queues.map(convert));
            PassedMount { mount, connection, held, survives, queues }
        };
        State {
            began_ns: self.began_ns,
            device: convert(self.device),
            lock: self.lock.map(&mut *convert),
            listeners: self.listeners.into_iter().map(|passed| listener(passed, convert)).collect(),
            clients: self.clients.into_iter().map(|client| client.map(&mut *convert)).collect(),
            large: self
                .large
                .into_iter()
                .map(|LargeBytes { client, file, received, unsent }| {
                    let file = convert(file);
                    LargeBytes { client, file, received, unsent }
                })
                .collect(),
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

impl State<OwnedFd> {
    /// Moves large amounts of bytes to files in memory.
    pub fn move_out_bytes(&mut self) -> io::Result<()> {
        for (at, client) in self.clients.iter_mut().enumerate() {
            if client.received.len() + client.unsent.len() < LARGE_BYTES {
                continue;
            }
            let mut file = File::from(memfd_create("forkdisk-upgrade", MemfdFlags::CLOEXEC)?);
            let (received, unsent) = (std::mem::take(&mut client.received), std::mem::take(&mut client.unsent));
            file.write_all(&received).and_then(|()| file.write_all(&unsent))?;
            let (received, unsent) = (received.len() as u64, unsent.len() as u64);
            self.large.push(LargeBytes { client: at, file: file.into(), received, unsent });
        }
        Ok(())
    }

    /// Reads the bytes back. A client of which they cannot be read cannot be continued.
    pub fn move_in_bytes(&mut self) -> io::Result<()> {
        for LargeBytes { client, file, received, unsent } in std::mem::take(&mut self.large) {
            let client = self.clients.get_mut(client).ok_or(io::ErrorKind::InvalidData)?;
            let (file, mut bytes) = (File::from(file), vec![0; (received + unsent) as usize]);
            file.read_exact_at(&mut bytes, 0)?;
            client.unsent = bytes.split_off(received as usize);
            client.received = bytes;
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use forkdisk_nbd::PassedClient;

    use super::*;

    #[test]
    fn large_amounts_of_bytes_go_by_a_file() {
        let stage =
            serde_json::json!({"Transmission": {"export": "a", "read_only": false, "style": "Simple", "contexts": []}});
        let client = |received: usize, unsent: usize| PassedClient {
            socket: OwnedFd::from(File::open("/dev/null").unwrap()),
            received: vec![1; received],
            unsent: vec![2; unsent],
            tls: None,
            stage: serde_json::from_value(stage.clone()).unwrap(),
        };
        let device = OwnedFd::from(File::open("/dev/null").unwrap());
        let empty = serde_json::json!({"began_ns": 1, "device": 0, "lock": null, "listeners": [], "clients": [],
            "disconnected": 0, "sessions": [], "disks": [], "mounts": [], "peers": [], "devices": 0});
        let state: State<usize> = serde_json::from_value(empty).unwrap();
        let mut state = state.join(vec![device]).unwrap();
        state.clients = vec![client(5, 6), client(70_000, 3), client(0, 1 << 20)];
        state.move_out_bytes().unwrap();
        let (state, files) = state.split();
        let text = serde_json::to_string(&state).unwrap();
        assert!(text.len() < 4096, "{} bytes", text.len());
        let mut state = serde_json::from_str::<State<usize>>(&text).unwrap().join(files).unwrap();
        state.move_in_bytes().unwrap();
        let sizes: Vec<_> = state.clients.iter().map(|client| (client.received.len(), client.unsent.len())).collect();
        assert_eq!(sizes, [(5, 6), (70_000, 3), (0, 1 << 20)]);
        assert!(state.clients[1].received.iter().all(|&byte| byte == 1) && state.clients[1].unsent == [2, 2, 2]);
    }
}
