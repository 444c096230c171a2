//! The pool's volumes as exports; some may be closed to new clients for a while.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use std::time::Duration;

use forkdisk::{Buf, Error, ErrorKind, Operation, Pool, Result, VolumeId, WriteFlags, WriteIntent};
use forkdisk_control::Guard;
use forkdisk_nbd::codec::{ExportInfo, StatusExtent};
use forkdisk_nbd::{Export, Exports};
use forkdisk_uring::UringDevice;

use super::io_error_log::IoErrorLog;
use super::mounts::Mounts;

/// Names that are closed to new users, with the number of guards for each.
#[derive(Clone, Default)]
pub struct ExportLocks(Rc<RefCell<BTreeMap<String, usize>>>);

impl ExportLocks {
    /// Closes `name` until the guard is dropped.
    pub fn close(&self, name: &str) -> ExportLock {
        *self.0.borrow_mut().entry(name.to_string()).or_default() += 1;
        ExportLock { export_locks: self.clone(), name: name.to_string() }
    }

    fn is_closed(&self, name: &str) -> bool {
        self.0.borrow().contains_key(name)
    }
}

/// Keeps an export closed while it lives.
pub struct ExportLock {
    export_locks: ExportLocks,
    name: String,
}

impl Guard for ExportLock {}

impl Drop for ExportLock {
    fn drop(&mut self) {
        let mut export_locks = self.export_locks.0.borrow_mut();
        if let Some(count) = export_locks.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                export_locks.remove(&self.name);
            }
        }
    }
}

/// Every volume and snapshot of a pool, except those that are closed.
#[derive(Clone)]
pub struct Served {
    pub pool: Pool<UringDevice>,
    /// Identity of the pool.
    pub uuid: [u8; 16],
    pub export_locks: ExportLocks,
    pub mounts: Mounts,
    pub io_errors: IoErrorLog,
}

impl Exports for Served {
    type Export = ServedExport;

    fn list(&self, after: &str, most: usize) -> Vec<(String, String)> {
        Exports::list(&self.pool, after, most)
    }

    fn open(&self, name: &str) -> Result<Self::Export> {
        if self.export_locks.is_closed(name) || name.is_empty() && self.has_locks() {
            let text = format!("{name} is closed while it is rolled back; try again");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let export = Exports::open(&self.pool, name)?;
        let info = export.info();
        let id = self.pool.find(&info.name)?.id;
        let (mounts, io_errors) = (self.mounts.clone(), self.io_errors.clone());
        Ok(ServedExport { export, id, serial: serial(&self.uuid, id), read_only: info.read_only, mounts, io_errors })
    }

    fn buffer(&self, len: usize) -> Buf {
        Pool::buffer(&self.pool, len)
    }
}

impl Served {
    /// Returns whether any name is closed: the default export has another name.
    fn has_locks(&self) -> bool {
        !self.export_locks.0.borrow().is_empty()
    }
}

/// A volume or snapshot whose file programs may have open: changes by a client are visible to them
/// before the client gets its reply.
pub struct ServedExport {
    export: PoolExport,
    id: VolumeId,
    serial: [u8; SERIAL_BYTES],
    read_only: bool,
    mounts: Mounts,
    io_errors: IoErrorLog,
}

/// Bytes of a serial number.
const SERIAL_BYTES: usize = 20;

/// Returns the serial number of a disk: the pool's identity and the number of the volume, which never changes.
fn serial(uuid: &[u8; 16], id: VolumeId) -> [u8; SERIAL_BYTES] {
    let pool_part: String = uuid[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    let text = format!("{pool_part}-{:x}", id.0);
    let mut serial = [0; SERIAL_BYTES];
    let len = text.len().min(SERIAL_BYTES);
    serial[..len].copy_from_slice(&text.as_bytes()[..len]);
    serial
}

impl ServedExport {
    /// Returns the serial number that a guest can read.
    pub fn serial(&self) -> [u8; SERIAL_BYTES] {
        self.serial
    }

    /// Returns whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn noted<T>(&self, what: &str, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.io_errors.note(self.id, what, || self.export.info().name, error))
    }
}

type PoolExport = <Pool<UringDevice> as Exports>::Export;

impl Export for ServedExport {
    type Context = <PoolExport as Export>::Context;

    fn announce_write(&self, offset: u64, len: u64) -> Option<WriteIntent> {
        self.export.announce_write(offset, len)
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Result<()>, Buf) {
        let len = buf.len() as u64;
        let (written, buf) = self.export.write(offset, buf, flags).await;
        self.mounts.changed(self.id, offset, len).await;
        (self.noted("write", written), buf)
    }

    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool, no_hole: bool) -> Result<()> {
        let zeroed = self.export.write_zeroes(offset, len, fua, no_hole).await;
        self.mounts.changed(self.id, offset, len).await;
        self.noted("write of zeroes", zeroed)
    }

    async fn trim(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        let trimmed = self.export.trim(offset, len, fua).await;
        self.mounts.changed(self.id, offset, len).await;
        self.noted("trim", trimmed)
    }

    fn info(&self) -> ExportInfo {
        self.export.info()
    }

    fn size(&self) -> u64 {
        self.export.size()
    }

    async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let (read, buf) = self.export.read(offset, buf).await;
        (self.noted("read", read), buf)
    }

    async fn read_sparse(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let (read, buf) = self.export.read_sparse(offset, buf).await;
        (self.noted("read", read), buf)
    }

    fn zeroing_is_fast(&self, offset: u64, len: u64) -> bool {
        self.export.zeroing_is_fast(offset, len)
    }

    async fn cache(&self, offset: u64, len: u64) -> Result<()> {
        self.noted("read", self.export.cache(offset, len).await)
    }

    async fn flush(&self) -> Result<()> {
        self.noted("flush", self.export.flush().await)
    }

    fn took(&self, operation: Operation, time: Duration) {
        self.export.took(operation, time);
    }

    fn contexts(&self) -> Vec<String> {
        self.export.contexts()
    }

    fn context(&self, name: &str) -> Option<Self::Context> {
        self.export.context(name)
    }

    async fn status(&self, context: &Self::Context, offset: u64, len: u64, looks: usize) -> Result<Vec<StatusExtent>> {
        self.noted("look at the map", self.export.status(context, offset, len, looks).await)
    }
}
