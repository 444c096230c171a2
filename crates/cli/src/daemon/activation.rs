//! Sockets passed by a service manager.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, bail};
use forkdisk_uring::{Inherited, Rt, inherited};
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::net::{AddressFamily, getsockname};

/// The name of the control socket; other names are data sockets (`FileDescriptorName=`).
pub const CONTROL: &str = "control";
/// A name of data sockets.
pub const DATA: &str = "data";

/// Sockets that were passed.
#[derive(Default)]
pub struct Activated {
    /// Data sockets, for clients of the volumes.
    pub data: Vec<OwnedFd>,
    /// The control socket, for verbs.
    pub control: Option<OwnedFd>,
}

/// Takes the sockets that were passed to this process, or to the one from which it took over; each must be a listening
/// unix socket.
pub fn take(runtime: &Rt) -> Result<Activated> {
    let mut taken = Activated::default();
    let earlier = runtime.take_activated().into_iter();
    let passed = inherited().into_iter().map(|Inherited { name, fd }| (name, fd));
    for (name, fd) in earlier.chain(passed) {
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

/// Returns the path of a socket, if it has one.
pub fn path_of(fd: impl AsFd) -> Option<std::path::PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let address = rustix::net::SocketAddrUnix::try_from(getsockname(fd).ok()?).ok()?;
    let path = address.path()?.to_bytes().to_vec();
    Some(std::path::PathBuf::from(std::ffi::OsStr::from_bytes(&path)))
}
