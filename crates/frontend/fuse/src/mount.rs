//! Mounting and unmounting: by system call if permitted, else by `fusermount3`.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use forkdisk::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::descriptor::receive_descriptor;

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
const TYPE: &str = "forkdisk";

/// Options of a mount.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MountOptions {
    /// Source as shown by `df`.
    pub source: String,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether other users may access it.
    pub allow_other: bool,
    /// Further options, such as `noexec`, `nosuid`, `nodev`, `noatime`.
    pub flags: Vec<String>,
    /// Percentage of this machine's dirty pages that may belong to this mount; `None`: the kernel's
    /// default for FUSE mounts.
    pub max_ratio: Option<u8>,
}

forkdisk::setters! {
    MountOptions {
        with_source source: impl Into<String>,
        with_read_only read_only: bool,
        with_allow_other allow_other: bool,
        with_flags flags: Vec<String>,
        with_max_ratio max_ratio: impl Into<Option<u8>>,
    }
}

/// Mounts at `dir`; returns the connection to the kernel, in non-blocking mode.
///
/// # Errors
/// The folder does not exist, this user may not mount there, or `/dev/fuse` or `fusermount3` is missing.
pub fn mount(dir: &Path, options: &MountOptions) -> Result<OwnedFd> {
    let failed = |e: io::Error| Error::io(format!("{}: cannot be mounted on", dir.display()), e);
    let found = std::fs::metadata(dir).map_err(failed)?;
    if !found.is_dir() {
        return Err(Error::new(ErrorKind::Invalid, format!("{}: not a directory", dir.display())));
    }
    // Resolved before the mount, since later a lookup there would wait for its server.
    let place = std::fs::canonicalize(dir).map_err(failed)?;
    let fd = match mount_directly(dir, found.mode(), options) {
        Err(e) if e == Errno::PERM => mount_by_helper(dir, options)?,
        Err(e) if e == Errno::NOENT => {
            let why = format!("{DEVICE} does not exist: load the kernel module with `modprobe fuse`");
            return Err(Error::new(ErrorKind::NotFound, why));
        }
        other => other.map_err(|e| failed(e.into()))?,
    };
    if let Some(percent) = options.max_ratio
        && let Err(e) = set(&place, "max_ratio", percent.into())
    {
        if let Err(error) = unmount(dir, true) {
            tracing::warn!(%error, "{} stays mounted", dir.display());
        }
        return Err(Error::io(format!("{}: max_ratio cannot be set, without it it can be mounted", dir.display()), e));
    }
    rustix::io::ioctl_fionbio(&fd, true).or_else(|_| set_nonblocking(&fd)).map_err(|e| failed(e.into()))?;
    Ok(fd)
}

fn set_nonblocking(fd: &OwnedFd) -> rustix::io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)
}

fn kernel_flag(option: &str) -> Option<MountFlags> {
    Some(match option {
        "noexec" => MountFlags::NOEXEC,
        "noatime" => MountFlags::NOATIME,
        "nodiratime" => MountFlags::NODIRATIME,
        "sync" => MountFlags::SYNCHRONOUS,
        "dirsync" => MountFlags::DIRSYNC,
        // Always set.
        "nosuid" => MountFlags::NOSUID,
        "nodev" => MountFlags::NODEV,
        "rw" | "exec" | "async" | "atime" => MountFlags::empty(),
        _ => return None,
    })
}

fn mount_directly(dir: &Path, mode: u32, options: &MountOptions) -> rustix::io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, open};
    let fd = open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let others = if options.allow_other { ",allow_other" } else { "" };
    let data =
        format!("fd={},rootmode={mode:o},user_id={uid},group_id={gid},default_permissions{others}", fd.as_raw_fd());
    let data = CString::new(data).map_err(|_| Errno::INVAL)?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, options.read_only);
    for option in &options.flags {
        flags |= kernel_flag(option).ok_or(Errno::INVAL)?;
    }
    rustix::mount::mount(options.source.as_str(), dir, format!("fuse.{TYPE}"), flags, Some(data.as_c_str()))?;
    Ok(fd)
}

