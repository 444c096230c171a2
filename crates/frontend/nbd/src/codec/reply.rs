//! Replies of the transmission phase, in the style that the session negotiated.

use serde::{Deserialize, Serialize};

use super::values::*;

/// Errors that a reply can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// The export is read-only.
    NotPermitted = 1,
    /// A device failed.
    Io = 5,
    /// The request is invalid.
    Invalid = 22,
    /// No space, or past the end of the export.
    NoSpace = 28,
    /// The result exceeds one reply.
    Overflow = 75,
    /// The operation is possible, but not as fast as the client demands.
    NotSupported = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

impl ErrorCode {
    /// Returns the code closest to a Linux errno.
    pub fn from_errno(errno: i32) -> ErrorCode {
        match errno {
            1 | 13 | 30 => ErrorCode::NotPermitted,
            22 => ErrorCode::Invalid,
            27 | 28 | 122 => ErrorCode::NoSpace,
            108 => ErrorCode::Shutdown,
            _ => ErrorCode::Io,
        }
    }

    /// Returns the number on the wire.
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// Format of a session's requests and replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplyStyle {
    /// One header and all of the data.
    #[default]
    Simple,
    /// Chunks.
    Structured,
    /// Chunks, and 64-bit lengths in requests and replies.
    Extended,
}

impl ReplyStyle {
    /// Returns whether a reply may consist of several chunks.
    pub fn has_chunks(self) -> bool {
        self != ReplyStyle::Simple
    }
}

/// A run of constant status in a metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length in bytes; never 0.
    pub len: u64,
    /// Flags or number that the context defines.
    pub flags: u32,
}

/// Address of a reply: the request that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    /// The request's cookie.
    pub cookie: u64,
    /// The request's offset, which replies with extended headers repeat.
    pub offset: u64,
}

/// Longest text of an error.
const MAX_TEXT: usize = 4096;

/// Encodes replies in the style that the session negotiated. Replies that need chunks (holes,
/// several pieces, status) must not be encoded for a session without them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplyEncoder {
    style: ReplyStyle,
}

impl ReplyEncoder {
    /// Creates an encoder for replies of this style.
    pub fn new(style: ReplyStyle) -> ReplyEncoder {
        ReplyEncoder { style }
    }

    /// Encodes a success without data; as a simple reply unless headers are extended.
    pub fn done(&self, to: ReplyTo, out: &mut Vec<u8>) {
        match self.style {
            ReplyStyle::Extended => self.chunk(to, CHUNK_NONE, 0, true, out),
            _ => simple(0, to.cookie, out),
        }
    }

    /// Encodes the header of `len` bytes of data from `offset`; `last`: nothing follows the data.
    /// If `len` is 0, encodes an empty chunk instead of a data chunk.
    pub fn data(&self, to: ReplyTo, offset: u64, len: u32, last: bool, out: &mut Vec<u8>) {
        match self.style {
            ReplyStyle::Simple => simple(0, to.cookie, out),
            _ if len == 0 => self.chunk(to, CHUNK_NONE, 0, last, out),
            _ => {
                self.chunk(to, CHUNK_OFFSET_DATA, u64::from(len) + 8, last, out);
                out.extend_from_slice(&offset.to_be_bytes());
            }
        }
    }

    /// Encodes that the `len` bytes from `offset` are zero.
    pub fn hole(&self, to: ReplyTo, offset: u64, len: u32, last: bool, out: &mut Vec<u8>) {
        self.chunk(to, CHUNK_OFFSET_HOLE, 12, last, out);
        out.extend_from_slice(&offset.to_be_bytes());
        out.extend_from_slice(&len.to_be_bytes());
    }

