//! Interface to the disks that the server serves: a set of exports, and an export that is open for I/O.

use std::future::{Future, ready};
use std::rc::Rc;
use std::time::Duration;

use forkdisk::{Buf, Operation, Result, WriteFlags, WriteIntent};
use forkdisk_uring::Turnstile;

use crate::codec::{ExportInfo, StatusExtent};

/// A set of exports that clients choose from by name.
pub trait Exports: 'static {
    /// An open export.
    type Export: Export;

    /// Returns names and descriptions for NBD_OPT_LIST: at most `most` exports after the one called `after`,
    /// in a fixed order of the implementation (empty: from the first). Exports may change between two calls.
    fn list(&self, after: &str, most: usize) -> Vec<(String, String)>;

    /// Opens an export. The empty name is the default export; `NotFound` if there is none.
    ///
    /// # Errors
    /// `NotFound` if there is no such export, otherwise why it cannot be opened.
    fn open(&self, name: &str) -> Result<Self::Export>;

    /// Allocates a buffer of `len` bytes that suits the exports; its contents are unspecified.
    fn buffer(&self, len: usize) -> Buf;
}

/// An open export: a disk with a volatile write cache. Offsets and lengths are in bytes, of any
/// alignment; ranges lie inside the last returned [`size`](Self::size).
///
/// The server runs every future to its end, even if the client disconnects.
pub trait Export: 'static {
    /// An open metadata context, which BLOCK_STATUS reports. It keeps alive
    /// what it depends on.
    type Context: 'static;

    /// Returns the properties that the handshake reports.
    fn info(&self) -> ExportInfo;

    /// Returns the current name of the disk that it shows, if that is not the export's.
    fn shows(&self) -> String {
        self.info().name
    }

    /// Returns the turnstile that requests pass, if the disk can be exchanged under its clients: for another one of the
    /// same size, with the same permission to write.
    fn turnstile(&self) -> Option<&Rc<Turnstile>> {
        None
    }

    /// Returns the current length in bytes.
    fn size(&self) -> u64;

    /// Fills all of `buf` from `offset`.
    fn read(&self, offset: u64, buf: Buf) -> impl Future<Output = (Result<()>, Buf)>;

    /// As [`read`](Self::read); holes may be left unfilled in `buf` and returned
    /// as pairs of start in `buf` and length, in rising order, with adjacent holes joined.
    fn read_sparse(&self, offset: u64, buf: Buf) -> impl Future<Output = (Result<Vec<(usize, usize)>>, Buf)> {
        async move {
            let (result, buf) = self.read(offset, buf).await;
            (result.map(|()| Vec::new()), buf)
        }
    }

    /// Hint: this range is about to be written, and its data is being received. The result is given to that write in
    /// its flags, or dropped when it is certain that there is none.
    fn announce_write(&self, offset: u64, len: u64) -> Option<WriteIntent>;

    /// Writes all of `buf`; with `flags.fua` it is durable when this returns.
    fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> impl Future<Output = (Result<()>, Buf)>;

    /// Makes the range read as zeroes. `no_hole`: the client prefers that it stays
    /// provisioned.
    fn write_zeroes(&self, offset: u64, len: u64, fua: bool, no_hole: bool) -> impl Future<Output = Result<()>>;

    /// Returns whether [`write_zeroes`](Self::write_zeroes) of this range is faster than writing it.
    fn zeroing_is_fast(&self, offset: u64, len: u64) -> bool;

    /// Discards the range.
    fn trim(&self, offset: u64, len: u64, fua: bool) -> impl Future<Output = Result<()>>;

    /// Hint: the range will be read soon. Its cost is small for any range.
    fn cache(&self, _offset: u64, _len: u64) -> impl Future<Output = Result<()>> {
        ready(Ok(()))
    }

    /// Makes durable every completed write to this disk, through any handle.
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// Called after every request, successful or not, with its time from admission, when its
    /// data was received, until its reply was ready.
    fn took(&self, _operation: Operation, _time: Duration) {}

    /// Returns the names of its metadata contexts. Very long lists may be incomplete;
    /// [`context`](Self::context) opens the others, too.
    fn contexts(&self) -> Vec<String>;

    /// Opens the metadata context of this name; `None` if there is none.
    fn context(&self, name: &str) -> Option<Self::Context>;

    /// Returns the status of a range in a context, from its start on: at least one extent, together
    /// not longer than the range. Ends early after examining about `looks` pieces.
    fn status(
        &self,
        context: &Self::Context,
        offset: u64,
        len: u64,
        looks: usize,
    ) -> impl Future<Output = Result<Vec<StatusExtent>>>;
}
