//! The directory's record of a volume or snapshot: one slot of 512 bytes.

use std::sync::Arc;

use crate::types::{Epoch, MAX_EPOCH, MAX_VOLUME_SIZE, VolumeId, is_chunk};

use super::cursor::{Append, Reader};
use super::stamp::ZONE_BYTES;
use super::{BreakPolicy, GatherPolicy, MapEntry, Stamp, Throttle, TreeRoot};

/// Bytes of one slot.
pub const DIRECTORY_SLOT_BYTES: usize = 512;
/// Longest name, in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// The number that means "no volume".
pub const NO_VOLUME: VolumeId = VolumeId(0);

/// The kind of a directory slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeState {
    /// Writable.
    Volume,
    /// Frozen; `parent` is the volume it was taken of.
    Snapshot,
    /// Deleted; its map is being released, everything before `cursor` already is.
    Dead,
    /// A folder with a record, which exists even if it is empty. It has no map.
    Folder,
    /// Without a name: removed while it was open, or not finished yet. It is deleted at its last close, or at
    /// the next open of the pool.
    Orphan,
    /// A further name of a file; `parent` is the file. It has no map.
    HardLink,
    /// A device that is protected in place; `protects` holds the settings.
    Origin,
}

/// Kind of a file on a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file: a disk.
    #[default]
    File,
    /// A folder.
    Folder,
    /// A symbolic link; its contents are the path that it refers to.
    Link,
    /// A FIFO. It has no contents.
    Fifo,
    /// A socket. It has no contents.
    Socket,
}

/// The bits of a mode that tell the kind of a file.
const KIND_BITS: u32 = 0o170000;

impl FileKind {
    /// The bits of a mode that stand for it in attributes; 0 for files and folders.
    pub fn bits(self) -> u32 {
        match self {
            FileKind::File | FileKind::Folder => 0,
            FileKind::Link => 0o120000,
            FileKind::Fifo => 0o010000,
            FileKind::Socket => 0o140000,
        }
    }

    fn from_bits(mode: u32) -> Option<FileKind> {
        let all = [FileKind::File, FileKind::Link, FileKind::Fifo, FileKind::Socket];
        all.into_iter().find(|kind| kind.bits() == mode & KIND_BITS)
    }
}

/// The attributes of a file beside its contents, as a mount shows them. The engine stores them, and uses only the kind
/// of file: what is no regular file is no disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits, at most 0o7777, and those of the kind of file.
    pub mode: u32,
    /// User ID of the owner; [`NOT_SET`](Self::NOT_SET) if none was set.
    pub uid: u32,
    /// Group ID; [`NOT_SET`](Self::NOT_SET) if none was set.
    pub gid: u32,
    /// Last access, in nanoseconds since 1970.
    pub accessed: i64,
    /// Last change of the contents, in nanoseconds since 1970.
    pub modified: i64,
    /// Last change of anything, in nanoseconds since 1970.
    pub changed: i64,
}

/// Bytes of encoded attributes.
pub const ATTRIBUTES_BYTES: usize = 36;
/// Set in the encoded mode if there are attributes at all.
const PRESENT: u32 = 1 << 31;

impl Attributes {
    /// The number that no owner and no group has.
    pub const NOT_SET: u32 = u32::MAX;

    /// Kind of the file; a folder has that of a file, since its record tells what it is.
    pub fn kind(&self) -> FileKind {
        FileKind::from_bits(self.mode).unwrap_or_default()
    }

    /// The same attributes for another kind of file.
    #[must_use]
    pub fn with_kind(self, kind: FileKind) -> Attributes {
        Attributes { mode: self.mode & 0o7777 | kind.bits(), ..self }
    }

    /// Returns the attributes of a volume created at `created`, in seconds since 1970, before an owner is
    /// set.
    pub fn of_no_owner(created: u64) -> Attributes {
        let time = i64::try_from(created).unwrap_or(0).saturating_mul(1_000_000_000);
        let (uid, gid) = (Attributes::NOT_SET, Attributes::NOT_SET);
        Attributes { mode: 0o644, uid, gid, accessed: time, modified: time, changed: time }
    }

    /// Encodes the attributes; all 0 if there are none.
    pub fn encode(of: Option<&Attributes>) -> [u8; ATTRIBUTES_BYTES] {
        let mut out = Vec::with_capacity(ATTRIBUTES_BYTES);
        if let Some(a) = of {
            [a.mode | PRESENT, a.uid, a.gid].into_iter().for_each(|v| Append::u32(&mut out, v));
            [a.accessed, a.modified, a.changed].into_iter().for_each(|v| Append::u64(&mut out, v as u64));
        }
        out.resize(ATTRIBUTES_BYTES, 0);
        out.try_into().expect("of this length")
    }