    /// Encodes the extents of the context with this number, from the request's offset on. With 32-bit
    /// lengths, extents that do not fit are left out; the client sends another request for the rest.
    pub fn status(&self, to: ReplyTo, context: u32, extents: &[StatusExtent], last: bool, out: &mut Vec<u8>) {
        if self.style == ReplyStyle::Extended {
            self.chunk(to, CHUNK_BLOCK_STATUS_EXT, 8 + 16 * extents.len() as u64, last, out);
            out.extend_from_slice(&context.to_be_bytes());
            out.extend_from_slice(&(extents.len() as u32).to_be_bytes());
            for extent in extents {
                out.extend_from_slice(&extent.len.to_be_bytes());
                out.extend_from_slice(&u64::from(extent.flags).to_be_bytes());
            }
            return;
        }
        let whole = extents.iter().position(|e| e.len > u64::from(u32::MAX)).map_or(extents.len(), |at| at + 1);
        self.chunk(to, CHUNK_BLOCK_STATUS, 4 + 8 * whole as u64, last, out);
        out.extend_from_slice(&context.to_be_bytes());
        for extent in &extents[..whole] {
            // If it must be cut: a multiple of every block size.
            let len = u32::try_from(extent.len).unwrap_or(u32::MAX - u32::MAX % MAX_PAYLOAD);
            out.extend_from_slice(&len.to_be_bytes());
            out.extend_from_slice(&extent.flags.to_be_bytes());
        }
    }

