//! Bytes from a client: a staging buffer that brings many small requests with one receive, and a
//! way around it for large payloads.
//!
//! After a large payload the next receive asks for little, so that the payload behind the next
//! request is not drawn into the staging buffer; small requests make it ask for more again.

use std::io;
use std::ops::Range;

use forkdisk::Buf;
use forkdisk_uring::ByteStream;

/// Bytes of the staging buffer. More than any handshake message and than any request with a
/// payload that is not received directly.
pub(super) const STAGING_BYTES: usize = 128 << 10;
/// A payload of which at least so much is missing is received directly into its buffer.
const DIRECT_BYTES: usize = 16 << 10;
/// What a receive asks for after a large payload.
const LITTLE_BYTES: usize = 4 << 10;

pub(super) struct Inbox<S> {
    stream: S,
    staging: Buf,
    filled: Range<usize>,
    ask: usize,
}

impl<S: ByteStream> Inbox<S> {
    pub(super) fn new(stream: S) -> Inbox<S> {
        Inbox { stream, staging: Buf::zeroed(STAGING_BYTES), filled: 0..0, ask: STAGING_BYTES }
    }

    /// Where the bytes come from.
    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    /// What has arrived and was not consumed.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.staging[self.filled.clone()]
    }

    /// Marks the first `n` bytes as done with.
    pub(super) fn consume(&mut self, n: usize) {
        self.filled.start += n;
        debug_assert!(self.filled.start <= self.filled.end);
    }

    /// Receives more; `false` when the client has finished.
    pub(super) async fn fill(&mut self) -> io::Result<bool> {
        self.make_room();
        let at = self.filled.end;
        let ask = self.ask.min(STAGING_BYTES - at);
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

    /// Fills `buf` with the next bytes; `false` when the client finished before.
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
            if !self.fill().await? {
                return Ok(None);
            }
        }
        self.ask = LITTLE_BYTES;
        match self.stream.recv_exact(buf, have, len - have).await {
            (Ok(()), buf) => Ok(Some(buf)),
            (Err(e), _) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            (Err(e), _) => Err(e),
        }
    }

    /// Throws away the next `len` bytes; `false` when the client finished before.
    pub(super) async fn skip(&mut self, mut len: u64) -> io::Result<bool> {
        loop {
            let here = self.bytes().len();
            let part = usize::try_from(len).map_or(here, |len| len.min(here));
            self.consume(part);
            len -= part as u64;
            if len == 0 {
                return Ok(true);
            }
            self.ask = STAGING_BYTES;
            if !self.fill().await? {
                return Ok(false);
            }
        }
    }

    /// Makes room for at least half of the staging buffer.
    fn make_room(&mut self) {
        if self.filled.is_empty() {
            self.filled = 0..0;
        } else if self.filled.end > STAGING_BYTES / 2 {
            self.staging.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
    }
}
