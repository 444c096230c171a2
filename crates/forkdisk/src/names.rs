//! Texts of public values, as every interface shows them: the command line, the control protocol, metrics.

use std::fmt;

use crate::error::ErrorKind;
use crate::format::{BreakPolicy, OriginFull};
use crate::pool::Mode;

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
    )* };
}

names! {
    Mode {
        ReadWrite "rw",
        ReadOnly "ro",
        OutOfDataSpace "out-of-data-space",
        Failed "failed",
    }
    BreakPolicy {
        Split "split",
        Copy "copy",
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

/// The identity of a pool in the usual five groups of digits.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_in_five_groups() {
        let uuid = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(&uuid), "00112233-4455-6677-8899-aabbccddeeff");
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
}
