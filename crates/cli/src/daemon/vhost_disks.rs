//! The pool's volumes as disks of the vhost-user server.

use std::time::Duration;

use forkdisk::{Buf, Operation, Pool, Result, WriteFlags};
use forkdisk_nbd::{Export, Exports};
use forkdisk_vhost_user::{Disk, DiskInfo, Disks};

use super::exports::{Served, ServedExport};

impl Disks for Served {
    type Disk = ServedExport;

    fn open(&self, name: &str) -> Result<ServedExport> {
        Exports::open(self, name)
    }

    fn buffer(&self, len: usize) -> Buf {
        Pool::buffer(&self.pool, len)
    }
}

impl Disk for ServedExport {
    fn info(&self) -> DiskInfo {
        let (info, serial) = (Export::info(self), self.serial());
        DiskInfo { name: info.name, size: info.size, read_only: info.read_only, serial }
    }

    fn size(&self) -> u64 {
        Export::size(self)
    }

    fn read_only(&self) -> bool {
        self.is_read_only()
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
