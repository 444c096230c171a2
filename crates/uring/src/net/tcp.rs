//! Listening on a TCP port.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use forkdisk::{Error, ErrorKind};

use super::stream::{self, Stream};
use crate::executor::Rt;
use crate::handle::Handle;
use crate::sys;

/// A TCP socket that accepts connections. The caller decides whether the address is
/// safe.
pub struct TcpListener {
    handle: Rc<Handle>,
    local: SocketAddr,
}

impl TcpListener {
    /// Listens on `addr`; port 0 lets the kernel choose one.
    ///
    /// # Errors
    /// The address is in use, is not local, or needs rights.
    pub fn bind(rt: &Rt, addr: SocketAddr) -> forkdisk::Result<TcpListener> {
        let failed = |e: io::Error| match e.kind() {
            io::ErrorKind::AddrInUse => Error::new(ErrorKind::Busy, format!("cannot listen on {addr}: {e}")),
            _ => Error::io(format!("cannot listen on {addr}"), e),
        };
        let socket = std::net::TcpListener::bind(addr).map_err(failed)?;
        let local = socket.local_addr().map_err(failed)?;
        Ok(TcpListener { handle: Handle::new(rt.driver(), OwnedFd::from(socket)), local })
    }

    /// Returns the address it listens on, with the real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Waits for the next connection; small messages are not delayed (TCP_NODELAY).
    ///
    /// # Errors
    /// There is no free descriptor, or the connection ended before it was accepted.
    pub async fn accept(&self) -> io::Result<Stream> {
        let stream = stream::accept(&self.handle).await?;
        sys::set_option(stream.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        Ok(stream)
    }
}
