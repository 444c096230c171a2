//! Requests of the transmission phase: decoding, and everything that can be checked without
//! touching the export.

use super::reply::ErrorCode;
use super::values::*;

/// A request as it came, nothing checked but its magic number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Command flags.
    pub flags: u16,
    /// Which command.
    pub command: u16,
    /// The client's name for it; means nothing here, and need not be unique.
    pub cookie: u64,
    /// Bytes into the export.
    pub offset: u64,
    /// Bytes; with commands without a range it should be 0.
    pub length: u64,
}

/// Bytes that are no request: the stream cannot be followed any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request begins with {0:#x}, not with its magic number")]
pub struct RequestError(pub u32);

/// What is to be done for a valid request. Ranges lie inside the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Answer with `len` bytes from `offset`.
    Read {
        /// Bytes into the export.
        offset: u64,
        /// At most [`MAX_PAYLOAD`].
        len: u32,
    },
    /// Write the `len` bytes that follow the request.
    Write {
        /// Bytes into the export.
        offset: u64,
        /// At most [`MAX_PAYLOAD`].
        len: u32,
        /// Durable before the answer.
        fua: bool,
    },
    /// Make durable every write that was answered before, on any connection.
    Flush,
    /// The range is not needed any more.
    Trim {
        /// Bytes into the export.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Durable before the answer.
        fua: bool,
    },
    /// The range shall read as zeroes.
    WriteZeroes {
        /// Bytes into the export.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Durable before the answer.
        fua: bool,
        /// The client wants the range provisioned.
        no_hole: bool,
    },
    /// End the session; there is no answer.
    Disconnect,
}

