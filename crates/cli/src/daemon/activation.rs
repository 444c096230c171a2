//! Sockets passed by a service manager.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, bail};
use forkdisk_uring::{Inherited, PassedListener, Rt};
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::net::{AddressFamily, getsockname};

/// The name of the control socket; other names are data sockets (`FileDescriptorName=`).
pub const CONTROL: &str = "control";

/// Sockets that were passed.
#[derive(Default)]
pub struct Activated {
    /// Data sockets, for clients of the volumes.
    pub data: Vec<PassedListener>,
    /// The control socket, for verbs.
    pub control: Option<PassedListener>,
}

/// Takes the sockets that were passed to this process (`handed`), or to the one from which it took over; each must
/// be a listening unix socket.
pub fn take(runtime: &Rt, handed: Vec<Inherited>) -> Result<Activated> {
    let mut taken = Activated::default();
    let opened = handed.into_iter().map(|Inherited { name, fd }| PassedListener::activated(&name, fd));
    for passed in runtime.take_activated().into_iter().chain(opened) {
        let name = passed.name().unwrap_or_default().to_string();
        check(&passed.socket).with_context(|| format!("the socket '{name}' that the service manager handed over"))?;
        if name != CONTROL {
            taken.data.push(passed);
        } else if taken.control.replace(passed).is_some() {
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
