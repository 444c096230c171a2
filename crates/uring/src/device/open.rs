//! Opening and creating devices: nothing is changed before the lock is held.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::device::{Array, Stripes};
use forkdisk::{Error, ErrorKind};

use super::geometry::{self, Kind};
use super::{State, UringDevice, lock};
use crate::at_once;
use crate::executor::Rt;
use crate::handle::Handle;
use crate::sys;

/// Bytes at the beginning of a block device that must be zero for it to count as empty.
const EMPTY_PROBE_BYTES: u64 = 1 << 20;

/// Options for opening a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// Refuse writes; several readers may open the device at the same time, but no writer with
    /// them.
    pub read_only: bool,
    /// Bypass the page cache if the file system supports it.
    pub direct: bool,
    /// How long to wait for a device whose last owner has ended but still has requests in flight.
    pub patience: Duration,
    /// Properties of an array with parity; `None`: as the block device reports them.
    pub array: Option<Array>,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions { read_only: false, direct: true, patience: Duration::from_secs(10), array: None }
    }
}

forkdisk::setters! {
    DeviceOptions {
        with_read_only read_only: bool,
        with_direct direct: bool,
        with_patience patience: Duration,
        with_array array: impl Into<Option<Array>>,
    }
}

pub(super) fn open(rt: &Rt, path: &Path, options: &DeviceOptions) -> forkdisk::Result<UringDevice> {
    let kind = kind_at(path)?;
    let opened = open_locked(path, kind, 0, options)?;
    finish(rt, path, opened, kind, options)
}

/// Opens a device by a descriptor of a process that passed it on, with its lock.
pub(super) fn inherit(rt: &Rt, path: &Path, fd: OwnedFd, options: &DeviceOptions) -> forkdisk::Result<UringDevice> {
    let file = File::from(fd);
    let failed = |e: io::Error| Error::io(format!("cannot continue to use {}", path.display()), e);
    let kind =
        geometry::kind(&file.metadata().map_err(failed)?).ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
    let direct = sys::is_direct(file.as_fd()).map_err(failed)?;
    finish(rt, path, Opened { file, direct }, kind, options)
}

pub(super) fn create(
    rt: &Rt,
    path: &Path,
    size: u64,
    force: bool,
    options: &DeviceOptions,
) -> forkdisk::Result<UringDevice> {
    if options.read_only {
        return Err(Error::new(ErrorKind::Invalid, format!("{} cannot be made read-only", path.display())));
    }
    let (kind, flags) = match kind_at(path) {
        Ok(kind) => (kind, 0),
        Err(e) if e.kind() == ErrorKind::NotFound => (Kind::File, libc::O_CREAT | libc::O_EXCL),
        Err(e) => return Err(e),
    };
    let is_new = flags != 0;
    let opened = open_locked(path, kind, flags, options)?;
    let prepared = match kind {
        Kind::File => prepare_file(&opened.file, path, size, force, is_new),
        Kind::Block => prepare_block(&opened.file, path, size, force),
    };
    let result = prepared.and_then(|()| finish(rt, path, opened, kind, options));
    if is_new && result.is_err() {
        // A file that never became a pool is removed; the first error is the one to report.
        let _ = fs::remove_file(path);
    }
    result
}

struct Opened {
    file: File,
    direct: bool,
}

/// Returns the type of `path` without opening it, since opening a pipe would block.
fn kind_at(path: &Path) -> forkdisk::Result<Kind> {
    let meta = fs::metadata(path).map_err(|e| explain(path, e))?;
    geometry::kind(&meta).ok_or_else(|| {
        let what = if meta.is_dir() { "a folder" } else { "neither a file nor a block device" };
        Error::new(ErrorKind::Invalid, format!("{} is {what}", path.display()))
    })
}

fn open_locked(path: &Path, kind: Kind, flags: i32, options: &DeviceOptions) -> forkdisk::Result<Opened> {
    let access = if options.read_only { libc::O_RDONLY } else { libc::O_RDWR };
    let exclusive = if kind == Kind::Block && !options.read_only { libc::O_EXCL } else { 0 };
    let flags = access | exclusive | flags;
    let (fd, mut direct) = open_patiently(path, kind, flags, options)?;
    let file = File::from(fd);
    let failed = |e: io::Error| Error::io(format!("cannot open {}", path.display()), e);
    if geometry::kind(&file.metadata().map_err(failed)?) != Some(kind) {
        return Err(Error::new(ErrorKind::Busy, format!("{} was replaced while it was opened", path.display())));
    }
    lock::acquire(&file, path, !options.read_only, options.patience)?;
    if direct && geometry::direct_block(file.as_fd(), kind).map_err(failed)?.is_none() {
        let plain = sys::set_direct(file.as_fd(), false);
        plain.map_err(failed)?;
        direct = false;
    }
    Ok(Opened { file, direct })
}

