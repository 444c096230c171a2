//! What another process has served, to be continued here.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result};
use forkdisk_control::{Server as ControlServer, Upgraded, params};
use forkdisk_fuse::unmount;
use forkdisk_nbd::Security;
use forkdisk_uring::{PassedListener, Rt};

use super::detach;
use super::doors::{Doors, now_ns};
use super::exports::Served;
use super::hand_over::{self, PassedMount, State};
use super::process::{Continued, Process};

/// Everything that was passed, less what is in use already: the pool and the listening sockets.
pub struct Earlier(State<OwnedFd>);

impl Earlier {
    /// Makes the listening sockets available.
    pub fn begin(runtime: &Rt, mut state: State<OwnedFd>) -> Earlier {
        let listeners = std::mem::take(&mut state.listeners).into_iter().map(|passed| {
            let hand_over::PassedListener { place, socket, accepted } = passed;
            PassedListener { place, socket, accepted }
        });
        runtime.inherit_listeners(listeners.collect());
        Earlier(state)
    }

    /// Returns the disks of virtual machines with sockets of their own.
    pub fn disks(&self) -> &[params::VhostUser] {
        &self.0.disks
    }

    /// Waits for the answer of the process before, if there is one, and continues all clients.
    pub fn resume(
        self,
        process: &Process<'_>,
        continued: &mut Continued,
        (doors, control): (&Doors, &ControlServer),
        exports: Served,
        security: Security,
    ) -> Result<()> {
        let (runtime, mut state) = (&process.runtime, self.0);
        runtime.close_unused_listeners();
        state.move_in_bytes().context("replies that were not fetched")?;
        let mut upgraded = Upgraded {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            connections: state.clients.len() + state.sessions.len() + state.peers.len(),
            disconnected: state.disconnected,
            mounts: state.mounts.len(),
            devices: state.devices,
            ..Upgraded::default()
        };
        let outcome = match std::mem::replace(continued, Continued::Nothing) {
            Continued::Nothing => None,
            Continued::Another(predecessor) => {
                let before = predecessor.pid();
                let before = if predecessor.take_over()? { None } else { before };
                if !detach::is_detached() && std::env::var_os("NOTIFY_SOCKET").is_none() {
                    drop(runtime.spawn(hand_over::follow_first(runtime.clone(), before)));
                }
                drop(runtime.spawn(doors.devices.clone().adopt_later(state.devices)));
                None
            }
            Continued::Itself(devices, failure) => {
                devices.resume(exports)?;
                Some(failure)
            }
        };
        for mount in state.mounts {
            resume_mount(doors, mount);
        }
        for client in state.clients {
            doors.data.resume(client, security.clone());
        }
        for session in state.sessions {
            let disk = session.disk.clone();
            if let Err(error) = doors.disks.resume(session) {
                tracing::error!("{disk}: its virtual machine cannot be continued: {error}");
            }
        }
        upgraded.pause_ms = now_ns().saturating_sub(state.began_ns) / 1_000_000;
        tracing::info!(pause_ms = upgraded.pause_ms, connections = upgraded.connections, "continuing all clients");
        for peer in state.peers {
            control.resume(peer, outcome.clone().map_or(Ok(upgraded.clone()), Err));
        }
        Ok(())
    }
}

fn resume_mount(doors: &Doors, passed: PassedMount<OwnedFd>) {
    let dir = passed.mount.dir.clone();
    if let Err(error) = doors.mounts.resume(passed) {
        tracing::error!("{dir}: cannot be continued: {error}");
        // Its connection is closed: calls on it fail instead of waiting.
        std::thread::spawn(move || drop(unmount(Path::new(&dir), true)));
    }
}