impl Request {
    /// Decodes the request at the front of `input`; `None`: more input is needed.
    pub fn decode(input: &[u8]) -> Result<Option<Request>, RequestError> {
        let Some((magic, _)) = input.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let magic = u32::from_be_bytes(*magic);
        if magic != REQUEST_MAGIC {
            return Err(RequestError(magic));
        }
        let Some((b, _)) = input.split_first_chunk::<REQUEST_HEADER>() else {
            return Ok(None);
        };
        let long = |at: usize| {
            u64::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3], b[at + 4], b[at + 5], b[at + 6], b[at + 7]])
        };
        Ok(Some(Request {
            flags: u16::from_be_bytes([b[4], b[5]]),
            command: u16::from_be_bytes([b[6], b[7]]),
            cookie: long(8),
            offset: long(16),
            length: u32::from_be_bytes([b[24], b[25], b[26], b[27]]).into(),
        }))
    }

    /// Encodes it as a client would. A length beyond 32 bits does not fit and is cut off.
    pub fn encode(&self) -> [u8; REQUEST_HEADER] {
        let mut b = [0; REQUEST_HEADER];
        b[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        b[4..6].copy_from_slice(&self.flags.to_be_bytes());
        b[6..8].copy_from_slice(&self.command.to_be_bytes());
        b[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        b[16..24].copy_from_slice(&self.offset.to_be_bytes());
        b[24..].copy_from_slice(&(self.length as u32).to_be_bytes());
        b
    }

    /// How many bytes of data follow the request, whether it is valid or not.
    pub fn payload(&self) -> u64 {
        if self.command == CMD_WRITE { self.length } else { 0 }
    }

    /// What to do for this request on an export of `size` bytes, or the error to answer.
    pub fn check(&self, size: u64, read_only: bool) -> Result<Action, ErrorCode> {
        let Request { offset, length: len, .. } = *self;
        let fua = self.flags & CMD_FLAG_FUA != 0;
        let allowed = match self.command {
            CMD_WRITE_ZEROES => CMD_FLAG_FUA | CMD_FLAG_NO_HOLE,
            CMD_READ | CMD_WRITE | CMD_DISC | CMD_FLUSH | CMD_TRIM => CMD_FLAG_FUA,
            _ => return Err(ErrorCode::Invalid),
        };
        if self.command == CMD_DISC {
            return Ok(Action::Disconnect);
        }
        if self.flags & !allowed != 0 {
            return Err(ErrorCode::Invalid);
        }
        if self.command == CMD_FLUSH {
            let reserved = offset != 0 || len != 0;
            return if reserved { Err(ErrorCode::Invalid) } else { Ok(Action::Flush) };
        }
        if read_only && self.command != CMD_READ {
            return Err(ErrorCode::NotPermitted);
        }
        self.check_range(size)?;
        Ok(match self.command {
            CMD_READ => Action::Read { offset, len: data_len(len)? },
            CMD_WRITE => Action::Write { offset, len: data_len(len)?, fua },
            CMD_TRIM => Action::Trim { offset, len, fua },
            _ => {
                let no_hole = self.flags & CMD_FLAG_NO_HOLE != 0;
                Action::WriteZeroes { offset, len, fua, no_hole }
            }
        })
    }

    /// The range must end inside the export. What goes past it is a lack of space for writes.
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
        Request { flags, command, cookie: 7, offset, length }
    }

    #[test]
    fn golden_request() {
        let r = Request {
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
        assert_eq!(Request::decode(&expected), Ok(Some(r)));
        assert_eq!(Request::decode(&expected[..27]), Ok(None));
    }

    #[test]
    fn a_wrong_magic_number_is_seen_before_the_rest_arrives() {
        assert_eq!(Request::decode(&[0x25, 0x60, 0x95]), Ok(None));
        assert_eq!(Request::decode(&[0x25, 0x60, 0x95, 0x14]), Err(RequestError(0x2560_9514)));
    }

    #[test]
    fn every_command_takes_fua() {
        let fua = CMD_FLAG_FUA;
        let check = |r: Request| r.check(100, false);
        assert_eq!(check(request(CMD_READ, fua, 1, 2)), Ok(Action::Read { offset: 1, len: 2 }));
        assert_eq!(check(request(CMD_WRITE, fua, 1, 2)), Ok(Action::Write { offset: 1, len: 2, fua: true }));
        assert_eq!(check(request(CMD_FLUSH, fua, 0, 0)), Ok(Action::Flush));
        assert_eq!(check(request(CMD_TRIM, fua, 1, 2)), Ok(Action::Trim { offset: 1, len: 2, fua: true }));
        assert_eq!(
            check(request(CMD_WRITE_ZEROES, fua | CMD_FLAG_NO_HOLE, 1, 2)),
            Ok(Action::WriteZeroes { offset: 1, len: 2, fua: true, no_hole: true })
        );
        assert_eq!(check(request(CMD_DISC, fua, 0, 0)), Ok(Action::Disconnect));
    }

    #[test]
    fn unknown_commands_and_flags_are_invalid() {
        for command in [5, 7, 8, 9, 0xffff] {
            assert_eq!(request(command, 0, 0, 1).check(100, false), Err(ErrorCode::Invalid));
        }
        for command in [CMD_READ, CMD_WRITE, CMD_FLUSH, CMD_TRIM] {
            for bit in 1..16 {
                let len = if command == CMD_FLUSH { 0 } else { 1 };
                let r = request(command, 1 << bit, 0, len);
                assert_eq!(r.check(100, false), Err(ErrorCode::Invalid), "{r:?}");
            }
        }
        for bit in 2..16 {
            let r = request(CMD_WRITE_ZEROES, 1 << bit, 0, 1);
            assert_eq!(r.check(100, false), Err(ErrorCode::Invalid), "{r:?}");
        }
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
    }

    #[test]
    fn data_is_capped_and_ranges_without_data_are_not() {
        let most = u64::from(MAX_PAYLOAD);
        for command in [CMD_READ, CMD_WRITE] {
            assert!(request(command, 0, 0, most).check(1 << 40, false).is_ok());
            let r = request(command, 0, 0, most + 1);
            assert_eq!(r.check(1 << 40, false), Err(ErrorCode::Invalid));
        }
        for command in [CMD_TRIM, CMD_WRITE_ZEROES] {
            assert!(request(command, 0, 0, u32::MAX.into()).check(1 << 40, false).is_ok());
        }
    }

    #[test]
    fn a_read_only_export_refuses_whatever_writes() {
        for command in [CMD_WRITE, CMD_TRIM, CMD_WRITE_ZEROES] {
            let r = request(command, 0, 0, 1);
            assert_eq!(r.check(100, true), Err(ErrorCode::NotPermitted));
        }
        assert!(request(CMD_READ, 0, 0, 1).check(100, true).is_ok());
        assert!(request(CMD_FLUSH, 0, 0, 0).check(100, true).is_ok());
    }
}
