//! Disks in memory: exports without a pool.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forkdisk::{Buf, Error, ErrorKind, Result, WriteFlags, WriteIntent};

use crate::codec::{ExportInfo, STATE_HOLE, STATE_ZERO, StatusExtent};
use crate::server::{ALLOCATION, Export, Exports};

/// Unit of holes in bytes, counted from the beginning of a request.
const UNIT_BYTES: usize = 4096;

/// A set of disks in memory. If there is only one, it is the default export.
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
    /// Creates an empty set.
    pub fn new() -> MemoryExports {
        MemoryExports::default()
    }

    /// Adds a disk of `size` zero bytes; replaces a disk of the same name.
    pub fn with(mut self, name: &str, size: usize, read_only: bool) -> MemoryExports {
        let (description, size) = ("memory".to_owned(), size as u64);
        let info = ExportInfo { name: name.to_owned(), description, size, read_only, multi_conn: true };
        let bytes = Rc::new(RefCell::new(vec![0; info.size as usize]));
        self.disks.insert(name.to_owned(), MemoryExport { info: Rc::new(info), bytes });
        self
    }
}

impl Exports for MemoryExports {
    type Export = MemoryExport;

    fn list(&self, after: &str, most: usize) -> Vec<(String, String)> {
        let behind = self.disks.iter().filter(|(name, _)| after.is_empty() || name.as_str() > after).take(most);
        behind.map(|(_, d)| (d.info.name.clone(), d.info.description.clone())).collect()
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

/// Returns the runs of whole zero units in `bytes`, as [`Export::read_sparse`] reports them.
fn holes(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut holes: Vec<(usize, usize)> = Vec::new();
    for (i, unit) in bytes.chunks(UNIT_BYTES).enumerate() {
        match holes.last_mut() {
            _ if unit.iter().any(|&b| b != 0) => {}
            Some((at, len)) if *at + *len == i * UNIT_BYTES => *len += unit.len(),
            _ => holes.push((i * UNIT_BYTES, unit.len())),
        }
    }
    holes
}

impl Export for MemoryExport {
    /// There is only `base:allocation`.
    type Context = ();

    fn announce_write(&self, _offset: u64, _len: u64) -> Option<WriteIntent> {
        None
    }

    fn info(&self) -> ExportInfo {
        (*self.info).clone()
    }

    fn size(&self) -> u64 {
        self.info.size
    }

    async fn read_sparse(&self, offset: u64, mut buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        let len = buf.len() as u64;
        let result = self.with_range(offset, len, |bytes| {
            buf.copy_from_slice(bytes);
            holes(bytes)
        });
        (result, buf)
    }

    fn zeroing_is_fast(&self, _offset: u64, _len: u64) -> bool {
        true
    }

    fn contexts(&self) -> Vec<String> {
        vec![ALLOCATION.to_owned()]
    }

    fn context(&self, name: &str) -> Option<()> {
        (name == ALLOCATION).then_some(())
    }

    async fn status(&self, _context: &(), offset: u64, len: u64, looks: usize) -> Result<Vec<StatusExtent>> {
        let len = len.min((looks.max(1) * UNIT_BYTES) as u64);
        self.with_range(offset, len, |bytes| {
            let end = bytes.len();
            let (mut extents, mut at) = (Vec::new(), 0);
            for (hole, len) in holes(bytes).into_iter().chain([(end, 0)]) {
                let parts = [(hole - at, 0), (len, STATE_HOLE | STATE_ZERO)];
                extents.extend(parts.map(|(len, flags)| StatusExtent { len: len as u64, flags }));
                at = hole + len;
            }
            extents.retain(|extent| extent.len > 0);
            extents
        })
    }

    async fn read(&self, offset: u64, mut buf: Buf) -> (Result<()>, Buf) {
        let len = buf.len() as u64;
        let result = self.with_range(offset, len, |bytes| buf.copy_from_slice(bytes));
        (result, buf)
    }

    async fn write(&self, offset: u64, buf: Buf, _flags: WriteFlags) -> (Result<()>, Buf) {
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
