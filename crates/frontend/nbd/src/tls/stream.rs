//! An encrypted stream: a TLS session without I/O, driven over a byte stream.
//!
//! Receiving and sending share the session and borrow it only between waits. A receive never sends:
//! pending output of the session (an answer to a key update) goes out with the next send.
//! Invariant: buffered ciphertext and plaintext are bounded by [`CIPHERTEXT`] and one TLS record.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use forkdisk::Buf;
use forkdisk_uring::{ByteStream, Piece};
use rustls::{ServerConfig, ServerConnection};

use super::identity::Identity;

/// Most bytes of ciphertext received at once.
const CIPHERTEXT_BYTES: usize = 128 << 10;
/// Most bytes of plaintext encrypted before they are sent.
const SEND_PART_BYTES: usize = 256 << 10;

/// The server's end of a TLS session over `S`. Clones are the same connection.
pub struct TlsStream<S> {
    inner: Rc<Inner<S>>,
}

struct Inner<S> {
    stream: S,
    session: RefCell<ServerConnection>,
    /// Received ciphertext that was not decrypted yet.
    arrived: RefCell<(Buf, Range<usize>)>,
    /// The client has closed its side, or the connection.
    ended: Cell<bool>,
}

impl<S> Clone for TlsStream<S> {
    fn clone(&self) -> TlsStream<S> {
        TlsStream { inner: self.inner.clone() }
    }
}

impl<S: ByteStream> TlsStream<S> {
    /// Performs the server's side of the TLS handshake on `stream`. After a
    /// failure an alert was sent, and the stream cannot be used any more.
    ///
    /// # Errors
    /// The handshake failed: the message says which side refused, and why.
    pub async fn accept(stream: S, config: Arc<ServerConfig>) -> io::Result<TlsStream<S>> {
        let mut session = ServerConnection::new(config).map_err(io::Error::other)?;
        // The sender limits how much is encrypted at a time.
        session.set_buffer_limit(None);
        let arrived = RefCell::new((Buf::zeroed(CIPHERTEXT_BYTES), 0..0));
        let inner = Inner { stream, session: RefCell::new(session), arrived, ended: Cell::new(false) };
        let tls = TlsStream { inner: Rc::new(inner) };
        let agreed = tls.inner.handshake().await;
        // Pending output: the end of the handshake, or the alert.
        let sent = tls.inner.send_pending().await;
        agreed.and(sent)?;
        Ok(tls)
    }

    /// Returns the client's identity, if it presented a certificate.
    pub fn identity(&self) -> Option<Identity> {
        let session = self.inner.session.borrow();
        session.peer_certificates().and_then(|chain| chain.first()).map(Identity::of)
    }
}

impl<S: ByteStream> Inner<S> {
    async fn handshake(&self) -> io::Result<()> {
        while self.session.borrow().is_handshaking() {
            self.send_pending().await?;
            if !self.session.borrow().is_handshaking() {
                return Ok(());
            }
            if !self.decrypt()? && !self.receive().await? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// Passes received ciphertext to the session; returns `false` if there is none.
    fn decrypt(&self) -> io::Result<bool> {
        let mut arrived = self.arrived.borrow_mut();
        let (buf, range) = &mut *arrived;
        if range.start == range.end {
            return Ok(false);
        }
        let mut session = self.session.borrow_mut();
        range.start += session.read_tls(&mut &buf[range.clone()])?;
        session.process_new_packets().map_err(|e| io::Error::new(ErrorKind::InvalidData, e))?;
        Ok(true)
    }

    /// Receives ciphertext; returns `false` when the client has closed its side.
    async fn receive(&self) -> io::Result<bool> {
        let (buf, _) = std::mem::replace(&mut *self.arrived.borrow_mut(), (Buf::zeroed(0), 0..0));
        let len = buf.len();
        let (result, buf) = self.stream.recv(buf, 0, len).await;
        let n = *result.as_ref().unwrap_or(&0);
        *self.arrived.borrow_mut() = (buf, 0..n);
        result.map(|n| n > 0)
    }

    /// Takes decrypted plaintext; `None` if more must arrive.
    fn take(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match self.session.borrow_mut().reader().read(into) {
            Ok(n) => Ok(Some(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn recv(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(n) = self.take(into)? {
                return Ok(n);
            }
            if self.ended.get() {
                return Ok(0);
            }
            // An end without a close_notify alert counts as a normal end: NBD itself detects
            // incomplete messages.
            if !self.decrypt()? && !self.receive().await? {
                self.ended.set(true);
            }
        }
    }

    async fn send(&self, pieces: &[Piece]) -> io::Result<()> {
        let mut room = SEND_PART_BYTES;
        for piece in pieces {
            let mut rest = piece.bytes();
            while !rest.is_empty() {
                let (part, later) = rest.split_at(rest.len().min(room));
                self.session.borrow_mut().writer().write_all(part)?;
                (rest, room) = (later, room - part.len());
                if room == 0 {
                    self.send_pending().await?;
                    room = SEND_PART_BYTES;
                }
            }
        }
        self.send_pending().await
    }

    /// Sends the pending output of the session.
    async fn send_pending(&self) -> io::Result<()> {
        let mut out = Vec::new();
        {
            let mut session = self.session.borrow_mut();
            while session.wants_write() {
                session.write_tls(&mut out)?;
            }
        }
        if out.is_empty() {
            return Ok(());
        }
        self.stream.send_vectored(vec![out.into()]).await.0
    }
}

impl<S: ByteStream> ByteStream for TlsStream<S> {
    fn recv(&self, mut buf: Buf, at: usize, max: usize) -> impl Future<Output = (io::Result<usize>, Buf)> + 'static {
        let inner = self.inner.clone();
        async move {
            let result = inner.recv(&mut buf[at..at + max]).await;
            (result, buf)
        }
    }

    fn send_vectored(&self, pieces: Vec<Piece>) -> impl Future<Output = (io::Result<()>, Vec<Piece>)> + 'static {
        let inner = self.inner.clone();
        async move {
            let result = inner.send(&pieces).await;
            (result, pieces)
        }
    }

    fn finish(&self) -> impl Future<Output = io::Result<()>> + 'static {
        let inner = self.inner.clone();
        async move {
            inner.session.borrow_mut().send_close_notify();
            inner.send_pending().await
        }
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.inner.stream.shutdown(how)
    }
}
