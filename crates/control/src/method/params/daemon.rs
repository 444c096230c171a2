//! Parameters of the methods that only a daemon has: mounts, devices, sockets, and its own end.

use serde::{Deserialize, Serialize};

use crate::declared::{Declared, Field};

parameters! {
    /// Mounts the pool as a folder of files: the descriptor that comes with the request is a
    /// connection to the kernel's FUSE driver, which the caller has mounted.
    Mount {
        /// The mount point: an absolute path without links.
        dir: String,
        /// Owner of files that have none, as a user number.
        uid: u32,
        /// Group of files that have none, as a group number.
        gid: u32,
        /// When scattered pages of files created there are gathered, as in `create`. Default: `auto`.
        #[serde(default)]
        gather: Option<String>,
        /// List `.snapshots` in the root.
        #[serde(default)]
        show_snapshots: bool,
    }
    /// Attaches a volume or snapshot as a block device through the kernel's ublk driver. Fails with
    /// `unsupported` if the kernel does not have that driver.
    Attach {
        /// The volume or snapshot.
        object: String,
        /// Make the device read-only; the device of a snapshot always is.
        #[serde(default)]
        read_only: bool,
    }
    /// Removes a block device that `attach` created, after writing out what the kernel has cached for it.
    Detach {
        /// Path of the device.
        device: String,
    }
    /// Serves a volume or snapshot as a vhost-user-blk disk of a virtual machine, on a socket of its own, until the
    /// socket is removed or the daemon ends.
    VhostUser {
        /// The volume or snapshot.
        object: String,
        /// Absolute path of the socket.
        socket: String,
        /// Mode of the socket in octal, such as `0660`. Default: `0600`, with a group `0660`.
        #[serde(default)]
        mode: Option<String>,
        /// Group of the socket, as a number. Default: that of the daemon.
        #[serde(default)]
        group: Option<u32>,
        /// Remove the socket; a connected virtual machine keeps its disk.
        #[serde(default)]
        remove: bool,
    }
    /// Points a door at another volume or snapshot, under its clients: requests in flight end with the old one, later
    /// ones go to the new one, and what was flushed or acknowledged before is durable.
    Switch {
        /// The name of an export, the path of a socket of one volume, or the path of a device that `attach` made.
        door: String,
        /// The volume or snapshot that it shows from now on. While it has clients: of the same size, and one that can
        /// be written if they can write.
        to: String,
    }
    /// Replaces the program of the daemon by another version of it, which continues all connections, mounts and
    /// devices. Answered by the new program. Fails with `busy` while another verb is under way. After any failure
    /// the daemon goes on as before.
    Upgrade {
        /// File of the new program; in a request an absolute path.
        program: String,
    }
    /// Ends the daemon; answered when the pool is closed. Fails with `busy` while clients are connected.
    Stop {
        /// Disconnect clients, after their requests in flight have been answered.
        #[serde(default)]
        force: bool,
    }
}
