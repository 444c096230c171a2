//! Sockets that a service manager listens on for us.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, bail};
use forkdisk_uring::{Inherited, inherited};
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::net::{AddressFamily, getsockname};

/// The name that tells the control socket from data sockets (`FileDescriptorName=`).
const CONTROL: &str = "control";

/// What was handed over.
#[derive(Default)]
pub struct Activated {
    /// For clients of the volumes.
    pub data: Vec<OwnedFd>,
    /// For verbs.
    pub control: Option<OwnedFd>,
}

/// Takes over the sockets of this process; each must be a listening unix socket.
pub fn take() -> Result<Activated> {
    let mut taken = Activated::default();
    for Inherited { name, fd } in inherited() {
        check(&fd).with_context(|| format!("the socket '{name}' that the service manager handed over"))?;
        if name != CONTROL {
            taken.data.push(fd);
        } else if taken.control.replace(fd).is_some() {
            bail!("the service manager handed over two control sockets");
        }
    }
    Ok(taken)
}

fn check(fd: &OwnedFd) -> Result<()> {
    let is_unix = socket_domain(fd).context("is no socket")? == AddressFamily::UNIX;
    if !is_unix || !socket_acceptconn(fd)? {
        bail!("is not a unix socket that listens (ListenStream= with a path)");
    }
    Ok(())
}

/// Where a socket lies, if it has a path.
pub fn path_of(fd: impl AsFd) -> Option<std::path::PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let address = rustix::net::SocketAddrUnix::try_from(getsockname(fd).ok()?).ok()?;
    let path = address.path()?.to_bytes().to_vec();
    Some(std::path::PathBuf::from(std::ffi::OsStr::from_bytes(&path)))
}
