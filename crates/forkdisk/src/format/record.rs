//! Journal records.

use crate::types::{
    BLOCK_PAGES, BLOCK_SIZE, MAX_COPY_AHEAD_BYTES, MAX_VOLUME_SIZE, PAGE_SIZE, PageAddr, VirtualPage, VolumeId,
    is_chunk,
};

use super::cursor::{Append, Reader};
use super::volume::{
    Attributes, Identity, MAX_NAME_BYTES, MAX_ORIGIN_TEXT_BYTES, MAX_STAMPED_TEXT_BYTES, OriginFull, SnapshotFlags,
    policy_byte, policy_of,
};
use super::{BreakPolicy, CopierSettings, GatherPolicy, Stamp, Throttle, transaction};

/// One change of the pool, described so that replaying it allocates nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// `len` pages of `volume` from `at` now lie in the pool from `to` on.
    Map { volume: VolumeId, at: VirtualPage, len: u32, to: PageAddr },
    /// `len` pages of `volume` from `at` are holes now.
    Unmap { volume: VolumeId, at: VirtualPage, len: u64 },
    /// A new, empty volume.
    Create { id: VolumeId, name: String, size: u64, chunk: u64, now: u64 },
    /// Snapshots of several volumes at one instant: (source, new id, name behind `@`).
    Snapshot { of: Vec<(VolumeId, VolumeId, String)>, now: u64, flags: SnapshotFlags },
    /// A new volume with the contents of another.
    Clone { source: VolumeId, id: VolumeId, name: String, now: u64 },
    /// `volume` gets the contents of `snapshot`; its old contents continue as the dead volume `dead`.
    Rollback { volume: VolumeId, snapshot: VolumeId, dead: VolumeId },
    /// These volumes are deleted.
    Delete { ids: Vec<VolumeId> },
    /// A new name.
    Rename { id: VolumeId, name: String },
    /// A new length in bytes.
    Resize { id: VolumeId, size: u64 },
    /// A new chunk size in bytes.
    SetChunk { id: VolumeId, chunk: u64 },
    /// `len` pages of `source` from `from` are shared into `target` at `to`. If a whole table replaces one
    /// that was exclusive to the target, the old one continues as the dead volume `dead`.
    CloneRange { source: VolumeId, from: VirtualPage, target: VolumeId, to: VirtualPage, len: u64, dead: VolumeId },
    /// The pool has a new length in bytes.
    Grow { size: u64 },
    /// The device at `path` is protected in place from now on.
    Protect { id: VolumeId, name: String, path: String, size: u64, chunk: u64, now: u64, identity: Identity },
    /// Settings of the exceptions of an origin.
    SetOrigin { id: VolumeId, copy_ahead: u64, when_full: OriginFull },
    /// Where an origin's device is, its state when it was stopped, and whether it was stopped cleanly.
    Identify { id: VolumeId, clean: bool, identity: Identity, path: String },
    /// The stamp by which an origin's device is recognised from now on.
    Stamp { id: VolumeId, stamp: Box<Stamp> },
    /// The samples of these zones of an origin may be written from now on, one bit each.
    ZonesWritten { id: VolumeId, zones: u32 },
    /// `len` pages of an origin from `at` were copied out for snapshot `sequence`, to the pool from `to` on.
    CopyOut { origin: VolumeId, sequence: VolumeId, at: VirtualPage, len: u32, to: PageAddr },
    /// A rollback of `origin` to `snapshot` has restored all chunks before `cursor`; `snapshot` 0: it has
    /// ended.
    RollbackProgress { origin: VolumeId, snapshot: VolumeId, cursor: u64 },
    /// A running rollback has restored `count` chunks of `origin` from `first` on, which are listed together.
    ChunksRolledBack { origin: VolumeId, first: u64, count: u32 },
    /// A new break policy and throttle.
    SetCopying { id: VolumeId, break_policy: BreakPolicy, throttle: Throttle },
    /// New settings of the pool's copier.
    SetCopier { settings: CopierSettings },
    /// A new limit of what the volume may have mapped, in bytes; 0: none.
    SetQuota { id: VolumeId, quota: u64 },
    /// New file attributes of a volume or folder.
    SetAttributes { id: VolumeId, attributes: Option<Attributes> },
    /// A new folder.
    MakeFolder { id: VolumeId, name: String, attributes: Option<Attributes>, now: u64 },
    /// A volume loses its name and stays until its last close.
    Unlink { id: VolumeId },
    /// A volume takes the name of another one, which is either still open and without a name (`kept`), or
    /// deleted.
    RenameOver { id: VolumeId, name: String, replaced: VolumeId, kept: bool },
    /// A folder is renamed with everything in it.
    RenameFolder { from: String, to: String },
    /// `volume` gets the contents and size of `source` (0: becomes empty); its old contents continue as the
    /// dead volume `dead`.
    Replace { volume: VolumeId, source: VolumeId, dead: VolumeId },
    /// A new, empty volume without a name: an orphan.
    CreateUnnamed { id: VolumeId, size: u64, chunk: u64, now: u64 },
    /// An orphan gets a name and becomes a volume.
    NameVolume { id: VolumeId, name: String },
    /// A clone of an origin's snapshot has no backing any more.
    Flatten { id: VolumeId },
    /// When a volume's scattered pages are gathered.
    SetGather { id: VolumeId, gather: GatherPolicy },
    /// In the virtual block that begins at `at`, the entries of these volumes that refer to pages in `moved`
    /// refer to their new places.
    Gather { volumes: Vec<VolumeId>, at: VirtualPage, moved: Vec<MovedRun> },
    /// All of these changes or none; see [`is_part`](Record::is_part).
    Transaction { parts: Vec<Record> },
}