/// Opens, with direct I/O if possible, and waits for a block device whose last owner is ending.
fn open_patiently(path: &Path, kind: Kind, flags: i32, options: &DeviceOptions) -> forkdisk::Result<(OwnedFd, bool)> {
    let start = Instant::now();
    loop {
        let opened = match sys::open(path, flags | direct_flag(options.direct), 0o600) {
            Ok(fd) => return Ok((fd, options.direct)),
            // The failed attempt may have created the file: it belongs to this process then.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && options.direct => {
                let left = if flags & libc::O_CREAT != 0 { flags & !libc::O_EXCL } else { flags };
                sys::open(path, left, 0o600)
            }
            Err(e) => Err(e),
        };
        match opened {
            Ok(fd) => return Ok((fd, false)),
            Err(e) if kind == Kind::Block && e.raw_os_error() == Some(libc::EBUSY) => {
                let user = lock::block_device_user(path);
                if user != lock::UNSEEN || start.elapsed() >= options.patience {
                    return Err(lock::busy(path, &user));
                }
                std::thread::sleep(lock::RETRY);
            }
            Err(e) => return Err(explain(path, e)),
        }
    }
}

fn direct_flag(direct: bool) -> i32 {
    if direct { libc::O_DIRECT } else { 0 }
}

fn prepare_file(file: &File, path: &Path, size: u64, force: bool, is_new: bool) -> forkdisk::Result<()> {
    let failed = |e: io::Error| Error::io(format!("cannot make {} {size} bytes long", path.display()), e);
    let old = file.metadata().map_err(failed)?.len();
    if old > 0 && !force {
        return Err(not_empty(path, &format!("has {old} bytes")));
    }
    if size > old {
        // Detects a length that the file system refuses while the old contents still exist.
        file.set_len(size).map_err(failed)?;
    }
    file.set_len(0).and_then(|()| file.set_len(size)).and_then(|()| file.sync_all()).map_err(failed)?;
    if is_new { sync_parent(path).map_err(failed) } else { Ok(()) }
}

fn prepare_block(file: &File, path: &Path, size: u64, force: bool) -> forkdisk::Result<()> {
    let failed = |e: io::Error| Error::io(format!("cannot read {}", path.display()), e);
    let len = geometry::len(file, Kind::Block).map_err(failed)?;
    if size > len {
        let text = format!("{} has {len} bytes, fewer than the requested {size}", path.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    if force {
        return Ok(());
    }
    // Through the page cache, which needs no aligned memory.
    let mut start = Vec::new();
    let read = File::open(path).and_then(|probe| probe.take(EMPTY_PROBE_BYTES).read_to_end(&mut start));
    read.map_err(failed)?;
    if start.iter().any(|&byte| byte != 0) { Err(not_empty(path, "does not begin with zeroes")) } else { Ok(()) }
}

fn not_empty(path: &Path, how: &str) -> Error {
    let text = format!("{} is not empty (it {how}); --force overwrites it", path.display());
    Error::new(ErrorKind::Exists, text)
}

/// Makes a new file's directory entry durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}

fn finish(rt: &Rt, path: &Path, opened: Opened, kind: Kind, options: &DeviceOptions) -> forkdisk::Result<UringDevice> {
    let Opened { file, direct } = opened;
    let failed = |e: io::Error| Error::io(format!("cannot find the size of {}", path.display()), e);
    let len = geometry::len(&file, kind).map_err(failed)?;
    let block = match direct {
        true => geometry::direct_block(file.as_fd(), kind).map_err(failed)?,
        false => None,
    };
    let block = match block {
        Some(block) => block,
        None => geometry::buffered_block(file.as_fd(), kind).map_err(failed)?,
    };
    let in_memory = kind == Kind::File && at_once::is_in_memory(file.as_fd()).map_err(failed)?;
    let array = options.array.or_else(|| geometry::array(&file, kind));
    let state = State {
        handle: Handle::new(rt.driver(), OwnedFd::from(file)),
        path: path.to_path_buf(),
        kind,
        direct,
        read_only: options.read_only,
        block,
        len: Cell::new(len),
        resized: Cell::new(0),
        resize_flushed: Cell::new(0),
        no_discard: Cell::new(false),
        in_memory,
        cloning: Default::default(),
    };
    let plain = UringDevice { rt: rt.clone(), state: Rc::new(state), stripes: None };
    let stripes =
        array.filter(|_| !options.read_only).and_then(|array| Stripes::new(plain.clone(), Rc::new(rt.clone()), array));
    Ok(UringDevice { stripes, ..plain })
}

fn explain(path: &Path, error: io::Error) -> Error {
    let path = path.display();
    match error.raw_os_error() {
        Some(libc::ENOENT) => Error::new(ErrorKind::NotFound, format!("{path} does not exist")),
        Some(libc::ENOTDIR) => {
            Error::new(ErrorKind::NotFound, format!("{path} does not exist: a part of it is not a folder"))
        }
        Some(libc::EEXIST) => Error::new(ErrorKind::Exists, format!("{path} exists already")),
        Some(libc::EACCES | libc::EPERM) => {
            Error::new(ErrorKind::Invalid, format!("no permission to open {path}: {error}"))
        }
        Some(libc::EROFS) => Error::new(
            ErrorKind::ReadOnly,
            format!("{path} lies on a read-only file system; it can only be opened read-only"),
        ),
        Some(libc::ETXTBSY | libc::EBUSY) => Error::new(ErrorKind::Busy, format!("{path} is in use: {error}")),
        Some(libc::EISDIR | libc::ELOOP | libc::ENAMETOOLONG | libc::EINVAL) => {
            Error::new(ErrorKind::Invalid, format!("cannot open {path}: {error}"))
        }
        _ => Error::io(format!("cannot open {path}"), error),
    }
}