    /// Decodes what [`encode`](Self::encode) wrote; `None` if it is invalid.
    pub fn decode(r: &mut Reader<'_>) -> Option<Option<Attributes>> {
        let (mode, uid, gid) = (r.u32()?, r.u32()?, r.u32()?);
        let [accessed, modified, changed] = [r.u64()? as i64, r.u64()? as i64, r.u64()? as i64];
        match mode {
            0 => Some(None),
            _ if mode & !(PRESENT | KIND_BITS | 0o7777) != 0 || mode & PRESENT == 0 => None,
            _ => {
                FileKind::from_bits(mode)?;
                Some(Some(Attributes { mode: mode & !PRESENT, uid, gid, accessed, modified, changed }))
            }
        }
    }
}

/// Policy for a write of an origin whose old chunk cannot be copied out because the pool is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OriginFull {
    /// The write waits for space, at most this many seconds, then fails with ENOSPC.
    Wait(u32),
    /// The write fails with ENOSPC at once.
    Error,
    /// The oldest droppable snapshot is deleted; the write fails with ENOSPC when there is none.
    DropOldest,
}

/// State of an origin when it was stopped cleanly, which distinguishes it from others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Modification time of a file, in nanoseconds since 1970; 0 for a block device.
    pub modified: u64,
    /// Hash of a sample of its contents.
    pub fingerprint: u64,
}

/// The record of an origin beside its volume record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OriginRecord {
    /// The ordered map of its exceptions.
    pub exceptions: TreeRoot,
    /// Most bytes that are copied ahead of a sequential writer; a multiple of 1 KiB.
    pub copy_ahead: u64,
    /// What happens when the pool is full.
    pub when_full: OriginFull,
    /// Whether it was stopped cleanly and must match its recorded identity.
    pub clean: bool,
    /// Its state when it was stopped.
    pub identity: Identity,
    /// The snapshot that a running rollback restores, else [`NO_VOLUME`].
    pub rollback_to: VolumeId,
}

/// Options of a snapshot, given when it is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotFlags {
    /// It has separate copies instead of sharing the chain's (snapshots of origins).
    pub independent: bool,
    /// It may be deleted when the pool is full.
    pub droppable: bool,
    /// It can be written; no other snapshot sees the written data (snapshots of origins).
    pub writable: bool,
}

impl SnapshotFlags {
    /// Encodes the flags.
    pub fn to_bits(self) -> u8 {
        u8::from(self.independent) | u8::from(self.droppable) << 1 | u8::from(self.writable) << 3
    }

    /// Decodes the flags; `None` if there are unknown ones.
    pub fn from_bits(bits: u8) -> Option<SnapshotFlags> {
        let [independent, droppable, writable] = [1, 2, 8].map(|bit| bits & bit != 0);
        (bits & !11 == 0).then_some(SnapshotFlags { independent, droppable, writable })
    }
}

/// Everything the pool stores of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    /// Returns the identifier of the entry.
    pub id: VolumeId,
    /// Its kind.
    pub state: VolumeState,
    /// The volume a snapshot belongs to, else [`NO_VOLUME`].
    pub parent: VolumeId,
    /// Its name; for a snapshot the part behind `@`. Shared with the directory's index of names.
    pub name: Arc<str>,
    /// Name of what it was cloned from, at that time; for an origin the path of its device; empty if there is
    /// none, or if it is deleted.
    pub origin: String,
    /// What it was cloned from; if that is deleted (`origin` is empty then), what that was cloned from or a
    /// snapshot of, and so on; else [`NO_VOLUME`].
    pub source: VolumeId,
    /// Returns the length in bytes.
    pub size: u64,
    /// End of a part beyond `size` that is still to be unmapped after shrinking (else ≤ `size`).
    pub trim_end: u64,
    /// How much space a first write reserves, in bytes.
    pub chunk: u64,
    /// Pages mapped.
    pub referenced: u64,
    /// Of them, those that are not contiguous with the page before them in their block.
    pub seams: u64,
    /// Whether `seams` is an estimate, because whole tables were shared without reading them.
    pub estimated: bool,
    /// Level of the root table, 1 to 4.
    pub level: u8,
    /// The root table's entry.
    pub root: MapEntry,
    /// Entries born later than this are exclusive to this volume.
    pub shared_at: Epoch,
    /// Creation time, in seconds since 1970.
    pub created: u64,
    /// For a dead volume: the first virtual page not yet released. For a living snapshot of an origin: how
    /// many of the pages it refers to are exceptions of it; the others were written to it. For an origin that
    /// is being rolled back: the first chunk that may not be restored.
    pub cursor: u64,
    /// Options given when a snapshot was taken.
    pub flags: SnapshotFlags,
    /// The snapshot of an origin that is the backing of this volume, else [`NO_VOLUME`].
    pub base: VolumeId,
    /// For an origin, also a dead one.
    pub origin_record: Option<Box<OriginRecord>>,
    /// The stamp by which an origin's device is recognised; `None` if an older version left none.
    pub stamp: Option<Box<Stamp>>,
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// Limits of copies for this volume.
    pub throttle: Throttle,
    /// When its scattered pages are gathered.
    pub gather: GatherPolicy,
    /// Most bytes it may have mapped; 0: no limit. A snapshot has none.
    pub quota: u64,
    /// Its file attributes; `None` until any of them is set.
    pub attributes: Option<Attributes>,
}

