//! Failures of verbs: a kind for programs and a message for people.

use forkdisk::ErrorKind;
use serde::{Deserialize, Serialize};

/// Kind of a failure. Each kind has its own number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// No volume or snapshot of that name.
    NotFound,
    /// The name is taken.
    Exists,
    /// A bad name, size, range or option.
    Invalid,
    /// In use, or has dependents that must be deleted first.
    Busy,
    /// A snapshot, or a pool that was opened for reading.
    ReadOnly,
    /// No free space for data or metadata.
    NoSpace,
    /// A request to the device, or to a file of the caller, failed.
    Io,
    /// Metadata that does not match its checksum or its identity.
    Corrupt,
    /// Made by a version with features this one does not know.
    Unsupported,
    /// An earlier flush or journal write failed: the pool refuses writes until it is opened again.
    Failed,
    /// Not a forkdisk pool.
    NotAPool,
    /// The reader of a pipe that was written to has closed it.
    BrokenPipe,
    /// The caller has disconnected.
    Cancelled,
    /// The daemon is shutting down.
    Ending,
    /// The peer or its message was refused before any verb ran; the error code says why.
    Protocol,
}

impl FailureKind {
    /// Every kind with its number.
    pub const CODES: [(FailureKind, i64); 15] = [
        (FailureKind::NotFound, 1),
        (FailureKind::Exists, 2),
        (FailureKind::Invalid, 3),
        (FailureKind::Busy, 4),
        (FailureKind::ReadOnly, 5),
        (FailureKind::NoSpace, 6),
        (FailureKind::Io, 7),
        (FailureKind::Corrupt, 8),
        (FailureKind::Unsupported, 9),
        (FailureKind::Failed, 10),
        (FailureKind::NotAPool, 11),
        (FailureKind::BrokenPipe, 12),
        (FailureKind::Cancelled, 13),
        (FailureKind::Ending, 14),
        (FailureKind::Protocol, 15),
    ];

    /// Returns the number of this kind in the protocol.
    pub fn code(self) -> i64 {
        let found = FailureKind::CODES.iter().find(|(kind, _)| *kind == self);
        found.map_or(0, |(_, code)| *code)
    }

    /// Returns the kind with number `code`; [`FailureKind::Protocol`] for a number that is no verb's failure.
    pub fn from_code(code: i64) -> FailureKind {
        let found = FailureKind::CODES.iter().find(|(_, number)| *number == code);
        found.map_or(FailureKind::Protocol, |(kind, _)| *kind)
    }
}

impl From<ErrorKind> for FailureKind {
    fn from(kind: ErrorKind) -> FailureKind {
        match kind {
            ErrorKind::NotFound => FailureKind::NotFound,
            ErrorKind::Exists => FailureKind::Exists,
            ErrorKind::Invalid => FailureKind::Invalid,
            ErrorKind::Busy => FailureKind::Busy,
            ErrorKind::ReadOnly => FailureKind::ReadOnly,
            ErrorKind::NoSpace => FailureKind::NoSpace,
            ErrorKind::Io => FailureKind::Io,
            ErrorKind::Corrupt => FailureKind::Corrupt,
            ErrorKind::Unsupported => FailureKind::Unsupported,
            ErrorKind::Failed => FailureKind::Failed,
            ErrorKind::NotAPool => FailureKind::NotAPool,
        }
    }
}

/// Failure of a verb. The message says what failed, where, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// Message for people.
    pub message: String,
}

impl Failure {
    /// Creates a failure of `kind` with `message`.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }

    /// Creates the failure of an operation on a caller's file; `what` names file and operation.
    pub fn file(what: impl std::fmt::Display, error: std::io::Error) -> Failure {
        let kind = match error.kind() {
            std::io::ErrorKind::BrokenPipe => FailureKind::BrokenPipe,
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => FailureKind::NoSpace,
            _ => FailureKind::Io,
        };
        Failure::new(kind, format!("{what}: {error}"))
    }

    /// Returns the same failure with `what` in front of its message.
    pub(crate) fn about(mut self, what: impl std::fmt::Display) -> Failure {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

impl From<forkdisk::Error> for Failure {
    fn from(error: forkdisk::Error) -> Failure {
        Failure::new(error.kind().into(), error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_one_number_of_its_own() {
        for (kind, code) in FailureKind::CODES {
            assert_eq!((kind.code(), FailureKind::from_code(code)), (code, kind));
        }
        assert_eq!(FailureKind::from_code(-32601), FailureKind::Protocol);
    }

    #[test]
    fn a_full_file_system_is_no_space_and_a_lost_reader_a_broken_pipe() {
        let kind = |errno| Failure::file("x", std::io::Error::from_raw_os_error(errno)).kind;
        assert_eq!(kind(28), FailureKind::NoSpace);
        assert_eq!(kind(32), FailureKind::BrokenPipe);
        assert_eq!(kind(5), FailureKind::Io);
    }
}
