//! What the server serves: a set of exports, and one export that is open for I/O.

use std::future::Future;
use std::time::Duration;

use forkdisk::{Buf, Operation, Result};

use crate::codec::ExportInfo;

/// A set of exports that clients choose from by name.
pub trait Exports: 'static {
    /// An export that is open.
    type Export: Export;

    /// Names and descriptions for NBD_OPT_LIST.
    fn list(&self) -> Vec<(String, String)>;

    /// Opens an export. The empty name is the default export; `NotFound` if there is none.
    fn open(&self, name: &str) -> Result<Self::Export>;

    /// A buffer of `len` bytes, best suited to the exports; contents unspecified.
    fn buffer(&self, len: usize) -> Buf;
}

/// An open export: a disk with a volatile write cache. Offsets and lengths are in bytes, of any
/// alignment; ranges lie inside the size that [`info`](Self::info) told when the export was opened.
///
/// The server runs every future to its end, whatever becomes of the client.
pub trait Export: 'static {
    /// What the handshake tells a client.
    fn info(&self) -> ExportInfo;

    /// Fills all of `buf` from `offset`.
    fn read(&self, offset: u64, buf: Buf) -> impl Future<Output = (Result<()>, Buf)>;

    /// Writes all of `buf`; with `fua` it is durable when this returns.
    fn write(&self, offset: u64, buf: Buf, fua: bool) -> impl Future<Output = (Result<()>, Buf)>;

    /// The range reads as zeroes afterwards. `no_hole`: the client would like it to stay
    /// provisioned.
    fn write_zeroes(&self, offset: u64, len: u64, fua: bool, no_hole: bool) -> impl Future<Output = Result<()>>;

    /// The range is not needed any more.
    fn trim(&self, offset: u64, len: u64, fua: bool) -> impl Future<Output = Result<()>>;

    /// Makes durable every write to this disk that has returned, through whatever handle.
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// Told of every request, whether it went well or not: how long it took from admission, with its
    /// data received, until its reply was ready.
    fn took(&self, _operation: Operation, _time: Duration) {}
}
