//! One connection. At most one receive and one send may be in flight at a time: the kernel does not
//! keep the order of two in the same direction.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use forkdisk::Buf;

use super::message::{Message, Piece};
use crate::driver::{Driver, Ticket};
use crate::executor::Rt;
use crate::handle::Handle;
use crate::op::{Op, Work, outcome};
use crate::sys::{self, PeerCred, SockAddr};

/// A connected stream socket, unix or TCP. Clones are the same connection; it ends when the last
/// clone and the last awaited operation are gone: the peer then reads what was
/// sent and the end.
///
/// Operations are submitted when the method is called and do not borrow the stream. One receive
/// and one send at a time.
#[derive(Clone)]
pub struct Stream {
    connection: Rc<Connection>,
}

/// Ends the connection with `shutdown(2)` when dropped, whatever the kernel still keeps of the socket:
/// closing the descriptor alone does not inform the peer while a request is in flight on it.
struct Connection {
    handle: Rc<Handle>,
    /// Another process has it, too.
    is_passed: Cell<bool>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.is_passed.get() {
            return;
        }
        // Fails if the peer closed the connection first, or if it never was connected.
        let _ = sys::shutdown(self.handle.fd(), Shutdown::Both);
    }
}

impl Stream {
    pub(super) fn of(driver: &Rc<Driver>, fd: OwnedFd) -> Stream {
        let (handle, is_passed) = (Handle::new(driver, fd), Cell::new(false));
        Stream { connection: Rc::new(Connection { handle, is_passed }) }
    }

    fn handle(&self) -> &Rc<Handle> {
        &self.connection.handle
    }

    fn start(&self, work: Work) -> Ticket {
        let handle = self.handle();
        handle.driver().start(handle, work)
    }

    /// Wraps a connected stream socket.
    pub fn from_fd(rt: &Rt, fd: OwnedFd) -> Stream {
        Stream::of(rt.driver(), fd)
    }

