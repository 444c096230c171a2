//! The extension of a volume or snapshot: a directory slot with what has no place in the slot of the volume itself. It
//! is a list of fields, each with a kind, so that later versions can add some.

use std::collections::BTreeMap;

use crate::types::{AccountId, CHECKSUMS, MAX_VOLUME_SIZE, NO_ACCOUNT, VolumeId};

use super::cursor::{Append, Reader};
use crate::planted::correct;

use super::inherited::{self, Inherited};

/// Longest list of fields of an extension, in bytes: what its slot has room for.
const MAX_FIELDS_BYTES: usize = super::volume::DIRECTORY_SLOT_BYTES - FIELDS_AT - 2;
/// Offset of the length of the list in a slot.
const FIELDS_AT: usize = 24;
/// Offset of the number of the volume that has the extension.
const VOLUME_AT: usize = 16;
/// The state of a directory slot that is an extension.
pub(super) const SLOT_STATE: u8 = 7;
/// Most bytes of all labels of a volume: keys, values, and [`LABEL_BYTES`] for each.
pub const MAX_LABELS_BYTES: usize = 320;
/// Bytes of a label besides its key and value.
pub const LABEL_BYTES: usize = 4;
/// Longest key of a label, in bytes.
pub const MAX_LABEL_KEY_BYTES: usize = 63;
/// Most bytes of all extended attributes of a file: names, values, and [`LABEL_BYTES`] for each. With the labels they
/// take at most [`MAX_LABELS_BYTES`].
pub const MAX_XATTRS_BYTES: usize = 256;
/// Longest name of an extended attribute, in bytes, without `user.`.
pub const MAX_XATTR_NAME_BYTES: usize = 250;
/// Longest text that says what made a volume, in bytes.
pub const MAX_CREATED_BY_BYTES: usize = 64;

/// What a volume or snapshot is deleted after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lease {
    /// The control connection with this number, of the open of the pool that made the volume.
    Connection(u64),
    /// A process.
    Process {
        /// Its process number.
        pid: u32,
        /// When it started, in ticks of the kernel's clock since the boot: another process with the same number has
        /// another start.
        start: u64,
        /// Identity of the boot of the machine that it runs on.
        boot: [u8; 16],
    },
}

/// What a volume does with written bytes that are there already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Writes {
    /// They are written.
    #[default]
    All,
    /// A write that needs new pages is compared with what is there, and what is the same is dropped page by page.
    Compare,
}

/// What a volume does with written pages of zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Zeroes {
    /// They are written.
    #[default]
    Written,
    /// They become holes.
    Holes,
}

/// Which writes a volume does not store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WritePolicy {
    /// Of bytes that are there already.
    pub writes: Writes,
    /// Of zeroes.
    pub zeroes: Zeroes,
}

impl WritePolicy {
    /// Everything that is written is stored.
    pub const ALL: WritePolicy = WritePolicy { writes: Writes::All, zeroes: Zeroes::Written };

    fn encode(self) -> u8 {
        u8::from(self.writes == Writes::Compare) | u8::from(self.zeroes == Zeroes::Holes) << 1
    }

    /// The policy that is stored as `value`; one that stores everything is not stored.
    fn decode(value: &[u8]) -> Option<WritePolicy> {
        let [bits @ 1..=3] = value else { return None };
        let writes = if bits & 1 != 0 { Writes::Compare } else { Writes::All };
        let zeroes = if bits & 2 != 0 { Zeroes::Holes } else { Zeroes::Written };
        Some(WritePolicy { writes, zeroes })
    }
}

/// The bounds of a volume: an account to which the new pages that it writes are charged, and how many of them it may
/// and can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Number of the account.
    pub account: AccountId,
    /// Most bytes that may be charged to it; 0: no limit.
    pub diverge: u64,
    /// Bytes that can be charged to it whatever else takes space; 0: none.
    pub reserve: u64,
    /// Pages charged to it, as of a checkpoint. In a record it has no meaning.
    pub charged: u64,
    /// Of a deleted volume: the folder that counts the account until nothing is charged to it; else 0.
    pub folder: VolumeId,
}

