//! Symbolic links, FIFOs and sockets: volumes with another kind of file in their attributes. The path of a symbolic
//! link is its contents, so snapshots, forks, names, owners and crashes treat all of them as they treat volumes.

use crate::catalog::CreateOptions;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Attributes, FileKind, NO_VOLUME, Record, VolumeRecord};
use crate::planted::correct;
use crate::types::{PAGE_SIZE, VolumeId};
use crate::volume::Volume;

use super::Pool;

/// Longest path in a symbolic link.
const MAX_TARGET_BYTES: usize = PAGE_SIZE - 1;

/// Refuses to read or write what is no disk.
pub(super) fn refuse_special(record: &VolumeRecord, name: &str) -> Result<()> {
    let what = match record.kind() {
        FileKind::File | FileKind::Folder => return Ok(()),
        FileKind::Link => "a symbolic link",
        FileKind::Fifo => "a FIFO",
        FileKind::Socket => "a socket",
    };
    let why = format!("{name:?} is {what}, not a disk; it can be used on a mount, and cloned, forked and deleted");
    Err(Error::new(ErrorKind::Invalid, why))
}

impl<D: Device> Pool<D> {
    /// Creates a symbolic link to `target`, a path that is not looked up; durable with the next flush, like the other
    /// verbs of files. A crash leaves all of it or nothing.
    ///
    /// # Errors
    /// `Exists` if the name is taken, `Invalid` for a bad name or a target that is empty or longer than 4,095 bytes;
    /// and those of [changing](crate#errors).
    pub async fn create_link(&self, name: &str, target: &[u8], attributes: Attributes, now: u64) -> Result<VolumeId> {
        if target.is_empty() || target.len() > MAX_TARGET_BYTES {
            let why = format!("bad target of {} bytes: a symbolic link has 1 to {MAX_TARGET_BYTES}", target.len());
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        self.store.meta.borrow().directory.check_new(NO_VOLUME, name)?;
        let options = CreateOptions { chunk: PAGE_SIZE as u64, ..CreateOptions::new(target.len() as u64, now) };
        let volume = self.create_unnamed(&options)?;
        let mut buf = self.buffer(target.len());
        buf.copy_from_slice(target);
        correct!(volume.write(0, buf, false).await.0?, Bug::LinkNamedBeforeWritten => ());
        self.name_file(&volume, name, attributes.with_kind(FileKind::Link))?;
        Ok(volume.id())
    }

    /// Creates a FIFO or a socket, as [`create_link`](Self::create_link).
    ///
    /// # Errors
    /// `Exists` if the name is taken, `Invalid` for a bad name or kind; and those of [changing](crate#errors).
    pub fn create_special(&self, name: &str, kind: FileKind, attributes: Attributes, now: u64) -> Result<VolumeId> {
        if !matches!(kind, FileKind::Fifo | FileKind::Socket) {
            return Err(Error::new(ErrorKind::Invalid, "only FIFOs and sockets are created without contents"));
        }
        self.store.note(|meta| {
            meta.directory.check_new(NO_VOLUME, name)?;
            let id = VolumeId(meta.next_id);
            let create = Record::Create { id, name: name.to_string(), size: 0, chunk: PAGE_SIZE as u64, now };
            let attributes = Record::SetAttributes { id, attributes: Some(attributes.with_kind(kind)) };
            Ok((Record::Transaction { parts: vec![create, attributes] }, id))
        })
    }

    /// Names an unnamed volume and sets its attributes, as [`name_volume`](Self::name_volume) without a flush: whatever
    /// a crash leaves has all earlier writes to it.
    ///
    /// # Errors
    /// Those of [`name_volume`](Self::name_volume).
    pub fn name_file(&self, volume: &Volume<D>, name: &str, attributes: Attributes) -> Result<()> {
        let id = volume.id();
        // Before the name: a crash in between leaves an orphan.
        self.store.note(|meta| {
            meta.directory.check_new(NO_VOLUME, name)?;
            Ok((Record::SetAttributes { id, attributes: Some(attributes) }, ()))
        })?;
        self.store.live.borrow_mut().set_change_recorded(id);
        self.store.note(|meta| Ok((super::unnamed::naming(meta, id, name)?, ())))
    }

    /// Reads the target of a symbolic link.
    ///
    /// # Errors
    /// `Invalid` if it is none; and those of reading.
    pub async fn read_link(&self, id: VolumeId) -> Result<Vec<u8>> {
        let volume = self.volume_by_id(id)?;
        let len = usize::try_from(volume.size()).unwrap_or(usize::MAX);
        let is_link = volume.info().attributes.is_some_and(|attributes| attributes.kind() == FileKind::Link);
        if !is_link || len > MAX_TARGET_BYTES {
            return Err(Error::new(ErrorKind::Invalid, "this is no symbolic link"));
        }
        let (read, buf) = volume.read(0, self.buffer(len)).await;
        read?;
        Ok(buf.to_vec())
    }
}
