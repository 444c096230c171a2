//! The pool's volumes as disks of the vhost-user server.

use std::rc::Rc;
use std::time::Duration;

use forkdisk::{Buf, Operation, Pool, Result, WriteFlags};
use forkdisk_nbd::Export;
use forkdisk_uring::Turnstile;
use forkdisk_vhost_user::{Disk, DiskInfo, Disks};

use super::exports::{Served, ServedExport};
use super::outlets::By;

impl Disks for Served {
    type Disk = ServedExport;

    fn open(&self, name: &str) -> Result<ServedExport> {
        self.open_at(name, "")
    }

    fn open_at(&self, name: &str, socket: &str) -> Result<ServedExport> {
        self.open_named(name, By::Socket(socket.to_string()))
    }

    fn buffer(&self, len: usize) -> Buf {
        Pool::buffer(&self.pool, len)
    }
}

impl Disk for ServedExport {
    fn info(&self) -> DiskInfo {
        let disk = self.disk();
        let info = disk.export.info();
        DiskInfo { name: info.name, size: info.size, read_only: info.read_only, serial: disk.serial }
    }

    fn turnstile(&self) -> Option<&Rc<Turnstile>> {
        Export::turnstile(self)
    }

    fn size(&self) -> u64 {
        Export::size(self)
    }

    fn read_only(&self) -> bool {
        self.disk().read_only
    }

    async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        Export::read(self, offset, buf).await
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Result<()>, Buf) {
        Export::write(self, offset, buf, flags).await
    }

    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        Export::write_zeroes(self, offset, len, fua, false).await
    }

    async fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        Export::trim(self, offset, len, fua).await
    }

    async fn flush(&self) -> Result<()> {
        Export::flush(self).await
    }

    fn took(&self, operation: Operation, time: Duration) {
        Export::took(self, operation, time);
    }
}
