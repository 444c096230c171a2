//! Files and block devices as a [`Device`].
//!
//! Requests are checked for alignment and length when they are made, and queued at once and in
//! order, one ring entry per segment. A write is complete when all of its bytes are; a short write
//! is continued, an interrupted one repeated. A device owns its file exclusively (see `lock`).

mod clone;
mod geometry;
mod in_memory;
mod lock;
mod open;

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forkdisk::device::{IoResult, Segment, Segments, Stripes};
use forkdisk::{Buf, Device, LocalFuture};

pub use lock::{block_device_user, lock_image};
pub use open::DeviceOptions;

use crate::at_once;
use crate::driver::Ticket;
use crate::executor::Rt;
use crate::handle::Handle;
use crate::op::{Op, Transfer, Work, outcome};

/// A file or block device driven through the ring of an [`Rt`]. Clones are the same device.
#[derive(Clone)]
pub struct UringDevice {
    rt: Rt,
    state: Rc<State>,
    /// For a block device that prefers whole stripes.
    stripes: Option<Rc<Stripes<UringDevice>>>,
}

struct State {
    handle: Rc<Handle>,
    path: PathBuf,
    kind: geometry::Kind,
    direct: bool,
    read_only: bool,
    block: usize,
    len: Cell<u64>,
    /// Incremented whenever the length changes, and its value at the last full flush.
    resized: Cell<u64>,
    resize_flushed: Cell<u64>,
    /// The device does not support discard.
    no_discard: Cell<bool>,
    /// A file in memory (tmpfs): see `in_memory`.
    in_memory: bool,
    cloning: clone::Cloning,
}

impl UringDevice {
    /// Opens an existing file or block device and locks it. Errors: `NotFound`, `Invalid` (not a
    /// file or block device, no permission), `ReadOnly` (the file system is), `Busy` (the message
    /// names the owner).
    ///
    /// A process that was killed keeps its lock until the kernel has finished its last request;
    /// opening waits for that, blocking the thread for at most
    /// [`patience`](DeviceOptions::patience).
    ///
    /// # Errors
    /// As listed above; `Io` for everything else.
    pub fn open(rt: &Rt, path: impl AsRef<Path>, options: &DeviceOptions) -> forkdisk::Result<UringDevice> {
        open::open(rt, path.as_ref(), options)
    }

    /// Continues to use a device that another process has [passed on](Self::pass_on), with its lock. `path` is that by
    /// which it was opened.
    ///
    /// # Errors
    /// `Io` if the descriptor is that of no device.
    pub fn inherit(
        rt: &Rt,
        path: impl AsRef<Path>,
        fd: OwnedFd,
        options: &DeviceOptions,
    ) -> forkdisk::Result<UringDevice> {
        open::inherit(rt, path.as_ref(), fd, options)
    }

