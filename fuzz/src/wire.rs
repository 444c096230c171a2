//! The client's end of a connection in memory, and replies as they come.

use forkdisk::Buf;
use forkdisk_nbd::codec::{EXTENDED_REPLY_MAGIC, ReplyStyle, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC};
use forkdisk_nbd::memory::MemoryStream;
use forkdisk_uring::ByteStream;

/// Longest chunk that any request here can lead to.
const MAX_CHUNK: u64 = 1 << 20;

pub struct Wire {
    stream: MemoryStream,
    bytes: Vec<u8>,
    at: usize,
}

/// The front of a reply: everything, but for the data of a simple one.
pub struct Piece {
    pub cookie: u64,
    pub body: Body,
}

pub enum Body {
    Simple { error: u32 },
    Chunk { flags: u16, kind: u16, offset: Option<u64>, data: Vec<u8> },
}

/// Big-endian numbers at the front of a slice.
pub fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |n, &b| n << 8 | u64::from(b))
}

impl Wire {
    pub fn new(stream: MemoryStream) -> Wire {
        Wire { stream, bytes: Vec::new(), at: 0 }
    }

    async fn fill(&mut self) -> bool {
        self.bytes.drain(..self.at);
        self.at = 0;
        let (result, buf) = self.stream.recv(Buf::zeroed(8192), 0, 8192).await;
        let n = result.expect("it cannot fail");
        self.bytes.extend_from_slice(&buf[..n]);
        n > 0
    }

    /// The next `n` bytes, which must come.
    pub async fn take(&mut self, n: usize) -> Vec<u8> {
        while self.bytes.len() - self.at < n {
            assert!(self.fill().await, "the connection ended where {n} bytes were due");
        }
        self.at += n;
        self.bytes[self.at - n..self.at].to_vec()
    }

    pub async fn number(&mut self, n: usize) -> u64 {
        number(&self.take(n).await)
    }

    /// Nothing must come any more.
    pub async fn expect_end(&mut self) {
        let more = self.at < self.bytes.len() || self.fill().await;
        assert!(!more, "something came that nobody asked for: {:02x?}", &self.bytes[self.at..]);
    }

    /// Reads to the end, whatever comes.
    pub async fn skip_to_end(&mut self) {
        while self.fill().await {
            self.at = self.bytes.len();
        }
    }

    pub async fn piece(&mut self, style: ReplyStyle) -> Piece {
        let magic = self.number(4).await as u32;
        let is_extended = style == ReplyStyle::Extended;
        if magic == SIMPLE_REPLY_MAGIC {
            assert!(!is_extended, "a simple reply where extended headers were agreed on");
            let error = self.number(4).await as u32;
            return Piece { cookie: self.number(8).await, body: Body::Simple { error } };
        }
        let due = if is_extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        assert!(style != ReplyStyle::Simple && magic == due, "no reply begins with {magic:#x} here");
        let (flags, kind) = (self.number(2).await as u16, self.number(2).await as u16);
        let cookie = self.number(8).await;
        let offset = if is_extended { Some(self.number(8).await) } else { None };
        let len = self.number(if is_extended { 8 } else { 4 }).await;
        assert!(len <= MAX_CHUNK, "a chunk of {len} bytes");
        Piece { cookie, body: Body::Chunk { flags, kind, offset, data: self.take(len as usize).await } }
    }
}