impl Bound {
    fn encode(self) -> Vec<u8> {
        [&self.account.0.to_le_bytes()[..], &self.diverge.to_le_bytes(), &self.charged.to_le_bytes()].concat()
    }

    fn decode(value: &[u8]) -> Option<Bound> {
        let mut r = Reader(value);
        let (account, diverge, charged) = (AccountId(r.u32()?), r.u64()?, r.u64()?);
        let bound = Bound { account, diverge, reserve: 0, charged, folder: VolumeId(0) };
        let is_sound = bound.account != NO_ACCOUNT && bound.account != CHECKSUMS && bound.diverge <= MAX_VOLUME_SIZE;
        (is_sound && r.0.is_empty()).then_some(bound)
    }
}

/// What the extension of a volume or snapshot stores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extension {
    /// When it expires, in seconds since 1970; 0: never.
    pub expires: u64,
    /// Time of the last open for I/O or close, in seconds since 1970; 0: not known.
    pub last_used: u64,
    /// What it is deleted after.
    pub lease: Option<Lease>,
    /// What made it; empty: not known.
    pub created_by: String,
    /// Labels: keys and values.
    pub labels: BTreeMap<String, String>,
    /// Which writes a volume does not store.
    pub writes: WritePolicy,
    /// How far a volume may diverge from what it was made from, if that is bounded.
    pub bound: Option<Bound>,
    /// Of a folder: properties of clones that are made below it.
    pub inherited: Inherited,
    /// Extended attributes of a file or folder: names without `user.`, and values.
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// Fields of later versions: kinds and values, kept as they are.
    pub unknown: Vec<(u8, Vec<u8>)>,
}

const EXPIRES_KIND: u8 = 1;
const LAST_USED_KIND: u8 = 2;
const LEASE_KIND: u8 = 3;
const CREATED_BY_KIND: u8 = 4;
const LABEL_KIND: u8 = 5;
const WRITES_KIND: u8 = 6;
const BOUND_KIND: u8 = 7;
const RESERVE_KIND: u8 = 8;
const XATTR_KIND: u8 = 9;
const FOLDER_KIND: u8 = 10;
const INHERITED_KIND: u8 = 12;
/// Unknown kinds from here on are kept; those below are damage.
const FIRST_KEPT_KIND: u8 = 128;

impl Extension {
    /// Whether there is nothing to store.
    pub fn is_empty(&self) -> bool {
        *self == Extension::default()
    }

    /// Bytes that labels take.
    pub fn labels_bytes(labels: &BTreeMap<String, String>) -> usize {
        labels.iter().map(|(key, value)| key.len() + value.len() + LABEL_BYTES).sum()
    }

    /// Bytes that extended attributes take.
    pub fn xattrs_bytes(xattrs: &BTreeMap<String, Vec<u8>>) -> usize {
        xattrs.iter().map(|(name, value)| name.len() + value.len() + LABEL_BYTES).sum()
    }

    /// Whether labels and extended attributes fit their room together.
    pub fn has_room(&self) -> bool {
        let (labels, xattrs) = (Extension::labels_bytes(&self.labels), Extension::xattrs_bytes(&self.xattrs));
        xattrs <= MAX_XATTRS_BYTES && labels + xattrs <= MAX_LABELS_BYTES
    }

