//! Ranges that the file system clones (`FICLONERANGE`) or zeroes itself, where supported: XFS with
//! reflinks, btrfs. After the first refusal it is not tried again.

use std::cell::{Cell, OnceCell};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use super::{UringDevice, geometry, invalid, past_end};
use crate::op::{Work, outcome};
use crate::sys;

/// Alignment of clones: file systems clone whole blocks, mostly pages. Those with larger blocks refuse.
const UNIT_BYTES: u64 = 4096;

/// What is known about cloning on a device.
#[derive(Default)]
pub(super) struct Cloning {
    /// The file system cannot clone.
    refused: Cell<bool>,
    /// It cannot clone from another file, since that lies on another file system.
    refused_from_others: Cell<bool>,
    /// The open file, for the cloning thread: it also keeps the lock until the thread has ended.
    file: OnceCell<Arc<OwnedFd>>,
}

impl UringDevice {
    pub(super) fn may_clone(&self, source: &UringDevice) -> bool {
        let (mine, theirs) = (&self.state, &source.state);
        let own = Rc::ptr_eq(mine, theirs);
        let files = mine.kind == geometry::Kind::File && theirs.kind == geometry::Kind::File;
        let refused = mine.cloning.refused.get() || !own && mine.cloning.refused_from_others.get();
        files && !refused && !mine.read_only
    }

    /// Implements [`Device::clone_range`](forkdisk::Device::clone_range). The system call waits for
    /// direct I/O in flight, so it is made on a separate thread.
    pub(super) fn start_clone(
        &self,
        source: &UringDevice,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        let checked = self.check_clone(source, from, to, len).and_then(|()| {
            let (source, target) = (source.shared_file()?, self.shared_file()?);
            Ok(self.rt.driver().helper.run(move || sys::clone_range(source.as_fd(), from, target.as_fd(), to, len)))
        });
        let (state, own) = (self.state.clone(), Rc::ptr_eq(&self.state, &source.state));
        async move {
            let error = match checked?.await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EXDEV) if !own => state.cloning.refused_from_others.set(true),
                Some(errno) if is_refusal(errno) => state.cloning.refused.set(true),
                _ => return Err(error),
            }
            Err(unsupported(error))
        }
    }

    /// Implements [`Device::zero_range`](forkdisk::Device::zero_range).
    pub(super) fn start_zero(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let checked = match self.may_clone(self) {
            false => Err(io::ErrorKind::Unsupported.into()),
            true => self.check_place(offset, len).map(|()| self.start(Work::Zero { offset, len })),
        };
        let state = self.state.clone();
        async move {
            match outcome(checked?.await.result) {
                Err(error) if error.raw_os_error().is_some_and(is_refusal) => {
                    state.cloning.refused.set(true);
                    Err(unsupported(error))
                }
                result => result.map(drop),
            }
        }
    }

    fn check_clone(&self, source: &UringDevice, from: u64, to: u64, len: u64) -> io::Result<()> {
        if !self.may_clone(source) || [from, to, len].iter().any(|n| !n.is_multiple_of(UNIT_BYTES)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        source.check_place(from, len)?;
        self.check_place(to, len)?;
        let overlap = from < to + len && to < from + len;
        if overlap && Rc::ptr_eq(&self.state, &source.state) {
            return Err(invalid(format!("{len} bytes at {from} cannot be cloned to {to}: the ranges overlap")));
        }
        Ok(())
    }

    fn check_place(&self, offset: u64, len: u64) -> io::Result<()> {
        let (block, end) = (self.state.block as u64, self.state.len.get());
        if (offset | len) & (block - 1) != 0 || len == 0 {
            return Err(invalid(format!("{len} bytes at {offset} do not suit blocks of {block}")));
        }
        match offset.checked_add(len) {
            Some(last) if last <= end => Ok(()),
            _ => Err(past_end(offset, len, end, true)),
        }
    }

    fn shared_file(&self) -> io::Result<Arc<OwnedFd>> {
        if let Some(file) = self.state.cloning.file.get() {
            return Ok(file.clone());
        }
        let file = Arc::new(self.state.handle.fd().try_clone_to_owned()?);
        Ok(self.state.cloning.file.get_or_init(|| file).clone())
    }
}

/// Returns whether an error is permanent: unknown call, missing feature, larger blocks,
/// or a special file (`EPERM`, `ETXTBSY`: swap, immutable).
fn is_refusal(errno: i32) -> bool {
    [libc::EOPNOTSUPP, libc::ENOTTY, libc::ENOSYS, libc::EINVAL, libc::EXDEV, libc::EPERM, libc::ETXTBSY]
        .contains(&errno)
}

fn unsupported(error: io::Error) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, error)
}

#[cfg(test)]
mod tests {
    use forkdisk::device::{Buf, Device, Segment};

    use super::*;
    use crate::{Config, DeviceOptions, block_on};

    /// Uses the file system of temporary files: it clones, or refuses once.
    #[test]
    fn a_range_is_cloned_or_refused_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        block_on(Config::default(), |rt| async move {
            let device = UringDevice::create(&rt, &path, 1 << 20, false, &DeviceOptions::default()).unwrap();
            let at = |offset, len| [Segment { offset, at: 0, len }].into_iter().collect();
            device.write(Buf::copy_of(&[7; 65536]), at(0, 65536), false).await.0.unwrap();
            device.write(Buf::copy_of(&[9; 65536]), at(65536, 65536), false).await.0.unwrap();
            assert!(device.can_clone(&device));
            let zeroed = device.zero_range(65536, 4096).await;
            let cloned = device.clone_range(&device, 0, 1 << 19, 65536).await;
            let kinds = [&cloned, &zeroed].map(|result| result.as_ref().map_err(io::Error::kind).err());
            assert!(kinds.iter().all(|kind| kind.is_none() || *kind == Some(io::ErrorKind::Unsupported)), "{kinds:?}");
            assert_eq!(device.can_clone(&device), kinds == [None, None]);
            for (place, result, there, before) in [(1 << 19, &cloned, 7, 0), (65536, &zeroed, 0, 9)] {
                let (read, buf) = device.read(Buf::zeroed(4096), at(place, 4096)).await;
                read.unwrap();
                let expected = if result.is_ok() { there } else { before };
                assert!(buf.iter().all(|&byte| byte == expected), "at {place}: {}", buf[0]);
            }
        })
        .unwrap();
    }

    #[test]
    fn what_cannot_be_right_is_refused_before_the_file_system_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        block_on(Config::default(), |rt| async move {
            let device = UringDevice::create(&rt, &path, 1 << 20, false, &DeviceOptions::default()).unwrap();
            let mut answers = Vec::new();
            for (from, to, len) in [(0, 4096, 8192), (0, 1 << 20, 4096), (1 << 20, 0, 4096), (0, 8192, 0)] {
                answers.push(device.clone_range(&device, from, to, len).await.unwrap_err().kind());
            }
            assert_eq!(answers, [io::ErrorKind::InvalidInput; 4]);
            let odd = device.clone_range(&device, 512, 8192, 4096).await.unwrap_err();
            assert_eq!(odd.kind(), io::ErrorKind::Unsupported);
            assert!(device.zero_range(100, 4096).await.is_err());
            assert!(device.can_clone(&device), "none of that says anything about the file system");
            drop(device);
            let options = DeviceOptions { read_only: true, ..DeviceOptions::default() };
            let device = UringDevice::open(&rt, &path, &options).unwrap();
            assert!(!device.can_clone(&device));
        })
        .unwrap();
    }
}