    /// Encodes a failure, which ends the reply. `text` is the reason for people; `at` is the offset
    /// of the failure, inside the range of the request.
    pub fn error(&self, to: ReplyTo, code: ErrorCode, text: &str, at: Option<u64>, out: &mut Vec<u8>) {
        if self.style == ReplyStyle::Simple {
            return simple(code.number(), to.cookie, out);
        }
        let cut = (0..=MAX_TEXT.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
        let text = &text[..cut.unwrap_or(0)];
        let kind = if at.is_some() { CHUNK_ERROR_OFFSET } else { CHUNK_ERROR };
        let len = 6 + text.len() + at.map_or(0, |_| 8);
        self.chunk(to, kind, len as u64, true, out);
        out.extend_from_slice(&code.number().to_be_bytes());
        out.extend_from_slice(&(text.len() as u16).to_be_bytes());
        out.extend_from_slice(text.as_bytes());
        if let Some(at) = at {
            out.extend_from_slice(&at.to_be_bytes());
        }
    }

    fn chunk(&self, to: ReplyTo, kind: u16, len: u64, last: bool, out: &mut Vec<u8>) {
        let flags = if last { REPLY_FLAG_DONE } else { 0 };
        let is_extended = self.style == ReplyStyle::Extended;
        let magic = if is_extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        out.extend_from_slice(&magic.to_be_bytes());
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&to.cookie.to_be_bytes());
        if is_extended {
            out.extend_from_slice(&to.offset.to_be_bytes());
            out.extend_from_slice(&len.to_be_bytes());
        } else {
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
}

fn simple(error: u32, cookie: u64, out: &mut Vec<u8>) {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: ReplyTo = ReplyTo { cookie: 9, offset: 4096 };

    fn golden(style: ReplyStyle, encode: impl FnOnce(&ReplyEncoder, &mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        encode(&ReplyEncoder::new(style), &mut out);
        out
    }

    /// Returns the header of a structured chunk.
    fn structured(flags: u8, kind: [u8; 2], len: u8) -> Vec<u8> {
        let head = [0x66, 0x8e, 0x33, 0xef, 0, flags, kind[0], kind[1]];
        [&head[..], &[0, 0, 0, 0, 0, 0, 0, 9], &[0, 0, 0, len]].concat()
    }

    /// Returns the header of a chunk with an extended header.
    fn extended(flags: u8, kind: [u8; 2], len: u8) -> Vec<u8> {
        let head = [0x6e, 0x8a, 0x27, 0x8c, 0, flags, kind[0], kind[1]];
        [&head[..], &[0, 0, 0, 0, 0, 0, 0, 9], &[0, 0, 0, 0, 0, 0, 16, 0], &[0, 0, 0, 0, 0, 0, 0, len]].concat()
    }

    #[test]
    fn golden_simple_replies() {
        let to = ReplyTo { cookie: 0x0102_0304_0506_0708, offset: 0 };
        let done = golden(ReplyStyle::Simple, |e, out| e.done(to, out));
        assert_eq!(done, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let error = golden(ReplyStyle::Simple, |e, out| e.error(TO, ErrorCode::NoSpace, "full", None, out));
        assert_eq!(error, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 0, 0, 0, 0, 0, 0, 0, 9]);
        let data = golden(ReplyStyle::Simple, |e, out| e.data(TO, 4096, 512, true, out));
        assert_eq!(data, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
        assert_eq!(golden(ReplyStyle::Structured, |e, out| e.done(TO, out)), data, "no chunk is needed");
    }

    #[test]
    fn golden_structured_replies() {
        let of = |f: &dyn Fn(&ReplyEncoder, &mut Vec<u8>)| golden(ReplyStyle::Structured, f);
        let data = of(&|e, out| e.data(TO, 8192, 4, false, out));
        assert_eq!(data, [structured(0, [0, 1], 12), vec![0, 0, 0, 0, 0, 0, 32, 0]].concat());
        let nothing = of(&|e, out| e.data(TO, 8192, 0, true, out));
        assert_eq!(nothing, structured(1, [0, 0], 0), "a chunk of data has at least one byte of it");
        let hole = of(&|e, out| e.hole(TO, 8192, 512, true, out));
        assert_eq!(hole, [structured(1, [0, 2], 12), vec![0, 0, 0, 0, 0, 0, 32, 0, 0, 0, 2, 0]].concat());
        let error = of(&|e, out| e.error(TO, ErrorCode::Io, "no", None, out));
        assert_eq!(error, [structured(1, [0x80, 1], 8), vec![0, 0, 0, 5, 0, 2, b'n', b'o']].concat());
        let there = of(&|e, out| e.error(TO, ErrorCode::Io, "no", Some(8192), out));
        let tail = vec![0, 0, 0, 5, 0, 2, b'n', b'o', 0, 0, 0, 0, 0, 0, 32, 0];
        assert_eq!(there, [structured(1, [0x80, 2], 16), tail].concat());
        let extents = [StatusExtent { len: 4096, flags: 3 }, StatusExtent { len: 1, flags: 0 }];
        let status = of(&|e, out| e.status(TO, 7, &extents, true, out));
        let tail = vec![0, 0, 0, 7, 0, 0, 16, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0];
        assert_eq!(status, [structured(1, [0, 5], 20), tail].concat());
    }

    #[test]
    fn golden_extended_replies() {
        let of = |f: &dyn Fn(&ReplyEncoder, &mut Vec<u8>)| golden(ReplyStyle::Extended, f);
        assert_eq!(of(&|e, out| e.done(TO, out)), extended(1, [0, 0], 0));
        let data = of(&|e, out| e.data(TO, 8192, 4, true, out));
        assert_eq!(data, [extended(1, [0, 1], 12), vec![0, 0, 0, 0, 0, 0, 32, 0]].concat());
        let extents = [StatusExtent { len: 1 << 40, flags: 3 }];
        let status = of(&|e, out| e.status(TO, 7, &extents, false, out));
        let tail = vec![0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
        assert_eq!(status, [extended(0, [0, 6], 24), tail].concat());
    }

    #[test]
    fn an_extent_that_needs_64_bits_is_cut_for_who_has_32() {
        let extents = [1, 1 << 40, 5].map(|len| StatusExtent { len, flags: 1 });
        let bytes = golden(ReplyStyle::Structured, |e, out| e.status(TO, 7, &extents, true, out));
        assert_eq!(bytes.len(), 20 + 4 + 2 * 8, "what follows the long one is left out");
        assert_eq!(bytes[32..36], (u32::MAX - (32 << 20) + 1).to_be_bytes());
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let text = "é".repeat(MAX_TEXT);
        let bytes = golden(ReplyStyle::Structured, |e, out| e.error(TO, ErrorCode::Io, &text, None, out));
        assert_eq!(bytes.len(), 20 + 6 + MAX_TEXT);
        assert!(std::str::from_utf8(&bytes[26..]).is_ok());
    }

    #[test]
    fn errnos_become_the_codes_of_the_protocol() {
        let pairs = [(1, 1), (30, 1), (5, 5), (12, 5), (16, 5), (22, 22), (27, 28), (28, 28), (122, 28)];
        for (errno, number) in pairs {
            assert_eq!(ErrorCode::from_errno(errno).number(), number, "errno {errno}");
        }
    }
}
