//! Texts of public values, as every interface shows them: the command line, the control protocol, metrics.

mod escape;
#[cfg(feature = "serde")]
mod written;

use std::fmt;
use std::str::FromStr;

use crate::error::ErrorKind;
use crate::format::{BreakPolicy, CloneProperty, Lease, OriginFull, SnapshotFlags, Writes, Zeroes};
use crate::types::{Mode, VolumeKind};

pub use escape::{NAME_MARKS, escape_name, has_sound_escapes, is_name_character, unescape_name};
#[cfg(feature = "serde")]
pub(crate) use written::{inherited, none_if_empty, none_if_zero, uuid};

/// A text that names no value of its kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoSuchName {
    text: String,
    known: &'static [&'static str],
}

impl fmt::Display for NoSuchName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is none of {}", self.text, self.known.join(", "))
    }
}

impl std::error::Error for NoSuchName {}

fn no_such(text: &str, known: &'static [&'static str]) -> NoSuchName {
    NoSuchName { text: text.to_string(), known }
}

impl fmt::Display for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lease::Connection(_) => f.write_str("connection"),
            Lease::Process { pid, .. } => write!(f, "{pid}"),
        }
    }
}

macro_rules! names {
    ($($kind:ident { $($variant:ident $name:literal),* $(,)? })*) => { $(
        impl $kind {
            #[doc = concat!("Every `", stringify!($kind), "`, in the order of the declaration.")]
            pub const ALL: &[$kind] = &[$($kind::$variant),*];

            /// Its name in interfaces; never changed.
            pub const fn name(self) -> &'static str {
                match self { $($kind::$variant => $name),* }
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $kind {
            type Err = NoSuchName;

            fn from_str(text: &str) -> Result<$kind, NoSuchName> {
                let found = $kind::ALL.iter().find(|value| value.name() == text);
                found.copied().ok_or_else(|| no_such(text, &[$($name),*]))
            }
        }
    )* };
}

names! {
    Mode {
        ReadWrite "rw",
        ReadOnly "ro",
        OutOfDataSpace "out-of-data-space",
        Failed "failed",
    }
    VolumeKind {
        Volume "volume",
        Snapshot "snapshot",
        Origin "origin",
        Link "link",
        Fifo "fifo",
        Socket "socket",
        Folder "folder",
    }
    CloneProperty {
        Chunk "chunk",
        Break "break",
        Quota "quota",
        Gather "gather",
        Diverge "diverge",
        Reserve "reserve",
        Expires "expires",
        Writes "writes",
        Zeroes "zeroes",
    }
    BreakPolicy {
        Split "split",
        Copy "copy",
    }
    Writes {
        All "all",
        Compare "compare",
    }
    Zeroes {
        Written "written",
        Holes "holes",
    }
    ErrorKind {
        NotFound "not_found",
        Exists "exists",
        Invalid "invalid",
        Busy "busy",
        ReadOnly "read_only",
        NoSpace "no_space",
        Io "io",
        Corrupt "corrupt",
        Unsupported "unsupported",
        Failed "failed",
        NotAPool "not_a_pool",
    }
}

impl fmt::Display for OriginFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OriginFull::Wait(seconds) => write!(f, "wait:{seconds}"),
            OriginFull::Error => f.write_str("error"),
            OriginFull::DropOldest => f.write_str("drop-oldest"),
        }
    }
}

impl FromStr for OriginFull {
    type Err = NoSuchName;

    fn from_str(text: &str) -> Result<OriginFull, NoSuchName> {
        match (text, text.strip_prefix("wait:").and_then(|seconds| seconds.parse().ok())) {
            (_, Some(seconds)) => Ok(OriginFull::Wait(seconds)),
            ("error", _) => Ok(OriginFull::Error),
            ("drop-oldest", _) => Ok(OriginFull::DropOldest),
            _ => Err(no_such(text, &["wait:SECONDS", "error", "drop-oldest"])),
        }
    }
}

/// Names of the flags of a snapshot.
const FLAGS: &[&str] = &["independent", "droppable", "writable"];

impl SnapshotFlags {
    /// The names of the flags that are set.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let set = [self.independent, self.droppable, self.writable];
        FLAGS.iter().zip(set).filter(|(_, is_set)| *is_set).map(|(name, _)| *name)
    }

    /// The flags with these names.
    ///
    /// # Errors
    /// A name is that of no flag.
    pub fn from_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<SnapshotFlags, NoSuchName> {
        names.into_iter().try_fold(SnapshotFlags::NONE, |flags, name| match name {
            "independent" => Ok(flags.with_independent(true)),
            "droppable" => Ok(flags.with_droppable(true)),
            "writable" => Ok(flags.with_writable(true)),
            _ => Err(no_such(name, FLAGS)),
        })
    }
}

/// The identity of a pool in the usual five groups of digits.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// The identity that is written as `text`, with or without hyphens; `None` if it is none.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> =
        text.chars().filter(|c| *c != '-').map(|c| Some(c.to_digit(16)? as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).unwrap_or(&0)).collect();
    (digits.len() == 32).then(|| bytes.try_into().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_in_five_groups() {
        let uuid = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(&uuid), "00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(parse_uuid("00112233-4455-6677-8899-aabbccddeeff"), Some(uuid));
        assert_eq!(parse_uuid("00112233-4455-6677-8899-aabbccddeef"), None);
    }

    #[test]
    fn names_are_told_apart() {
        let names = |all: &mut dyn Iterator<Item = &'static str>| {
            let names: Vec<_> = all.collect();
            let distinct: std::collections::BTreeSet<_> = names.iter().collect();
            assert_eq!(distinct.len(), names.len(), "{names:?}");
        };
        names(&mut Mode::ALL.iter().map(|mode| mode.name()));
        names(&mut ErrorKind::ALL.iter().map(|kind| kind.name()));
        assert_eq!(format!("{} {}", BreakPolicy::Copy, OriginFull::Wait(60)), "copy wait:60");
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        assert!(Mode::ALL.iter().all(|mode| mode.name().parse() == Ok(*mode)));
        for policy in [OriginFull::Wait(7), OriginFull::Error, OriginFull::DropOldest] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        for bits in 0..8 {
            let flags = SnapshotFlags { independent: bits & 1 > 0, droppable: bits & 2 > 0, writable: bits & 4 > 0 };
            assert_eq!(SnapshotFlags::from_names(flags.names()), Ok(flags));
        }
        let error = "both".parse::<BreakPolicy>().unwrap_err();
        assert_eq!(error.to_string(), "'both' is none of split, copy");
    }
}
