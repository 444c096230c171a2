//! Protecting a device, opening and closing it, and leaving it an ordinary disk again.

use std::rc::Rc;

use smallvec::smallvec;

use crate::device::{Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Identity, MAX_ORIGIN_TEXT, NO_VOLUME, OriginFull, Protects, Record, VolumeRecord, VolumeState};
use crate::pool::{Inner, Meta, Pool, VolumeInfo, check_size, gone};
use crate::sync::Hold;
use crate::types::{BLOCK_SIZE, MAX_COPY_AHEAD, PAGE_SIZE, VolumeId, is_chunk};

use super::{Origin, refuse_rolling};

/// Places that a fingerprint looks at, and how many bytes at each.
const SAMPLES: u64 = 64;
const SAMPLE: u64 = 4096;

/// How a device is protected.
#[derive(Clone, Debug)]
pub struct ProtectOptions {
    /// Where the device is found: kept for whoever opens it next.
    pub path: String,
    /// Bytes of a chunk, the unit in which old contents are kept: a power of two, 4 KiB to 1 MiB.
    pub chunk: u64,
    /// Most bytes that are kept ahead of a sequential writer (up to 1 GiB; 0: none).
    pub copy_ahead: u64,
    /// What happens to a write whose old contents find no space.
    pub when_full: OriginFull,
    /// When a file was last changed, in nanoseconds since 1970; 0 for a block device.
    pub modified: u64,
    /// Seconds since 1970.
    pub now: u64,
}

/// An origin, as the pool knows it.
#[derive(Clone, Debug)]
pub struct OriginInfo {
    /// Its name.
    pub name: String,
    /// Where its device was last.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Bytes of a chunk.
    pub chunk: u64,
    /// Most bytes kept ahead of a sequential writer.
    pub copy_ahead: u64,
    /// What happens to a write whose old contents find no space.
    pub when_full: OriginFull,
    /// Whether it was stopped cleanly.
    pub clean: bool,
    /// Whether its device is open.
    pub open: bool,
    /// The snapshot that a rollback under way brings back, as `volume@snapshot`: until that has ended the
    /// device by itself is not what the origin shows.
    pub rolling: Option<String>,
}

fn check_options(options: &ProtectOptions, name: &str) -> Result<()> {
    let invalid = |why: String| Err(Error::new(ErrorKind::Invalid, why));
    if !is_chunk(options.chunk) || options.chunk > BLOCK_SIZE {
        return invalid(format!("bad chunk of {} bytes: a power of two from 4 KiB to 1 MiB", options.chunk));
    }
    if options.copy_ahead > MAX_COPY_AHEAD {
        return invalid(format!("bad copy_ahead of {} bytes: at most 1 GiB", options.copy_ahead));
    }
    check_origin_text(name, &options.path)
}

/// Refuses what does not fit into the slot of an origin.
pub fn check_origin_text(name: &str, path: &str) -> Result<()> {
    if name.len() + path.len() <= MAX_ORIGIN_TEXT {
        return Ok(());
    }
    let why =
        format!("the origin's name and the path of its device ({path:?}) are longer than {MAX_ORIGIN_TEXT} bytes");
    Err(Error::new(ErrorKind::Invalid, format!("{why} together; use shorter ones")))
}

fn check_device<D: Device>(device: &D) -> Result<()> {
    let (len, block) = (device.len(), device.block_size() as u64);
    if len == 0 || !len.is_multiple_of(block) {
        let why = "its length is not a multiple of the disk's block size; lengthen it first (truncate -s %4K)";
        return Err(Error::new(ErrorKind::Invalid, format!("an origin of {len} bytes cannot be protected: {why}")));
    }
    Ok(())
}

