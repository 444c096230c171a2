//! File attributes, as exchanged with the kernel.

use forkdisk::FileKind;

use super::fields::{Fields, Put};

/// A point in time: seconds since 1970 (before it: negative) and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Below 1,000,000,000.
    pub nanos: u32,
}

impl Time {
    /// Converts from nanoseconds since 1970.
    pub fn from_nanos(nanos: i64) -> Time {
        Time { seconds: nanos.div_euclid(1_000_000_000), nanos: nanos.rem_euclid(1_000_000_000) as u32 }
    }

    /// Converts to nanoseconds since 1970, limited to the range of 64 bits.
    pub fn as_nanos(self) -> i64 {
        let nanos = i128::from(self.seconds) * 1_000_000_000 + i128::from(self.nanos);
        nanos.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
    }
}

/// Type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// A FIFO.
    Fifo,
    /// A socket.
    Socket,
}

impl From<FileKind> for Kind {
    fn from(kind: FileKind) -> Kind {
        match kind {
            FileKind::File => Kind::File,
            FileKind::Folder => Kind::Folder,
            FileKind::Link => Kind::Link,
            FileKind::Fifo => Kind::Fifo,
            FileKind::Socket => Kind::Socket,
        }
    }
}

impl Kind {
    /// Returns the type bits of a mode.
    pub fn mode(self) -> u32 {
        match self {
            Kind::File => libc::S_IFREG,
            Kind::Folder => libc::S_IFDIR,
            Kind::Link => libc::S_IFLNK,
            Kind::Fifo => libc::S_IFIFO,
            Kind::Socket => libc::S_IFSOCK,
        }
    }

    /// Returns the type of a directory entry.
    pub(super) fn entry_type(self) -> u32 {
        self.mode() >> 12
    }
}

/// All attributes that `stat` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: u64,
    /// Type of the file.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Number of the owner.
    pub uid: u32,
    /// Number of the group.
    pub gid: u32,
    /// Length in bytes.
    pub size: u64,
    /// Allocated space in units of 512 bytes.
    pub blocks: u64,
    /// Best size of one read or write, in bytes.
    pub blksize: u32,
    /// Last access.
    pub atime: Time,
    /// Last change of the contents.
    pub mtime: Time,
    /// Last change of contents or attributes.
    pub ctime: Time,
}

impl Attr {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        [self.ino, self.size, self.blocks].into_iter().for_each(|v| out.u64(v));
        let times = [self.atime, self.mtime, self.ctime];
        times.iter().for_each(|t| out.u64(t.seconds as u64));
        times.iter().for_each(|t| out.u32(t.nanos));
        let mode = self.kind.mode() | self.mode & 0o7777;
        [mode, self.nlink, self.uid, self.gid, 0, self.blksize, 0].into_iter().for_each(|v| out.u32(v));
    }
}

/// Size of an encoded entry in bytes.
pub(super) const ENTRY: usize = 128;

/// Reply to a lookup or creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Node number for the kernel.
    pub node: u64,
    /// Milliseconds for which the kernel may cache that the name belongs to this node.
    pub name_valid: u32,
    /// Milliseconds for which it may cache the attributes.
    pub attr_valid: u32,
    /// The attributes.
    pub attr: Attr,
}

impl Entry {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        put_node(self.node, [self.name_valid, self.attr_valid], out);
        self.attr.put(out);
    }

    /// Encodes that the name does not exist, which may be cached for `valid` milliseconds.
    pub(super) fn put_none(valid: u32, out: &mut Vec<u8>) {
        let end = out.len() + ENTRY;
        put_node(0, [valid, 0], out);
        out.resize(end, 0);
    }
}

fn put_node(node: u64, valid: [u32; 2], out: &mut Vec<u8>) {
    [node, 0].into_iter().for_each(|v| out.u64(v));
    valid.iter().for_each(|ms| out.u64(u64::from(ms / 1000)));
    valid.iter().for_each(|ms| out.u32(ms % 1000 * 1_000_000));
}

/// Changes of attributes; `None` leaves one unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Handle of the open file, if the change is made through one.
    pub handle: Option<u64>,
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Last access; `Some(None)`: now.
    pub atime: Option<Option<Time>>,
    /// Last change of the contents; `Some(None)`: now.
    pub mtime: Option<Option<Time>>,
    /// Last change of contents or attributes.
    pub ctime: Option<Time>,
    /// Clear the set-user-id and set-group-id bits.
    pub drop_privileges: bool,
}

impl SetAttr {
    pub(super) fn decode(r: &mut Fields<'_>) -> Option<SetAttr> {
        let valid = r.u32()?;
        r.skip(4)?;
        let (handle, size, _owner) = (r.u64()?, r.u64()?, r.u64()?);
        let seconds = [r.i64()?, r.i64()?, r.i64()?];
        let nanos = [r.u32()?, r.u32()?, r.u32()?];
        let mode = r.u32()?;
        r.skip(4)?;
        let (uid, gid) = (r.u32()?, r.u32()?);
        let has = |bit: u32| valid & 1 << bit != 0;
        let time = |i: usize| Time { seconds: seconds[i], nanos: nanos[i] };
        Some(SetAttr {
            handle: has(6).then_some(handle),
            mode: has(0).then_some(mode & 0o7777),
            uid: has(1).then_some(uid),
            gid: has(2).then_some(gid),
            size: has(3).then_some(size),
            atime: has(4).then(|| (!has(7)).then(|| time(0))),
            mtime: has(5).then(|| (!has(8)).then(|| time(1))),
            ctime: has(10).then(|| time(2)),
            drop_privileges: has(11),
        })
    }
}

/// Values of `statfs`. Amounts are in blocks of `block` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatFs {
    /// All blocks.
    pub blocks: u64,
    /// Free blocks.
    pub free: u64,
    /// Existing files.
    pub files: u64,
    /// Further files that could be created.
    pub free_files: u64,
    /// Size of a block in bytes.
    pub block: u32,
    /// Longest name in bytes.
    pub name: u32,
}

impl StatFs {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        [self.blocks, self.free, self.free, self.files, self.free_files].into_iter().for_each(|v| out.u64(v));
        [self.block, self.name, self.block, 0, 0, 0, 0, 0, 0, 0].into_iter().for_each(|v| out.u32(v));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        for nanos in [0, -1, 1, i64::MAX, i64::MIN, -1_000_000_000] {
            assert_eq!(Time::from_nanos(nanos).as_nanos(), nanos);
        }
        assert_eq!(Time::from_nanos(-1), Time { seconds: -1, nanos: 999_999_999 });
        assert_eq!(Time { seconds: i64::MAX, nanos: 0 }.as_nanos(), i64::MAX);
    }

    #[test]
    fn only_what_is_valid_changes() {
        let mut bytes = Vec::new();
        bytes.u32(1 << 3 | 1 << 5 | 1 << 8);
        bytes.resize(88, 0xff);
        let set = SetAttr::decode(&mut Fields(&bytes)).expect("whole");
        assert_eq!(set, SetAttr { size: Some(u64::MAX), mtime: Some(None), ..SetAttr::default() });
        assert_eq!(SetAttr::decode(&mut Fields(&bytes[..80])), None);
    }
}
