//! Received bytes of a client: a staging buffer that takes many small requests with one receive,
//! and a direct path for large payloads.
//!
//! After a large payload the next receive is short, so that the payload after the next
//! request does not enter the staging buffer; small requests lengthen it again.

use std::io;
use std::ops::Range;

use forkdisk::Buf;
use forkdisk_uring::{ByteStream, is_interrupted};

/// Size of the staging buffer in bytes: larger than any handshake message and than any request with
/// a payload that is not received directly.
pub(super) const STAGING_BYTES: usize = 128 << 10;
/// Missing bytes from which a payload is received directly into its buffer.
const DIRECT_BYTES: usize = 16 << 10;
/// Bytes of the receive after a large payload.
const LITTLE_BYTES: usize = 4 << 10;

pub(super) struct Inbox<S> {
    stream: S,
    staging: Buf,
    filled: Range<usize>,
    ask: usize,
    /// The first bytes of a payload, after its receive was interrupted.
    interrupted: Vec<u8>,
}

impl<S: ByteStream> Inbox<S> {
    /// Creates the inbox of a connection of which these bytes have been received.
    pub(super) fn after(stream: S, received: &[u8]) -> Inbox<S> {
        let mut staging = Buf::zeroed(STAGING_BYTES + received.len());
        staging[..received.len()].copy_from_slice(received);
        Inbox { stream, staging, filled: 0..received.len(), ask: STAGING_BYTES, interrupted: Vec::new() }
    }

    /// Takes everything that was received and not consumed, with the bytes of an interrupted payload.
    pub(super) fn take_rest(&mut self) -> Vec<u8> {
        let mut rest = std::mem::take(&mut self.interrupted);
        rest.extend_from_slice(self.bytes());
        self.filled = 0..0;
        rest
    }

    /// Returns the underlying stream.
    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    /// Returns the received bytes that were not consumed.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.staging[self.filled.clone()]
    }

    /// Consumes the first `n` bytes.
    pub(super) fn consume(&mut self, n: usize) {
        self.filled.start += n;
        debug_assert!(self.filled.start <= self.filled.end);
    }

    /// Receives more; returns `false` when the client has closed its side.
    pub(super) async fn fill(&mut self) -> io::Result<bool> {
        self.make_room();
        let at = self.filled.end;
        let ask = self.ask.min(self.staging.len() - at);
        let staging = std::mem::replace(&mut self.staging, Buf::zeroed(0));
        let (result, staging) = self.stream.recv(staging, at, ask).await;
        self.staging = staging;
        let n = result?;
        self.filled.end += n;
        if n == ask {
            self.ask = (self.ask * 4).min(STAGING_BYTES);
        }
        Ok(n > 0)
    }

    /// Fills `buf` with the next bytes; returns `None` if the client closed its side before.
    pub(super) async fn read(&mut self, mut buf: Buf) -> io::Result<Option<Buf>> {
        let len = buf.len();
        let mut have = 0;
        loop {
            let part = self.bytes().len().min(len - have);
            buf[have..have + part].copy_from_slice(&self.bytes()[..part]);
            self.consume(part);
            have += part;
            if have == len {
                return Ok(Some(buf));
            }
            if len - have >= DIRECT_BYTES {
                break;
            }
            match self.fill().await {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(e) => return self.stopped(&buf[..have], e),
            }
        }
        self.ask = LITTLE_BYTES;
        match self.stream.recv_exact(buf, have, len - have).await {
            (Ok(()), buf, _) => Ok(Some(buf)),
            (Err(e), _, _) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            (Err(e), buf, more) => self.stopped(&buf[..have + more], e),
        }
    }

    /// Keeps the bytes of an interrupted payload.
    fn stopped(&mut self, received: &[u8], error: io::Error) -> io::Result<Option<Buf>> {
        if is_interrupted(&error) {
            self.interrupted = received.to_vec();
        }
        Err(error)
    }

    /// Drops the next `len` bytes; returns `false` if the client closed its side before.
    pub(super) async fn skip(&mut self, all: u64) -> io::Result<bool> {
        let mut len = all;
        loop {
            let here = self.bytes().len();
            let part = usize::try_from(len).map_or(here, |len| len.min(here));
            self.consume(part);
            len -= part as u64;
            if len == 0 {
                return Ok(true);
            }
            self.ask = STAGING_BYTES;
            match self.fill().await {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) => {
                    if is_interrupted(&error) {
                        // Their place in the payload counts, not their contents.
                        self.interrupted = vec![0; (all - len) as usize];
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Frees at least half of the staging buffer.
    fn make_room(&mut self) {
        if self.filled.is_empty() {
            self.filled = 0..0;
            if self.staging.len() > STAGING_BYTES {
                self.staging = Buf::zeroed(STAGING_BYTES);
            }
        } else if self.filled.end > STAGING_BYTES / 2 {
            self.staging.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
    }
}