fn mount_by_helper(dir: &Path, options: &MountOptions) -> Result<OwnedFd> {
    let failed = |what: &str, e: io::Error| Error::io(format!("{}: {what}", dir.display()), e);
    // Without close-on-exec, since the helper inherits one end. This process closes that end before it waits.
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None);
    let (ours, its) = pair.map_err(|e| failed("no socket for fusermount3", e.into()))?;
    let mut all = vec![format!("fsname={}", escape(&options.source)), format!("subtype={TYPE}")];
    all.push("default_permissions".into());
    all.extend(options.allow_other.then(|| "allow_other".into()));
    all.extend(options.read_only.then(|| "ro".into()));
    all.extend(options.flags.iter().map(|f| escape(f)));
    let mut helper = Command::new(HELPER);
    helper.args(["-o", &all.join(","), "--"]).arg(dir).env("_FUSE_COMMFD", its.as_raw_fd().to_string());
    let child = helper.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            let why = format!("mounting needs root or {HELPER}, which is not installed (package fuse3)");
            Error::new(ErrorKind::NotFound, why)
        }
        _ => failed("cannot run fusermount3", e),
    })?;
    drop(its);
    let received = receive_descriptor(&ours);
    drop(ours);
    let ended = child.wait_with_output().map_err(|e| failed("waiting for fusermount3", e))?;
    match received {
        Ok(Some(fd)) if ended.status.success() => Ok(fd),
        _ => {
            let said = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
            let hint = if said.contains("user_allow_other") { "; without allow_other it works" } else { "" };
            Err(Error::new(ErrorKind::Invalid, format!("{}: {said}{hint}", dir.display())))
        }
    }
}

/// Escapes commas, which separate options.
fn escape(option: &str) -> String {
    option.replace('\\', "\\\\").replace(',', "\\,")
}

/// Unmounts the file system at `dir`. With `lazily` also if it is in use: it then disappears from
/// the name space and ends with its last user. Waits until cached data is written, so never call it
/// on the thread that serves the mount.
///
/// # Errors
/// `ResourceBusy` if it is in use, otherwise the error of `umount2` or the message of `fusermount3`.
pub fn unmount(dir: &Path, lazily: bool) -> Result<()> {
    let failed = |e: Errno| {
        let why = match e {
            Errno::BUSY => "is in use: `fuser -vm DIR` shows the processes".to_owned(),
            Errno::INVAL => "nothing is mounted there".to_owned(),
            e => format!("cannot be unmounted: {e}"),
        };
        let kind = if e == Errno::BUSY { ErrorKind::Busy } else { ErrorKind::Invalid };
        Error::new(kind, format!("{}: {why}", dir.display()))
    };
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(dir, flags | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => unmount_by_helper(dir, lazily),
        outcome => outcome.map_err(failed),
    }
}

fn unmount_by_helper(dir: &Path, lazily: bool) -> Result<()> {
    let mut helper = Command::new(HELPER);
    helper.arg("-u").args(lazily.then_some("-z")).arg("--").arg(dir).stdin(Stdio::null());
    let ended = helper.output().map_err(|e| Error::io(format!("{}: cannot run {HELPER}", dir.display()), e))?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
    let kind = if said.contains("busy") { ErrorKind::Busy } else { ErrorKind::Invalid };
    Err(Error::new(kind, said))
}

/// Sets the read-ahead of the mount at `dir` to `bytes`, if permitted.
pub fn raise_read_ahead(dir: &Path, bytes: usize) {
    if let Err(error) = set(dir, "read_ahead_kb", bytes >> 10) {
        tracing::debug!(%error, "the read-ahead is unchanged");
    }
}

