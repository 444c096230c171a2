//! Format of failures on standard error: a line for people, or a JSON object for programs.

use forkdisk::ErrorKind;
use forkdisk_control::{Failure, FailureKind};
use serde_json::{Value, json};

use crate::output::Format;
use crate::owner::InUse;

/// Formats `error` as JSON.
pub fn as_json(error: &anyhow::Error) -> Value {
    json!({ "error": format!("{error:#}"), "kind": kind(error) })
}

/// Formats wrong usage as JSON.
pub fn usage_as_json(text: &str) -> Value {
    json!({ "error": text.trim(), "kind": "usage" })
}

/// Returns whether a command line that failed to parse requests JSON.
pub fn wants_json(arguments: impl Iterator<Item = String>) -> bool {
    let arguments: Vec<String> = arguments.take_while(|argument| argument != "--").collect();
    let apart = |pair: &[String]| pair[0] == "--output" && pair[1] == Format::JSON;
    arguments.iter().any(|argument| argument == "--json" || argument.strip_prefix("--output=") == Some(Format::JSON))
        || arguments.windows(2).any(apart)
}

/// Returns the kind of a failure, as in the control protocol; `other` if there is none.
fn kind(error: &anyhow::Error) -> Value {
    let known = |cause: &(dyn std::error::Error + 'static)| {
        let failure = cause.downcast_ref::<Failure>().map(|failure| failure.kind);
        let engine = || cause.downcast_ref::<forkdisk::Error>().map(|error| error.kind().into());
        failure.or_else(engine).or_else(|| cause.downcast_ref::<std::io::Error>().map(of_file))
    };
    let in_use = error.downcast_ref::<InUse>().map(|_| ErrorKind::Busy.into());
    match in_use.or_else(|| error.chain().find_map(known)) {
        Some(kind) => json!(kind),
        None => json!("other"),
    }
}

/// Returns the kind of a file error.
fn of_file(error: &std::io::Error) -> FailureKind {
    use std::io::ErrorKind as Io;
    match error.kind() {
        Io::NotFound => ErrorKind::NotFound.into(),
        Io::AlreadyExists => ErrorKind::Exists.into(),
        Io::ReadOnlyFilesystem => ErrorKind::ReadOnly.into(),
        Io::ResourceBusy => ErrorKind::Busy.into(),
        Io::StorageFull | Io::QuotaExceeded => ErrorKind::NoSpace.into(),
        Io::BrokenPipe => FailureKind::BrokenPipe,
        _ => ErrorKind::Io.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_is_that_of_the_first_cause_that_has_one() {
        let of = |error: anyhow::Error| as_json(&error.context("p.img"));
        let busy = of(Failure::new(ErrorKind::Busy, "in use").into());
        assert_eq!(busy, json!({ "error": "p.img: in use", "kind": "busy" }));
        let damaged = forkdisk::Error::new(ErrorKind::NotAPool, "no");
        assert_eq!(of(damaged.into())["kind"], "not_a_pool");
        assert_eq!(of(std::io::Error::from_raw_os_error(2).into())["kind"], "not_found");
        assert_eq!(of(anyhow::anyhow!("no"))["kind"], "other");
    }

    #[test]
    fn json_is_seen_in_a_command_line_that_makes_no_sense() {
        let wants = |line: &str| wants_json(line.split(' ').map(str::to_string));
        assert!(["list --json --no", "--output json no", "--output=json no"].into_iter().all(wants));
        assert!(!["list no", "create -- --json", "--output text json"].into_iter().any(wants));
    }
}
