//! An encrypted stream: the records of a session, over a byte stream.
//!
//! Receiving and sending share the records and borrow them only between waits. A receive never sends: new keys that a
//! client requested are used from the next send on.
//! Invariant: buffered ciphertext and plaintext are bounded by [`CIPHERTEXT_BYTES`].

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use forkdisk::Buf;
use forkdisk_uring::{ByteStream, PeerCred, Piece, is_interrupted};
use rustls::ServerConfig;
use serde::{Deserialize, Serialize};

use super::handshake::{Agreed, agree};
use super::identity::Identity;
use super::records::{CLOSE_NOTIFY, DATA_BYTES, PassedRecords, Received, Records, Violation, record_len, sealed_len};

/// Most bytes of ciphertext received at once.
const CIPHERTEXT_BYTES: usize = 128 << 10;
/// Most bytes of plaintext encrypted before they are sent.
const SEND_PART_BYTES: usize = 256 << 10;

/// The server's end of a TLS session over `S`. Clones are the same connection.
pub struct TlsStream<S> {
    inner: Rc<Inner<S>>,
}

/// A session on its way to another process, with its keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedTls {
    records: PassedRecords,
    identity: Option<Identity>,
    /// Received ciphertext: the beginning of a record.
    #[serde(with = "crate::hex")]
    arrived: Vec<u8>,
    /// How many bytes of the replies that the client has not fetched are encrypted.
    encrypted: usize,
    /// The client sends nothing more.
    ended: bool,
}

/// A session as it leaves this process, with the bytes of the connection that belong to it.
pub(crate) struct Leaving {
    pub(crate) session: PassedTls,
    /// Decrypted bytes that were not received from the stream.
    pub(crate) received: Vec<u8>,
    /// Encrypted bytes that were not sent.
    pub(crate) unsent: Vec<u8>,
}

struct Inner<S> {
    stream: S,
    records: RefCell<Records>,
    identity: Option<Identity>,
    arrived: RefCell<Arrived>,
    /// Encrypted bytes that go out before all others.
    unsent: RefCell<Vec<u8>>,
    /// The client has closed its side, or the connection.
    ended: Cell<bool>,
    /// Why no further record can be read.
    violation: Cell<Option<Violation>>,
}

/// What has arrived: decrypted bytes of one record, and the records behind it.
struct Arrived {
    buf: Buf,
    plain: Range<usize>,
    cipher: Range<usize>,
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
        let Agreed { records, identity, arrived } = agree(&stream, &config, Buf::zeroed(CIPHERTEXT_BYTES)).await?;
        let (buf, cipher) = arrived;
        Ok(TlsStream::of(stream, records, identity, Arrived { buf, plain: 0..0, cipher }))
    }

    /// Continues a session of another process. Of the replies that the client has not fetched, takes what is
    /// encrypted; the others are sent as usual.
    ///
    /// # Errors
    /// There is no session with this state.
    pub(crate) fn resume(stream: S, passed: PassedTls, unsent: &mut Vec<u8>) -> io::Result<TlsStream<S>> {
        let PassedTls { records, identity, arrived, encrypted, ended } = passed;
        let unfit = |text| io::Error::new(ErrorKind::InvalidData, text);
        let records = Records::new(records).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        let mut buf = Buf::zeroed(CIPHERTEXT_BYTES);
        buf.get_mut(..arrived.len()).ok_or(unfit("more than a record has arrived"))?.copy_from_slice(&arrived);
        if encrypted > unsent.len() {
            return Err(unfit("encrypted bytes are missing"));
        }
        let tls = TlsStream::of(stream, records, identity, Arrived { buf, plain: 0..0, cipher: 0..arrived.len() });
        let clear = unsent.split_off(encrypted);
        tls.inner.unsent.replace(std::mem::replace(unsent, clear));
        tls.inner.ended.set(ended);
        Ok(tls)
    }

    fn of(stream: S, records: Records, identity: Option<Identity>, arrived: Arrived) -> TlsStream<S> {
        let (records, arrived) = (RefCell::new(records), RefCell::new(arrived));
        let (unsent, ended, violation) = Default::default();
        TlsStream { inner: Rc::new(Inner { stream, records, identity, arrived, unsent, ended, violation }) }
    }

    /// Returns the client's identity, if it presented a certificate.
    pub fn identity(&self) -> Option<Identity> {
        self.inner.identity.clone()
    }

    /// Returns the session for another process, between a receive and a send. If it is continued there, this stream
    /// must not be used any more.
    ///
    /// # Errors
    /// The client's records end the session.
    pub(crate) fn leave(&self) -> io::Result<Leaving> {
        let inner = &*self.inner;
        let mut received = Vec::new();
        // What has arrived is decrypted here, so that only the beginning of a record remains.
        loop {
            let mut arrived = inner.arrived.borrow_mut();
            received.extend_from_slice(&arrived.buf[arrived.plain.clone()]);
            arrived.plain = 0..0;
            drop(arrived);
            if !inner.open()? {
                break;
            }
        }
        let (arrived, unsent) = (inner.arrived.borrow(), inner.unsent.borrow().clone());
        let session = PassedTls {
            records: inner.records.borrow().pass_on(),
            identity: self.identity(),
            arrived: if inner.ended.get() { Vec::new() } else { arrived.buf[arrived.cipher.clone()].to_vec() },
            encrypted: unsent.len(),
            ended: inner.ended.get(),
        };
        Ok(Leaving { session, received, unsent })
    }
}

