//! The directory: one slot of 512 bytes per volume or snapshot, eight to a page.

use crate::types::{Epoch, MAX_VOLUME_SIZE, PAGE_SIZE, VolumeId, is_chunk};

use super::cursor::{Append, Reader};
use super::{BreakPolicy, Entry, Throttle};

/// Bytes of one slot.
pub const DIRECTORY_SLOT: usize = 512;
/// Slots in a directory page.
pub const SLOTS_PER_PAGE: usize = PAGE_SIZE / DIRECTORY_SLOT;
/// Longest name, in bytes.
pub const MAX_NAME: usize = 255;
/// Stands for "no volume".
pub const NO_VOLUME: VolumeId = VolumeId(0);

/// What a directory slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeState {
    /// Writable.
    Volume,
    /// Frozen; `parent` is the volume it was taken of.
    Snapshot,
    /// Deleted; its map is being given back, everything before `cursor` already is.
    Dead,
    /// A folder that exists whether or not a volume is in it. It has no map.
    Folder,
    /// Removed while it was open: it has no name any more and is deleted at its last close, or when the
    /// pool is opened again.
    Orphan,
}

/// What a file has beside its contents, as a mount shows it. The engine keeps it and looks at none of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits, at most 0o7777.
    pub mode: u32,
    /// Number of the owner.
    pub uid: u32,
    /// Number of the group.
    pub gid: u32,
    /// Last access, in nanoseconds since 1970.
    pub accessed: i64,
    /// Last change of the contents, in nanoseconds since 1970.
    pub modified: i64,
    /// Last change of anything, in nanoseconds since 1970.
    pub changed: i64,
}

/// Bytes of encoded attributes.
pub const ATTRIBUTES: usize = 36;
/// Set in the encoded mode: there are attributes at all.
const PRESENT: u32 = 1 << 31;

