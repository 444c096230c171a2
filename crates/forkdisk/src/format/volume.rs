//! The directory: one slot of 512 bytes per volume or snapshot, eight to a page.

use crate::types::{Epoch, MAX_VOLUME_SIZE, PAGE_SIZE, VolumeId, is_chunk};

use super::cursor::{Append, Reader};
use super::{BreakPolicy, Entry, Throttle, TreeRoot};

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
    /// A device that is protected in place; `protects` says how.
    Origin,
}

/// What happens to a write of an origin whose old chunk cannot be kept because the pool is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OriginFull {
    /// It waits for space, this many seconds at most, then fails with ENOSPC.
    Wait(u32),
    /// It fails with ENOSPC at once.
    Error,
    /// The oldest snapshot that may be dropped is deleted; it fails with ENOSPC when there is none.
    DropOldest,
}

/// What told an origin from others when it was stopped cleanly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// When a file was last changed, in nanoseconds since 1970; 0 for a block device.
    pub modified: u64,
    /// Hash of a sample of its contents.
    pub fingerprint: u64,
}

/// What the pool keeps of an origin beside its volume record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protects {
    /// The ordered map of its kept chunks.
    pub kept: TreeRoot,
    /// Most bytes that are kept ahead of a sequential writer; a multiple of 1 KiB.
    pub copy_ahead: u64,
    /// What happens when the pool is full.
    pub when_full: OriginFull,
    /// Whether it was stopped cleanly and must be found as it was left.
    pub clean: bool,
    /// How it was left.
    pub identity: Identity,
    /// The snapshot that a rollback under way brings back, else [`NO_VOLUME`].
    pub rolling: VolumeId,
}

/// What is said of a snapshot when it is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotFlags {
    /// It has copies of its own instead of sharing the chain's (snapshots of origins).
    pub independent: bool,
    /// It may be deleted when the pool is full.
    pub droppable: bool,
}

impl SnapshotFlags {
    /// The bits on disk.
    pub fn to_bits(self) -> u8 {
        u8::from(self.independent) | u8::from(self.droppable) << 1
    }

    /// The flags of these bits; `None` if there are unknown ones.
    pub fn from_bits(bits: u8) -> Option<SnapshotFlags> {
        (bits < 4).then_some(SnapshotFlags { independent: bits & 1 != 0, droppable: bits & 2 != 0 })
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
    /// Name of what it was cloned from, as it was then; of an origin the path of its device; empty if
    /// nothing.
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
    /// For a dead volume: the first virtual page not yet given back. For an origin that is being rolled
    /// back: the first chunk not yet brought back.
    pub cursor: u64,
    /// What was said of a snapshot when it was taken.
    pub flags: SnapshotFlags,
    /// The snapshot of an origin that shows through where this volume has nothing of its own, else
    /// [`NO_VOLUME`].
    pub base: VolumeId,
    /// For an origin, also a dead one.
    pub protects: Option<Protects>,
    /// What a first write to a shared chunk does.
    pub break_policy: BreakPolicy,
    /// What copies for this volume are held to.
    pub throttle: Throttle,
}

/// Longest origin that is kept (a longer one is cut).
const MAX_ORIGIN: usize = 127;
/// Longest name and path of an origin together.
pub const MAX_ORIGIN_TEXT: usize = ORIGIN_TAIL - 96 - 4;
/// Where an origin's own fields begin, and where every slot's `base` is.
const ORIGIN_TAIL: usize = 460;
const BASE: usize = 482;
/// The last byte: flags.
const FLAGS: usize = DIRECTORY_SLOT - 1;

impl VolumeRecord {
    fn encode(&self, slot: &mut [u8]) {
        let mut out = Vec::with_capacity(DIRECTORY_SLOT);
        let state = match self.state {
            VolumeState::Volume => 1,
            VolumeState::Snapshot => 2,
            VolumeState::Dead => 3,
            VolumeState::Origin => 4,
        };
        let bits = self.flags.to_bits() | u8::from(self.protects.is_some()) << 2;
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
        let most = if self.protects.is_some() { MAX_ORIGIN_TEXT } else { MAX_ORIGIN };
        let cut = (0..=most.min(self.origin.len())).rev().find(|&n| self.origin.is_char_boundary(n));
        out.text(&self.origin[..cut.unwrap_or(0)]);
        slot[..out.len()].copy_from_slice(&out);
        slot[BASE..BASE + 8].copy_from_slice(&self.base.0.to_le_bytes());
        slot[FLAGS] = bits;
        if let Some(protects) = &self.protects {
            protects.encode(&mut slot[ORIGIN_TAIL..FLAGS]);
        }
    }

