//! Attributes: `stat`, `chmod`, `chown`, `touch`, `truncate` and `df`.

use forkdisk::{Attributes, BLOCK_SIZE, Child, Device, ErrorKind, Volume, VolumeInfo};

use super::nodes::{Node, join};
use super::{Failed, Outcome, Volumes, now};
use crate::codec::{Attr, Header, Kind, Reply, SetAttr, StatFs, Time};

/// Milliseconds for which the kernel may cache names and attributes.
const VALID_MS: u32 = 1000;
/// Best size of one read or write, in bytes.
const BEST_IO_BYTES: u32 = 64 << 10;
/// Most bytes of a name with all its folders.
const MAX_NAME_BYTES: usize = 255;
/// Write permission for owner, group and others.
const WRITE_BITS: u32 = 0o222;
const READ_BITS: u32 = 0o444;
const EXECUTE_BITS: u32 = 0o111;
/// Set-user-id, set-group-id, and execute permission of the group.
const SET_USER: u32 = 0o4000;
const SET_GROUP: u32 = 0o2000;
const GROUP_EXECUTES: u32 = 0o0010;

/// Removes from a mode the bits that run a file with the rights of its owner or group. Without
/// execute permission of the group, set-group-id has another meaning and stays.
fn without_privileges(mode: u32) -> u32 {
    let kept = if mode & GROUP_EXECUTES != 0 { mode & !SET_GROUP } else { mode };
    kept & !SET_USER
}

/// Returns the attributes of a new file or folder.
pub fn fresh(mode: u32, uid: u32, gid: u32) -> Attributes {
    let time = now().as_nanos();
    Attributes { mode: mode & 0o7777, uid, gid, accessed: time, modified: time, changed: time }
}

/// Ignores that a full pool has no space for a change.
pub(super) fn unless_full(changed: forkdisk::Result<()>) -> forkdisk::Result<()> {
    changed.or_else(|error| if error.kind() == ErrorKind::NoSpace { Ok(()) } else { Err(error) })
}

impl<D: Device> Volumes<D> {
    /// Returns the attributes of a file, with defaults for those that were never set.
    pub(super) fn known_or_default(&self, known: Option<Attributes>, mode: u32, created: u64) -> Attributes {
        let time = i64::try_from(created).unwrap_or(0).saturating_mul(1_000_000_000);
        let (uid, gid) = (self.options.uid, self.options.gid);
        let known = known.unwrap_or(Attributes { mode, uid, gid, accessed: time, modified: time, changed: time });
        let set_or = |number, default| if number == Attributes::NOT_SET { default } else { number };
        Attributes { uid: set_or(known.uid, uid), gid: set_or(known.gid, gid), ..known }
    }

    /// Returns the milliseconds for which the kernel may cache names and attributes: 0 if they may change elsewhere.
    pub(super) fn valid(&self) -> u32 {
        if self.options.alone { VALID_MS } else { 0 }
    }

    pub(super) fn attr_of(&self, node: &Node) -> Outcome<Attr> {
        match node {
            Node::Volume(id) => Ok(self.volume_attr(&self.pool.volume_by_id(*id)?.info())),
            Node::Folder(path) if path.is_empty() => {
                let time = self.root_changed.get();
                Ok(Attr { mtime: time, ctime: time, ..self.folder_attr(self.known_or_default(None, 0o755, 0)) })
            }
            Node::Folder(path) => match self.pool.child(path)? {
                Child::Folder(known, created) => Ok(self.folder_attr(self.known_or_default(known, 0o755, created))),
                Child::Volume(_) => Err(Failed(libc::ESTALE)),
            },
            Node::Snapshots(path) if path.is_empty() => Ok(self.folder_attr(self.known_or_default(None, 0o755, 0))),
            Node::Snapshots(path) => self.mirrored_attr(path, 0o7777),
            Node::Kept(path, _) => self.mirrored_attr(path, !WRITE_BITS),
            Node::Phantom => Ok(self.folder_attr(self.known_or_default(None, 0o555, 0))),
            Node::Removed => Ok(Attr { nlink: 0, ..self.folder_attr(self.known_or_default(None, 0o755, 0)) }),
        }
    }