/// A run of pages of one virtual block that was copied to another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovedRun {
    /// The first page, counted from the beginning of the virtual block.
    pub slot: u8,
    /// Number of pages: 1 to 256.
    pub len: u16,
    /// Old and new place.
    pub from: PageAddr,
    pub to: PageAddr,
}

impl MovedRun {
    /// Returns the pages, counted from the beginning of the virtual block.
    pub fn slots(&self) -> std::ops::Range<usize> {
        usize::from(self.slot)..usize::from(self.slot) + usize::from(self.len)
    }

    /// Returns the old and new place of the page of `slot`, if it is one of them.
    pub fn of(&self, slot: usize) -> Option<(PageAddr, PageAddr)> {
        let i = slot.checked_sub(usize::from(self.slot)).filter(|&i| i < usize::from(self.len))? as u64;
        Some((PageAddr(self.from.0 + i), PageAddr(self.to.0 + i)))
    }

    fn decode(r: &mut Reader<'_>) -> Option<MovedRun> {
        let (slot, more) = (r.u8()?, r.u8()?);
        let len = u16::from(more) + 1;
        let moved = MovedRun { slot, len, from: PageAddr(r.u64()?), to: PageAddr(r.u64()?) };
        (usize::from(slot) + usize::from(len) <= BLOCK_PAGES as usize).then_some(moved)
    }
}

