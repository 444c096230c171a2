//! Journal records: each is one row, with its kind, and its fields in the order and with the codec in which they are
//! encoded.

use crate::types::{
    BLOCK_PAGES, BLOCK_SIZE, MAX_COPY_AHEAD_BYTES, MAX_VOLUME_SIZE, PAGE_SIZE, PageAddr, VirtualPage, VolumeId,
    is_chunk,
};

use super::cursor::{Append, Reader};
use super::volume::{
    Attributes, Identity, MAX_NAME_BYTES, MAX_ORIGIN_TEXT_BYTES, MAX_STAMPED_TEXT_BYTES, OriginFull, SnapshotFlags,
    policy_byte, policy_of,
};
use super::{BreakPolicy, CopierSettings, Extension, GatherPolicy, Stamp, Throttle, transaction};

/// Declares the records: `kind => Name { field: type = codec, … }`.
macro_rules! records {
    ($($(#[$doc:meta])* $kind:literal => $name:ident { $($field:ident: $type:ty = $codec:ident),* $(,)? },)*) => {
        /// One change of the pool, described so that replaying it allocates nothing.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Record {
            $($(#[$doc])* $name { $($field: $type),* },)*
        }

        impl Record {
            fn encode_whole(&self, out: &mut Vec<u8>) {
                match self {
                    $(Record::$name { $($field),* } => {
                        Append::u8(out, $kind);
                        $($codec::encode($field, out);)*
                    })*
                }
            }

            fn decode_kind(kind: u8, r: &mut Reader<'_>) -> Option<Record> {
                Some(match kind {
                    $($kind => {
                        $(let $field = $codec::decode(r)?;)*
                        Record::$name { $($field),* }
                    })*
                    _ => return None,
                })
            }
        }
    };
}

records! {
    /// `len` pages of `volume` from `at` now lie in the pool from `to` on.
    1 => Map { volume: VolumeId = volume, at: VirtualPage = page, len: u32 = small, to: PageAddr = address },
    /// `len` pages of `volume` from `at` are holes now.
    2 => Unmap { volume: VolumeId = volume, at: VirtualPage = page, len: u64 = pages },
    /// A new, empty volume.
    3 => Create {
        id: VolumeId = volume,
        size: u64 = size,
        chunk: u64 = chunk,
        now: u64 = number,
        name: String = name,
    },
    /// Snapshots of several volumes at one instant: (source, new id, name behind `@`).
    13 => Snapshot {
        flags: SnapshotFlags = flags,
        now: u64 = number,
        of: Vec<(VolumeId, VolumeId, String)> = snapshots,
    },
    /// A new volume with the contents of another.
    5 => Clone { source: VolumeId = volume, id: VolumeId = volume, now: u64 = number, name: String = name },
    /// `volume` gets the contents of `snapshot`, which may be a volume, too; its old contents continue as the dead
    /// volume `dead`.
    6 => Rollback { volume: VolumeId = volume, snapshot: VolumeId = volume, dead: VolumeId = volume },
    /// These volumes are deleted.
    7 => Delete { ids: Vec<VolumeId> = volumes },
    /// A new name.
    8 => Rename { id: VolumeId = volume, name: String = name },
    /// A new length in bytes.
    9 => Resize { id: VolumeId = volume, size: u64 = size },
    /// A new chunk size in bytes.
    10 => SetChunk { id: VolumeId = volume, chunk: u64 = chunk },
    /// `len` pages of `source` from `from` are shared into `target` at `to`. If a whole table replaces one
    /// that was exclusive to the target, the old one continues as the dead volume `dead`.
    11 => CloneRange {
        source: VolumeId = volume,
        from: VirtualPage = page,
        target: VolumeId = volume,
        to: VirtualPage = page,
        len: u64 = pages,
        dead: VolumeId = volume,
    },
    /// The pool has a new length in bytes.
    12 => Grow { size: u64 = number },
    /// The device at `path` is protected in place from now on.
    14 => Protect {
        id: VolumeId = volume,
        size: u64 = size,
        chunk: u64 = chunk,
        now: u64 = number,
        identity: Identity = identity,
        name: String = name,
        path: String = origin_text,
    },
    /// Settings of the exceptions of an origin.
    15 => SetOrigin { when_full: OriginFull = when_full, id: VolumeId = volume, copy_ahead: u64 = copy_ahead },
    /// Where an origin's device is, its state when it was stopped, and whether it was stopped cleanly.
    16 => Identify {
        clean: bool = bit,
        id: VolumeId = volume,
        identity: Identity = identity,
        path: String = origin_text,
    },
    /// The stamp by which an origin's device is recognised from now on.
    50 => Stamp { id: VolumeId = volume, stamp: Box<Stamp> = stamp },
    /// The samples of these zones of an origin may be written from now on, one bit each.
    51 => ZonesWritten { id: VolumeId = volume, zones: u32 = small },
    /// `len` pages of an origin from `at` were copied out for snapshot `sequence`, to the pool from `to` on.
    17 => CopyOut {
        origin: VolumeId = volume,
        sequence: VolumeId = volume,
        at: VirtualPage = page,
        len: u32 = small,
        to: PageAddr = address,
    },
    /// A rollback of `origin` to `snapshot` has restored all chunks before `cursor`; `snapshot` 0: it has
    /// ended.
    18 => RollbackProgress { origin: VolumeId = volume, snapshot: VolumeId = volume, cursor: u64 = number },
    /// A running rollback has restored `count` chunks of `origin` from `first` on, which are listed together.
    19 => ChunksRolledBack { origin: VolumeId = volume, first: u64 = number, count: u32 = small },
    /// A new break policy and throttle.
    20 => SetCopying { id: VolumeId = volume, break_policy: BreakPolicy = policy, throttle: Throttle = throttle },
    /// New settings of the pool's copier.
    21 => SetCopier { settings: CopierSettings = copier },
    /// A new limit of what the volume may have mapped, in bytes; 0: none.
    22 => SetQuota { id: VolumeId = volume, quota: u64 = size },
    /// New file attributes of a volume or folder.
    32 => SetAttributes { id: VolumeId = volume, attributes: Option<Attributes> = attributes },
    /// A new folder.
    33 => MakeFolder {
        id: VolumeId = volume,
        now: u64 = number,
        attributes: Option<Attributes> = attributes,
        name: String = name,
    },
    /// A volume loses its name and stays until its last close.
    34 => Unlink { id: VolumeId = volume },
    /// A volume takes the name of another one, which is either still open and without a name (`kept`), or
    /// deleted.
    35 => RenameOver { id: VolumeId = volume, replaced: VolumeId = volume, kept: bool = bit, name: String = name },
    /// A folder is renamed with everything in it.
    36 => RenameFolder { from: String = name, to: String = name },
    /// `volume` gets the contents and size of `source` (0: becomes empty); its old contents continue as the
    /// dead volume `dead`.
    37 => Replace { volume: VolumeId = volume, source: VolumeId = volume, dead: VolumeId = volume },
    /// A new, empty volume without a name: an orphan.
    38 => CreateUnnamed { id: VolumeId = volume, size: u64 = size, chunk: u64 = chunk, now: u64 = number },
    /// An orphan gets a name and becomes a volume.
    39 => NameVolume { id: VolumeId = volume, name: String = name },
    /// A clone of an origin's snapshot has no backing any more.
    40 => Flatten { id: VolumeId = volume },
    /// When a volume's scattered pages are gathered.
    48 => SetGather { id: VolumeId = volume, gather: GatherPolicy = gather },
    /// In the virtual block that begins at `at`, the entries of these volumes that refer to pages in `moved`
    /// refer to their new places.
    49 => Gather {
        at: VirtualPage = block_start,
        volumes: Vec<VolumeId> = volumes,
        moved: Vec<MovedRun> = moved_runs,
    },
    /// Everything with the name `a`, or in that folder, has the name `b` from now on, and the other way round.
    53 => Exchange { a: String = name, b: String = name },
    /// The snapshots of volume `id` become those of the new, empty volume `remnant`.
    54 => KeepSnapshots { id: VolumeId = volume, remnant: VolumeId = volume, now: u64 = number, name: String = name },
    /// The extension of a volume or snapshot is this one from now on.
    55 => SetExtension { id: VolumeId = volume, extension: Box<Extension> = extension },
    /// A further name of a file.
    57 => MakeHardLink { id: VolumeId = volume, file: VolumeId = volume, name: String = name },
    /// A file takes the name of one of its hard links, which is removed; its own name is free.
    58 => TakeName { file: VolumeId = volume, link: VolumeId = volume },
    /// All of these changes or none; see [`is_part`](Record::is_part).
    52 => Transaction { parts: Vec<Record> = parts },
}

/// Kind of a snapshot without flags: it is encoded without them.
const PLAIN_SNAPSHOT_KIND: u8 = 4;

impl Record {
    /// Appends the record's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Record::Snapshot { of, now, flags } if flags.to_bits() == 0 => {
                Append::u8(out, PLAIN_SNAPSHOT_KIND);
                number::encode(now, out);
                snapshots::encode(of, out);
            }
            record => record.encode_whole(out),
        }
    }

    pub fn decode(r: &mut Reader<'_>) -> Option<Record> {
        let record = match r.u8()? {
            PLAIN_SNAPSHOT_KIND => {
                let (now, of) = (number::decode(r)?, snapshots::decode(r)?);
                Record::Snapshot { of, now, flags: SnapshotFlags::default() }
            }
            kind => Record::decode_kind(kind, r)?,
        };
        match &record {
            Record::Protect { name, path, chunk, .. } => {
                let fits = name.len() + path.len() <= MAX_ORIGIN_TEXT_BYTES && *chunk <= BLOCK_SIZE;
                fits.then_some(record)
            }
            _ => Some(record),
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

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend([self.slot, (self.len - 1) as u8]);
        out.u64s(&[self.from.0, self.to.0]);
    }

    fn decode(r: &mut Reader<'_>) -> Option<MovedRun> {
        let (slot, more) = (r.u8()?, r.u8()?);
        let len = u16::from(more) + 1;
        let moved = MovedRun { slot, len, from: PageAddr(r.u64()?), to: PageAddr(r.u64()?) };
        (usize::from(slot) + usize::from(len) <= BLOCK_PAGES as usize).then_some(moved)
    }
}

/// Declares codecs of fields, each a module with `encode` and `decode`; `decode` refuses what is out of range.
macro_rules! codecs {
    ($(
        $(#[$doc:meta])* $name:ident: $type:ty { |$value:ident, $out:ident| $encode:expr, |$r:ident| $decode:expr }
    )*) => {
        $($(#[$doc])*
        mod $name {
            use super::*;

            #[allow(clippy::ptr_arg, clippy::borrowed_box, reason = "the type is that of the field")]
            pub fn encode($value: &$type, $out: &mut Vec<u8>) {
                $encode
            }

            pub fn decode($r: &mut Reader<'_>) -> Option<$type> {
                $decode
            }
        })*
    };
}

codecs! {
    number: u64 { |value, out| Append::u64(out, *value), |r| r.u64() }
    small: u32 { |value, out| Append::u32(out, *value), |r| r.u32() }
    bit: bool { |value, out| Append::u8(out, u8::from(*value)), |r| r.u8().filter(|&bit| bit < 2).map(|bit| bit == 1) }
    volume: VolumeId { |value, out| Append::u64(out, value.0), |r| r.u64().map(VolumeId) }
    address: PageAddr { |value, out| Append::u64(out, value.0), |r| r.u64().map(PageAddr) }
    /// A page of a volume, or the end.
    page: VirtualPage { |value, out| Append::u64(out, value.0), |r| pages::decode(r).map(VirtualPage) }
    /// A number of pages of a volume.
    pages: u64 {
        |value, out| Append::u64(out, *value),
        |r| r.u64().filter(|&n| n <= MAX_VOLUME_SIZE / PAGE_SIZE as u64)
    }
    /// The first page of a virtual block.
    block_start: VirtualPage { |value, out| page::encode(value, out), |r| page::decode(r).filter(|at| at.index() == 0) }
    /// A length of a volume in bytes.
    size: u64 { |value, out| Append::u64(out, *value), |r| r.u64().filter(|&bytes| bytes <= MAX_VOLUME_SIZE) }
    chunk: u64 { |value, out| Append::u64(out, *value), |r| r.u64().filter(|&bytes| is_chunk(bytes)) }
    copy_ahead: u64 { |value, out| Append::u64(out, *value), |r| r.u64().filter(|&n| n <= MAX_COPY_AHEAD_BYTES) }
    name: String { |value, out| out.text(value), |r| r.text(MAX_NAME_BYTES) }
    origin_text: String { |value, out| out.text(value), |r| r.text(MAX_ORIGIN_TEXT_BYTES) }
    /// Flags of a snapshot that has some.
    flags: SnapshotFlags {
        |value, out| Append::u8(out, value.to_bits()),
        |r| r.u8().filter(|&bits| bits != 0).and_then(SnapshotFlags::from_bits)
    }
    identity: Identity {
        |value, out| out.u64s(&[value.modified, value.fingerprint]),
        |r| Some(Identity { modified: r.u64()?, fingerprint: r.u64()? })
    }
    when_full: OriginFull {
        |value, out| {
            let (policy, seconds) = value.to_parts();
            Append::u8(out, policy);
            Append::u32(out, seconds);
        },
        |r| OriginFull::from_parts(r.u8()?, r.u32()?)
    }
    stamp: Box<Stamp> {
        |value, out| {
            out.extend(value.zones_to_bytes());
            out.text(&value.device);
        },
        |r| {
            let (hashes, written) = Stamp::zones_from_bytes(r)?;
            Some(Box::new(Stamp { device: r.text(MAX_STAMPED_TEXT_BYTES)?, hashes, written }))
        }
    }
    policy: BreakPolicy { |value, out| Append::u8(out, policy_byte(*value)), |r| r.u8().and_then(policy_of) }
    throttle: Throttle {
        |value, out| {
            let (percent, kib) = value.encoded();
            Append::u8(out, percent);
            Append::u32(out, kib);
        },
        |r| Throttle::decoded(r.u8()?, r.u32()?)
    }
    copier: CopierSettings { |value, out| value.encode(out), |r| CopierSettings::decode(r) }
    attributes: Option<Attributes> {
        |value, out| out.extend_from_slice(&Attributes::encode(value.as_ref())),
        |r| Attributes::decode(r)
    }
    extension: Box<Extension> {
        |value, out| value.encode(out),
        |r| Extension::decode(r).map(Box::new)
    }
    gather: GatherPolicy { |value, out| Append::u8(out, value.encoded()), |r| r.u8().and_then(GatherPolicy::decoded) }
    volumes: Vec<VolumeId> {
        |value, out| {
            Append::u32(out, value.len() as u32);
            value.iter().for_each(|id| Append::u64(out, id.0));
        },
        |r| (0..r.u32()?).map(|_| volume::decode(r)).collect()
    }
    /// Source, new number and name of each snapshot.
    snapshots: Vec<(VolumeId, VolumeId, String)> {
        |value, out| {
            Append::u32(out, value.len() as u32);
            for (source, id, name) in value {
                out.u64s(&[source.0, id.0]);
                out.text(name);
            }
        },
        |r| (0..r.u32()?).map(|_| Some((volume::decode(r)?, volume::decode(r)?, name::decode(r)?))).collect()
    }
    moved_runs: Vec<MovedRun> {
        |value, out| {
            Append::u32(out, value.len() as u32);
            value.iter().for_each(|run| run.encode(out));
        },
        |r| (0..r.u32().filter(|&n| u64::from(n) <= BLOCK_PAGES)?).map(|_| MovedRun::decode(r)).collect()
    }
    parts: Vec<Record> { |value, out| transaction::encode(value, out), |r| transaction::decode(r) }
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
            Record::Rename { id: v, name: name.clone() },
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
            Record::SetExtension { id: v, extension: Box::new(crate::format::extension::tests::longest()) },
            Record::SetExtension { id: v, extension: Box::default() },
            Record::MakeHardLink { id: v, file: v, name: name.clone() },
            Record::TakeName { file: v, link: v },
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
