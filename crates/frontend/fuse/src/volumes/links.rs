//! Symbolic links, FIFOs and sockets, hard links, and files that get their name when they are complete (`O_TMPFILE`).

use forkdisk::{Attributes, CreateOptions, Device, FileKind, MAX_HARD_LINKS};

use super::attributes::unless_full;
use super::nodes::{Node, parent};
use super::{Failed, Outcome, Volumes, now};
use crate::codec::{Header, Kind, Reply};

impl<D: Device> Volumes<D> {
    pub(super) async fn make_link(&self, header: &Header, name: &str, target: &[u8]) -> Outcome {
        let path = self.path_in(header.node, name)?;
        let attributes = self.fresh_in(parent(&path), header, 0o777, Kind::Link)?;
        let id = self.pool.create_link(&path, target, attributes, now().seconds as u64).await?;
        self.touch_folder(parent(&path))?;
        self.entry(Node::Volume(id), self.valid()).map(Reply::Entry)
    }

    pub(super) async fn read_link(&self, number: u64) -> Outcome {
        let Node::Volume(id) = self.node(number)? else { return Err(Failed(libc::EINVAL)) };
        Ok(Reply::Bytes(self.pool.read_link(id).await?))
    }

    /// Creates a FIFO or a socket. Devices are refused: the mount has `nodev`.
    pub(super) fn make_special(&self, header: &Header, name: &str, mode: u32) -> Outcome {
        let kind = match mode & libc::S_IFMT {
            libc::S_IFIFO => FileKind::Fifo,
            libc::S_IFSOCK => FileKind::Socket,
            _ => return Err(Failed(libc::EPERM)),
        };
        let path = self.path_in(header.node, name)?;
        let attributes = self.fresh_in(parent(&path), header, mode, kind.into())?;
        let id = self.pool.create_special(&path, kind, attributes, now().seconds as u64)?;
        self.touch_folder(parent(&path))?;
        self.entry(Node::Volume(id), self.valid()).map(Reply::Entry)
    }

    /// Opens a new file without a name. It is deleted with its last close, unless it gets a name before.
    pub(super) fn create_unnamed(&self, header: &Header, mode: u32) -> Outcome {
        let Node::Folder(path) = self.node(header.node)? else { return Err(Failed(libc::EOPNOTSUPP)) };
        let attributes = self.fresh_in(&path, header, mode, Kind::File)?;
        let options = CreateOptions::new(0, now().seconds as u64).with_gather(self.options.gather);
        let volume = self.pool.create_unnamed(&options)?;
        self.pool.set_attributes(volume.id(), attributes)?;
        let entry = self.entry(Node::Volume(volume.id()), 0)?;
        let (handle, flags) = self.opened(volume, true, header);
        Ok(Reply::Created(entry, handle, flags))
    }

    /// Gives a file a further name, or its first.
    pub(super) fn give_name(&self, number: u64, folder: u64, name: &str) -> Outcome {
        let Node::Volume(id) = self.node(number)? else { return Err(Failed(libc::EPERM)) };
        let volume = self.pool.volume_by_id(id)?;
        let info = volume.info();
        if info.is_snapshot() || info.is_origin() {
            return Err(Failed(libc::EPERM));
        }
        let path = self.path_in(folder, name)?;
        let attributes = self.known_or_default(info.attributes, 0o644, info.created);
        if info.name.is_empty() {
            self.pool.name_file(&volume, &path, attributes)?;
        } else if info.hard_links.len() + 1 >= MAX_HARD_LINKS {
            return Err(Failed(libc::EMLINK));
        } else {
            self.pool.link_file(id, &path)?;
            unless_full(self.pool.set_attributes(id, Attributes { changed: now().as_nanos(), ..attributes }))?;
        }
        self.touch_folder(parent(&path))?;
        self.entry(Node::Volume(id), self.valid()).map(Reply::Entry)
    }
}
