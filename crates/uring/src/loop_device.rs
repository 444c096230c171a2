//! The kernel's loop driver, which makes a file a block device.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::sys::{self, LoopConfig};

const CONTROL: &str = "/dev/loop-control";
/// How long releasing a device may take: programs that examine new devices hold them for a moment.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

const READ_ONLY: u32 = 1;
const PARTITIONS: u32 = 8;
const DIRECT_IO: u32 = 16;

/// Makes `file` a block device with direct I/O and partitions; returns its path. The kernel keeps
/// the file open until [`detach_loop`]. Needs root and Linux 5.8. Bytes after the file's last whole
/// sector of 512 bytes are not part of the device.
///
/// The kernel does I/O on the file's own file system, so never call this on the thread that serves it.
///
/// # Errors
/// `PermissionDenied` without root, `NotFound` without the loop driver, otherwise the error of the kernel.
pub fn attach_loop(file: &File, read_only: bool) -> io::Result<PathBuf> {
    let control = File::options().read(true).write(true).open(CONTROL);
    let control = control.map_err(|e| io::Error::new(e.kind(), format!("{CONTROL}: {e} (modprobe loop)")))?;
    loop {
        let number = sys::loop_free(control.as_fd())?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = File::options().read(true).write(!read_only).open(&path);
        let device = device.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        let flags = PARTITIONS | DIRECT_IO | if read_only { READ_ONLY } else { 0 };
        let config = LoopConfig::new(file.as_fd(), flags);
        match sys::loop_configure(device.as_fd(), &config) {
            // Another process took this number first.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
            outcome => return outcome.map(|()| path),
        }
    }
}

/// Detaches the device at `path` from its file, after everything is written. Fails with
/// [`ResourceBusy`](io::ErrorKind::ResourceBusy) while it is mounted or in use.
///
/// # Errors
/// `ResourceBusy` while it is mounted or in use, `NotFound` if there is no such device, otherwise the error
/// of the kernel.
pub fn detach_loop(path: &Path) -> io::Result<()> {
    let_go(path, File::sync_all)
}

/// As [`detach_loop`], for a device whose server is gone: unwritten data is lost already.
///
/// # Errors
/// Those of [`detach_loop`].
pub fn abandon_loop(path: &Path) -> io::Result<()> {
    let_go(path, |_| Ok(()))
}

/// Sets the device at `path` to the length of its file. Never call it on the thread that serves the file.
///
/// # Errors
/// `NotFound` if there is no such device, otherwise the error of the kernel.
pub fn resize_loop(path: &Path) -> io::Result<()> {
    sys::loop_set_capacity(File::open(path)?.as_fd())
}

fn let_go(path: &Path, first: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    let start = Instant::now();
    let device = loop {
        // Fails if the device or one of its partitions is claimed.
        match sys::open(path, libc::O_RDONLY | libc::O_EXCL, 0) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < Duration::from_secs(1) => {
                std::thread::sleep(PAUSE);
            }
            outcome => break File::from(outcome?),
        }
    };
    first(&device)?;
    sys::loop_clear(device.as_fd())?;
    drop(device);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let backing = PathBuf::from(format!("/sys/block/{name}/loop/backing_file"));
    while backing.exists() {
        if start.elapsed() > PATIENCE {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "it is removed when the last program has closed it",
            ));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