    /// Creates two connected unix sockets.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn pair(rt: &Rt) -> io::Result<(Stream, Stream)> {
        let (a, b) = std::os::unix::net::UnixStream::pair()?;
        Ok((Stream::from_fd(rt, a.into()), Stream::from_fd(rt, b.into())))
    }

    /// Connects to a unix socket.
    ///
    /// # Errors
    /// Nothing listens there, or this user has no access.
    pub async fn connect_unix(rt: &Rt, path: &Path) -> io::Result<Stream> {
        connect(rt, sys::stream_socket(libc::AF_UNIX)?, SockAddr::unix(path)?).await
    }

    /// Connects over TCP; small messages are not delayed (TCP_NODELAY).
    ///
    /// # Errors
    /// The host cannot be reached or refuses the connection.
    pub async fn connect_tcp(rt: &Rt, addr: SocketAddr) -> io::Result<Stream> {
        let domain = if addr.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let socket = sys::stream_socket(domain)?;
        sys::set_option(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        connect(rt, socket, SockAddr::inet(addr)).await
    }

    /// Receives up to `max` bytes to `buf[at..]`; 0 means that the peer has closed its side.
    ///
    /// # Panics
    /// If `at + max` lies beyond the buffer.
    pub fn recv(&self, buf: Buf, at: usize, max: usize) -> impl Future<Output = (io::Result<usize>, Buf)> + 'static {
        let (ticket, stream) = (self.start_recv(buf, at, max, 0), self.clone());
        async move {
            let (result, buf) = received(ticket.await);
            drop(stream);
            (outcome(result), buf)
        }
    }

    /// Receives exactly `len` bytes to `buf[at..]`. `UnexpectedEof` if the peer closes its side
    /// before. Also returns how many bytes were received.
    ///
    /// # Panics
    /// If `at + len` lies beyond the buffer.
    pub fn recv_exact(
        &self,
        buf: Buf,
        at: usize,
        len: usize,
    ) -> impl Future<Output = (io::Result<()>, Buf, usize)> + 'static {
        let stream = self.clone();
        let mut ticket = stream.start_recv(buf, at, len, libc::MSG_WAITALL);
        async move {
            let mut done = 0;
            loop {
                let (result, buf) = received(ticket.await);
                match outcome(result) {
                    Err(e) => return (Err(e), buf, done),
                    Ok(n) if done + n == len => return (Ok(()), buf, len),
                    Ok(0) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf, done),
                    Ok(n) => done += n,
                }
                ticket = stream.start_recv(buf, at + done, len - done, libc::MSG_WAITALL);
            }
        }
    }

    /// Waits until a receive would not block: bytes have arrived or the peer has closed its side.
    /// Takes no bytes, so the caller may receive by other means, such as with descriptors.
    ///
    /// # Errors
    /// The connection failed.
    pub fn readable(&self) -> impl Future<Output = io::Result<()>> + 'static {
        let (ticket, stream) = (self.start(Work::Readable), self.clone());
        async move {
            let result = ticket.await.result;
            drop(stream);
            outcome(result).map(drop)
        }
    }

    /// Sends all of `buf[at..at + len]`. The buffer does not come back if it is interrupted.
    ///
    /// # Panics
    /// If `at + len` lies beyond the buffer.
    pub fn send(&self, buf: Buf, at: usize, len: usize) -> impl Future<Output = (io::Result<()>, Buf)> + 'static {
        let sent = self.send_vectored(vec![Piece::Buf(buf, at..at + len)]);
        async move {
            let (result, mut pieces) = sent.await;
            match pieces.pop() {
                Some(Piece::Buf(buf, _)) => (result, buf),
                // It was interrupted.
                _ => (result, Buf::zeroed(0)),
            }
        }
    }

    /// Sends all bytes of all pieces, in order, in as few system calls as the kernel allows, and returns the pieces.
    /// If the peer is gone, fails with `BrokenPipe`, without a signal. If it is interrupted, returns the bytes that
    /// were not sent as one piece.
    ///
    /// # Panics
    /// If a piece's range lies outside its buffer.
    pub fn send_vectored(&self, pieces: Vec<Piece>) -> impl Future<Output = (io::Result<()>, Vec<Piece>)> + 'static {
        let message = Message::new(pieces);
        let state = if message.is_sent() { Err(message) } else { Ok(self.start(Work::Send(message))) };
        let stream = self.clone();
        async move {
            let ticket = match state {
                Ok(ticket) => ticket,
                Err(message) => return (Ok(()), message.into_pieces()),
            };
            let op = ticket.await;
            drop(stream);
            match op.work {
                Work::Send(message) if op.result == -libc::ECANCELED => {
                    (outcome(op.result).map(drop), vec![message.into_rest().into()])
                }
                Work::Send(message) => (outcome(op.result).map(drop), message.into_pieces()),
                _ => unreachable!("a send stays a send"),
            }
        }
    }

    /// Ends a receive or [`readable`](Self::readable) in flight. It returns what had arrived; without any bytes it
    /// fails with [`is_interrupted`]. No byte is lost: the connection can be used for further receives.
    pub fn interrupt(&self) {
        self.handle().driver().interrupt(self.handle(), false);
    }

    /// Ends a send in flight; see [`send_vectored`](Self::send_vectored).
    pub fn interrupt_send(&self) {
        self.handle().driver().interrupt(self.handle(), true);
    }

    /// Returns the connection for another process. From now on it does not end when the last clone is gone.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn pass_on(&self) -> io::Result<OwnedFd> {
        let fd = self.handle().fd().try_clone_to_owned()?;
        self.connection.is_passed.set(true);
        Ok(fd)
    }

    /// Ends one or both directions; a receive in flight ends with what had arrived.
    ///
    /// # Errors
    /// The stream is not connected.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        sys::shutdown(self.handle().fd(), how)
    }

    /// Returns the peer's credentials. Unix sockets only.
    ///
    /// # Errors
    /// The stream is no unix socket.
    pub fn peer_cred(&self) -> io::Result<PeerCred> {
        sys::peer_cred(self.handle().fd())
    }

    fn start_recv(&self, mut buf: Buf, at: usize, len: usize, flags: i32) -> Ticket {
        let base = buf[at..at + len].as_mut_ptr();
        let len = u32::try_from(len).expect("a receive of less than 4 GiB");
        self.start(Work::Recv { buf, base, len, flags })
    }
}

/// Returns whether an operation ended because of [`Stream::interrupt`].
pub fn is_interrupted(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ECANCELED)
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle().fd()
    }
}

fn received(op: Op) -> (i32, Buf) {
    match op.work {
        Work::Recv { buf, .. } => (op.result, buf),
        _ => unreachable!("a receive stays a receive"),
    }
}

async fn connect(rt: &Rt, socket: OwnedFd, addr: SockAddr) -> io::Result<Stream> {
    let stream = Stream::from_fd(rt, socket);
    let op = stream.start(Work::Connect(Box::new(addr))).await;
    outcome(op.result)?;
    Ok(stream)
}

pub(super) async fn accept(listener: &Rc<Handle>) -> io::Result<Stream> {
    let op = listener.driver().start(listener, Work::Accept).await;
    let fd = sys::own(outcome(op.result)? as i32);
    Ok(Stream::of(listener.driver(), fd))
}