/// Longest origin that is stored, in bytes (a longer one is cut).
const MAX_ORIGIN_BYTES: usize = 85;
/// Longest name and path of an origin together, in bytes.
pub const MAX_ORIGIN_TEXT_BYTES: usize = ORIGIN_TAIL_AT - 96 - 4;
/// Longest name, path and identity of the device of an origin together, in bytes, if its zones are stored,
/// too.
pub const MAX_STAMPED_TEXT_BYTES: usize = ZONES_AT - 96 - 6;
/// Offset of the zones of an origin, behind its texts.
const ZONES_AT: usize = ORIGIN_TAIL_AT - ZONE_BYTES;
/// Offset of an origin's own fields, before `base`.
const ORIGIN_TAIL_AT: usize = 396;
/// Offset of the base in a slot, behind the longest names.
const BASE_AT: usize = 440;
/// Offset of the attributes in a slot.
const ATTRIBUTES_AT: usize = 448;
/// Offset of the gather policy in a slot, followed by the seams.
const GATHER_AT: usize = 484;
const ESTIMATED_AT: usize = 485;
const SEAMS_AT: usize = 488;
/// Offset of the quota in a slot.
const QUOTA_AT: usize = 496;
/// Offset of the source in a slot, of which 7 bytes are stored.
const SOURCE_AT: usize = 504;
/// The last byte: flags.
const FLAGS_AT: usize = DIRECTORY_SLOT_BYTES - 1;

impl VolumeRecord {
    /// Kind of the file that a mount shows.
    pub fn kind(&self) -> FileKind {
        match self.state {
            VolumeState::Folder => FileKind::Folder,
            _ => self.attributes.map_or(FileKind::File, |attributes| attributes.kind()),
        }
    }

    /// Whether it is a symbolic link, a FIFO or a socket, also as a snapshot or without a name.
    pub fn is_special(&self) -> bool {
        !matches!(self.kind(), FileKind::File | FileKind::Folder)
    }

    /// Returns how many seams `pages` of the pages it maps have, as far as it can be estimated without
    /// reading them.
    pub fn seams_among(&self, pages: u64) -> u64 {
        (u128::from(self.seams) * u128::from(pages) / u128::from(self.referenced.max(1))) as u64
    }

    /// Creates a volume of length 0 with creation time `created`.
    pub fn empty(id: VolumeId, name: &str, created: u64) -> VolumeRecord {
        VolumeRecord {
            id,
            state: VolumeState::Volume,
            parent: NO_VOLUME,
            name: name.into(),
            origin: String::new(),
            source: NO_VOLUME,
            size: 0,
            trim_end: 0,
            chunk: 65536,
            referenced: 0,
            seams: 0,
            estimated: false,
            level: 1,
            root: MapEntry::ABSENT,
            shared_at: Epoch(0),
            created,
            cursor: 0,
            flags: SnapshotFlags::default(),
            base: NO_VOLUME,
            origin_record: None,
            stamp: None,
            break_policy: BreakPolicy::default(),
            throttle: Throttle::NONE,
            gather: GatherPolicy::Off,
            quota: 0,
            attributes: None,
        }
    }

