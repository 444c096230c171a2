//! Several pieces of memory that are sent in one system call.

use std::ops::Range;
use std::rc::Rc;

use forkdisk::Buf;

/// Most pieces per system call (UIO_MAXIOV).
const MAX_IOVECS: usize = 1024;

/// A part of what is sent: bytes, or a range of an I/O buffer.
#[derive(Debug)]
pub enum Piece {
    /// All of these bytes.
    Bytes(Vec<u8>),
    /// A range of a buffer, in bytes.
    Buf(Buf, Range<usize>),
    /// A range of a shared buffer, in bytes; other pieces hold other ranges of it.
    Part(Rc<Buf>, Range<usize>),
}

impl Piece {
    /// Returns the bytes to send.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Piece::Bytes(bytes) => bytes,
            Piece::Buf(buf, range) => &buf[range.clone()],
            Piece::Part(buf, range) => &buf[range.clone()],
        }
    }
}

impl From<Vec<u8>> for Piece {
    fn from(bytes: Vec<u8>) -> Piece {
        Piece::Bytes(bytes)
    }
}

impl From<Buf> for Piece {
    fn from(buf: Buf) -> Piece {
        let all = 0..buf.len();
        Piece::Buf(buf, all)
    }
}

/// Pieces being sent, with the kernel's description of the rest.
pub(crate) struct Message {
    pieces: Vec<Piece>,
    iovecs: Vec<libc::iovec>,
    /// Index of the first piece that was not sent completely.
    first: usize,
    header: libc::msghdr,
}

impl Message {
    /// # Panics
    /// If a piece's range lies outside its buffer.
    pub(crate) fn new(pieces: Vec<Piece>) -> Box<Message> {
        let iovecs = pieces
            .iter()
            .map(|piece| {
                let bytes = piece.bytes();
                libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
            })
            .collect();
        // SAFETY: all zeroes is a valid msghdr.
        let header = unsafe { std::mem::zeroed() };
        let mut message = Box::new(Message { pieces, iovecs, first: 0, header });
        message.skip_empty();
        message
    }

    pub(crate) fn is_sent(&self) -> bool {
        self.first == self.iovecs.len()
    }

    /// Returns the header for the rest; valid while this message stays in place.
    pub(crate) fn header(&mut self) -> *const libc::msghdr {
        let left = &mut self.iovecs[self.first..];
        self.header.msg_iov = left.as_mut_ptr();
        self.header.msg_iovlen = left.len().min(MAX_IOVECS) as _;
        &raw const self.header
    }

    /// Returns the number of bytes left.
    pub(crate) fn left(&self) -> usize {
        self.iovecs[self.first..].iter().map(|iovec| iovec.iov_len).sum()
    }

    /// Records that `sent` more bytes were sent; returns how many pieces are left.
    pub(crate) fn advance(&mut self, mut sent: usize) -> usize {
        while sent > 0 {
            let iovec = &mut self.iovecs[self.first];
            let part = sent.min(iovec.iov_len);
            iovec.iov_base = iovec.iov_base.wrapping_byte_add(part);
            iovec.iov_len -= part;
            sent -= part;
            self.skip_empty();
        }
        self.iovecs.len() - self.first
    }

    fn skip_empty(&mut self) {
        while self.iovecs.get(self.first).is_some_and(|iovec| iovec.iov_len == 0) {
            self.first += 1;
        }
    }

    /// Returns the bytes that were not sent.
    pub(crate) fn into_rest(self) -> Vec<u8> {
        let left = self.pieces.iter().zip(&self.iovecs).skip(self.first);
        left.flat_map(|(piece, iovec)| &piece.bytes()[piece.bytes().len() - iovec.iov_len..]).copied().collect()
    }

    pub(crate) fn into_pieces(self) -> Vec<Piece> {
        self.pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_skips_whole_and_empty_pieces() {
        let mut buf = Buf::zeroed(10);
        buf.copy_from_slice(b"0123456789");
        let pieces = vec![vec![].into(), b"abc".to_vec().into(), vec![].into(), Piece::Buf(buf, 2..6)];
        let mut m = Message::new(pieces);
        assert_eq!(m.first, 1);
        assert_eq!((m.left(), m.advance(2), m.left()), (7, 3, 5));
        assert_eq!(m.iovecs[1].iov_len, 1);
        assert_eq!(m.advance(3), 1, "the rest of the bytes, the empty piece and two of the buffer");
        assert_eq!(m.iovecs[3].iov_len, 2);
        let mut other = Message::new(vec![b"abc".to_vec().into(), vec![].into(), b"defg".to_vec().into()]);
        other.advance(5);
        assert_eq!(other.into_rest(), b"fg");
        assert_eq!(m.advance(2), 0);
        assert!(m.is_sent());
        assert_eq!(m.into_pieces().len(), 4);
    }
}