    /// Returns the attributes of a folder that stands for a volume or folder: its owners, and those of its mode's bits
    /// that `bits` has. The file of a volume can be read where its folder can be entered.
    fn mirrored_attr(&self, path: &str, bits: u32) -> Outcome<Attr> {
        let attributes = match self.pool.child(path) {
            Ok(Child::Folder(known, created)) => self.known_or_default(known, 0o755, created),
            // The folder was removed, and only root sees what it had.
            Err(_) if self.pool.has_kept(path) => self.known_or_default(None, 0o700, 0),
            Err(error) => return Err(error.into()),
            Ok(Child::Volume(info)) => {
                let file = self.known_or_default(info.attributes, 0o644, info.created);
                let mode = file.mode & !(SET_USER | SET_GROUP | EXECUTE_BITS);
                Attributes { mode: mode | (mode & READ_BITS) >> 2, ..file }
            }
        };
        Ok(self.folder_attr(Attributes { mode: attributes.mode & bits, ..attributes }))
    }

    pub(super) fn volume_attr(&self, info: &VolumeInfo) -> Attr {
        let a = self.known_or_default(info.attributes, 0o644, info.created);
        let mode = if info.is_snapshot() { a.mode & !WRITE_BITS } else { a.mode };
        let nlink = u32::from(!info.name.is_empty()) + info.hard_links.len() as u32;
        let blocks = info.referenced / 512;
        Attr { mode, nlink, size: info.size, blocks, ..attr(info.id.0 * 2 + 1, a.kind().into(), &a) }
    }

    fn folder_attr(&self, a: Attributes) -> Attr {
        Attr { nlink: 2, ..attr(0, Kind::Folder, &a) }
    }

    pub(super) fn get_attr(&self, number: u64, handle: Option<u64>, pid: u32) -> Outcome {
        let attr = match handle {
            Some(handle) => self.volume_attr(&self.file(handle)?.volume.info()),
            None => self.attr_of(&self.node(number)?)?,
        };
        if self.copiers.asks(pid, number) {
            // Not to be cached, since the answer is for this program only.
            return Ok(Reply::Attr(Attr { ino: number, blocks: attr.size.div_ceil(512), ..attr }, 0));
        }
        Ok(Reply::Attr(Attr { ino: number, ..attr }, self.valid()))
    }

    pub(super) async fn set_attr(&self, number: u64, set: &SetAttr) -> Outcome {
        match self.node(number)? {
            Node::Volume(id) => {
                let volume = match set.handle {
                    Some(handle) => self.file(handle)?.volume.clone(),
                    None => match self.pool.volume_by_id(id) {
                        // The kernel also writes back the times of removed files, and a failure
                        // here would become the result of the next `syncfs`.
                        Err(error) if error.kind() == ErrorKind::NotFound && set.size.is_none() => {
                            let gone = self.known_or_default(None, 0, 0);
                            let gone = Attr { nlink: 0, ..attr(number, Kind::File, &gone) };
                            return Ok(Reply::Attr(gone, 0));
                        }
                        found => found?,
                    },
                };
                self.set_volume(&volume, set).await?;
                Ok(Reply::Attr(Attr { ino: number, ..self.volume_attr(&volume.info()) }, self.valid()))
            }
            Node::Folder(path) => {
                let Child::Folder(known, created) = self.pool.child(&path)? else { return Err(Failed(libc::ESTALE)) };
                let new = changed(self.known_or_default(known, 0o755, created), set, Kind::Folder);
                self.pool.set_folder_attributes(&path, new, now().seconds as u64)?;
                self.get_attr(number, None, 0)
            }
            Node::Snapshots(_) | Node::Kept(..) => Err(Failed(libc::EPERM)),
            // `mkdir -m` sets the mode of the new snapshot, which has none.
            Node::Phantom | Node::Removed => self.get_attr(number, None, 0),
        }
    }

    async fn set_volume(&self, volume: &Volume<D>, set: &SetAttr) -> Outcome<()> {
        if volume.read_only() {
            return Err(Failed(libc::EROFS));
        }
        if let Some(size) = set.size {
            if size < volume.size() {
                let info = volume.info();
                [&info.name].into_iter().chain(&info.hard_links).try_for_each(|name| self.check_unused(name))?;
            }
            volume.set_size(size).await?;
            self.tell(volume.id(), 0, 0).await;
        }
        let info = volume.info();
        let old = self.known_or_default(info.attributes, 0o644, info.created);
        let new = changed(old, set, Kind::File);
        // A change of length affects stored times only, and the kernel sends those separately.
        let is_kept = !info.name.is_empty() || info.attributes.is_some();
        if is_kept && (new != old || info.attributes.is_none()) {
            self.pool.set_attributes(volume.id(), new)?;
        }
        Ok(())
    }

