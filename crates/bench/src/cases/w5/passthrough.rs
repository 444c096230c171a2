//! Baseline for files: one file passed through, on the same library and the same runtime, and
//! nothing else. It supports read, write, sync and attributes; its length is fixed.

use std::path::Path;
use std::rc::Rc;

use anyhow::Result;
use forkdisk::Buf;
use forkdisk::device::{Device, Segment};
use forkdisk_fuse::codec::{Attr, Entry, Header, Kind, Operation, Reply, Time};
use forkdisk_fuse::{Handler, MountOptions, Session, SessionHandle};
use forkdisk_uring::{DeviceOptions, JoinHandle, Rt, UringDevice};

const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Milliseconds for which the kernel may cache names and attributes.
const VALID: u32 = 3_600_000;
/// Name of the file.
pub const NAME: &str = "file";

struct Passthrough {
    device: UringDevice,
}

/// Mounts the file at `path` at `dir`, where it is called [`NAME`].
pub async fn mount(rt: &Rt, path: &Path, dir: &Path) -> Result<(SessionHandle, JoinHandle<forkdisk::Result<()>>)> {
    let device = UringDevice::open(rt, path, &DeviceOptions::default())?;
    let options = MountOptions::default().with_source("passthrough");
    let session = Session::mount(rt, Rc::new(Passthrough { device }), dir, &options).await?;
    let handle = session.handle();
    Ok((handle, rt.spawn(session.serve())))
}

impl Passthrough {
    fn attr(&self, ino: u64) -> Attr {
        let (kind, size) = if ino == FILE { (Kind::File, self.device.len()) } else { (Kind::Folder, 0) };
        let [atime, mtime, ctime] = [Time::default(); 3];
        let (mode, nlink, uid, gid, blksize, blocks) = (0o777, 1, 0, 0, 65536, size / 512);
        Attr { ino, kind, mode, nlink, uid, gid, size, blocks, blksize, atime, mtime, ctime }
    }

    async fn read(&self, offset: u64, mut buf: Buf) -> Reply {
        let left = self.device.len().saturating_sub(offset);
        buf.set_len(buf.len().min(left as usize));
        if buf.is_empty() {
            return Reply::Data(buf);
        }
        let segment = Segment { offset, at: 0, len: buf.len() };
        match self.device.read(buf, [segment].into_iter().collect()).await {
            (Ok(()), buf) => Reply::Data(buf),
            (Err(e), _) => Reply::Error(e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    async fn write(&self, offset: u64, data: Buf) -> Reply {
        let segment = Segment { offset, at: 0, len: data.len() };
        match self.device.write(data, [segment].into_iter().collect(), false).await {
            (Ok(()), data) => Reply::Stored(data),
            (Err(e), _) => Reply::Error(e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}

impl Handler for Passthrough {
    async fn handle(self: Rc<Self>, header: Header, operation: Operation) -> Reply {
        match operation {
            Operation::Lookup { name } if header.node == ROOT && name == NAME => {
                Reply::Entry(Entry { node: FILE, name_valid: VALID, attr_valid: VALID, attr: self.attr(FILE) })
            }
            Operation::Lookup { .. } => Reply::Error(libc::ENOENT),
            Operation::GetAttr { .. } | Operation::SetAttr(_) => Reply::Attr(self.attr(header.node), VALID),
            Operation::Open { .. } => Reply::Opened(1, 0),
            Operation::Read { offset, buf, .. } => self.read(offset, buf).await,
            Operation::Write { offset, data, .. } => self.write(offset, data).await,
            Operation::Sync { .. } => match self.device.flush().await {
                Ok(()) => Reply::Done,
                Err(e) => Reply::Error(e.raw_os_error().unwrap_or(libc::EIO)),
            },
            Operation::Release { .. } | Operation::Forget(_) => Reply::Done,
            _ => Reply::Error(libc::ENOSYS),
        }
    }

    fn buffer(&self, len: usize) -> Buf {
        self.device.buffer(len)
    }
}
