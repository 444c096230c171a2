//! Requests of the transmission phase: decoding, and all checks that do not need
//! the export.

use super::reply::{ErrorCode, ReplyStyle};
use super::values::*;

/// A decoded request; only its magic number was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Format of the session's requests.
    pub style: ReplyStyle,
    /// Command flags.
    pub flags: u16,
    /// Command number.
    pub command: u16,
    /// The client's identifier of the request; not interpreted, and not necessarily unique.
    pub cookie: u64,
    /// Offset in the export, in bytes.
    pub offset: u64,
    /// Length in bytes; should be 0 for commands without a range.
    pub length: u64,
}

/// Bytes that are not a request: the stream cannot be decoded any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request begins with {0:#x}, not with its magic number")]
pub struct RequestError(pub u32);

/// Operation of a valid request. Ranges lie inside the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Answer with `len` bytes from `offset`.
    Read {
        /// Offset in the export, in bytes.
        offset: u64,
        /// At most [`MAX_PAYLOAD`].
        len: u32,
        /// Answer in one piece, without holes.
        whole: bool,
    },
    /// Write the `len` bytes that follow the request.
    Write {
        /// Offset in the export, in bytes.
        offset: u64,
        /// At most [`MAX_PAYLOAD`].
        len: u32,
        /// Make it durable before the answer.
        fua: bool,
    },
    /// Make durable all writes that were answered before, on any connection.
    Flush,
    /// Discard the range.
    Trim {
        /// Offset in the export, in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Make it durable before the answer.
        fua: bool,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Offset in the export, in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Make it durable before the answer.
        fua: bool,
        /// Keep the range provisioned.
        no_hole: bool,
        /// Fail unless it is faster than a write.
        fast: bool,
    },
    /// Prefetch the range.
    Cache {
        /// Offset in the export, in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Return the status of the range in the chosen contexts.
    BlockStatus {
        /// Offset in the export, in bytes.
        offset: u64,
        /// Bytes; not 0.
        len: u64,
        /// One extent of each context suffices.
        one: bool,
    },
    /// End the session, without an answer.
    Disconnect,
}