impl<S: ByteStream> Inner<S> {
    /// Decrypts the next record; returns `false` if it has not arrived, or if none follows.
    fn open(&self) -> io::Result<bool> {
        if let Some(violation) = self.violation.get() {
            return Err(io::Error::new(ErrorKind::InvalidData, violation));
        }
        let mut arrived = self.arrived.borrow_mut();
        let Arrived { buf, plain, cipher } = &mut *arrived;
        let opened = match record_len(&buf[cipher.clone()]) {
            _ if self.ended.get() => return Ok(false),
            Ok(Some(len)) if len <= cipher.len() => {
                let start = cipher.start;
                cipher.start += len;
                self.records.borrow_mut().open(&mut buf[start..start + len]).map(|received| (start, received))
            }
            Ok(_) => return Ok(false),
            Err(violation) => Err(violation),
        };
        match opened {
            Ok((start, Received::Data(place))) => *plain = start + place.start..start + place.end,
            Ok((_, Received::Nothing)) => {}
            Ok((_, Received::Closed)) => self.ended.set(true),
            Err(violation) => {
                self.violation.set(Some(violation));
                return Err(io::Error::new(ErrorKind::InvalidData, violation));
            }
        }
        Ok(true)
    }

    /// Receives ciphertext behind what is there; returns `false` when the client has closed its side.
    async fn receive(&self) -> io::Result<bool> {
        let nothing = Arrived { buf: Buf::zeroed(0), plain: 0..0, cipher: 0..0 };
        let Arrived { mut buf, cipher, .. } = self.arrived.replace(nothing);
        let len = cipher.len();
        buf.copy_within(cipher, 0);
        let room = buf.len() - len;
        let (result, buf) = self.stream.recv(buf, len, room).await;
        let cipher = 0..len + result.as_ref().unwrap_or(&0);
        self.arrived.replace(Arrived { buf, plain: 0..0, cipher });
        result.map(|n| n > 0)
    }