    /// Returns a descriptor with which another process continues to use the device. The lock lasts until all
    /// descriptors are closed.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn pass_on(&self) -> io::Result<OwnedFd> {
        self.state.handle.fd().try_clone_to_owned()
    }

    /// Creates a sparse file of `size` bytes, or takes a block device of at least that length, and
    /// opens it locked. A target that is not empty (a file with a length, a block device that does
    /// not begin with zeroes) is `Exists` unless `force`; then a file is emptied first. A target in
    /// use stays untouched in any case.
    ///
    /// # Errors
    /// `Exists` if the target is not empty, `Busy` if it is in use, `Invalid` if a device is too short,
    /// `NoSpace` or `Io` if it cannot be created.
    pub fn create(
        rt: &Rt,
        path: impl AsRef<Path>,
        size: u64,
        force: bool,
        options: &DeviceOptions,
    ) -> forkdisk::Result<UringDevice> {
        open::create(rt, path.as_ref(), size, force, options)
    }

    /// Returns the path by which it was opened.
    pub fn path(&self) -> &Path {
        &self.state.path
    }

    /// Returns whether requests bypass the page cache. False if the file system does not support that.
    pub fn is_direct(&self) -> bool {
        self.state.direct
    }

    /// Returns whether it is a block device.
    pub fn is_block_device(&self) -> bool {
        self.state.kind == geometry::Kind::Block
    }

    /// Writes the data held for incomplete stripes.
    fn release(&self) {
        self.stripes.iter().for_each(|stripes| stripes.release());
    }

    fn start(&self, work: Work) -> Ticket {
        self.rt.driver().start(&self.state.handle, work)
    }

    fn transfer(&self, mut buf: Buf, segments: Segments, write: bool, fua: bool) -> Request {
        if let Err(error) = self.check(&buf, &segments, write) {
            return Request::Refused(error, buf);
        }
        let base = buf.as_mut_ptr();
        if self.state.in_memory && self.transfer_at_once(&mut buf, &segments, write) {
            return Request::Done(buf);
        }
        let slot = self.rt.driver().registered_slot(buf.slot(), base);
        let rw_flags = if fua { libc::RWF_DSYNC } else { 0 };
        let block = self.state.block;
        Request::Started(self.start(Work::Transfer(Transfer { buf, base, segments, write, slot, block, rw_flags })))
    }

    fn check(&self, buf: &Buf, segments: &Segments, write: bool) -> io::Result<()> {
        let (block, len) = (self.state.block, self.len());
        if write && self.state.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        for s in segments {
            let aligned = (s.offset | s.at as u64 | s.len as u64) & (block as u64 - 1) == 0;
            if !aligned || s.len == 0 || s.at.checked_add(s.len).is_none_or(|end| end > buf.len()) {
                return Err(invalid(format!("{s:?} does not suit blocks of {block} and a buffer of {}", buf.len())));
            }
            if s.offset.checked_add(s.len as u64).is_none_or(|end| end > len) {
                return Err(past_end(s.offset, s.len as u64, len, write));
            }
        }
        Ok(())
    }

    async fn flushed(self, flush: Result<Ticket, io::Result<()>>, resized: u64) -> io::Result<()> {
        match flush {
            Ok(ticket) => outcome(ticket.await.result).map(drop)?,
            Err(done) => done?,
        }
        let done = &self.state.resize_flushed;
        done.set(done.get().max(resized));
        Ok(())
    }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

fn past_end(offset: u64, len: u64, end: u64, write: bool) -> io::Error {
    let kind = if write { io::ErrorKind::InvalidInput } else { io::ErrorKind::UnexpectedEof };
    io::Error::new(kind, format!("{len} bytes at {offset} lie beyond the device's end at {end}"))
}

enum Request {
    Done(Buf),
    Started(Ticket),
    Refused(io::Error, Buf),
}

impl Request {
    async fn outcome(self) -> IoResult {
        match self {
            Request::Done(buf) => (Ok(()), buf),
            Request::Refused(error, buf) => (Err(error), buf),
            Request::Started(ticket) => match ticket.await {
                Op { work: Work::Transfer(t), result, .. } => (outcome(result).map(drop), t.buf),
                _ => unreachable!("a transfer stays a transfer"),
            },
        }
    }
}

impl UringDevice {
    /// Rewrites the contents of the range, so that a thin block device allocates storage for it.
    async fn write_again(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut at = offset;
        while at < offset + len {
            let n = (offset + len - at).min(1 << 20) as usize;
            let segment = Segment { offset: at, at: 0, len: n };
            let (read, buf) = self.read(self.buffer(n), [segment].into_iter().collect()).await;
            read?;
            self.write(buf, [segment].into_iter().collect(), false).await.0?;
            at += n as u64;
        }
        Ok(())
    }
}

impl Device for UringDevice {
    fn len(&self) -> u64 {
        self.state.len.get()
    }

    fn block_size(&self) -> usize {
        self.state.block
    }

