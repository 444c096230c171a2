//! The yardstick for throughput and CPU: one file passed through, on the same library and the same runtime, and
//! nothing else.
//!
//! `passthrough FILE DIR` shows FILE as DIR/file until it is unmounted. Reads and writes go to FILE with
//! direct I/O, as the engine's do. It can read, write, sync and tell the length; the file is as long as FILE
//! is and stays so.

use std::path::PathBuf;
use std::rc::Rc;

use forkdisk::device::{Device, Segment};
use forkdisk::{Buf, Error, ErrorKind, Result};
use forkdisk_fuse::codec::{Attr, Entry, Header, Kind, Operation, Reply, Time};
use forkdisk_fuse::{Handler, MountOptions, Session};
use forkdisk_uring::{Config, DeviceOptions, UringDevice, block_on};
use smallvec::smallvec;

const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Milliseconds for which the kernel may believe everything.
const VALID: u32 = 3_600_000;

struct Passthrough {
    device: UringDevice,
}

impl Passthrough {
    fn attr(&self, ino: u64) -> Attr {
        let time = Time::default();
        let (kind, size) = if ino == FILE { (Kind::File, self.device.len()) } else { (Kind::Folder, 0) };
        let (mode, nlink, uid, gid, blksize) = (0o777, 1, 0, 0, 65536);
        Attr {
            ino,
            kind,
            mode,
            nlink,
            uid,
            gid,
            size,
            blocks: size / 512,
            blksize,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    async fn read(&self, offset: u64, mut buf: Buf) -> Reply {
        let left = self.device.len().saturating_sub(offset);
        buf.set_len(buf.len().min(left as usize));
        if buf.is_empty() {
            return Reply::Data(buf);
        }
        let segment = Segment { offset, at: 0, len: buf.len() };
        match self.device.read(buf, smallvec![segment]).await {
            (Ok(()), buf) => Reply::Data(buf),
            (Err(e), _) => Reply::Error(e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    async fn write(&self, offset: u64, data: Buf) -> Reply {
        let segment = Segment { offset, at: 0, len: data.len() };
        match self.device.write(data, smallvec![segment], false).await {
            (Ok(()), data) => Reply::Stored(data),
            (Err(e), _) => Reply::Error(e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}

impl Handler for Passthrough {
    async fn handle(self: Rc<Self>, header: Header, operation: Operation) -> Reply {
        match operation {
            Operation::Lookup { name } if header.node == ROOT && name == "file" => {
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

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(file), Some(dir)) = (args.next(), args.next()) else {
        return Err(Error::new(ErrorKind::Invalid, "usage: passthrough FILE DIR"));
    };
    block_on(Config::default(), |rt| async move {
        let device = UringDevice::open(&rt, &file, &DeviceOptions::default())?;
        let options = MountOptions { source: file.display().to_string(), ..MountOptions::default() };
        let session = Session::mount(&rt, Rc::new(Passthrough { device }), &dir, &options).await?;
        println!("{} is shown as {}", file.display(), dir.join("file").display());
        session.serve().await
    })?
}