/// A hash of the device's length and a sample of its contents: two devices that differ may have the
/// same one, but hardly by mistake.
async fn fingerprint<D: Device>(device: &D) -> Result<u64> {
    let (len, block) = (device.len(), device.block_size() as u64);
    let step = (len / SAMPLES).max(SAMPLE.max(block)) / block * block;
    let mut hash = xxhash_rust::xxh3::Xxh3::with_seed(len);
    let mut at = 0;
    while at < len {
        let n = SAMPLE.max(block).min(len - at) as usize;
        let (result, buf) = device.read(device.buffer(n), smallvec![Segment { offset: at, at: 0, len: n }]).await;
        result.map_err(|e| Error::io(format!("reading the origin at {at}"), e))?;
        hash.update(&buf);
        at += step;
    }
    Ok(hash.digest())
}

impl<D: Device> Pool<D> {
    /// Protects `device` under `name`, from now on a volume like any other whose data stays where it
    /// is. The device is open afterwards.
    pub async fn protect(&self, name: &str, device: D, options: &ProtectOptions) -> Result<VolumeInfo> {
        check_options(options, name)?;
        check_device(&device)?;
        let inner = &self.0;
        inner.check_writable()?;
        let size = device.len();
        check_size(size)?;
        let identity = Identity { modified: options.modified, fingerprint: fingerprint(&device).await? };
        let ProtectOptions { path, chunk, copy_ahead, when_full, now, .. } = options.clone();
        let id = inner
            .verb(|meta| {
                meta.directory.check_new(NO_VOLUME, name)?;
                let id = VolumeId(meta.next_id);
                inner
                    .publish(meta, &Record::Protect { id, name: name.to_string(), path, size, chunk, now, identity })?;
                // At hand as soon as the name is there: nobody else can bring another device for it.
                inner.origins.borrow_mut().insert(id, Rc::new(Origin::new(id, device, size, chunk)));
                Ok((Record::SetOrigin { id, copy_ahead, when_full }, id))
            })
            .await?;
        inner.info(id)
    }

    /// Opens the device of an origin; `path` is where it was found, `modified` when a file was changed
    /// last (0 for a block device). Refused if it is not the device it was: another length, or after a
    /// clean stop other contents (as far as a sample tells) or another time.
    pub async fn attach_origin(&self, name: &str, device: D, path: &str, modified: u64) -> Result<()> {
        let inner = &self.0;
        let (id, record) = {
            let meta = inner.meta.borrow();
            let record = &meta.directory.find(name)?.record;
            (record.id, record.clone())
        };
        let Some(protects) = record.protects.filter(|_| record.state == VolumeState::Origin) else {
            return Err(Error::new(ErrorKind::Invalid, format!("{name:?} is a volume of the pool, not an origin")));
        };
        let other = |what: String| {
            let why = format!("{path:?} is not the device that {name:?} protects as it was left: {what}");
            let help = "its snapshots would show what they never held. Give the right device, or unprotect it";
            Err(Error::new(ErrorKind::Busy, format!("{why}; {help}")))
        };
        let is_open = || Error::new(ErrorKind::Busy, format!("the device of {name:?} is open already"));
        if inner.origins.borrow().contains_key(&id) {
            return Err(is_open());
        }
        check_origin_text(&record.name, path)?;
        if device.len() != record.size {
            return other(format!("it has {} bytes instead of {}", device.len(), record.size));
        }
        check_device(&device)?;
        if protects.clean && protects.identity.modified != modified {
            return other("it has been written since it was stopped".into());
        }
        if protects.clean && fingerprint(&device).await? != protects.identity.fingerprint {
            return other("its contents have changed since it was stopped".into());
        }
        let origin = Origin::new(id, device, record.size, record.chunk);
        if !inner.options.read_only {
            // After a kill what was written may be in a cache only: what is shown from now on stays.
            origin.flush().await?;
        }
        let origin = Rc::new(origin);
        {
            // Others may have brought a device, or changed what is known of it, while this one was read.
            let meta = inner.meta.borrow();
            let now = meta.directory.get(id).map(|v| &v.record).filter(|now| now.state == VolumeState::Origin);
            let is_same = |now: &VolumeRecord| {
                let known = |p: Protects| (p.clean, p.identity);
                (now.size, now.chunk, now.protects.map(known)) == (record.size, record.chunk, Some(known(protects)))
            };
            if !now.is_some_and(is_same) {
                return Err(Error::new(ErrorKind::Busy, format!("{name:?} has been changed meanwhile; try again")));
            }
            if inner.origins.borrow().contains_key(&id) {
                return Err(is_open());
            }
            inner.origins.borrow_mut().insert(id, origin.clone());
        }
        origin.roll_soon(inner);
        if record.origin != path && !inner.options.read_only {
            let path = path.to_string();
            inner
                .verb(|meta| {
                    let (protects, _) = meta.protects(id).ok_or_else(gone)?;
                    let (clean, identity) = (protects.clean, protects.identity);
                    Ok((Record::Identify { id, clean, identity, path }, ()))
                })
                .await?;
        }
        Ok(())
    }

