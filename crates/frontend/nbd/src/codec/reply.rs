//! Replies of the transmission phase.

use super::values::SIMPLE_REPLY_MAGIC;

/// The errors that a reply can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// The export is read-only.
    NotPermitted = 1,
    /// A device failed.
    Io = 5,
    /// A request that makes no sense.
    Invalid = 22,
    /// No space, or past the end of the export.
    NoSpace = 28,
    /// The server is shutting down.
    Shutdown = 108,
}

impl ErrorCode {
    /// The code that comes closest to a Linux errno.
    pub fn from_errno(errno: i32) -> ErrorCode {
        match errno {
            1 | 13 | 30 => ErrorCode::NotPermitted,
            22 => ErrorCode::Invalid,
            27 | 28 | 122 => ErrorCode::NoSpace,
            108 => ErrorCode::Shutdown,
            _ => ErrorCode::Io,
        }
    }

    /// The number on the wire.
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// Encodes replies in the style the session has negotiated; so far that is always simple replies.
/// The arguments are those that structured replies need too.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplyEncoder;

impl ReplyEncoder {
    /// A success without data.
    pub fn done(&self, cookie: u64, out: &mut Vec<u8>) {
        simple(0, cookie, out);
    }

    /// What goes before the `len` bytes of data that were read at `offset`.
    pub fn data(&self, cookie: u64, _offset: u64, _len: u32, out: &mut Vec<u8>) {
        simple(0, cookie, out);
    }

    /// A failure.
    pub fn error(&self, cookie: u64, code: ErrorCode, out: &mut Vec<u8>) {
        simple(code.number(), cookie, out);
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

    #[test]
    fn golden_replies() {
        let mut out = Vec::new();
        ReplyEncoder.done(0x0102_0304_0506_0708, &mut out);
        assert_eq!(out, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        out.clear();
        ReplyEncoder.error(9, ErrorCode::NoSpace, &mut out);
        assert_eq!(out, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 0, 0, 0, 0, 0, 0, 0, 9]);
        out.clear();
        ReplyEncoder.data(9, 4096, 512, &mut out);
        assert_eq!(out, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
    }

    #[test]
    fn errnos_become_the_codes_of_the_protocol() {
        let pairs = [(1, 1), (30, 1), (5, 5), (12, 5), (16, 5), (22, 22), (27, 28), (28, 28), (122, 28)];
        for (errno, number) in pairs {
            assert_eq!(ErrorCode::from_errno(errno).number(), number, "errno {errno}");
        }
    }
}
