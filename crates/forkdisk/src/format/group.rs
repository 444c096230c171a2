//! Groups of journal records, as they are written.
//!
//! A group starts at a page boundary and holds a header of 64 bytes and whole records. Its chain value covers
//! the header, the records and the chain value of the group before it, so that a group is valid only where it
//! was written. The header also contains the chain value of the group before: a group can be recognised even
//! if the one before it is damaged.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::planted::correct;
use crate::types::{PAGE_SIZE, PageAddr};

use super::Record;
use super::cursor::{Append, Reader};

/// Bytes of a group's header.
pub const GROUP_HEADER_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"fkdjrnl1";

/// Data checksum of pages that a group's records map: the group is valid only if the pages match it, or if a
/// later group says that it was durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataChecksum {
    /// The first page.
    pub to: PageAddr,
    /// Number of contiguous pages.
    pub pages: u32,
    /// [`data_checksum`] of their contents.
    pub sum: u64,
}

/// Bytes of an encoded checksum.
const DATA_CHECKSUM_BYTES: usize = 20;

impl DataChecksum {
    /// Appends its bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        Append::u64(out, self.to.0);
        Append::u32(out, self.pages);
        Append::u64(out, self.sum);
    }
}

/// Returns the checksum of `bytes`, whole pages that lie in the pool from `to` on.
pub fn data_checksum(to: PageAddr, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, to.0)
}

/// A group's header, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalGroup {
    /// Number of the open that wrote it.
    pub incarnation: u64,
    /// Sequence number of its first record.
    pub first: u64,
    /// Number of records.
    pub count: u32,
    /// Bytes of the records and of the checksums behind them (without the header).
    pub bytes: u32,
    /// Chain value over this group and everything before it.
    pub chain: u64,
    /// Everything before this sequence number was durable when it was written.
    pub confirmed: u64,
}

impl JournalGroup {
    /// Returns the bytes the group takes in the journal: whole pages.
    pub fn length(bytes: usize) -> u64 {
        (GROUP_HEADER_BYTES + bytes).next_multiple_of(PAGE_SIZE) as u64
    }
}

fn chain_value(pool: &[u8; 16], before: u64, head: &[u8], body: &[u8]) -> u64 {
    let mut all = Vec::with_capacity(16 + head.len() + body.len());
    all.extend_from_slice(pool);
    all.extend_from_slice(head);
    all.extend_from_slice(body);
    xxh3_64_with_seed(&all, before)
}

/// Returns the bytes of a group and its chain value. `group.chain` is ignored.
pub fn encode_group(pool: &[u8; 16], before: u64, group: &JournalGroup, records: &[u8]) -> (Vec<u8>, u64) {
    let mut head = Vec::with_capacity(GROUP_HEADER_BYTES);
    head.extend_from_slice(&MAGIC);
    head.u64s(&[group.incarnation, group.first, group.confirmed]);
    Append::u32(&mut head, group.count);
    Append::u32(&mut head, records.len() as u32);
    let chain = chain_value(pool, before, &head, records);
    head.u64s(&[chain, before]);
    head.resize(GROUP_HEADER_BYTES, 0);
    head.extend_from_slice(records);
    (head, chain)
}

/// Returns the header at the start of `bytes` and the chain value before it, if it looks like one; nothing is
/// verified yet.
fn peek_group(bytes: &[u8]) -> Option<(JournalGroup, u64)> {
    let mut r = Reader(bytes);
    if r.array::<8>()? != MAGIC {
        return None;
    }
    let [incarnation, first, confirmed] = [r.u64()?, r.u64()?, r.u64()?];
    Some((JournalGroup { incarnation, first, confirmed, count: r.u32()?, bytes: r.u32()?, chain: r.u64()? }, r.u64()?))
}

/// Returns the group of this pool at the start of `bytes`, whatever comes before it.
pub fn find_group(pool: &[u8; 16], bytes: &[u8]) -> Option<JournalGroup> {
    let (group, before) = peek_group(bytes)?;
    let records = bytes.get(GROUP_HEADER_BYTES..GROUP_HEADER_BYTES + group.bytes as usize)?;
    (chain_value(pool, before, &bytes[..40], records) == group.chain).then_some(group)
}

/// Returns the bytes that a group at the start of `bytes` takes in the journal, if it is one.
pub fn length_of_group(bytes: &[u8]) -> Option<u64> {
    peek_group(bytes).map(|(group, _)| JournalGroup::length(group.bytes as usize))
}

