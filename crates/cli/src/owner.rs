//! Says who has a pool that cannot be opened, by program and verb, and what to do about it.

use std::fs;
use std::path::Path;

use forkdisk::{Error, ErrorKind};

/// The failure to open the device at `path`, in words for the user.
pub fn explain(path: &Path, error: Error) -> anyhow::Error {
    match named_pid(&error) {
        Some(pid) => anyhow::anyhow!(
            "{} is in use by {} (pid {pid}): wait until it ends, or end it with `kill {pid}`",
            path.display(),
            command(pid)
        ),
        None => error.into(),
    }
}

/// Whether a refusal of [`explain`] names a daemon.
pub fn is_a_daemon(error: &anyhow::Error) -> bool {
    error.to_string().contains("is in use by forkdisk serve (pid ")
}

/// The process that a refusal names, as in `… is in use by qemu-nbd (pid 123)`.
fn named_pid(error: &Error) -> Option<u32> {
    let text = error.to_string();
    let (_, rest) = text.rsplit_once("(pid ").filter(|_| error.kind() == ErrorKind::Busy)?;
    rest.split_once(')')?.0.parse().ok()
}

/// Program and verb of a process, without paths and options: `forkdisk serve`.
fn command(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command_name(&line).unwrap_or_else(|| "another process".to_string())
}

fn command_name(line: &[u8]) -> Option<String> {
    let mut words = line.split(|&byte| byte == 0).map(String::from_utf8_lossy);
    let program = words.next()?;
    let program = program.rsplit('/').next().filter(|name| !name.is_empty())?;
    let verb = words.find(|word| !word.is_empty() && !word.starts_with('-'));
    match verb {
        Some(verb) if program == "forkdisk" => Some(format!("forkdisk {verb}")),
        _ => Some(program.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verb_of_our_own_program_is_named() {
        assert_eq!(command_name(b"/usr/bin/forkdisk\0--json\0serve\0pool.img\0").unwrap(), "forkdisk serve");
        assert_eq!(command_name(b"qemu-nbd\0disk.img\0").unwrap(), "qemu-nbd");
        assert_eq!(command_name(b""), None);
    }

    #[test]
    fn only_a_refusal_names_a_process() {
        let busy = Error::new(ErrorKind::Busy, "p is in use by x (pid 12)");
        assert_eq!(named_pid(&busy), Some(12));
        assert_eq!(named_pid(&Error::new(ErrorKind::Io, "p (pid 12)")), None);
        assert_eq!(named_pid(&Error::new(ErrorKind::Busy, "p has snapshots")), None);
    }
}
