//! The pool's volumes as exports; some may be closed to new clients for a while.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::{Buf, Error, ErrorKind, Operation, Pool, Result, VolumeId, WriteFlags, WriteIntent};
use forkdisk_control::Guard;
use forkdisk_nbd::codec::{ExportInfo, StatusExtent};
use forkdisk_nbd::{Export, Exports};
use forkdisk_uring::{Turnstile, UringDevice};

use super::io_error_log::IoErrorLog;
use super::mounts::Mounts;
use super::outlets::{By, Disk, Door, NamedContext, Outlet, Outlets, open_disk};

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
    pub outlets: Outlets,
}

impl Exports for Served {
    type Export = ServedExport;

    fn list(&self, after: &str, most: usize) -> Vec<(String, String)> {
        Exports::list(&self.pool, after, most)
    }

    fn open(&self, name: &str) -> Result<Self::Export> {
        if name.is_empty() {
            if self.has_locks() {
                return Err(closed("the default export"));
            }
            let only = Exports::open(&self.pool, "")?.info().name;
            return self.open(&only);
        }
        let door = Door::Export(name.to_string());
        let Some(id) = self.outlets.switched(&door) else { return self.open_named(name, By::Export) };
        let disk = self.disk(id).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                let text = format!(
                    "the export {name} was switched to a volume that is deleted: `forkdisk switch` points it at another"
                );
                Error::new(ErrorKind::NotFound, text)
            }
            _ => error,
        })?;
        Ok(self.outlet(By::Export, disk, Some(name.to_string())))
    }

    fn buffer(&self, len: usize) -> Buf {
        Pool::buffer(&self.pool, len)
    }
}

fn closed(name: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("{name} is closed while it is rolled back; try again"))
}

impl Served {
    /// Creates the exports of the pool at `path`.
    pub fn new(path: &Path, pool: &Pool<UringDevice>, mounts: &Mounts) -> Served {
        let (export_locks, io_errors, uuid) = (ExportLocks::default(), IoErrorLog::default(), pool.info().uuid);
        let (pool, mounts, outlets) = (pool.clone(), mounts.clone(), Outlets::open(path, &uuid));
        Served { pool, uuid, export_locks, mounts, io_errors, outlets }
    }

    /// Returns whether any name is closed: the default export has another name.
    fn has_locks(&self) -> bool {
        !self.export_locks.0.borrow().is_empty()
    }

    /// Opens a volume or snapshot of the pool, whatever its export shows.
    pub fn open_named(&self, name: &str, by: By) -> Result<ServedExport> {
        if self.export_locks.is_closed(name) {
            return Err(closed(name));
        }
        // By name first: other kinds of files have a number, too.
        let id = self.pool.volume(name)?.id();
        Ok(self.outlet(by, self.disk(id)?, None))
    }

    /// Opens a volume or snapshot by its number.
    pub fn disk(&self, id: VolumeId) -> Result<Disk> {
        let disk = open_disk(&self.pool, &self.uuid, id)?;
        let name = disk.export.info().name;
        if self.export_locks.is_closed(&name) { Err(closed(&name)) } else { Ok(disk) }
    }

    fn outlet(&self, by: By, disk: Disk, switched: Option<String>) -> ServedExport {
        let (mounts, io_errors) = (self.mounts.clone(), self.io_errors.clone());
        ServedExport { outlet: self.outlets.add(by, disk, switched), mounts, io_errors }
    }
}

/// A volume or snapshot whose file programs may have open: changes by a client are visible to them
/// before the client gets its reply.
pub struct ServedExport {
    pub outlet: Rc<Outlet>,
    mounts: Mounts,
    io_errors: IoErrorLog,
}

impl ServedExport {
    /// Returns the disk that it shows.
    pub fn disk(&self) -> Rc<Disk> {
        self.outlet.disk()
    }

    fn noted<T>(&self, disk: &Disk, what: &str, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.io_errors.note(disk.id, what, || disk.export.info().name, error))
    }
}

impl Drop for ServedExport {
    fn drop(&mut self) {
        self.outlet.has_client.set(false);
    }
}

impl Export for ServedExport {
    type Context = Rc<NamedContext>;

    fn announce_write(&self, offset: u64, len: u64) -> Option<WriteIntent> {
        self.disk().export.announce_write(offset, len)
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Result<()>, Buf) {
        let (disk, len) = (self.disk(), buf.len() as u64);
        let (written, buf) = disk.export.write(offset, buf, flags).await;
        self.mounts.changed(disk.id, offset, len).await;
        (self.noted(&disk, "write", written), buf)
    }

    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool, no_hole: bool) -> Result<()> {
        let disk = self.disk();
        let zeroed = disk.export.write_zeroes(offset, len, fua, no_hole).await;
        self.mounts.changed(disk.id, offset, len).await;
        self.noted(&disk, "write of zeroes", zeroed)
    }

    async fn trim(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        let disk = self.disk();
        let trimmed = disk.export.trim(offset, len, fua).await;
        self.mounts.changed(disk.id, offset, len).await;
        self.noted(&disk, "trim", trimmed)
    }

    fn info(&self) -> ExportInfo {
        ExportInfo { name: self.outlet.name(), ..self.disk().export.info() }
    }

    fn shows(&self) -> String {
        self.disk().export.info().name
    }

    fn turnstile(&self) -> Option<&Rc<Turnstile>> {
        Some(&self.outlet.turnstile)
    }

    fn size(&self) -> u64 {
        self.disk().export.size()
    }

    async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let disk = self.disk();
        let (read, buf) = disk.export.read(offset, buf).await;
        (self.noted(&disk, "read", read), buf)
    }

    async fn read_sparse(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let disk = self.disk();
        let (read, buf) = disk.export.read_sparse(offset, buf).await;
        (self.noted(&disk, "read", read), buf)
    }

    fn zeroing_is_fast(&self, offset: u64, len: u64) -> bool {
        self.disk().export.zeroing_is_fast(offset, len)
    }

    async fn cache(&self, offset: u64, len: u64) -> Result<()> {
        let disk = self.disk();
        self.noted(&disk, "read", disk.export.cache(offset, len).await)
    }

    async fn flush(&self) -> Result<()> {
        let disk = self.disk();
        self.noted(&disk, "flush", disk.export.flush().await)
    }

    fn took(&self, operation: Operation, time: Duration) {
        self.disk().export.took(operation, time);
    }

    fn contexts(&self) -> Vec<String> {
        self.disk().export.contexts()
    }

    fn context(&self, name: &str) -> Option<Self::Context> {
        self.outlet.context(name)
    }

    async fn status(&self, context: &Self::Context, offset: u64, len: u64, looks: usize) -> Result<Vec<StatusExtent>> {
        let disk = self.disk();
        let Some(open) = context.now() else {
            let text = format!("the export was switched to {}, which has no {}", self.shows(), context.name());
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        self.noted(&disk, "look at the map", disk.export.status(&open, offset, len, looks).await)
    }
}
