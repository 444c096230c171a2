//! Disks in memory: exports without a pool, for measurements and tests of the server alone.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forkdisk::{Buf, Error, ErrorKind, Result};

use crate::codec::ExportInfo;
use crate::server::{Export, Exports};

/// A set of disks in memory. The only disk is the default export.
#[derive(Clone, Default)]
pub struct MemoryExports {
    disks: BTreeMap<String, MemoryExport>,
}

/// One disk in memory. Clones are the same disk.
#[derive(Clone)]
pub struct MemoryExport {
    info: Rc<ExportInfo>,
    bytes: Rc<RefCell<Vec<u8>>>,
}

impl MemoryExports {
    /// No disks.
    pub fn new() -> MemoryExports {
        MemoryExports::default()
    }

    /// Adds a disk of `size` zero bytes, replacing one of that name.
    pub fn with(mut self, name: &str, size: usize, read_only: bool) -> MemoryExports {
        let info = ExportInfo { name: name.to_owned(), description: "memory".to_owned(), size: size as u64, read_only };
        let bytes = Rc::new(RefCell::new(vec![0; size]));
        self.disks.insert(name.to_owned(), MemoryExport { info: Rc::new(info), bytes });
        self
    }
}

impl Exports for MemoryExports {
    type Export = MemoryExport;

    fn list(&self) -> Vec<(String, String)> {
        self.disks.values().map(|d| (d.info.name.clone(), d.info.description.clone())).collect()
    }

    fn open(&self, name: &str) -> Result<MemoryExport> {
        let disk = match name {
            "" if self.disks.len() == 1 => self.disks.values().next(),
            name => self.disks.get(name),
        };
        disk.cloned().ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no disk {name:?}")))
    }

    fn buffer(&self, len: usize) -> Buf {
        Buf::zeroed(len)
    }
}

impl MemoryExport {
    fn with_range<T>(&self, offset: u64, len: u64, f: impl FnOnce(&mut [u8]) -> T) -> Result<T> {
        let mut bytes = self.bytes.borrow_mut();
        let range = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
        let range = range.and_then(|(at, len)| bytes.get_mut(at..at.checked_add(len)?));
        range.map(f).ok_or_else(|| Error::new(ErrorKind::Invalid, "a range past the end"))
    }
}

impl Export for MemoryExport {
    fn info(&self) -> ExportInfo {
        (*self.info).clone()
    }

    async fn read(&self, offset: u64, mut buf: Buf) -> (Result<()>, Buf) {
        let len = buf.len() as u64;
        let result = self.with_range(offset, len, |bytes| buf.copy_from_slice(bytes));
        (result, buf)
    }

    async fn write(&self, offset: u64, buf: Buf, _fua: bool) -> (Result<()>, Buf) {
        let len = buf.len() as u64;
        let result = self.with_range(offset, len, |bytes| bytes.copy_from_slice(&buf));
        (result, buf)
    }

    async fn write_zeroes(&self, offset: u64, len: u64, _fua: bool, _no_hole: bool) -> Result<()> {
        self.with_range(offset, len, |bytes| bytes.fill(0))
    }

    async fn trim(&self, offset: u64, len: u64, _fua: bool) -> Result<()> {
        self.with_range(offset, len, |bytes| bytes.fill(0))
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }
}