impl Request {
    /// Decodes the request at the front of `input`; returns it with the length of its header.
    /// `None` if more input is needed.
    ///
    /// # Errors
    /// The input is no request: the connection must be closed.
    pub fn decode(input: &[u8], style: ReplyStyle) -> Result<Option<(Request, usize)>, RequestError> {
        let Some((magic, _)) = input.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let magic = u32::from_be_bytes(*magic);
        let is_extended = style == ReplyStyle::Extended;
        if magic != if is_extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC } {
            return Err(RequestError(magic));
        }
        let header = if is_extended { EXTENDED_REQUEST_HEADER } else { REQUEST_HEADER };
        let Some(b) = input.get(..header) else {
            return Ok(None);
        };
        let long = |at: usize| {
            u64::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3], b[at + 4], b[at + 5], b[at + 6], b[at + 7]])
        };
        let length = if is_extended { long(24) } else { u32::from_be_bytes([b[24], b[25], b[26], b[27]]).into() };
        let flags = u16::from_be_bytes([b[4], b[5]]);
        let command = u16::from_be_bytes([b[6], b[7]]);
        Ok(Some((Request { style, flags, command, cookie: long(8), offset: long(16), length }, header)))
    }

    /// Encodes the request as a client would. Without extended headers, lengths are truncated to
    /// 32 bits.
    pub fn encode(&self) -> Vec<u8> {
        let is_extended = self.style == ReplyStyle::Extended;
        let magic = if is_extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut b = Vec::with_capacity(EXTENDED_REQUEST_HEADER);
        b.extend_from_slice(&magic.to_be_bytes());
        b.extend_from_slice(&self.flags.to_be_bytes());
        b.extend_from_slice(&self.command.to_be_bytes());
        b.extend_from_slice(&self.cookie.to_be_bytes());
        b.extend_from_slice(&self.offset.to_be_bytes());
        if is_extended {
            b.extend_from_slice(&self.length.to_be_bytes());
        } else {
            b.extend_from_slice(&(self.length as u32).to_be_bytes());
        }
        b
    }

    /// Returns how many bytes of data follow the request, whether it is valid or not.
    pub fn payload(&self) -> u64 {
        let has_payload = match self.style {
            ReplyStyle::Extended => self.flags & CMD_FLAG_PAYLOAD_LEN != 0,
            _ => self.command == CMD_WRITE,
        };
        if has_payload { self.length } else { 0 }
    }

    /// Returns the operation for an export of `size` bytes, or the error to answer.
    ///
    /// # Errors
    /// The error to answer: an unknown command or flag, a range past the end, a write to a read-only export.
    pub fn check(&self, size: u64, read_only: bool) -> Result<Action, ErrorCode> {
        let Request { offset, length: len, .. } = *self;
        let has = |flag| self.flags & flag != 0;
        let fua = has(CMD_FLAG_FUA);
        if self.command == CMD_DISC {
            return Ok(Action::Disconnect);
        }
        self.check_flags()?;
        if self.command == CMD_FLUSH {
            let reserved = offset != 0 || len != 0;
            return if reserved { Err(ErrorCode::Invalid) } else { Ok(Action::Flush) };
        }
        if read_only && matches!(self.command, CMD_WRITE | CMD_TRIM | CMD_WRITE_ZEROES) {
            return Err(ErrorCode::NotPermitted);
        }
        self.check_range(size)?;
        Ok(match self.command {
            CMD_READ => Action::Read { offset, len: data_len(len)?, whole: has(CMD_FLAG_DF) },
            CMD_WRITE => Action::Write { offset, len: data_len(len)?, fua },
            CMD_TRIM => Action::Trim { offset, len, fua },
            CMD_CACHE => Action::Cache { offset, len },
            CMD_BLOCK_STATUS if len == 0 => return Err(ErrorCode::Invalid),
            CMD_BLOCK_STATUS => Action::BlockStatus { offset, len, one: has(CMD_FLAG_REQ_ONE) },
            _ => {
                let (no_hole, fast) = (has(CMD_FLAG_NO_HOLE), has(CMD_FLAG_FAST_ZERO));
                Action::WriteZeroes { offset, len, fua, no_hole, fast }
            }
        })
    }

    /// Refuses unknown commands, flags that the command does not have, and a payload that must not
    /// be there or is missing.
    fn check_flags(&self) -> Result<(), ErrorCode> {
        let own = match self.command {
            CMD_READ if self.style.has_chunks() => CMD_FLAG_DF,
            CMD_WRITE if self.style == ReplyStyle::Extended => CMD_FLAG_PAYLOAD_LEN,
            CMD_WRITE_ZEROES => CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO,
            CMD_BLOCK_STATUS if self.style.has_chunks() => CMD_FLAG_REQ_ONE,
            CMD_READ | CMD_WRITE | CMD_FLUSH | CMD_TRIM | CMD_CACHE => 0,
            _ => return Err(ErrorCode::Invalid),
        };
        let is_known = self.flags & !(own | CMD_FLAG_FUA) == 0;
        let has_data = self.command != CMD_WRITE || self.payload() == self.length;
        if is_known && has_data { Ok(()) } else { Err(ErrorCode::Invalid) }
    }

    /// Returns where the range leaves an export of `size` bytes, if that lies within the range;
    /// `None` for an empty range.
    pub fn past_end(&self, size: u64) -> Option<u64> {
        let end = self.offset.checked_add(self.length)?;
        (end > size && self.length > 0).then_some(size.max(self.offset))
    }

    /// Checks that the range ends inside the export. For writes a longer range is a lack of space.
    fn check_range(&self, size: u64) -> Result<(), ErrorCode> {
        let end = self.offset.checked_add(self.length).ok_or(ErrorCode::Invalid)?;
        match self.command {
            _ if end <= size => Ok(()),
            CMD_WRITE | CMD_WRITE_ZEROES => Err(ErrorCode::NoSpace),
            _ => Err(ErrorCode::Invalid),
        }
    }
}