    /// Clears the set-user-id and set-group-id bits if they are set.
    pub(super) fn drop_privileges(&self, volume: &Volume<D>) -> Outcome<()> {
        match volume.info().attributes {
            Some(a) if without_privileges(a.mode) != a.mode => {
                self.pool.set_attributes(volume.id(), Attributes { mode: without_privileges(a.mode), ..a })?;
                // The kernel may have the old mode cached.
                let node = self.nodes.borrow().number(&Node::Volume(volume.id()));
                let forgotten = self.notifier.get().map_or(Ok(()), |notifier| notifier.forget_attributes(node));
                forgotten.map_err(|e| Failed(e.raw_os_error().unwrap_or(libc::EIO)))
            }
            _ => Ok(()),
        }
    }

    /// As [`drop_privileges`](Self::drop_privileges), for requests without a flag for it: requests
    /// of root keep the bits.
    pub(super) fn written_by(&self, header: &Header, volume: &Volume<D>) -> Outcome<()> {
        if header.uid == 0 { Ok(()) } else { self.drop_privileges(volume) }
    }

    /// Returns the attributes of an object that `header` creates in the folder `path`: a folder
    /// with set-group-id passes on its group, and to folders also the bit.
    pub(super) fn fresh_in(&self, path: &str, header: &Header, mode: u32, kind: Kind) -> Outcome<Attributes> {
        let Child::Folder(known, created) = self.pool.child(path)? else { return Err(Failed(libc::ENOTDIR)) };
        let folder = self.known_or_default(known, 0o755, created);
        Ok(match folder.mode & SET_GROUP {
            0 => fresh(mode, header.uid, header.gid),
            bit if kind == Kind::Folder => fresh(mode | bit, header.uid, folder.gid),
            _ => fresh(mode, header.uid, folder.gid),
        })
    }

    pub(super) fn stat_fs(&self) -> Reply {
        let space = self.pool.space();
        let block = 4096;
        let free = space.free / u64::from(block);
        // A file needs at most one page of the directory.
        let (blocks, files) = (space.size / u64::from(block), space.entries + free);
        Reply::StatFs(StatFs { blocks, free, files, free_files: free, block, name: 255 })
    }

    /// Implements `fallocate`: allocates (with or without changing the size), punches holes and zeroes.
    pub(super) async fn allocate(&self, header: &Header, request: (u64, u64, u64, u32)) -> Outcome {
        let (handle, offset, len, mode) = request;
        const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE as u32;
        const PUNCH: u32 = libc::FALLOC_FL_PUNCH_HOLE as u32 | KEEP_SIZE;
        const ZERO: u32 = libc::FALLOC_FL_ZERO_RANGE as u32;
        let file = self.file(handle)?;
        let volume = &file.volume;
        let end = offset.checked_add(len).ok_or(Failed(libc::EFBIG))?;
        match mode {
            PUNCH => {}
            _ if mode == ZERO || mode == ZERO | KEEP_SIZE => {}
            0 | KEEP_SIZE => self.promise_space(volume, offset, end)?,
            _ => return Err(Failed(libc::EOPNOTSUPP)),
        }
        self.written_by(header, volume)?;
        if mode & KEEP_SIZE == 0 {
            volume.grow_to(end).await?;
        }
        if mode & !KEEP_SIZE != 0 {
            let end = end.min(volume.size());
            volume.write_zeroes(offset.min(end), end - offset.min(end), false).await?;
        }
        self.tell(volume.id(), offset, len).await;
        Ok(Reply::Done)
    }

    /// Refuses an allocation that exceeds the free space. Thin volumes reserve nothing.
    fn promise_space(&self, volume: &Volume<D>, offset: u64, end: u64) -> Outcome<()> {
        let info = volume.info();
        if volume.read_only() {
            return Err(Failed(libc::EROFS));
        }
        let missing = (end - offset).saturating_sub(info.referenced);
        if missing > self.pool.space().free.saturating_sub(BLOCK_SIZE) { Err(Failed(libc::ENOSPC)) } else { Ok(()) }
    }

    /// Creates the folder's own record if it has none. That also keeps a folder when its last
    /// volume is removed, as folders must. A full pool does not keep a file from being removed: then the folder
    /// may go with it.
    pub(super) fn keep_folder(&self, path: &str) -> Outcome<()> {
        if path.is_empty() {
            return Ok(());
        }
        if let Child::Folder(None, _) = self.pool.child(path)? {
            let attributes = fresh(0o755, self.options.uid, self.options.gid);
            unless_full(self.pool.set_folder_attributes(path, attributes, now().seconds as u64))?;
        }
        Ok(())
    }