    /// Takes decrypted bytes, of as many records as have arrived; returns 0 if more must arrive, or if none follow.
    fn take(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        loop {
            let mut arrived = self.arrived.borrow_mut();
            let Arrived { buf, plain, .. } = &mut *arrived;
            let part = plain.len().min(into.len() - done);
            into[done..done + part].copy_from_slice(&buf[plain.start..plain.start + part]);
            plain.start += part;
            done += part;
            drop(arrived);
            if done == into.len() {
                return Ok(done);
            }
            match self.open() {
                Ok(true) => {}
                Ok(false) => return Ok(done),
                // The next call returns the error.
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    async fn recv(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let taken = self.take(into)?;
            if taken > 0 || into.is_empty() || self.ended.get() {
                return Ok(taken);
            }
            // An end without a close_notify alert counts as a normal end: NBD itself detects
            // incomplete messages.
            if !self.receive().await? {
                self.ended.set(true);
            }
        }
    }

    /// Sends everything that is encrypted, then all pieces. If that fails, returns the bytes that were not encrypted.
    async fn send(&self, pieces: &[Piece]) -> Result<(), (io::Error, Vec<u8>)> {
        let mut unsealed = Unsealed { pieces, at: 0 };
        loop {
            let mut out = self.unsent.take();
            let sealed = self.seal_part(&mut unsealed, &mut out);
            let sent = self.send_sealed(out).await;
            if let Err(error) = sent.and(sealed) {
                return Err((error, unsealed.rest()));
            }
            if unsealed.is_empty() {
                return Ok(());
            }
        }
    }

    /// Encrypts what is sent at once.
    fn seal_part(&self, unsealed: &mut Unsealed<'_>, out: &mut Vec<u8>) -> io::Result<()> {
        let (mut records, mut room) = (self.records.borrow_mut(), SEND_PART_BYTES);
        out.reserve(sealed_len(unsealed.len().min(room)));
        while room > 0 && !unsealed.is_empty() {
            let begun = match records.begin(out) {
                Ok(begun) => begun,
                Err(exhausted) => {
                    tracing::warn!("closed a connection: {exhausted}");
                    records.seal_alert(CLOSE_NOTIFY, out);
                    return Err(io::Error::new(ErrorKind::BrokenPipe, exhausted));
                }
            };
            room -= unsealed.take(DATA_BYTES.min(room), out);
            records.end(begun, out);
        }
        Ok(())
    }

    /// Sends encrypted bytes; keeps those that were not sent if it is interrupted.
    async fn send_sealed(&self, out: Vec<u8>) -> io::Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let (result, rest) = self.stream.send_vectored(vec![out.into()]).await;
        if result.as_ref().is_err_and(is_interrupted) {
            self.unsent.replace(rest.iter().flat_map(Piece::bytes).copied().collect());
        }
        result
    }
}

/// Pieces that are not encrypted yet, from a place of the first one on.
struct Unsealed<'a> {
    pieces: &'a [Piece],
    at: usize,
}

impl Unsealed<'_> {
    fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes().len()).sum::<usize>() - self.at
    }

    /// Skips what has no bytes; returns whether nothing is left.
    fn is_empty(&mut self) -> bool {
        while let [first, rest @ ..] = self.pieces
            && first.bytes().len() == self.at
        {
            (self.pieces, self.at) = (rest, 0);
        }
        self.pieces.is_empty()
    }

    /// Moves up to `most` bytes to `out`; returns how many.
    fn take(&mut self, most: usize, out: &mut Vec<u8>) -> usize {
        let mut done = 0;
        while done < most && !self.is_empty() {
            let bytes = &self.pieces[0].bytes()[self.at..];
            let part = bytes.len().min(most - done);
            out.extend_from_slice(&bytes[..part]);
            self.at += part;
            done += part;
        }
        done
    }

    fn rest(mut self) -> Vec<u8> {
        let mut rest = Vec::with_capacity(self.len());
        self.take(usize::MAX, &mut rest);
        rest
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

    fn interrupt(&self) {
        self.inner.stream.interrupt();
    }

    fn interrupt_send(&self) {
        self.inner.stream.interrupt_send();
    }

    fn pass_on(&self) -> io::Result<Option<OwnedFd>> {
        self.inner.stream.pass_on()
    }

    fn send_vectored(&self, pieces: Vec<Piece>) -> impl Future<Output = (io::Result<()>, Vec<Piece>)> + 'static {
        let inner = self.inner.clone();
        async move {
            match inner.send(&pieces).await {
                Err((error, rest)) if is_interrupted(&error) => (Err(error), vec![rest.into()]),
                result => (result.map_err(|(error, _)| error), pieces),
            }
        }
    }

    fn finish(&self) -> impl Future<Output = io::Result<()>> + 'static {
        let inner = self.inner.clone();
        async move {
            let mut out = inner.unsent.take();
            let alert = inner.violation.get().map_or(CLOSE_NOTIFY, Violation::alert);
            inner.records.borrow_mut().seal_alert(alert, &mut out);
            inner.send_sealed(out).await
        }
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.inner.stream.shutdown(how)
    }

    fn peer(&self) -> Option<PeerCred> {
        self.inner.stream.peer()
    }
}