    /// Closes the device of an origin: what was written is durable, and the pool knows how it was left.
    /// `modified` tells, once everything is written, when the file was changed last. Refused while it,
    /// or what shows through to it, is in use.
    pub async fn detach_origin(&self, name: &str, modified: impl FnOnce() -> u64) -> Result<()> {
        let inner = &self.0;
        let id = inner.meta.borrow().directory.find(name)?.record.id;
        let origin = inner.attached(id)?;
        origin.stop_rolling().await;
        // A commit that goes on by itself is no user, and takes hold of no origin while this is held.
        let settling = origin.settling.lock(0..1, Hold::Alone).await;
        // The map's and ours.
        let in_use = |origin: &Rc<Origin<D>>| {
            let why = || Error::new(ErrorKind::Busy, format!("{name:?} or a snapshot of it is in use; close it first"));
            if Rc::strong_count(origin) > 2 { Err(why()) } else { Ok(()) }
        };
        let mut identity = None;
        let flushed = async {
            in_use(&origin)?;
            if origin.marked.get() && inner.check_writable().is_ok() {
                origin.flush().await?;
                let modified = modified();
                identity = Some(Identity { modified, fingerprint: fingerprint(&*origin.device).await? });
            }
            // It may have been opened, and written, while its device was read.
            in_use(&origin)
        };
        if let Err(error) = flushed.await {
            origin.roll_soon(inner);
            return Err(error);
        }
        // From here on nobody can open it; nothing has been waited for since it was found unused.
        inner.origins.borrow_mut().remove(&id);
        drop(settling);
        if let Some(identity) = identity
            && let Err(error) = inner.identify(id, true, identity).await
        {
            inner.origins.borrow_mut().entry(id).or_insert(origin);
            return Err(error);
        }
        Ok(())
    }

    /// Leaves an origin an ordinary disk: its data stays as it is, its name and all its snapshots are
    /// gone. With `snapshots` false it is refused while it has any. Its device need not be open.
    pub async fn unprotect(&self, name: &str, snapshots: bool) -> Result<()> {
        let inner = &self.0;
        self.check_unprotect(name, snapshots)?;
        let id = inner.meta.borrow().directory.find(name)?.record.id;
        let open = inner.origins.borrow().get(&id).cloned();
        let in_use = || match &open {
            Some(origin) if Rc::strong_count(origin) > 2 => {
                Err(Error::new(ErrorKind::Busy, format!("{name:?} is in use; close it first")))
            }
            _ => Ok(()),
        };
        let mut settling = None;
        if let Some(origin) = &open {
            origin.stop_rolling().await;
            settling = Some(origin.settling.lock(0..1, Hold::Alone).await);
            in_use()?;
            origin.flush().await?;
        }
        inner
            .verb(|meta| {
                // It may have been opened while it was flushed, or its device brought.
                in_use()?;
                if open.is_none() && inner.origins.borrow().contains_key(&id) {
                    return Err(Error::new(ErrorKind::Busy, format!("{name:?} has been opened meanwhile; try again")));
                }
                let mut ids = unprotectable(meta, id, snapshots)?;
                ids.push(id);
                inner.origins.borrow_mut().remove(&id);
                drop(settling.take());
                Ok((Record::Delete { ids }, ()))
            })
            .await?;
        inner.reap_soon();
        Ok(())
    }