    pub(super) fn encode(&self, slot: &mut [u8]) {
        let mut out = Vec::with_capacity(DIRECTORY_SLOT_BYTES);
        let state = match self.state {
            VolumeState::Volume => 1,
            VolumeState::Snapshot => 2,
            VolumeState::Dead => 3,
            VolumeState::Folder => 4,
            VolumeState::Orphan => 5,
            VolumeState::Origin => 6,
            VolumeState::HardLink => 8,
        };
        let stamp = self.stamp.as_ref().filter(|_| self.origin_record.is_some());
        let bits = self.flags.to_bits() | u8::from(self.origin_record.is_some()) << 2 | u8::from(stamp.is_some()) << 4;
        Append::u8(&mut out, state);
        Append::u8(&mut out, self.level);
        let (percent, kib) = self.throttle.encoded();
        Append::u8(&mut out, policy_byte(self.break_policy));
        Append::u8(&mut out, percent);
        Append::u32(&mut out, kib);
        for v in [self.id.0, self.parent.0, self.size, self.trim_end, self.chunk, self.referenced] {
            Append::u64(&mut out, v);
        }
        for v in [self.shared_at.0, self.created, self.cursor] {
            Append::u64(&mut out, v);
        }
        out.extend_from_slice(&self.root.to_bytes());
        out.text(&self.name);
        let most = if self.origin_record.is_some() { MAX_ORIGIN_TEXT_BYTES } else { MAX_ORIGIN_BYTES };
        let cut = (0..=most.min(self.origin.len())).rev().find(|&n| self.origin.is_char_boundary(n));
        out.text(&self.origin[..cut.unwrap_or(0)]);
        if let Some(stamp) = stamp {
            out.text(&stamp.device);
            slot[ZONES_AT..ORIGIN_TAIL_AT].copy_from_slice(&stamp.zones_to_bytes());
        }
        slot[..out.len()].copy_from_slice(&out);
        slot[GATHER_AT] = self.gather.encoded();
        slot[ESTIMATED_AT] = u8::from(self.estimated);
        slot[SEAMS_AT..SEAMS_AT + 8].copy_from_slice(&self.seams.min(self.referenced).to_le_bytes());
        slot[QUOTA_AT..QUOTA_AT + 8].copy_from_slice(&self.quota.to_le_bytes());
        slot[ATTRIBUTES_AT..ATTRIBUTES_AT + ATTRIBUTES_BYTES]
            .copy_from_slice(&Attributes::encode(self.attributes.as_ref()));
        slot[BASE_AT..BASE_AT + 8].copy_from_slice(&self.base.0.to_le_bytes());
        // A number that long is not reached.
        let source = if self.source.0 >> 56 == 0 { self.source } else { NO_VOLUME };
        slot[SOURCE_AT..FLAGS_AT].copy_from_slice(&source.0.to_le_bytes()[..7]);
        slot[FLAGS_AT] = bits;
        if let Some(protects) = &self.origin_record {
            protects.encode(&mut slot[ORIGIN_TAIL_AT..ATTRIBUTES_AT]);
        }
    }

    pub(super) fn decode(slot: &[u8], pool_pages: u64) -> Option<VolumeRecord> {
        let mut r = Reader(slot);
        let state = match r.u8()? {
            1 => VolumeState::Volume,
            2 => VolumeState::Snapshot,
            3 => VolumeState::Dead,
            4 => VolumeState::Folder,
            5 => VolumeState::Orphan,
            6 => VolumeState::Origin,
            8 => VolumeState::HardLink,
            _ => return None,
        };
        let level = r.u8()?;
        let break_policy = policy_of(r.u8()?)?;
        let throttle = Throttle::decoded(r.u8()?, r.u32()?)?;
        let bits = slot[FLAGS_AT];
        let flags = SnapshotFlags::from_bits(bits & !20)?;
        let protects = match bits & 4 {
            0 => (state != VolumeState::Origin).then_some(None)?,
            _ => Some(OriginRecord::decode(&slot[ORIGIN_TAIL_AT..ATTRIBUTES_AT], pool_pages)?),
        };
        let zones = match bits & 16 {
            0 => None,
            _ => Some(protects.and(Stamp::zones_from_bytes(&mut Reader(&slot[ZONES_AT..ORIGIN_TAIL_AT])))?),
        };
        // An origin stores the target of its rollback there.
        let base = match protects {
            Some(_) => NO_VOLUME,
            None => VolumeId(u64::from_le_bytes(slot[BASE_AT..BASE_AT + 8].try_into().ok()?)),
        };
        let longest = if protects.is_some() { MAX_ORIGIN_TEXT_BYTES } else { MAX_ORIGIN_BYTES };
        let [id, parent, size, trim_end, chunk, referenced] =
            [r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u64()?];
        let [shared_at, created, cursor] = [r.u64()?, r.u64()?, r.u64()?];
        let root = MapEntry::from_bytes(r.array()?);
        let quota = Reader(&slot[QUOTA_AT..]).u64()?;
        let mut source = [0; 8];
        source[..7].copy_from_slice(&slot[SOURCE_AT..FLAGS_AT]);
        let source = VolumeId(u64::from_le_bytes(source));
        let gather = GatherPolicy::decoded(slot[GATHER_AT])?;
        let seams = Reader(&slot[SEAMS_AT..]).u64()?;
        let estimated = slot[ESTIMATED_AT] != 0;
        let attributes = Attributes::decode(&mut Reader(&slot[ATTRIBUTES_AT..]))?;
        let sound = (1..=4).contains(&level)
            && root.flaw(level + 1, pool_pages).is_none()
            && size <= MAX_VOLUME_SIZE
            && trim_end <= MAX_VOLUME_SIZE
            && quota <= MAX_VOLUME_SIZE
            && seams <= referenced
            && slot[ESTIMATED_AT] <= 1
            && is_chunk(chunk)
            && shared_at < MAX_EPOCH
            && (!matches!(state, VolumeState::Folder | VolumeState::HardLink) || root.is_absent())
            && (state != VolumeState::HardLink || parent != 0)
            && id != 0;
        if !sound {
            return None;
        }
        let (name, origin) = (r.text(MAX_NAME_BYTES)?, r.text(longest)?);
        let stamp = match zones {
            Some((hashes, written)) => {
                Some(Box::new(Stamp { device: r.text(MAX_STAMPED_TEXT_BYTES)?, hashes, written }))
            }
            None => None,
        };
        if stamp.as_ref().is_some_and(|stamp| name.len() + origin.len() + stamp.device.len() > MAX_STAMPED_TEXT_BYTES) {
            return None;
        }
        Some(VolumeRecord {
            id: VolumeId(id),
            state,
            parent: VolumeId(parent),
            size,
            trim_end,
            chunk,
            referenced,
            seams,
            estimated,
            level,
            root,
            shared_at: Epoch(shared_at),
            created,
            cursor,
            break_policy,
            throttle,
            gather,
            quota,
            attributes,
            name: name.into(),
            origin,
            source,
            flags,
            base,
            origin_record: protects.map(Box::new),
            stamp,
        })
    }
}

