//! Connections and listeners as a server uses them, independent of the transport.

use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;

use forkdisk::Buf;

use super::{Piece, Stream, TcpListener, UnixListener};
use crate::sys::PeerCred;

/// One connection: bytes in order, in both directions. Clones are the same connection.
///
/// At most one receive and one send at a time. The bytes of a dropped receive are lost.
pub trait ByteStream: Clone + 'static {
    /// Receives up to `max` bytes to `buf[at..]`; 0 means that the peer has closed its side.
    ///
    /// # Panics
    /// If `at + max` lies beyond the buffer.
    fn recv(&self, buf: Buf, at: usize, max: usize) -> impl Future<Output = (io::Result<usize>, Buf)> + 'static;

    /// Receives exactly `len` bytes to `buf[at..]`; `UnexpectedEof` if the peer closes its side before. Also returns
    /// how many bytes were received.
    ///
    /// # Panics
    /// If `at + len` lies beyond the buffer.
    fn recv_exact(
        &self,
        buf: Buf,
        at: usize,
        len: usize,
    ) -> impl Future<Output = (io::Result<()>, Buf, usize)> + 'static {
        let stream = self.clone();
        async move {
            let (mut buf, mut done) = (buf, 0);
            while done < len {
                let (result, back) = stream.recv(buf, at + done, len - done).await;
                buf = back;
                match result {
                    Ok(0) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf, done),
                    Ok(n) => done += n,
                    Err(e) => return (Err(e), buf, done),
                }
            }
            (Ok(()), buf, done)
        }
    }

    /// Ends a receive in flight; see [`Stream::interrupt`].
    fn interrupt(&self) {}

    /// Ends a send in flight; see [`Stream::interrupt_send`].
    fn interrupt_send(&self) {}

    /// Returns the connection for another process; `None` if its state lies in this one. See [`Stream::pass_on`].
    ///
    /// # Errors
    /// There is no free descriptor.
    fn pass_on(&self) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Sends all bytes of all pieces, in order, and returns the pieces. If the peer is gone, fails
    /// with `BrokenPipe`.
    fn send_vectored(&self, pieces: Vec<Piece>) -> impl Future<Output = (io::Result<()>, Vec<Piece>)> + 'static;

    /// Tells the peer that nothing more will be sent, if the protocol has a message for that.
    fn finish(&self) -> impl Future<Output = io::Result<()>> + 'static {
        std::future::ready(Ok(()))
    }

    /// Ends one or both directions; a receive in flight ends with what had arrived.
    ///
    /// # Errors
    /// The stream is not connected.
    fn shutdown(&self, how: Shutdown) -> io::Result<()>;

    /// Returns the local process that connected, if the stream provides it.
    fn peer(&self) -> Option<PeerCred> {
        None
    }
}

impl ByteStream for Stream {
    fn recv(&self, buf: Buf, at: usize, max: usize) -> impl Future<Output = (io::Result<usize>, Buf)> + 'static {
        Stream::recv(self, buf, at, max)
    }

    fn recv_exact(
        &self,
        buf: Buf,
        at: usize,
        len: usize,
    ) -> impl Future<Output = (io::Result<()>, Buf, usize)> + 'static {
        Stream::recv_exact(self, buf, at, len)
    }

    fn interrupt(&self) {
        Stream::interrupt(self);
    }

    fn interrupt_send(&self) {
        Stream::interrupt_send(self);
    }

    fn pass_on(&self) -> io::Result<Option<OwnedFd>> {
        Stream::pass_on(self).map(Some)
    }

    fn send_vectored(&self, pieces: Vec<Piece>) -> impl Future<Output = (io::Result<()>, Vec<Piece>)> + 'static {
        Stream::send_vectored(self, pieces)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        Stream::shutdown(self, how)
    }

    fn peer(&self) -> Option<PeerCred> {
        // The kernel knows no process for a TCP connection.
        self.peer_cred().ok().filter(|peer| peer.pid > 0)
    }
}

/// A source of connections.
pub trait Accept {
    /// Type of a connection.
    type Stream: ByteStream;

    /// Waits for the next connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>>;
}

impl Accept for UnixListener {
    type Stream = Stream;

    async fn accept(&self) -> io::Result<Stream> {
        UnixListener::accept(self).await
    }
}

impl Accept for TcpListener {
    type Stream = Stream;

    async fn accept(&self) -> io::Result<Stream> {
        TcpListener::accept(self).await
    }
}