    /// Refuses what [`unprotect`](Self::unprotect) would, but for what is in use.
    pub fn check_unprotect(&self, name: &str, snapshots: bool) -> Result<()> {
        let inner = &self.0;
        let meta = inner.meta.borrow();
        let record = &meta.directory.find(name)?.record;
        if record.state != VolumeState::Origin {
            return Err(Error::new(ErrorKind::Invalid, format!("{name:?} is a volume of the pool: delete it")));
        }
        // A rollback never ends where the device is gone.
        if inner.origins.borrow().contains_key(&record.id) {
            refuse_rolling(&meta, record.id)?;
        }
        unprotectable(&meta, record.id, snapshots).map(drop)
    }

    /// How old contents of an origin are kept from now on.
    pub async fn set_origin(&self, name: &str, copy_ahead: u64, when_full: OriginFull) -> Result<()> {
        if copy_ahead > MAX_COPY_AHEAD {
            return Err(Error::new(ErrorKind::Invalid, "bad copy_ahead: at most 1 GiB"));
        }
        self.0
            .verb(|meta| {
                let record = &meta.directory.find(name)?.record;
                match record.state {
                    VolumeState::Origin => Ok((Record::SetOrigin { id: record.id, copy_ahead, when_full }, ())),
                    _ => Err(Error::new(ErrorKind::Invalid, format!("{name:?} is not an origin"))),
                }
            })
            .await
    }

    /// All origins, by name.
    pub fn origins(&self) -> Vec<OriginInfo> {
        let (meta, open) = (self.0.meta.borrow(), self.0.origins.borrow());
        let mut all: Vec<OriginInfo> = meta
            .directory
            .iter()
            .filter(|v| v.record.state == VolumeState::Origin)
            .filter_map(|v| v.record.protects.map(|protects| (&v.record, protects)))
            .map(|(record, protects)| OriginInfo {
                name: record.name.clone(),
                path: record.origin.clone(),
                size: record.size,
                chunk: record.chunk,
                copy_ahead: protects.copy_ahead,
                when_full: protects.when_full,
                clean: protects.clean,
                open: open.contains_key(&record.id),
                rolling: meta.rolled_to(record.id),
            })
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

impl<D: Device> Inner<D> {
    async fn identify(self: &Rc<Self>, id: VolumeId, clean: bool, identity: Identity) -> Result<()> {
        self.verb(|meta| {
            let path = meta.directory.get(id).ok_or_else(gone)?.record.origin.clone();
            Ok((Record::Identify { id, clean, identity, path }, ()))
        })
        .await
    }
}

impl<D: Device> Origin<D> {
    /// Before the first write: the pool knows, durably, that the origin is no longer as it was left.
    pub(super) async fn mark(&self, inner: &Rc<Inner<D>>) -> Result<()> {
        if self.marked.get() {
            return Ok(());
        }
        let _alone = self.edges.lock(u64::MAX - 1..u64::MAX, Hold::Alone).await;
        if !self.marked.get() {
            inner.identify(self.id, false, Identity::default()).await?;
            self.marked.set(true);
        }
        Ok(())
    }
}

const _: () = assert!(SAMPLE == PAGE_SIZE as u64);

/// The snapshots that go with an origin; refuses where there are some and they are not to, or somebody needs one.
fn unprotectable(meta: &Meta, origin: VolumeId, snapshots: bool) -> Result<Vec<VolumeId>> {
    let ids = meta.directory.snapshots_of(origin);
    if let Some(&first) = ids.first().filter(|_| !snapshots) {
        let first = meta.directory.get(first).map(|v| meta.directory.full_name(&v.record));
        let why =
            format!("it has snapshots, such as {:?}; delete them first or with it (-r)", first.unwrap_or_default());
        return Err(Error::new(ErrorKind::Busy, why));
    }
    for &snapshot in &ids {
        match meta.directory.resting_on(snapshot) {
            Some(by) if by.record.id != origin => meta.directory.refuse_held(snapshot)?,
            _ => {}
        }
    }
    Ok(ids)
}
