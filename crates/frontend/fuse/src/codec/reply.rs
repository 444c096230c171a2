//! Replies to the kernel.

use forkdisk::{Buf, unescape_name};

use super::attr::{Attr, ENTRY, Entry, Kind, StatFs};
use super::fields::Put;
use super::init::InitReply;

/// Flags in the reply to an open.
pub mod open_flags {
    /// Reads and writes bypass the kernel's cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// The kernel's cache of the file stays valid.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// Closing the file needs no request (Linux 5.16).
    pub const NO_FLUSH: u32 = 1 << 5;
    /// Direct writes may run concurrently.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Reply to a request.
#[derive(Debug)]
pub enum Reply {
    /// Failure with this errno.
    Error(i32),
    /// Success without data. Also for requests without a reply.
    Done,
    /// Result of the negotiation.
    Init(InitReply),
    /// Result of a lookup or creation.
    Entry(Entry),
    /// The name does not exist; the kernel may cache that for this many milliseconds.
    NoEntry(u32),
    /// Attributes, and the milliseconds for which the kernel may cache them.
    Attr(Attr, u32),
    /// A handle, with [`open_flags`].
    Opened(u64, u32),
    /// A created and opened file.
    Created(Entry, u64, u32),
    /// Contents.
    Data(Buf),
    /// A page of a directory, a value or a list of names.
    Bytes(Vec<u8>),
    /// All bytes of this buffer were written.
    Stored(Buf),
    /// Number of bytes written.
    Written(u32),
    /// Number of bytes copied, in 64 bits.
    Copied(u64),
    /// Length that a value would have.
    Length(u32),
    /// A position in a file.
    Position(u64),
    /// The state of the file system.
    StatFs(StatFs),
}

impl Reply {
    /// Encodes the header and the reply, except file contents.
    pub fn head(&self, unique: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(16 + self.room());
        out.resize(16, 0);
        let error = self.put(&mut out);
        let contents = if let Reply::Data(data) = self { data.len() } else { 0 };
        let len = (out.len() + contents) as u32;
        out[..4].copy_from_slice(&len.to_ne_bytes());
        out[4..8].copy_from_slice(&(-error).to_ne_bytes());
        out[8..16].copy_from_slice(&unique.to_ne_bytes());
        out
    }

    fn room(&self) -> usize {
        match self {
            Reply::Bytes(bytes) => bytes.len(),
            Reply::Error(_) | Reply::Done | Reply::Data(_) => 0,
            _ => 160,
        }
    }

    /// Appends the part after the header; returns the errno.
    fn put(&self, out: &mut Vec<u8>) -> i32 {
        match self {
            Reply::Error(errno) => return *errno,
            Reply::Done | Reply::Data(_) => {}
            Reply::Init(init) => init.put(out),
            Reply::Entry(entry) => entry.put(out),
            Reply::NoEntry(valid) => Entry::put_none(*valid, out),
            Reply::Attr(attr, valid) => {
                out.u64(u64::from(valid / 1000));
                out.u32(valid % 1000 * 1_000_000);
                out.u32(0);
                attr.put(out);
            }
            Reply::Opened(handle, flags) => opened(out, *handle, *flags),
            Reply::Created(entry, handle, flags) => {
                entry.put(out);
                opened(out, *handle, *flags);
            }
            Reply::Bytes(bytes) => out.extend_from_slice(bytes),
            Reply::Stored(data) => written(out, data.len() as u32),
            Reply::Written(n) | Reply::Length(n) => written(out, *n),
            Reply::Copied(n) | Reply::Position(n) => out.u64(*n),
            Reply::StatFs(state) => state.put(out),
        }
        0
    }
}

fn written(out: &mut Vec<u8>, n: u32) {
    out.u32(n);
    out.u32(0);
}

fn opened(out: &mut Vec<u8>, handle: u64, flags: u32) {
    out.u64(handle);
    out.u32(flags);
    out.u32(0);
}

/// A page of directory entries, filled as far as they fit. Names are those of the pool: the kernel gets them without
/// escapes.
pub struct DirectoryPage {
    bytes: Vec<u8>,
    limit: usize,
}

impl DirectoryPage {
    /// Creates a page of at most `limit` bytes.
    pub fn new(limit: u32) -> DirectoryPage {
        DirectoryPage { bytes: Vec::new(), limit: limit as usize }
    }

