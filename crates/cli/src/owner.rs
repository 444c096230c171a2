//! Reports which process has a pool open, by program and verb, and what to do about it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use forkdisk::{Error, ErrorKind};

/// Command of a process that mounts a pool without a daemon.
const MOUNT: &str = "forkdisk mount";

/// A pool that is open in another process.
#[derive(Debug)]
pub struct InUse {
    path: PathBuf,
    /// Program and verb, without paths and options: `forkdisk serve`.
    command: String,
    pid: u32,
    /// The path by which the process opened the pool, if it leads to another file or device than `path`.
    other: Option<PathBuf>,
    /// Whether the process is ending: it has no memory any more, or it is a `forkdisk mount` that is closing the pool
    /// and has unmounted its mount point.
    is_ending: bool,
}

impl InUse {
    /// Builds the report from `error`, the failure to open the device at `path`; `None` if it names no process.
    pub fn of(path: &Path, error: &Error) -> Option<InUse> {
        Some(InUse::by(path, named_pid(error)?, None))
    }

    /// Builds the report for the pool at `path`, open in process `pid`, as file or device `other`
    /// if that is another one.
    pub fn by(path: &Path, pid: u32, other: Option<PathBuf>) -> InUse {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let command = command_name(&line).unwrap_or_else(|| "another process".to_string());
        let is_unmounted = || ![Some(path), other.as_deref()].into_iter().flatten().any(is_mounted);
        let is_ending = line.is_empty() || command == MOUNT && is_unmounted();
        InUse { path: path.to_path_buf(), command, pid, other, is_ending }
    }

    /// Returns whether the process is a daemon, which carries out verbs.
    pub fn by_a_daemon(&self) -> bool {
        self.command == "forkdisk serve"
    }

    /// Returns whether the process is a verb that ends without a request: any but those that serve,
    /// unless they are ending.
    pub fn by_a_verb(&self) -> bool {
        let verb = self.command.strip_prefix("forkdisk ");
        let serves = |verb| matches!(verb, "serve" | "mount" | "attach" | "bench");
        !self.by_itself() && (self.is_ending || verb.is_some_and(|verb| !serves(verb)))
    }

    /// Returns whether it is this process, which uses the pool as a plain file.
    fn by_itself(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Returns the path by which it was opened, if that leads to another file or device.
    pub fn other(&self) -> Option<&Path> {
        self.other.as_deref()
    }

    /// Returns whether it was opened by a path that leads to another file or device. No daemon
    /// answers for this path then.
    pub fn by_another_way(&self) -> bool {
        self.other.is_some()
    }

    /// Describes the process, without advice.
    pub fn who(&self) -> String {
        let who = format!("{} is in use by {} (pid {})", self.path.display(), self.command, self.pid);
        match &self.other {
            Some(other) => {
                format!("{who} as {}, which is the same pool under another path or a copy of it", other.display())
            }
            None => who,
        }
    }
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = self.who();
        match self.command.as_str() {
            _ if self.by_itself() => {
                let path = self.path.display();
                write!(f, "{path} is the pool itself, which cannot be a file that this command reads or writes as well")
            }
            "forkdisk serve" if let Some(other) = &self.other => {
                let other = other.display();
                let path = self.path.display();
                write!(
                    f,
                    "{who}: use {other} instead, or end that with `forkdisk stop {other}`; a copy gets an identity \
                     of its own with `forkdisk set uuid=new {path}`"
                )
            }
            MOUNT if !self.is_ending => write!(
                f,
                "{who}: `forkdisk umount` ends that; while `forkdisk serve POOL --mount DIR` has it mounted, all \
                 verbs work"
            ),
            _ if self.by_a_verb() => write!(f, "{who}: try again when that has ended"),
            _ => write!(f, "{who}: wait until it ends, or end it with `kill {}`", self.pid),
        }
    }
}

impl std::error::Error for InUse {}

/// Returns whether the pool at `path` is mounted in the mount namespace of this process.
fn is_mounted(path: &Path) -> bool {
    let Ok(pool) = path.canonicalize() else { return false };
    let is_it = |source: &str| Path::new(source).canonicalize().is_ok_and(|source| source == pool);
    forkdisk_fuse::mounts().iter().any(|(_, mount)| is_it(&mount.source))
}

/// Converts the failure to open the device at `path` to one with advice.
pub fn explain(path: &Path, error: Error) -> anyhow::Error {
    match InUse::of(path, &error) {
        Some(in_use) => in_use.into(),
        None => error.into(),
    }
}

/// Returns whether an error of [`explain`] names another verb.
pub fn is_a_verb(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(InUse::by_a_verb)
}

/// Returns the process that an error names, as in `… is in use by qemu-nbd (pid 123)`.
fn named_pid(error: &Error) -> Option<u32> {
    let text = error.to_string();
    let (_, rest) = text.rsplit_once("(pid ").filter(|_| error.kind() == ErrorKind::Busy)?;
    rest.split_once(')')?.0.parse().ok()
}

/// Returns whether process `pid` is this program with the verb `verb`.
pub fn is_verb(pid: u32, verb: &str) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command_name(&line).and_then(|name| name.strip_prefix("forkdisk ").map(|found| found == verb)).unwrap_or(false)
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
    fn what_to_do_depends_on_who_has_it() {
        let by = |command: &str| {
            let (path, command, pid) = ("p".into(), command.to_string(), 12);
            InUse { path, command, pid, other: None, is_ending: false }
        };
        assert_eq!(
            by("qemu-nbd").to_string(),
            "p is in use by qemu-nbd (pid 12): wait until it ends, or end it with `kill 12`"
        );
        let mount = by("forkdisk mount").to_string();
        assert!(mount.contains("`forkdisk umount` ends that") && !mount.contains("kill"), "{mount}");
        assert!(by("forkdisk serve").by_a_daemon() && !by("forkdisk mount").by_a_daemon());
        assert!(by("forkdisk clone").by_a_verb() && !by("forkdisk mount").by_a_verb() && !by("qemu-nbd").by_a_verb());
        let ending = InUse { is_ending: true, ..by("forkdisk mount") };
        assert!(ending.by_a_verb() && !ending.to_string().contains("umount"), "{ending}");
        assert!(!by("forkdisk import").to_string().contains("kill"));
        // The process has ended since.
        let gone = InUse::by(Path::new("p"), u32::MAX >> 2, None);
        assert!(gone.by_a_verb() && gone.to_string().contains("another process"), "{gone}");
    }

    #[test]
    fn only_a_refusal_names_a_process() {
        let busy = Error::new(ErrorKind::Busy, "p is in use by x (pid 12)");
        assert_eq!(named_pid(&busy), Some(12));
        assert_eq!(named_pid(&Error::new(ErrorKind::Io, "p (pid 12)")), None);
        assert_eq!(named_pid(&Error::new(ErrorKind::Busy, "p has snapshots")), None);
    }
}