/// Result of [`decode_group`].
pub enum Decoded {
    /// A valid group, its records, and its data checksums.
    Group(JournalGroup, Vec<Record>, Vec<DataChecksum>),
    /// It may be a group, but verifying it takes this many bytes, at most `limit`.
    Needs(u64),
    /// Not a group that follows the one before.
    End,
}

/// Decodes the group at the start of `bytes`, which must follow one with chain value `before`.
/// At most `limit` bytes belong to it.
pub fn decode_group(pool: &[u8; 16], before: u64, bytes: &[u8], limit: u64) -> Decoded {
    let Some((group, said)) = peek_group(bytes) else {
        return Decoded::End;
    };
    let whole = GROUP_HEADER_BYTES + group.bytes as usize;
    let follows = correct!(
        said == before,
        Bug::EarlierRoundReplayed => true,
        Bug::StaleIncarnationReplayed => true
    );
    if !follows || JournalGroup::length(group.bytes as usize) > limit {
        return Decoded::End;
    }
    if bytes.len() < whole {
        return Decoded::Needs(JournalGroup::length(group.bytes as usize));
    }
    let records = &bytes[GROUP_HEADER_BYTES..whole];
    if chain_value(pool, said, &bytes[..40], records) != group.chain {
        return Decoded::End;
    }
    let mut r = Reader(records);
    let decoded: Option<Vec<Record>> = (0..group.count).map(|_| Record::decode(&mut r)).collect();
    let checksum = |r: &mut Reader<'_>| Some(DataChecksum { to: PageAddr(r.u64()?), pages: r.u32()?, sum: r.u64()? });
    match decoded {
        Some(decoded) if r.0.len().is_multiple_of(DATA_CHECKSUM_BYTES) => {
            let checksums = (0..r.0.len() / DATA_CHECKSUM_BYTES).map_while(|_| checksum(&mut r)).collect();
            Decoded::Group(group, decoded, checksums)
        }
        _ => Decoded::End,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::format::record::tests::samples;

    pub fn samples_witnessed() -> Vec<DataChecksum> {
        vec![
            DataChecksum { to: PageAddr(512), pages: 256, sum: 77 },
            DataChecksum { to: PageAddr(900), pages: 1, sum: u64::MAX },
        ]
    }

    pub fn group_of(records: &[Record], before: u64) -> (Vec<u8>, u64) {
        let mut body = Vec::new();
        records.iter().for_each(|r| r.encode(&mut body));
        samples_witnessed().iter().for_each(|w| w.encode(&mut body));
        let group =
            JournalGroup { incarnation: 3, first: 10, count: records.len() as u32, bytes: 0, chain: 0, confirmed: 9 };
        encode_group(&[5; 16], before, &group, &body)
    }

    #[test]
    fn a_group_out_of_place_is_not_taken() {
        let (bytes, _) = group_of(&samples(), 42);
        assert!(matches!(decode_group(&[5; 16], 43, &bytes, 1 << 20), Decoded::End), "another predecessor");
        assert!(matches!(decode_group(&[6; 16], 42, &bytes, 1 << 20), Decoded::End), "another pool");
        assert!(matches!(decode_group(&[5; 16], 42, &bytes, 100), Decoded::End), "longer than the journal");
        assert!(matches!(decode_group(&[5; 16], 42, &bytes[..70], 1 << 20), Decoded::Needs(4096)));
    }

    #[test]
    fn no_bit_of_a_group_may_flip() {
        let (bytes, _) = group_of(&samples()[..2], 1);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let reserved = (56..GROUP_HEADER_BYTES).contains(&(bit / 8));
            let taken = matches!(decode_group(&[5; 16], 1, &bad, 1 << 20), Decoded::Group(..));
            assert_eq!(taken, reserved, "bit {bit}");
            assert_eq!(find_group(&[5; 16], &bad).is_some(), reserved, "bit {bit}");
        }
    }

    #[test]
    fn a_group_is_known_without_the_one_before() {
        let (bytes, _) = group_of(&samples(), 42);
        assert_eq!(find_group(&[5; 16], &bytes).map(|g| (g.first, g.confirmed)), Some((10, 9)));
        assert_eq!(find_group(&[6; 16], &bytes), None, "another pool's");
        assert_eq!(find_group(&[5; 16], &bytes[..70]), None, "cut off");
    }
}