    /// Updates the times of a folder after a change of its entries, if the pool has space for that.
    pub(super) fn touch_folder(&self, path: &str) -> Outcome<()> {
        if path.is_empty() {
            self.root_changed.set(now());
            return Ok(());
        }
        if let Child::Folder(known, created) = self.pool.child(path)? {
            let (known, time) = (self.known_or_default(known, 0o755, created), now().as_nanos());
            let touched = Attributes { modified: time, changed: time, ..known };
            unless_full(self.pool.set_folder_attributes(path, touched, now().seconds as u64))?;
        }
        Ok(())
    }

    /// Returns the path of a name in a folder; fails outside folders of volumes.
    pub(super) fn path_in(&self, number: u64, name: &str) -> Outcome<String> {
        match self.node(number)? {
            Node::Folder(path) => {
                let path = join(&path, name);
                if path.len() > MAX_NAME_BYTES { Err(Failed(libc::ENAMETOOLONG)) } else { Ok(path) }
            }
            Node::Snapshots(_) | Node::Kept(..) => Err(Failed(libc::EROFS)),
            Node::Removed => Err(Failed(libc::ENOENT)),
            Node::Volume(_) | Node::Phantom => Err(Failed(libc::ENOTDIR)),
        }
    }
}

fn attr(ino: u64, kind: Kind, a: &Attributes) -> Attr {
    let [atime, mtime, ctime] = [a.accessed, a.modified, a.changed].map(Time::from_nanos);
    let (mode, uid, gid) = (a.mode, a.uid, a.gid);
    Attr { ino, kind, mode, nlink: 1, uid, gid, size: 0, blocks: 0, blksize: BEST_IO_BYTES, atime, mtime, ctime }
}

fn changed(old: Attributes, set: &SetAttr, kind: Kind) -> Attributes {
    let now = now().as_nanos();
    let time = |wanted: Option<Option<Time>>, old: i64| match wanted {
        None => old,
        Some(None) => now,
        Some(Some(time)) => time.as_nanos(),
    };
    let mut mode = set.mode.unwrap_or(old.mode);
    let chowned = set.uid.is_some() || set.gid.is_some();
    if kind == Kind::File && ((chowned && set.mode.is_none()) || set.drop_privileges) {
        mode = without_privileges(mode);
    }
    let modified = time(set.mtime, if set.size.is_some() { now } else { old.modified });
    let new = Attributes {
        mode,
        uid: set.uid.unwrap_or(old.uid),
        gid: set.gid.unwrap_or(old.gid),
        accessed: time(set.atime, old.accessed),
        modified,
        changed: old.changed,
    };
    match set.ctime {
        Some(time) => Attributes { changed: time.as_nanos(), ..new },
        None if new != old => Attributes { changed: now, ..new },
        None => new,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old() -> Attributes {
        Attributes { mode: 0o6755, uid: 1, gid: 2, accessed: 3, modified: 4, changed: 5 }
    }

    #[test]
    fn nothing_changes_that_nobody_asked_for() {
        assert_eq!(changed(old(), &SetAttr::default(), Kind::File), old());
    }

    #[test]
    fn a_new_owner_takes_the_special_bits_away() {
        let new = changed(old(), &SetAttr { uid: Some(9), ..SetAttr::default() }, Kind::File);
        assert_eq!((new.mode, new.uid, new.gid), (0o755, 9, 2));
        assert!(new.changed > 5);
        let kept = changed(old(), &SetAttr { uid: Some(9), mode: Some(0o4711), ..SetAttr::default() }, Kind::File);
        assert_eq!(kept.mode, 0o4711);
        let folder = changed(old(), &SetAttr { uid: Some(9), ..SetAttr::default() }, Kind::Folder);
        assert_eq!(folder.mode, 0o6755, "a folder keeps them");
        assert_eq!(without_privileges(0o6644), 0o2644, "without execution by the group it is no privilege");
    }

    #[test]
    fn times_are_set_to_the_nanosecond() {
        let time = Time { seconds: 7, nanos: 8 };
        let set = SetAttr { mtime: Some(Some(time)), ctime: Some(time), ..SetAttr::default() };
        let new = changed(old(), &set, Kind::File);
        assert_eq!((new.accessed, new.modified, new.changed), (3, 7_000_000_008, 7_000_000_008));
        assert!(changed(old(), &SetAttr { size: Some(0), ..SetAttr::default() }, Kind::File).modified > 4);
    }
}