    /// Adds a name; a later request continues after it with offset `next`. Returns false if it does not fit.
    pub fn add(&mut self, ino: u64, kind: Kind, name: &str, next: u64) -> bool {
        if self.bytes.len() + (24 + unescape_name(name).len()).next_multiple_of(8) > self.limit {
            return false;
        }
        self.put(ino, kind, name, next);
        true
    }

    /// Returns whether `name` with its attributes fits.
    pub fn has_room_plus(&self, name: &str) -> bool {
        self.bytes.len() + (ENTRY + 24 + unescape_name(name).len()).next_multiple_of(8) <= self.limit
    }

    /// Adds a name with its attributes; `None` adds the name only. It must fit.
    pub fn add_plus(&mut self, ino: u64, kind: Kind, name: &str, next: u64, entry: Option<&Entry>) {
        match entry {
            Some(entry) => entry.put(&mut self.bytes),
            None => Entry::put_none(0, &mut self.bytes),
        }
        self.put(ino, kind, name, next);
    }

    fn put(&mut self, ino: u64, kind: Kind, name: &str, next: u64) {
        let (out, shown) = (&mut self.bytes, unescape_name(name));
        out.u64(ino);
        out.u64(next);
        out.u32(shown.len() as u32);
        out.u32(kind.entry_type());
        out.extend_from_slice(&shown);
        out.align();
    }

    /// Returns the page as a reply.
    pub fn reply(self) -> Reply {
        Reply::Bytes(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Time;
    use super::*;

    fn entry() -> Entry {
        let time = Time { seconds: -1, nanos: 5 };
        let (ino, kind, mode, nlink, uid, gid) = (9, Kind::File, 0o644, 1, 2, 3);
        let (size, blocks, blksize) = (10, 8, 4096);
        let attr =
            Attr { ino, kind, mode, nlink, uid, gid, size, blocks, blksize, atime: time, mtime: time, ctime: time };
        Entry { node: 9, name_valid: 1500, attr_valid: 0, attr }
    }

    #[test]
    fn replies_have_the_lengths_of_the_protocol() {
        let statfs = StatFs { blocks: 1, free: 1, files: 1, free_files: 1, block: 4096, name: 255 };
        let all = [
            (Reply::Error(2), 0),
            (Reply::Done, 0),
            (Reply::Entry(entry()), 128),
            (Reply::Attr(entry().attr, 1), 104),
            (Reply::Opened(1, 2), 16),
            (Reply::Created(entry(), 1, 2), 144),
            (Reply::Bytes(vec![1; 5]), 5),
            (Reply::Written(7), 8),
            (Reply::Stored(Buf::zeroed(7)), 8),
            (Reply::Copied(7), 8),
            (Reply::Length(7), 8),
            (Reply::Position(7), 8),
            (Reply::StatFs(statfs), 80),
        ];
        for (reply, len) in all {
            let head = reply.head(0x0102_0304_0506_0708);
            assert_eq!(head.len(), 16 + len, "{reply:?}");
            assert_eq!(head[..4], (head.len() as u32).to_ne_bytes());
            assert_eq!(head[8..16], 0x0102_0304_0506_0708u64.to_ne_bytes());
        }
        assert_eq!(Reply::Error(2).head(1)[4..8], (-2i32).to_ne_bytes());
        let data = Reply::Data(Buf::zeroed(100)).head(1);
        assert_eq!((data.len(), &data[..4]), (16, &116u32.to_ne_bytes()[..]));
    }

    #[test]
    fn an_entry_says_how_long_it_is_valid_and_what_it_is() {
        let head = Reply::Entry(entry()).head(1);
        assert_eq!(head[16 + 16..16 + 24], 1u64.to_ne_bytes());
        assert_eq!(head[16 + 32..16 + 36], 500_000_000u32.to_ne_bytes());
        assert_eq!(head[16 + 40 + 60..16 + 40 + 64], 0o100644u32.to_ne_bytes());
    }

    #[test]
    fn a_page_of_a_directory_takes_what_fits() {
        let mut page = DirectoryPage::new(64);
        assert!(page.add(1, Kind::Folder, "a", 1) && page.add(2, Kind::File, "bb", 2));
        assert!(!page.add(3, Kind::File, "c", 3) && !page.has_room_plus("c"));
        let Reply::Bytes(bytes) = page.reply() else { panic!("no bytes") };
        assert_eq!(bytes.len(), 64);
        assert_eq!((bytes[20], bytes[24], bytes[52]), (4, b'a', 8));
    }
}