    /// The fields, in the order of their kinds.
    fn fields(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut field = |kind: u8, value: &[u8]| {
            Append::u8(&mut out, kind);
            Append::u16(&mut out, value.len() as u16);
            out.extend_from_slice(value);
        };
        for (kind, time) in [(EXPIRES_KIND, self.expires), (LAST_USED_KIND, self.last_used)] {
            if time != 0 {
                field(kind, &time.to_le_bytes());
            }
        }
        if let Some(lease) = self.lease {
            field(LEASE_KIND, &lease.encode());
        }
        if !self.created_by.is_empty() {
            field(CREATED_BY_KIND, self.created_by.as_bytes());
        }
        for (key, value) in &self.labels {
            field(LABEL_KIND, &[&[key.len() as u8], key.as_bytes(), value.as_bytes()].concat());
        }
        if self.writes != WritePolicy::ALL {
            field(WRITES_KIND, &[self.writes.encode()]);
        }
        if let Some(bound) = self.bound {
            field(BOUND_KIND, &bound.encode());
            if bound.reserve != 0 {
                field(RESERVE_KIND, &bound.reserve.to_le_bytes());
            }
        }
        for (name, value) in &self.xattrs {
            field(XATTR_KIND, &[&[name.len() as u8], name.as_bytes(), value].concat());
        }
        if let Some(bound) = self.bound.filter(|bound| bound.folder.0 != 0) {
            field(FOLDER_KIND, &bound.folder.0.to_le_bytes());
        }
        if !self.inherited.is_empty() {
            field(INHERITED_KIND, &inherited::encode(&self.inherited));
        }
        self.unknown.iter().for_each(|(kind, value)| field(*kind, value));
        out
    }

    /// Appends the fields and their length.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let fields = self.fields();
        assert!(fields.len() <= MAX_FIELDS_BYTES, "an extension fits its slot");
        Append::u16(out, fields.len() as u16);
        out.extend(fields);
    }

    /// Decodes what [`encode`](Self::encode) wrote; `None` if it makes no sense.
    pub fn decode(r: &mut Reader<'_>) -> Option<Extension> {
        let len = usize::from(r.u16()?);
        (len <= MAX_FIELDS_BYTES).then_some(())?;
        let mut fields = Reader(r.bytes(len)?);
        let (mut extension, mut last) = (Extension::default(), 0);
        while !fields.0.is_empty() {
            let (kind, len) = (fields.u8()?, usize::from(fields.u16()?));
            let value = fields.bytes(len)?;
            // Each kind once, except labels, extended attributes and what is not known.
            let may_repeat = matches!(kind, LABEL_KIND | XATTR_KIND | FIRST_KEPT_KIND..);
            let is_repeated = kind == last && !may_repeat;
            (kind >= last && !is_repeated).then_some(())?;
            last = kind;
            extension.take(kind, value)?;
        }
        (extension.has_room() && extension.created_by.len() <= MAX_CREATED_BY_BYTES).then_some(extension)
    }

    fn take(&mut self, kind: u8, value: &[u8]) -> Option<()> {
        let time = || Some(u64::from_le_bytes(value.try_into().ok()?)).filter(|&time| time != 0);
        match kind {
            EXPIRES_KIND => self.expires = time()?,
            LAST_USED_KIND => self.last_used = time()?,
            LEASE_KIND => self.lease = Some(Lease::decode(value)?),
            CREATED_BY_KIND => {
                self.created_by = String::from_utf8(value.to_vec()).ok().filter(|text| !text.is_empty())?
            }
            LABEL_KIND => {
                let (len, rest) = value.split_first()?;
                let (key, value) = rest.split_at_checked(usize::from(*len))?;
                let [key, value] = [key, value].map(|text| String::from_utf8(text.to_vec()).ok());
                let is_new = self.labels.insert(key.filter(|key| !key.is_empty())?, value?).is_none();
                is_new.then_some(())?;
            }
            WRITES_KIND => self.writes = WritePolicy::decode(value)?,
            BOUND_KIND => self.bound = Some(Bound::decode(value)?),
            RESERVE_KIND => self.bound.as_mut()?.reserve = time().filter(|&bytes| bytes <= MAX_VOLUME_SIZE)?,
            FOLDER_KIND => self.bound.as_mut()?.folder = VolumeId(time()?),
            INHERITED_KIND => self.inherited = inherited::decode(value)?,
            XATTR_KIND => {
                let (len, rest) = value.split_first()?;
                let (name, value) = rest.split_at_checked(usize::from(*len))?;
                let name = String::from_utf8(name.to_vec()).ok().filter(|name| !name.is_empty())?;
                self.xattrs.insert(name, value.to_vec()).is_none().then_some(())?;
            }
            FIRST_KEPT_KIND.. => self.unknown.push((kind, value.to_vec())),
            _ => return None,
        }
        Some(())
    }

    /// Fills the slot of the extension of volume `of`.
    pub(super) fn encode_slot(&self, of: VolumeId, slot: &mut [u8]) {
        slot[0] = SLOT_STATE;
        slot[VOLUME_AT..VOLUME_AT + 8].copy_from_slice(&of.0.to_le_bytes());
        let mut fields = Vec::new();
        correct!(
            self.encode(&mut fields),
            Bug::InheritedNotCheckpointed =>
                Extension { inherited: Inherited::new(), ..self.clone() }.encode(&mut fields)
        );
        slot[FIELDS_AT..FIELDS_AT + fields.len()].copy_from_slice(&fields);
    }

    /// Decodes a slot: the number of the volume, and its extension.
    pub(super) fn decode_slot(slot: &[u8]) -> Option<(VolumeId, Extension)> {
        let of = VolumeId(Reader(&slot[VOLUME_AT..]).u64()?);
        let extension = Extension::decode(&mut Reader(&slot[FIELDS_AT..]))?;
        let is_sound = of.0 != 0 && !extension.is_empty() && slot[1..VOLUME_AT].iter().all(|&byte| byte == 0);
        is_sound.then_some((of, extension))
    }
}