    fn decode(slot: &[u8], pool_pages: u64) -> Option<VolumeRecord> {
        let mut r = Reader(slot);
        let state = match r.u8()? {
            1 => VolumeState::Volume,
            2 => VolumeState::Snapshot,
            3 => VolumeState::Dead,
            4 => VolumeState::Origin,
            _ => return None,
        };
        let level = r.u8()?;
        let break_policy = policy_of(r.u8()?)?;
        let throttle = Throttle::decoded(r.u8()?, r.u32()?)?;
        let bits = slot[FLAGS];
        let flags = SnapshotFlags::from_bits(bits & 3).filter(|_| bits < 8)?;
        let protects = match bits & 4 {
            0 => (state != VolumeState::Origin).then_some(None)?,
            _ => Some(Protects::decode(&slot[ORIGIN_TAIL..FLAGS], pool_pages)?),
        };
        let base = VolumeId(u64::from_le_bytes(slot[BASE..BASE + 8].try_into().ok()?));
        let longest = if protects.is_some() { MAX_ORIGIN_TEXT } else { MAX_ORIGIN };
        let [id, parent, size, trim_end, chunk, referenced] =
            [r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u64()?];
        let [shared_at, created, cursor] = [r.u64()?, r.u64()?, r.u64()?];
        let root = Entry::from_bytes(r.array()?);
        let sound = (1..=4).contains(&level)
            && root.flaw(level + 1, pool_pages).is_none()
            && size <= MAX_VOLUME_SIZE
            && trim_end <= MAX_VOLUME_SIZE
            && is_chunk(chunk)
            && shared_at < 1 << 40
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
            name: r.text(MAX_NAME)?,
            origin: r.text(longest)?,
            flags,
            base,
            protects,
        })
    }
}

impl Protects {
    /// Fills the tail of a slot; `base` lies between its fields.
    fn encode(&self, tail: &mut [u8]) {
        let (policy, wait) = self.when_full.to_parts();
        let mut put = |at: usize, bytes: &[u8]| tail[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &((self.copy_ahead >> 10) as u32).to_le_bytes());
        put(4, &self.identity.modified.to_le_bytes());
        put(12, &self.identity.fingerprint.to_le_bytes());
        put(20, &[u8::from(self.clean), policy]);
        put(BASE - ORIGIN_TAIL, &self.rolling.0.to_le_bytes());
        put(30, &self.kept.entry.to_bytes());
        put(46, &wait.to_le_bytes());
        put(50, &[self.kept.height]);
    }

    fn decode(tail: &[u8], pool_pages: u64) -> Option<Protects> {
        let mut r = Reader(tail);
        let copy_ahead = u64::from(r.u32()?) << 10;
        let identity = Identity { modified: r.u64()?, fingerprint: r.u64()? };
        let (clean, policy) = (r.u8()?, r.u8()?);
        let rolling = VolumeId(r.u64()?);
        let entry = Entry::from_bytes(r.array()?);
        let when_full = OriginFull::from_parts(policy, r.u32()?)?;
        let kept = TreeRoot { entry, height: r.u8()? };
        let sound = clean <= 1 && kept.flaw(pool_pages).is_none();
        sound.then_some(Protects { kept, copy_ahead, when_full, clean: clean == 1, identity, rolling })
    }
}

impl OriginFull {
    /// The number of the policy and the seconds on disk.
    pub fn to_parts(self) -> (u8, u32) {
        match self {
            OriginFull::Wait(seconds) => (0, seconds),
            OriginFull::Error => (1, 0),
            OriginFull::DropOldest => (2, 0),
        }
    }

    /// The policy of these numbers.
    pub fn from_parts(policy: u8, seconds: u32) -> Option<OriginFull> {
        match policy {
            0 => Some(OriginFull::Wait(seconds)),
            1 => Some(OriginFull::Error),
            2 => Some(OriginFull::DropOldest),
            _ => None,
        }
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
            flags: SnapshotFlags { independent: true, droppable: true },
            base: VolumeId(u64::MAX),
            protects: None,
            break_policy: BreakPolicy::Copy,
            throttle: Throttle { percent: 1, bytes_per_second: u64::from(u32::MAX) * 1024 },
        }
    }

    #[test]
    fn an_origin_with_the_longest_path_fits_its_slot() {
        let kept = TreeRoot {
            entry: Entry::table(super::super::TableRef::on_disk(PageAddr(78)), Epoch(6), 0xdead_beef),
            height: 3,
        };
        let protects = Protects {
            kept,
            copy_ahead: 8 << 20,
            when_full: OriginFull::Wait(u32::MAX),
            clean: true,
            identity: Identity { modified: u64::MAX, fingerprint: u64::MAX },
            rolling: VolumeId(77),
        };
        let (state, base, flags) = (VolumeState::Origin, VolumeId(77), SnapshotFlags::default());
        let origin = "/".repeat(MAX_ORIGIN_TEXT - MAX_NAME);
        let record = VolumeRecord { state, base, flags, origin, protects: Some(protects), ..sample() };
        let (mut page, mut slots) = (vec![0; PAGE_SIZE], [None; SLOTS_PER_PAGE]);
        slots[0] = Some(&record);
        encode_directory_page(&slots, &mut page);
        assert_eq!(decode_directory_page(&page, 1000).expect("valid")[0].as_ref(), Some(&record));
        assert!(decode_directory_page(&page, 78).is_err(), "kept chunks outside the pool");
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
