//! The kernel's cache of a block device.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use crate::sys;

/// A block device from which nothing is mounted, and nothing can be, while this lives.
pub struct ClaimedDevice(File);

impl ClaimedDevice {
    /// Claims the device and writes what the kernel has cached of it. Never call it on the thread that serves the
    /// device.
    ///
    /// # Errors
    /// `ResourceBusy` if it, or one of its partitions, is mounted or claimed otherwise; `PermissionDenied`.
    pub fn claim(path: &Path) -> io::Result<ClaimedDevice> {
        let device = File::from(sys::open(path, libc::O_RDONLY | libc::O_EXCL, 0)?);
        device.sync_all()?;
        Ok(ClaimedDevice(device))
    }

    /// Makes the kernel drop what it has cached of the device. Needs root. Never call it on the thread that serves the
    /// device.
    ///
    /// # Errors
    /// `PermissionDenied` without root.
    pub fn drop_cache(&self) -> io::Result<()> {
        sys::drop_device_cache(self.0.as_fd())
    }
}