    fn buffer(&self, len: usize) -> Buf {
        self.rt.buffer(len)
    }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        if let Some(stripes) = &self.stripes {
            segments.iter().for_each(|s| stripes.release_of(s.offset, s.len as u64));
        }
        self.transfer(buf, segments, false, false).outcome()
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        let write = match &self.stripes {
            Some(stripes) => Err(Box::pin(stripes.write(buf, segments, fua)) as LocalFuture<IoResult>),
            None => Ok(self.transfer(buf, segments, true, fua)),
        };
        async move {
            match write {
                Ok(request) => request.outcome().await,
                Err(striped) => striped.await,
            }
        }
    }

    fn cork(&self, more: bool) {
        self.stripes.iter().for_each(|stripes| stripes.cork(more));
    }

    fn stripe(&self) -> Option<u64> {
        self.stripes.as_ref().map(|stripes| stripes.stripe())
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        self.release();
        let resized = self.state.resized.get();
        let datasync = self.state.resize_flushed.get() == resized;
        let ticket = match self.state.in_memory {
            true => Err(at_once::sync(self.state.handle.fd())),
            false => Ok(self.start(Work::Flush { datasync })),
        };
        self.clone().flushed(ticket, resized)
    }

    /// Punches a hole into a file, which then reads as zeroes; sends a discard to a block device.
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.release();
        let end = self.len();
        let wanted = len > 0 && !self.state.no_discard.get();
        let checked = if self.state.read_only {
            Err(io::Error::from_raw_os_error(libc::EROFS))
        } else if offset.checked_add(len).is_none_or(|last| last > end) {
            Err(past_end(offset, len, end, true))
        } else {
            Ok(wanted.then(|| self.start(Work::Punch { offset, len })))
        };
        let state = self.state.clone();
        async move {
            let Some(ticket) = checked? else { return Ok(()) };
            match outcome(ticket.await.result) {
                Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
                    state.no_discard.set(true);
                    Ok(())
                }
                result => result.map(drop),
            }
        }
    }

    fn allocate(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let wanted = len > 0 && !self.is_block_device();
        let ticket = wanted.then(|| self.start(Work::Allocate { offset, len }));
        let device = self.clone();
        async move {
            let Some(ticket) = ticket else { return device.write_again(offset, len).await };
            match outcome(ticket.await.result) {
                Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => Ok(()),
                result => result.map(drop),
            }
        }
    }

    fn can_clone(&self, source: &Self) -> bool {
        self.may_clone(source)
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        self.release();
        self.start_clone(source, from, to, len)
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.release();
        self.start_zero(offset, len)
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        std::future::ready(self.lengthen(len))
    }
}

impl UringDevice {
    fn lengthen(&self, len: u64) -> io::Result<()> {
        if self.is_block_device() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if self.state.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if len < self.len() {
            return Err(invalid(format!("a device of {} bytes is never shortened (to {len})", self.len())));
        }
        geometry::set_file_len(self.state.handle.fd(), len)?;
        self.state.len.set(len);
        self.state.resized.set(self.state.resized.get() + 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use forkdisk::device::{Buf, Device, Segment};

    use crate::{Config, DeviceOptions, UringDevice, block_on};

    const STRIPE: u64 = 12288;
    const ARRAY: forkdisk::device::Array = forkdisk::device::Array { stripe: STRIPE, in_flight: 8 * STRIPE };
    const LEN: usize = 5 * 4096;

    /// Writes that end anywhere in stripes, with and without others in flight: each byte is there
    /// when it is acknowledged, and the last write is not held for long.
    #[test]
    fn what_was_held_for_its_stripe_is_there_when_it_is_acknowledged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        block_on(Config::default(), |rt| async move {
            let options = DeviceOptions { array: Some(ARRAY), ..DeviceOptions::default() };
            let device = UringDevice::create(&rt, &path, 4 << 20, false, &options).unwrap();
            assert!(device.stripes.is_some());
            let at = |i: u64| [Segment { offset: i * LEN as u64, at: 0, len: LEN }].into_iter().collect();
            device.cork(true);
            let mut all = Vec::new();
            for i in 0..100 {
                let buf = Buf::copy_of(&[i as u8 + 1; LEN]);
                all.push(rt.spawn(device.write(buf, at(i), false)));
                rt.sleep_for(Duration::from_micros(200)).await;
            }
            for write in all {
                write.await.0.unwrap();
            }
            device.flush().await.unwrap();
            for i in 0..100 {
                let (read, buf) = device.read(Buf::zeroed(LEN), at(i)).await;
                read.unwrap();
                assert!(buf.iter().all(|&byte| byte == i as u8 + 1), "at {i}");
            }
        })
        .unwrap();
    }
}
