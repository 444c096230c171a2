//! Transactions: several changes in one record of the journal, so that recovery makes all of them or none.
//!
//! A record has one sequence number, lies in one group of the journal, and is one entry of the volatile log;
//! each of these counts as a whole or not at all.

use super::Record;
use super::cursor::{Append, Reader};

/// Its kind in the journal.
pub(super) const KIND: u8 = 52;

impl Record {
    /// Whether it may be a part of a transaction: it changes names or properties, needs no page of metadata, and so
    /// never stops half-way.
    pub fn is_part(&self) -> bool {
        matches!(
            self,
            Record::Create { .. }
                | Record::Clone { .. }
                | Record::Rollback { .. }
                | Record::MakeFolder { .. }
                | Record::Resize { .. }
                | Record::SetChunk { .. }
                | Record::Protect { .. }
                | Record::SetOrigin { .. }
                | Record::Identify { .. }
                | Record::SetCopying { .. }
                | Record::SetQuota { .. }
                | Record::SetAttributes { .. }
                | Record::SetGather { .. }
                | Record::SetExtension { .. }
                | Record::Snapshot { .. }
                | Record::Stamp { .. }
                | Record::Unlink { .. }
                | Record::Delete { .. }
                | Record::Rename { .. }
                | Record::MakeHardLink { .. }
                | Record::TakeName { .. }
        )
    }
}

/// Appends the parts and their number.
pub(super) fn encode(parts: &[Record], out: &mut Vec<u8>) {
    Append::u32(out, parts.len() as u32);
    for part in parts {
        assert!(part.is_part(), "only records of verbs are in a transaction");
        part.encode(out);
    }
}

/// Decodes the parts; there is at least one.
pub(super) fn decode(r: &mut Reader<'_>) -> Option<Vec<Record>> {
    let count = r.u32().filter(|&count| count > 0)?;
    let part = |_| {
        // A transaction in a transaction must not be decoded first: its depth has no limit.
        (r.0.first() != Some(&KIND)).then_some(())?;
        Record::decode(r).filter(Record::is_part)
    };
    (0..count).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::tests::samples;

    fn bytes_of(parts: &[Record]) -> Vec<u8> {
        let mut bytes = vec![KIND];
        Append::u32(&mut bytes, parts.len() as u32);
        parts.iter().for_each(|part| part.encode(&mut bytes));
        bytes
    }

    #[test]
    fn a_transaction_has_only_parts_that_never_stop_half_way() {
        let (parts, others): (Vec<Record>, Vec<Record>) = samples().into_iter().partition(Record::is_part);
        assert!(parts.len() > 8 && others.len() > 8);
        let whole = Record::Transaction { parts };
        let mut bytes = Vec::new();
        whole.encode(&mut bytes);
        assert_eq!(Record::decode_one(&bytes), Some(whole));
        for other in others {
            assert_eq!(Record::decode_one(&bytes_of(std::slice::from_ref(&other))), None, "{other:?}");
        }
        assert_eq!(Record::decode_one(&bytes_of(&[])), None, "nothing");
    }

    #[test]
    fn a_transaction_is_neither_nested_nor_cut_off() {
        let part = Record::SetQuota { id: crate::types::VolumeId(1), quota: 0 };
        let whole = bytes_of(&[part.clone(), part]);
        assert!((0..whole.len()).all(|len| Record::decode_one(&whole[..len]).is_none()));
        let mut nested = [KIND, 1, 0, 0, 0].repeat(1 << 20);
        nested.extend(whole);
        assert_eq!(Record::decode_one(&nested), None);
    }
}
