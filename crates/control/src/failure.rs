//! Failures of verbs: a kind for programs and a message for people.

use forkdisk::ErrorKind;
use serde::{Serialize, Serializer};

/// Kind of a failure. Each kind has its own number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureKind {
    /// The engine refused or failed, or something of the same kind happened in a verb: a request to a file of the
    /// caller failed ([`ErrorKind::Io`]), a parameter is bad ([`ErrorKind::Invalid`]).
    Engine(ErrorKind),
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
        (FailureKind::Engine(ErrorKind::NotFound), 1),
        (FailureKind::Engine(ErrorKind::Exists), 2),
        (FailureKind::Engine(ErrorKind::Invalid), 3),
        (FailureKind::Engine(ErrorKind::Busy), 4),
        (FailureKind::Engine(ErrorKind::ReadOnly), 5),
        (FailureKind::Engine(ErrorKind::NoSpace), 6),
        (FailureKind::Engine(ErrorKind::Io), 7),
        (FailureKind::Engine(ErrorKind::Corrupt), 8),
        (FailureKind::Engine(ErrorKind::Unsupported), 9),
        (FailureKind::Engine(ErrorKind::Failed), 10),
        (FailureKind::Engine(ErrorKind::NotAPool), 11),
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

    /// Returns the name of this kind in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            FailureKind::Engine(kind) => kind.name(),
            FailureKind::BrokenPipe => "broken_pipe",
            FailureKind::Cancelled => "cancelled",
            FailureKind::Ending => "ending",
            FailureKind::Protocol => "protocol",
        }
    }
}

impl Serialize for FailureKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl From<ErrorKind> for FailureKind {
    fn from(kind: ErrorKind) -> FailureKind {
        FailureKind::Engine(kind)
    }
}

impl PartialEq<ErrorKind> for FailureKind {
    fn eq(&self, kind: &ErrorKind) -> bool {
        *self == FailureKind::Engine(*kind)
    }
}

/// Failure of a verb. The message says what failed, where, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
#[non_exhaustive]
pub struct Failure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// Message for people.
    pub message: String,
}

impl Failure {
    /// Creates a failure of `kind` with `message`.
    pub fn new(kind: impl Into<FailureKind>, message: impl Into<String>) -> Failure {
        Failure { kind: kind.into(), message: message.into() }
    }

    /// Creates the failure of an operation on a caller's file; `what` names file and operation.
    pub fn file(what: impl std::fmt::Display, error: std::io::Error) -> Failure {
        let kind: FailureKind = match error.kind() {
            std::io::ErrorKind::BrokenPipe => FailureKind::BrokenPipe,
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace.into(),
            _ => ErrorKind::Io.into(),
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
        Failure::new(error.kind(), error.to_string())
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
    fn every_kind_of_the_engine_has_a_number_and_the_document_has_all_names() {
        for kind in ErrorKind::ALL {
            assert!(FailureKind::from(*kind).code() > 0, "{kind}");
        }
        let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/control.md")).unwrap();
        for (kind, code) in FailureKind::CODES {
            assert!(document.contains(&format!("| {code} | `{}` |", kind.name())), "{kind:?}");
        }
    }

    #[test]
    fn a_full_file_system_is_no_space_and_a_lost_reader_a_broken_pipe() {
        let kind = |errno| Failure::file("x", std::io::Error::from_raw_os_error(errno)).kind;
        assert_eq!(kind(28), ErrorKind::NoSpace);
        assert_eq!(kind(32), FailureKind::BrokenPipe);
        assert_eq!(kind(5), ErrorKind::Io);
    }
}
