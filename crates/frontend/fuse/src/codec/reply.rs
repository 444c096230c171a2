//! Replies to the kernel.

use forkdisk::Buf;

use super::attr::{Attr, ENTRY, Entry, Kind, StatFs};
use super::fields::Put;
use super::init::InitReply;

/// Bits of the answer to an open.
pub mod open_flags {
    /// What the kernel has in its cache stays valid.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// Direct writes may run beside each other.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// What a request is answered with.
#[derive(Debug)]
pub enum Reply {
    /// It failed, with this errno.
    Error(i32),
    /// It succeeded and there is nothing to say. Also for requests without a reply.
    Done,
    /// What [`InitReply`] says.
    Init(InitReply),
    /// A name.
    Entry(Entry),
    /// Nothing has this name, which may be believed for so many milliseconds.
    NoEntry(u32),
    /// Attributes, and for how many milliseconds they may be believed.
    Attr(Attr, u32),
    /// A handle, with [`open_flags`].
    Opened(u64, u32),
    /// A file that was made and opened.
    Created(Entry, u64, u32),
    /// Contents.
    Data(Buf),
    /// A page of a directory, a value or a list of names.
    Bytes(Vec<u8>),
    /// All of this was written.
    Stored(Buf),
    /// How many bytes were written.
    Written(u32),
    /// How many bytes were copied, in 64 bits.
    Copied(u64),
    /// How long a value would be.
    Length(u32),
    /// A position in a file.
    Position(u64),
    /// The state of the file system.
    StatFs(StatFs),
}

impl Reply {
    /// The header, and the part of the reply that is not contents.
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

    /// Appends what follows the header; returns the errno.
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

/// The names of a directory, as many as fit.
pub struct DirectoryPage {
    bytes: Vec<u8>,
    limit: usize,
}

impl DirectoryPage {
    /// A page of at most `limit` bytes.
    pub fn new(limit: u32) -> DirectoryPage {
        DirectoryPage { bytes: Vec::new(), limit: limit as usize }
    }

    /// Adds a name, behind which a later request goes on with `next`. False if there is no room for it.
    pub fn add(&mut self, ino: u64, kind: Kind, name: &str, next: u64) -> bool {
        if self.bytes.len() + (24 + name.len()).next_multiple_of(8) > self.limit {
            return false;
        }
        self.put(ino, kind, name, next);
        true
    }

    /// Whether there is room for `name` with its attributes.
    pub fn has_room_plus(&self, name: &str) -> bool {
        self.bytes.len() + (ENTRY + 24 + name.len()).next_multiple_of(8) <= self.limit
    }

    /// Adds a name with its attributes; without (`None`) it is only listed. There must be room for it.
    pub fn add_plus(&mut self, ino: u64, kind: Kind, name: &str, next: u64, entry: Option<&Entry>) {
        match entry {
            Some(entry) => entry.put(&mut self.bytes),
            None => Entry::put_none(0, &mut self.bytes),
        }
        self.put(ino, kind, name, next);
    }

    fn put(&mut self, ino: u64, kind: Kind, name: &str, next: u64) {
        let out = &mut self.bytes;
        out.u64(ino);
        out.u64(next);
        out.u32(name.len() as u32);
        out.u32(kind.entry_type());
        out.extend_from_slice(name.as_bytes());
        out.align();
    }

    /// The reply.
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