fn data_len(len: u64) -> Result<u32, ErrorCode> {
    u32::try_from(len).ok().filter(|&len| len <= MAX_PAYLOAD).ok_or(ErrorCode::Invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(command: u16, flags: u16, offset: u64, length: u64) -> Request {
        Request { style: ReplyStyle::Structured, flags, command, cookie: 7, offset, length }
    }

    #[test]
    fn golden_request() {
        let r = Request {
            style: ReplyStyle::Simple,
            flags: 0x0102,
            command: 0x0304,
            cookie: 0x1112_1314_1516_1718,
            offset: 0x2122_2324_2526_2728,
            length: 0x3132_3334,
        };
        let expected = [
            0x25, 0x60, 0x95, 0x13, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24,
            0x25, 0x26, 0x27, 0x28, 0x31, 0x32, 0x33, 0x34,
        ];
        assert_eq!(r.encode(), expected);
        assert_eq!(
            Request::decode(&expected, ReplyStyle::Structured).map(|r| r.map(|r| r.0.offset)),
            Ok(Some(r.offset))
        );
        assert_eq!(Request::decode(&expected, ReplyStyle::Simple), Ok(Some((r, 28))));
        assert_eq!(Request::decode(&expected[..27], ReplyStyle::Simple), Ok(None));
        assert_eq!(Request::decode(&expected, ReplyStyle::Extended), Err(RequestError(REQUEST_MAGIC)));
    }

    #[test]
    fn golden_extended_request() {
        let style = ReplyStyle::Extended;
        let r = Request { style, flags: 0x20, command: 1, cookie: 7, offset: 1 << 40, length: 1 << 33 };
        let expected = [
            0x21, 0xe4, 0x1c, 0x71, 0, 0x20, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0,
            0,
        ];
        assert_eq!(r.encode(), expected);
        assert_eq!(Request::decode(&expected, style), Ok(Some((r, 32))));
        assert_eq!(Request::decode(&expected[..31], style), Ok(None));
    }

    #[test]
    fn with_extended_headers_a_flag_says_whether_there_is_a_payload() {
        let of = |command, flags| Request { style: ReplyStyle::Extended, ..request(command, flags, 0, 8) };
        let with = CMD_FLAG_PAYLOAD_LEN;
        assert_eq!(of(CMD_WRITE, with).payload(), 8);
        assert!(of(CMD_WRITE, with).check(100, false).is_ok());
        assert_eq!(of(CMD_WRITE, 0).payload(), 0);
        assert_eq!(of(CMD_WRITE, 0).check(100, false), Err(ErrorCode::Invalid));
        for command in [CMD_READ, CMD_TRIM, CMD_CACHE, CMD_WRITE_ZEROES, CMD_BLOCK_STATUS, 99] {
            assert_eq!(of(command, with).payload(), 8, "it must be skipped");
            assert_eq!(of(command, with).check(100, false), Err(ErrorCode::Invalid));
        }
    }

    #[test]
    fn where_a_range_leaves_the_export() {
        assert_eq!(request(CMD_READ, 0, 90, 20).past_end(100), Some(100));
        assert_eq!(request(CMD_READ, 0, 120, 20).past_end(100), Some(120));
        assert_eq!(request(CMD_READ, 0, 90, 10).past_end(100), None);
        assert_eq!(request(CMD_READ, 0, 120, 0).past_end(100), None, "nothing, and not inside");
        assert_eq!(request(CMD_READ, 0, u64::MAX, 10).past_end(100), None, "there is no such range");
    }

    #[test]
    fn a_wrong_magic_number_is_seen_before_the_rest_arrives() {
        assert_eq!(Request::decode(&[0x25, 0x60, 0x95], ReplyStyle::Simple), Ok(None));
        assert_eq!(Request::decode(&[0x25, 0x60, 0x95, 0x14], ReplyStyle::Simple), Err(RequestError(0x2560_9514)));
    }

    #[test]
    fn every_command_takes_fua() {
        let fua = CMD_FLAG_FUA;
        let check = |r: Request| r.check(100, false);
        assert_eq!(check(request(CMD_READ, fua, 1, 2)), Ok(Action::Read { offset: 1, len: 2, whole: false }));
        assert_eq!(check(request(CMD_WRITE, fua, 1, 2)), Ok(Action::Write { offset: 1, len: 2, fua: true }));
        assert_eq!(check(request(CMD_FLUSH, fua, 0, 0)), Ok(Action::Flush));
        assert_eq!(check(request(CMD_TRIM, fua, 1, 2)), Ok(Action::Trim { offset: 1, len: 2, fua: true }));
        assert_eq!(
            check(request(CMD_WRITE_ZEROES, fua | CMD_FLAG_NO_HOLE, 1, 2)),
            Ok(Action::WriteZeroes { offset: 1, len: 2, fua: true, no_hole: true, fast: false })
        );
        assert_eq!(check(request(CMD_CACHE, fua, 1, 2)), Ok(Action::Cache { offset: 1, len: 2 }));
        let status = Action::BlockStatus { offset: 1, len: 2, one: true };
        assert_eq!(check(request(CMD_BLOCK_STATUS, fua | CMD_FLAG_REQ_ONE, 1, 2)), Ok(status));
        assert_eq!(check(request(CMD_DISC, fua, 0, 0)), Ok(Action::Disconnect));
    }

    #[test]
    fn unknown_commands_and_flags_are_invalid() {
        for command in [8, 9, 0xffff] {
            assert_eq!(request(command, 0, 0, 1).check(100, false), Err(ErrorCode::Invalid));
        }
        let own = [
            (CMD_READ, CMD_FLAG_DF),
            (CMD_WRITE, 0),
            (CMD_FLUSH, 0),
            (CMD_TRIM, 0),
            (CMD_CACHE, 0),
            (CMD_WRITE_ZEROES, CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO),
            (CMD_BLOCK_STATUS, CMD_FLAG_REQ_ONE),
        ];
        for (command, own) in own {
            for bit in (0..16).map(|n| 1 << n) {
                let len = if command == CMD_FLUSH { 0 } else { 1 };
                let r = request(command, bit, 0, len);
                assert_eq!(r.check(100, false).is_ok(), (own | CMD_FLAG_FUA) & bit != 0, "{r:?}");
            }
        }
    }

    #[test]
    fn chunks_and_status_need_structured_replies() {
        let simple = |r: Request| Request { style: ReplyStyle::Simple, ..r }.check(100, false);
        assert_eq!(simple(request(CMD_READ, CMD_FLAG_DF, 0, 1)), Err(ErrorCode::Invalid));
        assert_eq!(simple(request(CMD_BLOCK_STATUS, 0, 0, 1)), Err(ErrorCode::Invalid));
    }

    #[test]
    fn ranges_end_inside_the_export() {
        let past = |command| request(command, 0, 99, 2).check(100, false);
        assert_eq!(past(CMD_READ), Err(ErrorCode::Invalid));
        assert_eq!(past(CMD_TRIM), Err(ErrorCode::Invalid));
        assert_eq!(past(CMD_WRITE), Err(ErrorCode::NoSpace));
        assert_eq!(past(CMD_WRITE_ZEROES), Err(ErrorCode::NoSpace));
        for command in [CMD_READ, CMD_WRITE, CMD_TRIM, CMD_WRITE_ZEROES] {
            let r = request(command, 0, u64::MAX, 2);
            assert_eq!(r.check(u64::MAX, false), Err(ErrorCode::Invalid), "overflow");
            assert!(request(command, 0, 98, 2).check(100, false).is_ok());
            assert!(request(command, 0, 100, 0).check(100, false).is_ok());
        }
        assert_eq!(request(CMD_FLUSH, 0, 1, 0).check(100, false), Err(ErrorCode::Invalid));
        assert_eq!(request(CMD_BLOCK_STATUS, 0, 1, 0).check(100, false), Err(ErrorCode::Invalid));
    }

    #[test]
    fn data_is_capped_and_ranges_without_data_are_not() {
        let most = u64::from(MAX_PAYLOAD);
        for command in [CMD_READ, CMD_WRITE] {
            assert!(request(command, 0, 0, most).check(1 << 40, false).is_ok());
            let r = request(command, 0, 0, most + 1);
            assert_eq!(r.check(1 << 40, false), Err(ErrorCode::Invalid));
        }
        for command in [CMD_TRIM, CMD_WRITE_ZEROES, CMD_CACHE, CMD_BLOCK_STATUS] {
            assert!(request(command, 0, 0, u32::MAX.into()).check(1 << 40, false).is_ok());
        }
    }

    #[test]
    fn a_read_only_export_refuses_whatever_writes() {
        for command in [CMD_WRITE, CMD_TRIM, CMD_WRITE_ZEROES] {
            let r = request(command, 0, 0, 1);
            assert_eq!(r.check(100, true), Err(ErrorCode::NotPermitted));
        }
        for command in [CMD_READ, CMD_CACHE, CMD_BLOCK_STATUS] {
            assert!(request(command, 0, 0, 1).check(100, true).is_ok());
        }
        assert!(request(CMD_FLUSH, 0, 0, 0).check(100, true).is_ok());
    }
}
