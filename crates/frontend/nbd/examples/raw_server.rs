//! Serves a raw file or block device without an engine, to measure the cost of server and device
//! together and compare it with other NBD servers on the same file.
//!
//! `raw_server SOCKET FILE [SECONDS]` serves one export called `disk` and ends after that time, by
//! default an hour. Requests must be aligned to the device's block size.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::device::Segment;
use forkdisk::{Buf, Device, Error, Result, WriteFlags, WriteIntent};
use forkdisk_nbd::codec::StatusExtent;
use forkdisk_nbd::{Export, ExportInfo, Exports, Server, ServerOptions, nbd_uri};
use forkdisk_uring::{Config, DeviceOptions, UnixListener, UringDevice, block_on};

#[derive(Clone)]
struct Raw(Rc<UringDevice>);

impl Exports for Raw {
    type Export = Raw;

    fn list(&self, after: &str, _most: usize) -> Vec<(String, String)> {
        if after.is_empty() { vec![("disk".to_owned(), "raw file".to_owned())] } else { Vec::new() }
    }

    fn open(&self, _name: &str) -> Result<Raw> {
        Ok(self.clone())
    }

    fn buffer(&self, len: usize) -> Buf {
        self.0.buffer(len)
    }
}

impl Export for Raw {
    type Context = ();

    fn announce_write(&self, _offset: u64, _len: u64) -> Option<WriteIntent> {
        None
    }

    fn size(&self) -> u64 {
        self.0.len()
    }

    fn zeroing_is_fast(&self, _offset: u64, _len: u64) -> bool {
        false
    }

    fn contexts(&self) -> Vec<String> {
        Vec::new()
    }

    fn context(&self, _name: &str) -> Option<()> {
        None
    }

    async fn status(&self, _context: &(), _offset: u64, len: u64, _looks: usize) -> Result<Vec<StatusExtent>> {
        Ok(vec![StatusExtent { len, flags: 0 }])
    }

    fn info(&self) -> ExportInfo {
        ExportInfo {
            name: "disk".to_owned(),
            description: String::new(),
            size: self.0.len(),
            read_only: false,
            multi_conn: true,
        }
    }

    async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let all = Segment { offset, at: 0, len: buf.len() };
        let (result, buf) = self.0.read(buf, [all].into_iter().collect()).await;
        (result.map_err(|e| Error::io("read", e)), buf)
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Result<()>, Buf) {
        let all = Segment { offset, at: 0, len: buf.len() };
        let (result, buf) = self.0.write(buf, [all].into_iter().collect(), flags.fua).await;
        (result.map_err(|e| Error::io("write", e)), buf)
    }

    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool, _no_hole: bool) -> Result<()> {
        const PART: u64 = 1 << 20;
        for from in (offset..offset + len).step_by(PART as usize) {
            let part = PART.min(offset + len - from) as usize;
            self.write(from, Buf::zeroed(part), fua.into()).await.0?;
        }
        Ok(())
    }

    async fn trim(&self, offset: u64, len: u64, _fua: bool) -> Result<()> {
        self.0.discard(offset, len).await.map_err(|e| Error::io("discard", e))
    }

    async fn flush(&self) -> Result<()> {
        self.0.flush().await.map_err(|e| Error::io("flush", e))
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let usage = "usage: raw_server SOCKET FILE [SECONDS]";
    let socket = PathBuf::from(args.next().ok_or(usage)?);
    let file = PathBuf::from(args.next().ok_or(usage)?);
    let seconds: u64 = args.next().map_or(Ok(3600), |arg| arg.to_string_lossy().parse())?;
    block_on(Config::default(), |rt| async move {
        let device = UringDevice::open(&rt, &file, &DeviceOptions::default())?;
        let listener = UnixListener::bind(&rt, &socket)?;
        let server = Server::new(&rt, Raw(Rc::new(device)), ServerOptions::default());
        println!("{}", nbd_uri(&socket, "disk"));
        let (handle, sleep) = (server.handle(), rt.sleep_for(Duration::from_secs(seconds)));
        rt.spawn(async move {
            sleep.await;
            handle.stop();
        });
        server.serve(listener).await;
        Ok(())
    })?
}