impl Lease {
    fn encode(self) -> Vec<u8> {
        match self {
            Lease::Connection(number) => [&[0][..], &number.to_le_bytes()].concat(),
            Lease::Process { pid, start, boot } => [&[1][..], &pid.to_le_bytes(), &start.to_le_bytes(), &boot].concat(),
        }
    }

    fn decode(value: &[u8]) -> Option<Lease> {
        let mut r = Reader(value);
        let lease = match r.u8()? {
            0 => Lease::Connection(r.u64()?),
            1 => Lease::Process { pid: r.u32()?, start: r.u64()?, boot: r.array()? },
            _ => return None,
        };
        r.0.is_empty().then_some(lease)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The longest that this version writes.
    pub fn longest() -> Extension {
        // What attributes leave.
        let label = "k".repeat(MAX_LABELS_BYTES - MAX_XATTRS_BYTES - LABEL_BYTES);
        Extension {
            expires: u64::MAX,
            last_used: 1,
            lease: Some(Lease::Process { pid: u32::MAX, start: u64::MAX, boot: [255; 16] }),
            created_by: "c".repeat(MAX_CREATED_BY_BYTES),
            labels: BTreeMap::from([(label, String::new())]),
            writes: WritePolicy { writes: Writes::Compare, zeroes: Zeroes::Holes },
            bound: Some(Bound {
                account: AccountId(u32::MAX - 1),
                diverge: MAX_VOLUME_SIZE,
                reserve: MAX_VOLUME_SIZE,
                charged: u64::MAX,
                folder: VolumeId(0),
            }),
            // Only folders have some, and these have no labels.
            inherited: Inherited::new(),
            xattrs: BTreeMap::from([("n".repeat(200), vec![255; MAX_XATTRS_BYTES - 200 - LABEL_BYTES])]),
            unknown: Vec::new(),
        }
    }

    fn trip(extension: &Extension) -> Option<Extension> {
        let mut bytes = Vec::new();
        extension.encode(&mut bytes);
        let mut r = Reader(&bytes);
        Extension::decode(&mut r).filter(|_| r.0.is_empty())
    }

    #[test]
    fn the_longest_extension_leaves_room_in_its_slot() {
        let longest = longest();
        assert_eq!(trip(&longest).as_ref(), Some(&longest));
        // For fields of later versions: docs/format.md.
        assert_eq!(MAX_FIELDS_BYTES - longest.fields().len(), 7);
        let mut slot = [0; super::super::volume::DIRECTORY_SLOT_BYTES];
        longest.encode_slot(VolumeId(9), &mut slot);
        assert_eq!(Extension::decode_slot(&slot), Some((VolumeId(9), longest)));
    }

    #[test]
    fn the_account_of_a_deleted_volume_has_the_folder_that_it_counts_in() {
        let bound = Bound { account: AccountId(5), diverge: 0, reserve: 0, charged: 7, folder: VolumeId(9) };
        let kept = Extension { bound: Some(bound), ..Extension::default() };
        assert_eq!(trip(&kept).as_ref(), Some(&kept));
        assert_eq!(kept.fields()[23..], [10, 8, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn later_kinds_are_kept_and_earlier_unknown_ones_are_damage() {
        let later =
            Extension { unknown: vec![(128, vec![1, 2]), (128, vec![]), (255, vec![3])], ..Extension::default() };
        assert_eq!(trip(&later).as_ref(), Some(&later));
        for kind in [0, 10, 127] {
            assert_eq!(Extension::decode(&mut Reader(&[4, 0, kind, 1, 0, 0])), None, "kind {kind}");
        }
    }

    #[test]
    fn an_extension_that_makes_no_sense_is_damage() {
        let whole = |fields: &[u8]| [&(fields.len() as u16).to_le_bytes()[..], fields].concat();
        let decoded = |fields: &[u8]| Extension::decode(&mut Reader(&whole(fields)));
        let time = [1, 8, 0, 5, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(decoded(&time).map(|extension| extension.expires), Some(5));
        for bad in [
            [&time[..], &time].concat(),
            vec![1, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            vec![1, 7, 0, 5, 0, 0, 0, 0, 0, 0],
            vec![1, 8, 0, 5],
            vec![3, 1, 0, 2],
            vec![4, 0, 0],
            vec![6, 1, 0, 0],
            vec![6, 1, 0, 4],
            vec![6, 2, 0, 1, 1],
            [&[7, 20, 0, 0, 0, 0, 0, 1][..], &[0; 15]].concat(),
            [&[7, 21, 0, 1, 0, 0, 0, 1][..], &[0; 16]].concat(),
            vec![8, 8, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            vec![10, 8, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            vec![9, 0, 0],
            vec![9, 1, 0, 0],
            vec![9, 2, 0, 2, b'a'],
            vec![9, 2, 0, 1, 255],
            [[9, 3, 0, 1, b'a', b'b'], [9, 3, 0, 1, b'a', b'c']].concat(),
            vec![5, 0, 0],
            vec![5, 1, 0, 0],
            vec![5, 2, 0, 2, b'a'],
            [[5, 3, 0, 1, b'a', b'b'], [5, 3, 0, 1, b'a', b'c']].concat(),
            [&[5, 3, 0, 1, b'a', b'b'], &time[..]].concat(),
        ] {
            assert_eq!(decoded(&bad), None, "{bad:?}");
        }
        let long = Extension { labels: BTreeMap::from([("k".into(), "v".repeat(MAX_LABELS_BYTES))]), ..longest() };
        assert_eq!(decoded(&Extension { created_by: String::new(), ..long }.fields()), None);
        let many =
            Extension { xattrs: [("n".to_string(), vec![1; MAX_XATTRS_BYTES - 4])].into(), ..Default::default() };
        assert_eq!(decoded(&many.fields()), None);
        let both = Extension { labels: [("k".to_string(), "v".repeat(61))].into(), ..longest() };
        assert_eq!(decoded(&Extension { created_by: String::new(), ..both }.fields()), None);
    }
}
