//! What the server serves: a set of exports, and one export that is open for I/O.

use std::future::{Future, ready};
use std::time::Duration;

use forkdisk::{Buf, Operation, Result, WriteIntent};

use crate::codec::{ExportInfo, StatusExtent};

/// A set of exports that clients choose from by name.
pub trait Exports: 'static {
    /// An export that is open.
    type Export: Export;

    /// Names and descriptions for NBD_OPT_LIST: of at most `most` exports, those that come behind the one of the name
    /// `after` in an order of the exports' own (empty: from the first on). Exports may come and go between two pieces.
    fn list(&self, after: &str, most: usize) -> Vec<(String, String)>;

    /// Opens an export. The empty name is the default export; `NotFound` if there is none.
    fn open(&self, name: &str) -> Result<Self::Export>;

    /// A buffer of `len` bytes, best suited to the exports; contents unspecified.
    fn buffer(&self, len: usize) -> Buf;
}

/// An open export: a disk with a volatile write cache. Offsets and lengths are in bytes, of any
/// alignment; ranges lie inside the [`size`](Self::size) that was told last.
///
/// The server runs every future to its end, whatever becomes of the client.
pub trait Export: 'static {
    /// A metadata context that a client has chosen: what BLOCK_STATUS tells of. It keeps alive
    /// whatever that takes.
    type Context: 'static;

    /// What the handshake tells a client.
    fn info(&self) -> ExportInfo;

    /// Its length at the moment, in bytes.
    fn size(&self) -> u64;

    /// Fills all of `buf` from `offset`.
    fn read(&self, offset: u64, buf: Buf) -> impl Future<Output = (Result<()>, Buf)>;

    /// As [`read`](Self::read); parts that are holes may be left as they are in `buf` and reported
    /// instead: where they begin in it and how long they are, in rising order, neighbours as one.
    fn read_sparse(&self, offset: u64, buf: Buf) -> impl Future<Output = (Result<Vec<(usize, usize)>>, Buf)> {
        async move {
            let (result, buf) = self.read(offset, buf).await;
            (result.map(|()| Vec::new()), buf)
        }
    }

    /// A hint for the writes that follow: the client sends `more` before they are answered. What wraps an export
    /// passes this on, so it is not left out by default.
    fn cork(&self, more: bool);

    /// A hint: this range is about to be written, its data is being received. Held until just before that, or
    /// until no write will come of it.
    fn announce_write(&self, offset: u64, len: u64) -> Option<WriteIntent>;

    /// Writes all of `buf`; with `fua` it is durable when this returns.
    fn write(&self, offset: u64, buf: Buf, fua: bool) -> impl Future<Output = (Result<()>, Buf)>;

    /// The range reads as zeroes afterwards. `no_hole`: the client would like it to stay
    /// provisioned.
    fn write_zeroes(&self, offset: u64, len: u64, fua: bool, no_hole: bool) -> impl Future<Output = Result<()>>;

    /// Whether [`write_zeroes`](Self::write_zeroes) of this range is faster than writing it.
    fn zeroing_is_fast(&self, offset: u64, len: u64) -> bool;

    /// The range is not needed any more.
    fn trim(&self, offset: u64, len: u64, fua: bool) -> impl Future<Output = Result<()>>;

    /// The range will be read soon. A hint: it costs little, whatever the range.
    fn cache(&self, _offset: u64, _len: u64) -> impl Future<Output = Result<()>> {
        ready(Ok(()))
    }

    /// Makes durable every write to this disk that has returned, through whatever handle.
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// Told of every request, whether it went well or not: how long it took from admission, with its
    /// data received, until its reply was ready.
    fn took(&self, _operation: Operation, _time: Duration) {}

    /// The names of its metadata contexts. Where they are very many, some may be left out; [`context`](Self::context)
    /// opens those, too.
    fn contexts(&self) -> Vec<String>;

    /// Opens the metadata context of this name; `None` if there is none.
    fn context(&self, name: &str) -> Option<Self::Context>;

    /// What a context says of a range, from its front on: at least one extent, together not longer
    /// than the range. It ends early after looking at about `looks` pieces.
    fn status(
        &self,
        context: &Self::Context,
        offset: u64,
        len: u64,
        looks: usize,
    ) -> impl Future<Output = Result<Vec<StatusExtent>>>;
}