/// Changes a setting of the kernel's cache for the mount at `dir`.
fn set(dir: &Path, setting: &str, value: usize) -> io::Result<()> {
    let Some(MountPoint { device: (major, minor), .. }) = mounted_at(dir) else {
        return Err(io::Error::new(io::ErrorKind::NotFound, "nothing is mounted there any more"));
    };
    std::fs::write(format!("/sys/class/bdi/{major}:{minor}/{setting}"), value.to_string())
}

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MountPoint {
    /// Type of the file system; `fuse.forkdisk` for a pool.
    pub kind: String,
    /// Source as shown by `df`: the pool.
    pub source: String,
    /// Major and minor number of its device.
    pub device: (u32, u32),
}

impl MountPoint {
    /// Returns whether it is a forkdisk pool.
    pub fn is_pool(&self) -> bool {
        self.kind == format!("fuse.{TYPE}")
    }
}

/// Returns the mount at `dir`, an absolute path without links. Reads the kernel's table and does
/// not access the mount.
pub fn mounted_at(dir: &Path) -> Option<MountPoint> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    table.lines().rev().find_map(|line| parse_mount(line, dir))
}

/// Returns all mounts visible to thread `pid`, with their directories, in the order of the kernel's table.
pub fn table_of(pid: u32) -> Vec<(PathBuf, MountPoint)> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    table.lines().filter_map(parse_line).collect()
}

/// Returns all mounted pools, with their directories: absolute paths without links, in the order of
/// the kernel's table.
pub fn mounts() -> Vec<(PathBuf, MountPoint)> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().filter_map(parse_line).filter(|(_, mount)| mount.is_pool()).collect()
}

/// Parses a line such as `36 35 0:44 / /mnt rw,… - fuse.forkdisk /pool.img rw,…` if it is about `dir`.
fn parse_mount(line: &str, dir: &Path) -> Option<MountPoint> {
    parse_line(line).filter(|(at, _)| at == dir).map(|(_, mount)| mount)
}

fn parse_line(line: &str) -> Option<(PathBuf, MountPoint)> {
    let (place, rest) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(2);
    let (major, minor) = place.next()?.split_once(':')?;
    let dir = PathBuf::from(unescape(place.nth(1)?));
    let mut rest = rest.split(' ');
    let (kind, source) = (unescape(rest.next()?), unescape(rest.next()?));
    Some((dir, MountPoint { kind, source, device: (major.parse().ok()?, minor.parse().ok()?) }))
}

/// Decodes a path of the mount table, where blanks and some other characters are written as `\040`.
pub fn unescape(text: &str) -> String {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let code = (byte == b'\\').then(|| tail.get(..3)).flatten();
        let code = code.and_then(|c| u8::from_str_radix(std::str::from_utf8(c).ok()?, 8).ok());
        out.push(code.unwrap_or(byte));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_in_the_table() {
        let line = r"36 35 0:44 / /mnt/a\040b rw,nosuid - fuse.forkdisk /pools/x\040y.img rw,user_id=0";
        let found = parse_mount(line, Path::new("/mnt/a b")).expect("found");
        assert!(found.is_pool());
        assert_eq!((found.source.as_str(), found.device), ("/pools/x y.img", (0, 44)));
        assert_eq!(parse_mount(line, Path::new("/mnt")), None);
        let other = "36 35 0:44 / /mnt rw - fuse.sshfs host: rw";
        assert!(!parse_mount(other, Path::new("/mnt")).expect("found").is_pool());
    }

    #[test]
    fn commas_in_a_source_do_not_become_options() {
        assert_eq!(escape("/pools/a,allow_other\\b"), "/pools/a\\,allow_other\\\\b");
    }

    #[test]
    fn what_is_no_directory_or_not_mounted_is_refused_with_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = mount(&file, &MountOptions::default()).unwrap_err();
        assert!(error.to_string().contains("not a directory"), "{error}");
        let error = mount(&dir.path().join("none"), &MountOptions::default()).unwrap_err();
        assert!(error.to_string().contains("none"), "{error}");
        let error = unmount(dir.path(), false).unwrap_err();
        assert!(error.to_string().contains(dir.path().to_str().unwrap()), "{error}");
    }
}
