//! Listening on a TCP port.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use forkdisk::{Error, ErrorKind};

use super::listeners::{Listening, PassedListener};
use super::stream::Stream;
use crate::executor::Rt;
use crate::sys;

/// A TCP socket that accepts connections. The caller decides whether the address is
/// safe.
pub struct TcpListener {
    listening: Rc<Listening>,
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
        let place = format!("tcp:{addr}");
        let (socket, accepted) = match rt.driver().listeners.take(&place) {
            Some(PassedListener { socket, accepted, .. }) => (std::net::TcpListener::from(socket), accepted),
            None => (std::net::TcpListener::bind(addr).map_err(failed)?, Vec::new()),
        };
        let local = socket.local_addr().map_err(failed)?;
        let passed = PassedListener { place, socket: OwnedFd::from(socket), accepted };
        Ok(TcpListener { listening: Listening::of(rt.driver(), passed, None), local })
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
        let stream = self.listening.accept().await?;
        sys::set_option(stream.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        Ok(stream)
    }
}
