//! Errors in few kinds, each with the errno that a client of a disk would see.

use std::fmt;
use std::sync::Arc;

/// A result with forkdisk's error.
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of a failure; each has one errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No volume, snapshot or pool with that name (ENOENT).
    NotFound,
    /// The name is in use (EEXIST).
    Exists,
    /// A bad name, size, range or option (EINVAL).
    Invalid,
    /// In use, or has dependents that must be removed first, such as snapshots (EBUSY).
    Busy,
    /// The volume is a snapshot, or the pool was opened read-only (EROFS).
    ReadOnly,
    /// No free space for data or for the metadata it needs (ENOSPC).
    NoSpace,
    /// A device request failed (EIO).
    Io,
    /// Metadata that does not match its checksum or its identity (EIO).
    Corrupt,
    /// A pool created by a version with features this one does not know (EOPNOTSUPP).
    Unsupported,
    /// An earlier flush or journal write failed: nothing is acknowledged until the pool is reopened (EIO).
    Failed,
    /// Not a forkdisk pool (EINVAL).
    NotAPool,
}

impl ErrorKind {
    /// Returns the errno that a system call with this outcome would set.
    pub fn errno(self) -> i32 {
        match self {
            ErrorKind::NotFound => 2,
            ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::Failed => 5,
            ErrorKind::Busy => 16,
            ErrorKind::Exists => 17,
            ErrorKind::Invalid | ErrorKind::NotAPool => 22,
            ErrorKind::NoSpace => 28,
            ErrorKind::ReadOnly => 30,
            ErrorKind::Unsupported => 95,
        }
    }
}

/// A failure: its kind, a sentence that says what failed and where, and its cause.
#[derive(Clone)]
pub struct Error {
    kind: ErrorKind,
    message: Arc<str>,
    source: Option<Arc<std::io::Error>>,
}

impl Error {
    /// Creates a failure of `kind` with `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into().into(), source: None }
    }

    /// Creates the error of a device request that failed while doing `what`. A full host file system is
    /// `NoSpace`.
    pub fn io(what: impl Into<String>, source: std::io::Error) -> Error {
        let full = matches!(source.raw_os_error(), Some(28 | 122)) || source.kind() == std::io::ErrorKind::StorageFull;
        let kind = if full { ErrorKind::NoSpace } else { ErrorKind::Io };
        Error { kind, message: what.into().into(), source: Some(Arc::new(source)) }
    }

    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the device had no space, as a sparse file has none when the file system under it is full.
    pub(crate) fn is_full_host(&self) -> bool {
        self.kind == ErrorKind::NoSpace && self.source.is_some()
    }

    /// Returns the errno that a system call with this outcome would set.
    pub fn errno(&self) -> i32 {
        self.kind.errno()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.kind)
    }
}

impl std::error::Error for Error {
    /// Returns the cause below the device's error, which is part of the message already.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().and_then(|e| e.source())
    }
}