impl OriginRecord {
    /// Fills the fields of an origin in a slot; `base` comes behind.
    fn encode(&self, tail: &mut [u8]) {
        let (policy, wait) = self.when_full.to_parts();
        let mut put = |at: usize, bytes: &[u8]| tail[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &((self.copy_ahead >> 10) as u32).to_le_bytes());
        put(4, &self.identity.modified.to_le_bytes());
        put(12, &self.identity.fingerprint.to_le_bytes());
        put(20, &[u8::from(self.clean), policy, self.exceptions.height]);
        put(24, &wait.to_le_bytes());
        put(28, &self.exceptions.entry.to_bytes());
        put(BASE_AT - ORIGIN_TAIL_AT, &self.rollback_to.0.to_le_bytes());
    }

    fn decode(tail: &[u8], pool_pages: u64) -> Option<OriginRecord> {
        let mut r = Reader(tail);
        let copy_ahead = u64::from(r.u32()?) << 10;
        let identity = Identity { modified: r.u64()?, fingerprint: r.u64()? };
        let [clean, policy, height, zero] = r.array()?;
        let when_full = OriginFull::from_parts(policy, r.u32()?)?;
        let kept = TreeRoot { entry: MapEntry::from_bytes(r.array()?), height };
        let rolling = VolumeId(r.u64()?);
        let sound = clean <= 1 && zero == 0 && kept.flaw(pool_pages).is_none();
        sound.then_some(OriginRecord {
            exceptions: kept,
            copy_ahead,
            when_full,
            clean: clean == 1,
            identity,
            rollback_to: rolling,
        })
    }
}

impl OriginFull {
    /// Encodes the policy and its seconds.
    pub fn to_parts(self) -> (u8, u32) {
        match self {
            OriginFull::Wait(seconds) => (0, seconds),
            OriginFull::Error => (1, 0),
            OriginFull::DropOldest => (2, 0),
        }
    }

    /// Decodes the policy.
    pub fn from_parts(policy: u8, seconds: u32) -> Option<OriginFull> {
        match policy {
            0 => Some(OriginFull::Wait(seconds)),
            1 => Some(OriginFull::Error),
            2 => Some(OriginFull::DropOldest),
            _ => None,
        }
    }
}

/// Encodes a break policy.
pub(super) fn policy_byte(policy: BreakPolicy) -> u8 {
    match policy {
        BreakPolicy::Split => 0,
        BreakPolicy::Copy => 1,
    }
}

/// Decodes a break policy.
pub(super) fn policy_of(byte: u8) -> Option<BreakPolicy> {
    match byte {
        0 => Some(BreakPolicy::Split),
        1 => Some(BreakPolicy::Copy),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