impl Record {
    /// Appends the record's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Record::Map { volume, at, len, to } => {
                Append::u8(out, 1);
                Append::u64(out, volume.0);
                Append::u64(out, at.0);
                Append::u32(out, *len);
                Append::u64(out, to.0);
            }
            Record::Unmap { volume, at, len } => {
                Append::u8(out, 2);
                out.u64s(&[volume.0, at.0, *len]);
            }
            Record::Create { id, name, size, chunk, now } => {
                Append::u8(out, 3);
                out.u64s(&[id.0, *size, *chunk, *now]);
                out.text(name);
            }
            Record::Snapshot { of, now, flags } => {
                // Plain ones keep their original encoding.
                match flags.to_bits() {
                    0 => Append::u8(out, 4),
                    bits => out.extend([13, bits]),
                }
                Append::u64(out, *now);
                Append::u32(out, of.len() as u32);
                for (source, id, name) in of {
                    Append::u64(out, source.0);
                    Append::u64(out, id.0);
                    out.text(name);
                }
            }
            Record::Clone { source, id, name, now } => {
                Append::u8(out, 5);
                out.u64s(&[source.0, id.0, *now]);
                out.text(name);
            }
            Record::Rollback { volume, snapshot, dead } => {
                Append::u8(out, 6);
                out.u64s(&[volume.0, snapshot.0, dead.0]);
            }
            Record::Delete { ids } => {
                Append::u8(out, 7);
                Append::u32(out, ids.len() as u32);
                for id in ids {
                    Append::u64(out, id.0);
                }
            }
            Record::Rename { id, name } => {
                Append::u8(out, 8);
                Append::u64(out, id.0);
                out.text(name);
            }
            Record::Resize { id, size } => {
                Append::u8(out, 9);
                out.u64s(&[id.0, *size]);
            }
            Record::SetChunk { id, chunk } => {
                Append::u8(out, 10);
                out.u64s(&[id.0, *chunk]);
            }
            Record::CloneRange { source, from, target, to, len, dead } => {
                Append::u8(out, 11);
                out.u64s(&[source.0, from.0, target.0, to.0, *len, dead.0]);
            }
            Record::Grow { size } => {
                Append::u8(out, 12);
                Append::u64(out, *size);
            }
            Record::Protect { id, name, path, size, chunk, now, identity } => {
                Append::u8(out, 14);
                out.u64s(&[id.0, *size, *chunk, *now, identity.modified, identity.fingerprint]);
                out.text(name);
                out.text(path);
            }
            Record::SetOrigin { id, copy_ahead, when_full } => {
                let (policy, seconds) = when_full.to_parts();
                out.extend([15, policy]);
                Append::u32(out, seconds);
                out.u64s(&[id.0, *copy_ahead]);
            }
            Record::Identify { id, clean, identity, path } => {
                out.extend([16, u8::from(*clean)]);
                out.u64s(&[id.0, identity.modified, identity.fingerprint]);
                out.text(path);
            }
            Record::Stamp { id, stamp } => {
                Append::u8(out, 50);
                Append::u64(out, id.0);
                out.extend(stamp.zones_to_bytes());
                out.text(&stamp.device);
            }
            Record::ZonesWritten { id, zones } => {
                Append::u8(out, 51);
                Append::u64(out, id.0);
                Append::u32(out, *zones);
            }
            Record::CopyOut { origin, sequence, at, len, to } => {
                Append::u8(out, 17);
                out.u64s(&[origin.0, sequence.0, at.0]);
                Append::u32(out, *len);
                Append::u64(out, to.0);
            }
            Record::RollbackProgress { origin, snapshot, cursor } => {
                Append::u8(out, 18);
                out.u64s(&[origin.0, snapshot.0, *cursor]);
            }
            Record::ChunksRolledBack { origin, first, count } => {
                Append::u8(out, 19);
                out.u64s(&[origin.0, *first]);
                Append::u32(out, *count);
            }
            Record::SetCopying { id, break_policy, throttle } => {
                let (percent, kib) = throttle.encoded();
                Append::u8(out, 20);
                Append::u64(out, id.0);
                Append::u8(out, policy_byte(*break_policy));
                Append::u8(out, percent);
                Append::u32(out, kib);
            }
            Record::SetCopier { settings } => {
                Append::u8(out, 21);
                settings.encode(out);
            }
            Record::SetQuota { id, quota } => {
                Append::u8(out, 22);
                out.u64s(&[id.0, *quota]);
            }
            Record::SetAttributes { id, attributes } => {
                Append::u8(out, 32);
                Append::u64(out, id.0);
                out.extend_from_slice(&Attributes::encode(attributes.as_ref()));
            }
            Record::MakeFolder { id, name, attributes, now } => {
                Append::u8(out, 33);
                out.u64s(&[id.0, *now]);
                out.extend_from_slice(&Attributes::encode(attributes.as_ref()));
                out.text(name);
            }
            Record::Unlink { id } => {
                Append::u8(out, 34);
                Append::u64(out, id.0);
            }
            Record::RenameOver { id, name, replaced, kept } => {
                Append::u8(out, 35);
                out.u64s(&[id.0, replaced.0]);
                Append::u8(out, u8::from(*kept));
                out.text(name);
            }
            Record::RenameFolder { from, to } => {
                Append::u8(out, 36);
                out.text(from);
                out.text(to);
            }
            Record::Replace { volume, source, dead } => {
                Append::u8(out, 37);
                out.u64s(&[volume.0, source.0, dead.0]);
            }
            Record::CreateUnnamed { id, size, chunk, now } => {
                Append::u8(out, 38);
                out.u64s(&[id.0, *size, *chunk, *now]);
            }
            Record::NameVolume { id, name } => {
                Append::u8(out, 39);
                Append::u64(out, id.0);
                out.text(name);
            }
            Record::Flatten { id } => {
                Append::u8(out, 40);
                Append::u64(out, id.0);
            }
            Record::SetGather { id, gather } => {
                Append::u8(out, 48);
                Append::u64(out, id.0);
                Append::u8(out, gather.encoded());
            }
            Record::Gather { volumes, at, moved } => {
                Append::u8(out, 49);
                Append::u64(out, at.0);
                Append::u32(out, volumes.len() as u32);
                volumes.iter().for_each(|id| Append::u64(out, id.0));
                Append::u32(out, moved.len() as u32);
                for run in moved {
                    Append::u8(out, run.slot);
                    Append::u8(out, (run.len - 1) as u8);
                    out.u64s(&[run.from.0, run.to.0]);
                }
            }
            Record::Transaction { parts } => transaction::encode(parts, out),
        }
    }

    /// Decodes the record at the start of `bytes`.
    pub fn decode_one(bytes: &[u8]) -> Option<Record> {
        Record::decode(&mut Reader(bytes))
    }

    /// Whether it may be merged with the next one, see [`extend`](Self::extend).
    pub fn is_run(&self) -> bool {
        matches!(self, Record::Map { .. } | Record::CopyOut { .. })
    }

    /// Merges `next` into this record if both map (or copy out) and `next` continues where this one ends, in
    /// the volume and in the pool.
    pub fn extend(&mut self, next: &Record) -> bool {
        let (whose, at, len, to) = match self {
            Record::Map { volume, at, len, to } => ((*volume, None), *at, len, *to),
            Record::CopyOut { origin, sequence, at, len, to } => ((*origin, Some(*sequence)), *at, len, *to),
            _ => return false,
        };
        let (w, a, n, t) = match next {
            Record::Map { volume, at, len, to } => ((*volume, None), *at, len, *to),
            Record::CopyOut { origin, sequence, at, len, to } => ((*origin, Some(*sequence)), *at, len, *to),
            _ => return false,
        };
        let ends = u64::from(*len);
        let follows = whose == w && a.0 == at.0 + ends && t.0 == to.0 + ends;
        match len.checked_add(*n).filter(|_| follows) {
            Some(sum) => {
                *len = sum;
                true
            }
            None => false,
        }
    }

    pub fn decode(r: &mut Reader<'_>) -> Option<Record> {
        let volume = |r: &mut Reader<'_>| r.u64().map(VolumeId);
        let page = |r: &mut Reader<'_>| r.u64().filter(|&p| p <= MAX_VOLUME_SIZE / PAGE_SIZE as u64).map(VirtualPage);
        let size = |r: &mut Reader<'_>| r.u64().filter(|&bytes| bytes <= MAX_VOLUME_SIZE);
        let chunk = |r: &mut Reader<'_>| r.u64().filter(|&bytes| is_chunk(bytes));
        Some(match r.u8()? {
            1 => Record::Map { volume: volume(r)?, at: page(r)?, len: r.u32()?, to: PageAddr(r.u64()?) },
            2 => Record::Unmap { volume: volume(r)?, at: page(r)?, len: page(r)?.0 },
            3 => {
                let (id, size, chunk, now) = (volume(r)?, size(r)?, chunk(r)?, r.u64()?);
                Record::Create { id, size, chunk, now, name: r.text(MAX_NAME_BYTES)? }
            }
            kind @ (4 | 13) => {
                let bits = if kind == 13 { r.u8().filter(|&bits| bits != 0)? } else { 0 };
                let flags = SnapshotFlags::from_bits(bits)?;
                let (now, n) = (r.u64()?, r.u32()?);
                let of =
                    (0..n).map(|_| Some((volume(r)?, volume(r)?, r.text(MAX_NAME_BYTES)?))).collect::<Option<_>>()?;
                Record::Snapshot { of, now, flags }
            }
            5 => {
                let (source, id, now) = (volume(r)?, volume(r)?, r.u64()?);
                Record::Clone { source, id, now, name: r.text(MAX_NAME_BYTES)? }
            }
            6 => Record::Rollback { volume: volume(r)?, snapshot: volume(r)?, dead: volume(r)? },
            7 => {
                let n = r.u32()?;
                Record::Delete { ids: (0..n).map(|_| volume(r)).collect::<Option<_>>()? }
            }
            8 => Record::Rename { id: volume(r)?, name: r.text(MAX_NAME_BYTES)? },
            9 => Record::Resize { id: volume(r)?, size: size(r)? },
            10 => Record::SetChunk { id: volume(r)?, chunk: chunk(r)? },
            11 => {
                let (source, from, target, to) = (volume(r)?, page(r)?, volume(r)?, page(r)?);
                Record::CloneRange { source, from, target, to, len: page(r)?.0, dead: volume(r)? }
            }
            12 => Record::Grow { size: r.u64()? },
            14 => {
                let (id, size, chunk, now) = (volume(r)?, size(r)?, chunk(r)?, r.u64()?);
                let identity = Identity { modified: r.u64()?, fingerprint: r.u64()? };
                let (name, path) = (r.text(MAX_NAME_BYTES)?, r.text(MAX_ORIGIN_TEXT_BYTES)?);
                let fits = name.len() + path.len() <= MAX_ORIGIN_TEXT_BYTES && chunk <= BLOCK_SIZE;
                fits.then_some(Record::Protect { id, name, path, size, chunk, now, identity })?
            }
            15 => {
                let when_full = OriginFull::from_parts(r.u8()?, r.u32()?)?;
                Record::SetOrigin {
                    id: volume(r)?,
                    copy_ahead: r.u64().filter(|&n| n <= MAX_COPY_AHEAD_BYTES)?,
                    when_full,
                }
            }
            16 => {
                let clean = r.u8().filter(|&bit| bit < 2)? == 1;
                let (id, identity) = (volume(r)?, Identity { modified: r.u64()?, fingerprint: r.u64()? });
                Record::Identify { id, clean, identity, path: r.text(MAX_ORIGIN_TEXT_BYTES)? }
            }
            17 => Record::CopyOut {
                origin: volume(r)?,
                sequence: volume(r)?,
                at: page(r)?,
                len: r.u32()?,
                to: PageAddr(r.u64()?),
            },
            18 => {
                let (origin, snapshot) = (volume(r)?, VolumeId(r.u64()?));
                Record::RollbackProgress { origin, snapshot, cursor: r.u64()? }
            }
            19 => Record::ChunksRolledBack { origin: volume(r)?, first: r.u64()?, count: r.u32()? },
            20 => {
                let (id, break_policy) = (volume(r)?, policy_of(r.u8()?)?);
                Record::SetCopying { id, break_policy, throttle: Throttle::decoded(r.u8()?, r.u32()?)? }
            }
            21 => Record::SetCopier { settings: CopierSettings::decode(r)? },
            22 => Record::SetQuota { id: volume(r)?, quota: size(r)? },
            32 => Record::SetAttributes { id: volume(r)?, attributes: Attributes::decode(r)? },
            33 => {
                let (id, now, attributes) = (volume(r)?, r.u64()?, Attributes::decode(r)?);
                Record::MakeFolder { id, now, attributes, name: r.text(MAX_NAME_BYTES)? }
            }
            34 => Record::Unlink { id: volume(r)? },
            35 => {
                let (id, replaced) = (volume(r)?, volume(r)?);
                let kept = r.u8().filter(|&k| k <= 1)? == 1;
                Record::RenameOver { id, replaced, kept, name: r.text(MAX_NAME_BYTES)? }
            }
            36 => Record::RenameFolder { from: r.text(MAX_NAME_BYTES)?, to: r.text(MAX_NAME_BYTES)? },
            37 => Record::Replace { volume: volume(r)?, source: volume(r)?, dead: volume(r)? },
            38 => Record::CreateUnnamed { id: volume(r)?, size: size(r)?, chunk: chunk(r)?, now: r.u64()? },
            39 => Record::NameVolume { id: volume(r)?, name: r.text(MAX_NAME_BYTES)? },
            40 => Record::Flatten { id: volume(r)? },
            48 => Record::SetGather { id: volume(r)?, gather: GatherPolicy::decoded(r.u8()?)? },
            49 => {
                let at = page(r).filter(|at| at.index() == 0)?;
                let n = r.u32()?;
                let volumes = (0..n).map(|_| volume(r)).collect::<Option<_>>()?;
                let n = r.u32().filter(|&n| u64::from(n) <= BLOCK_PAGES)?;
                Record::Gather { volumes, at, moved: (0..n).map(|_| MovedRun::decode(r)).collect::<Option<_>>()? }
            }
            50 => {
                let (id, (hashes, written)) = (volume(r)?, Stamp::zones_from_bytes(r)?);
                Record::Stamp {
                    id,
                    stamp: Box::new(Stamp { device: r.text(MAX_STAMPED_TEXT_BYTES)?, hashes, written }),
                }
            }
            51 => Record::ZonesWritten { id: volume(r)?, zones: r.u32()? },
            transaction::KIND => Record::Transaction { parts: transaction::decode(r)? },
            _ => return None,
        })
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::format::ZONES;
    use crate::format::group::tests::{group_of, samples_witnessed};
    use crate::format::group::{Decoded, decode_group};

    pub fn samples() -> Vec<Record> {
        let (v, w) = (VolumeId(7), VolumeId(9));
        let name = "a/b".to_string();
        let (plain, flags) =
            (SnapshotFlags::default(), SnapshotFlags { independent: true, droppable: true, writable: true });
        let identity = Identity { modified: 11, fingerprint: 12 };
        vec![
            Record::Map { volume: v, at: VirtualPage(1), len: 256, to: PageAddr(512) },
            Record::Unmap { volume: v, at: VirtualPage(3), len: 1 << 38 },
            Record::Create { id: v, name: name.clone(), size: 1 << 50, chunk: 65536, now: 5 },
            Record::Snapshot { of: vec![(v, w, name.clone()), (w, v, "x".into())], now: 6, flags: plain },
            Record::Snapshot { of: vec![(v, w, name.clone())], now: 6, flags },
            Record::Protect {
                id: v,
                name: name.clone(),
                path: "/dev/x".into(),
                size: 5,
                chunk: 4096,
                now: 7,
                identity,
            },
            Record::SetOrigin { id: v, copy_ahead: 1 << 20, when_full: OriginFull::Wait(60) },
            Record::Identify { id: v, clean: true, identity, path: "/dev/y".into() },
            Record::Stamp { id: v, stamp: Box::new(Stamp { device: "wwn:1".into(), hashes: [9; ZONES], written: 5 }) },
            Record::ZonesWritten { id: v, zones: 1 << 31 },
            Record::CopyOut { origin: v, sequence: w, at: VirtualPage(16), len: 32, to: PageAddr(512) },
            Record::RollbackProgress { origin: v, snapshot: w, cursor: 17 },
            Record::ChunksRolledBack { origin: v, first: 130, count: 3 },
            Record::Clone { source: v, id: w, name: name.clone(), now: 7 },
            Record::Rollback { volume: v, snapshot: w, dead: VolumeId(10) },
            Record::Delete { ids: vec![v, w] },
            Record::CreateUnnamed { id: v, size: 1 << 50, chunk: 65536, now: 5 },
            Record::NameVolume { id: v, name: name.clone() },
            Record::Rename { id: v, name },
            Record::Resize { id: v, size: 12345 },
            Record::SetChunk { id: v, chunk: 4096 },
            Record::CloneRange {
                source: v,
                from: VirtualPage(1),
                target: w,
                to: VirtualPage(2),
                len: 3,
                dead: VolumeId(10),
            },
            Record::Grow { size: 1 << 40 },
            Record::SetCopying {
                id: v,
                break_policy: BreakPolicy::Copy,
                throttle: Throttle { percent: 50, bytes_per_second: 1 << 20 },
            },
            Record::SetCopier { settings: CopierSettings { offload: true, ..CopierSettings::default() } },
            Record::SetQuota { id: v, quota: 1 << 30 },
            Record::Flatten { id: v },
            Record::SetGather { id: v, gather: GatherPolicy::Above(7) },
            Record::Gather {
                volumes: vec![v, w],
                at: VirtualPage(512),
                moved: vec![
                    MovedRun { slot: 0, len: 255, from: PageAddr(9), to: PageAddr(1024) },
                    MovedRun { slot: 255, len: 1, from: PageAddr(7), to: PageAddr(1279) },
                ],
            },
        ]
    }

    #[test]
    fn every_record_survives_the_trip() {
        let (bytes, chain) = group_of(&samples(), 42);
        let Decoded::Group(group, records, checksums) = decode_group(&[5; 16], 42, &bytes, 1 << 20) else {
            panic!("a valid group")
        };
        assert_eq!((group.incarnation, group.first, group.chain), (3, 10, chain));
        assert_eq!((records, checksums), (samples(), samples_witnessed()));
    }

    #[test]
    fn a_record_out_of_range_is_not_taken() {
        let id = VolumeId(7);
        for bad in [
            Record::Create { id, name: "a".into(), size: MAX_VOLUME_SIZE + 1, chunk: 65536, now: 5 },
            Record::Create { id, name: "a".into(), size: 1, chunk: 0, now: 5 },
            Record::CreateUnnamed { id, size: MAX_VOLUME_SIZE + 1, chunk: 65536, now: 5 },
            Record::CreateUnnamed { id, size: 1, chunk: 0, now: 5 },
            Record::Resize { id, size: u64::MAX },
            Record::SetChunk { id, chunk: 2048 },
            Record::SetQuota { id, quota: MAX_VOLUME_SIZE + 1 },
            Record::Unmap { volume: id, at: VirtualPage(u64::MAX), len: 1 },
            Record::SetGather { id, gather: GatherPolicy::Above(100) },
            Record::Gather { volumes: vec![id], at: VirtualPage(1), moved: Vec::new() },
            Record::Gather {
                volumes: vec![id],
                at: VirtualPage(0),
                moved: vec![MovedRun { slot: 1, len: 256, from: PageAddr(9), to: PageAddr(1024) }],
            },
        ] {
            let (bytes, _) = group_of(std::slice::from_ref(&bad), 42);
            assert!(matches!(decode_group(&[5; 16], 42, &bytes, 1 << 20), Decoded::End), "{bad:?}");
        }
    }
}