impl Attributes {
    /// The attributes' bytes; all 0 where there are none.
    pub fn encode(of: Option<&Attributes>) -> [u8; ATTRIBUTES] {
        let mut out = Vec::with_capacity(ATTRIBUTES);
        if let Some(a) = of {
            [a.mode | PRESENT, a.uid, a.gid].into_iter().for_each(|v| Append::u32(&mut out, v));
            [a.accessed, a.modified, a.changed].into_iter().for_each(|v| Append::u64(&mut out, v as u64));
        }
        out.resize(ATTRIBUTES, 0);
        out.try_into().expect("of this length")
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` if it makes no sense.
    pub fn decode(r: &mut Reader<'_>) -> Option<Option<Attributes>> {
        let (mode, uid, gid) = (r.u32()?, r.u32()?, r.u32()?);
        let [accessed, modified, changed] = [r.u64()? as i64, r.u64()? as i64, r.u64()? as i64];
        match mode {
            0 => Some(None),
            _ if mode & !(PRESENT | 0o7777) != 0 || mode & PRESENT == 0 => None,
            _ => Some(Some(Attributes { mode: mode & 0o7777, uid, gid, accessed, modified, changed })),
        }
    }
}

/// Everything the pool keeps of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    /// Its number.
    pub id: VolumeId,
    /// What it is.
    pub state: VolumeState,
    /// The volume a snapshot belongs to, else [`NO_VOLUME`].
    pub parent: VolumeId,
    /// Its name; of a snapshot the part behind `@`.
    pub name: String,
    /// Name of what it was cloned from, as it was then; empty if nothing.
    pub origin: String,
    /// Length in bytes.
    pub size: u64,
    /// End of a part beyond `size` that is still to be unmapped after shrinking (else ≤ `size`).
    pub trim_end: u64,
    /// How much room a first write reserves, in bytes.
    pub chunk: u64,
    /// Pages mapped.
    pub referenced: u64,
    /// Level of the root table, 1 to 4.
    pub level: u8,
    /// The root table's entry.
    pub root: Entry,
    /// Entries born later than this are this volume's alone.
    pub shared_at: Epoch,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// For a dead volume: the first virtual page not yet given back.
    pub cursor: u64,
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// What copies for this volume are held to.
    pub throttle: Throttle,
    /// Most bytes it may have mapped; 0: no bound. A snapshot has none.
    pub quota: u64,
    /// What it has as a file; `None` until somebody sets any of it.
    pub attributes: Option<Attributes>,
}

/// Longest origin that is kept (a longer one is cut).
const MAX_ORIGIN: usize = 93;
/// Where the attributes begin in a slot, behind the longest names.
const ATTRIBUTES_AT: usize = 448;
/// Where the quota is in a slot.
const QUOTA_AT: usize = 496;

impl VolumeRecord {
    /// A volume of length 0 that was made at `created`.
    pub fn empty(id: VolumeId, name: &str, created: u64) -> VolumeRecord {
        VolumeRecord {
            id,
            state: VolumeState::Volume,
            parent: NO_VOLUME,
            name: name.to_string(),
            origin: String::new(),
            size: 0,
            trim_end: 0,
            chunk: 65536,
            referenced: 0,
            level: 1,
            root: Entry::ABSENT,
            shared_at: Epoch(0),
            created,
            cursor: 0,
            break_policy: BreakPolicy::default(),
            throttle: Throttle::NONE,
            quota: 0,
            attributes: None,
        }
    }

    fn encode(&self, slot: &mut [u8]) {
        let mut out = Vec::with_capacity(DIRECTORY_SLOT);
        let state = match self.state {
            VolumeState::Volume => 1,
            VolumeState::Snapshot => 2,
            VolumeState::Dead => 3,
            VolumeState::Folder => 4,
            VolumeState::Orphan => 5,
        };
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
        let cut = (0..=MAX_ORIGIN.min(self.origin.len())).rev().find(|&n| self.origin.is_char_boundary(n));
        out.text(&self.origin[..cut.unwrap_or(0)]);
        slot[..out.len()].copy_from_slice(&out);
        slot[QUOTA_AT..QUOTA_AT + 8].copy_from_slice(&self.quota.to_le_bytes());
        slot[ATTRIBUTES_AT..ATTRIBUTES_AT + ATTRIBUTES].copy_from_slice(&Attributes::encode(self.attributes.as_ref()));
    }

    fn decode(slot: &[u8], pool_pages: u64) -> Option<VolumeRecord> {
        let mut r = Reader(slot);
        let state = match r.u8()? {
            1 => VolumeState::Volume,
            2 => VolumeState::Snapshot,
            3 => VolumeState::Dead,
            4 => VolumeState::Folder,
            5 => VolumeState::Orphan,
            _ => return None,
        };
        let level = r.u8()?;
        let break_policy = policy_of(r.u8()?)?;
        let throttle = Throttle::decoded(r.u8()?, r.u32()?)?;
        let [id, parent, size, trim_end, chunk, referenced] =
            [r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u64()?];
        let [shared_at, created, cursor] = [r.u64()?, r.u64()?, r.u64()?];
        let root = Entry::from_bytes(r.array()?);
        let quota = Reader(&slot[QUOTA_AT..]).u64()?;
        let attributes = Attributes::decode(&mut Reader(&slot[ATTRIBUTES_AT..]))?;
        let sound = (1..=4).contains(&level)
            && root.flaw(level + 1, pool_pages).is_none()
            && size <= MAX_VOLUME_SIZE
            && trim_end <= MAX_VOLUME_SIZE
            && quota <= MAX_VOLUME_SIZE
            && is_chunk(chunk)
            && shared_at < 1 << 40
            && (state != VolumeState::Folder || root.is_absent())
            && id != 0;
        if !sound {
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
            level,
            root,
            shared_at: Epoch(shared_at),
            created,
            cursor,
            break_policy,
            throttle,
            quota,
            attributes,
            name: r.text(MAX_NAME)?,
            origin: r.text(MAX_ORIGIN)?,
        })
    }
}

/// The byte that stands for a policy.
pub(super) fn policy_byte(policy: BreakPolicy) -> u8 {
    match policy {
        BreakPolicy::Split => 0,
        BreakPolicy::Copy => 1,
    }
}

/// The policy that a byte stands for.
pub(super) fn policy_of(byte: u8) -> Option<BreakPolicy> {
    match byte {
        0 => Some(BreakPolicy::Split),
        1 => Some(BreakPolicy::Copy),
        _ => None,
    }
}

/// Writes a directory page.
pub fn encode_directory_page(slots: &[Option<&VolumeRecord>; SLOTS_PER_PAGE], page: &mut [u8]) {
    page[..PAGE_SIZE].fill(0);
    for (slot, out) in slots.iter().zip(page.chunks_exact_mut(DIRECTORY_SLOT)) {
        if let Some(record) = slot {
            record.encode(out);
        }
    }
}

/// Reads a directory page, or says which slot is damaged.
pub fn decode_directory_page(page: &[u8], pool_pages: u64) -> Result<Vec<Option<VolumeRecord>>, String> {
    let slots = page[..PAGE_SIZE].chunks_exact(DIRECTORY_SLOT).enumerate();
    slots
        .map(|(i, slot)| match slot[0] {
            0 => Ok(None),
            _ => VolumeRecord::decode(slot, pool_pages).map(Some).ok_or_else(|| format!("slot {i} makes no sense")),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::PageAddr;

    fn sample() -> VolumeRecord {
        VolumeRecord {
            id: VolumeId(u64::MAX),
            state: VolumeState::Snapshot,
            parent: VolumeId(3),
            name: "n".repeat(MAX_NAME),
            origin: "o".repeat(MAX_ORIGIN),
            size: MAX_VOLUME_SIZE,
            trim_end: 1,
            chunk: 65536,
            referenced: 12,
            level: 4,
            root: Entry::table(super::super::TableRef::on_disk(PageAddr(77)), Epoch(5), 0xdead_beef),
            shared_at: Epoch(4),
            created: 1_700_000_000,
            cursor: 1 << 38,
            break_policy: BreakPolicy::Copy,
            throttle: Throttle { percent: 1, bytes_per_second: u64::from(u32::MAX) * 1024 },
            quota: MAX_VOLUME_SIZE,
            attributes: Some(Attributes { mode: 0o7777, uid: 1, gid: 2, accessed: -1, modified: 3, changed: i64::MAX }),
        }
    }

    #[test]
    fn attributes_are_there_or_not_and_anything_else_is_damage() {
        let none = Attributes::encode(None);
        assert_eq!(Attributes::decode(&mut Reader(&none)), Some(None));
        let mut some = Attributes::encode(Some(&Attributes { mode: 0, ..sample().attributes.unwrap() }));
        assert_eq!(Attributes::decode(&mut Reader(&some)).unwrap().unwrap().mode, 0);
        some[2] = 1;
        assert_eq!(Attributes::decode(&mut Reader(&some)), None);
    }

    #[test]
    fn a_chunk_that_no_volume_can_have_is_damage() {
        for (chunk, sound) in
            [(4096, true), (64 << 20, true), (1, false), (2048, false), (12288, false), (1 << 27, false)]
        {
            let record = VolumeRecord { chunk, ..sample() };
            let (mut page, mut slots) = (vec![0; PAGE_SIZE], [None; SLOTS_PER_PAGE]);
            slots[0] = Some(&record);
            encode_directory_page(&slots, &mut page);
            assert_eq!(decode_directory_page(&page, 1000).is_ok(), sound, "{chunk}");
        }
    }

    #[test]
    fn a_quota_that_no_volume_can_have_is_damage() {
        for (quota, sound) in [(0, true), (4096, true), (MAX_VOLUME_SIZE, true), (MAX_VOLUME_SIZE + 1, false)] {
            let record = VolumeRecord { quota, ..sample() };
            let (mut page, mut slots) = (vec![0; PAGE_SIZE], [None; SLOTS_PER_PAGE]);
            slots[3] = Some(&record);
            encode_directory_page(&slots, &mut page);
            assert_eq!(decode_directory_page(&page, 1000).is_ok(), sound, "{quota}");
        }
    }

    #[test]
    fn a_record_with_the_longest_names_fits_its_slot() {
        let record = sample();
        let mut page = vec![1u8; PAGE_SIZE];
        let mut slots = [None; SLOTS_PER_PAGE];
        slots[7] = Some(&record);
        encode_directory_page(&slots, &mut page);
        let again = decode_directory_page(&page, 1000).expect("valid");
        assert_eq!(again[7].as_ref(), Some(&record));
        assert!(again[..7].iter().all(Option::is_none));
        page[7 * DIRECTORY_SLOT + 1] = 9;
        assert!(decode_directory_page(&page, 1000).is_err());
    }
}
