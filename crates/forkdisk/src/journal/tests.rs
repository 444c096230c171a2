//! Tests of the journal.

use super::*;
use crate::format::{Decoded, decode_group};
use crate::types::{VirtualPage, VolumeId};

fn journal() -> Journal {
    Journal::new([1; 16], vec![(PageAddr(256), 2), (PageAddr(1000), 1)], 1, JournalStart::default())
}

fn map(at: u64, to: u64) -> Record {
    Record::Map { volume: VolumeId(1), at: VirtualPage(at), len: 1, to: PageAddr(to) }
}

#[test]
fn neighbouring_mappings_are_one_record() {
    let mut j = journal();
    (0..100).for_each(|i| j.append(&map(i, 5000 + i)));
    j.append(&map(100, 7000));
    let out = j.take().groups;
    let Decoded::Group(group, records, _) = decode_group(&[1; 16], 0, &out[0].bytes, 1 << 20) else { panic!() };
    assert_eq!((group.count, records.len()), (2, 2));
    assert_eq!(records[0], Record::Map { volume: VolumeId(1), at: VirtualPage(0), len: 100, to: PageAddr(5000) });
}

#[test]
fn a_record_behind_a_mark_is_not_merged_with_one_before() {
    let mut j = journal();
    j.append(&map(0, 5000));
    let start = j.mark();
    j.append(&map(1, 5001));
    let out = j.take().groups;
    let Decoded::Group(first, ..) = decode_group(&[1; 16], 0, &out[0].bytes, 1 << 20) else { panic!() };
    let Decoded::Group(second, records, _) = decode_group(&[1; 16], first.chain, &out[1].bytes, 1 << 20) else {
        panic!()
    };
    assert_eq!((second.first, second.count), (start.sequence, 1), "it is replayed, the first is not");
    assert_eq!(records, [map(1, 5001)]);
}

#[test]
fn the_group_of_a_record_is_known_before_it_is_appended() {
    let mut j = journal();
    for at in [0, 2] {
        let early = group_of(&j, &map(at, 500 + at), 7).expect("nothing is pending");
        j.append_map(&map(at, 500 + at), Some(7));
        assert!(group_of(&j, &map(9, 600), 7).is_none(), "it would not be the only one");
        assert!(j.take().groups == [early]);
    }
    j.append(&Record::Delete { ids: vec![VolumeId(5)] });
    let here = j.mark();
    j.released(here);
    assert!(group_of(&j, &map(9, 600), 7).is_none(), "the data has to be flushed first");
}

#[test]
fn a_finished_checkpoint_takes_the_records_before_its_mark() {
    let mut j = journal();
    (0..1000).for_each(|i| j.append(&map(i * 2, i)));
    assert!(!j.fits());
    let start = j.mark();
    j.append(&map(7, 7000));
    j.released(start);
    assert!(j.fits());
    let out = j.take().groups;
    let Decoded::Group(group, records, _) = decode_group(&[1; 16], 0, &out[0].bytes, 1 << 20) else { panic!() };
    assert_eq!((out.len(), group.first, records.len()), (1, start.sequence, 1));
    assert_eq!(j.pending(), 0);
}

#[test]
fn what_is_pending_fills_a_piece_when_it_reaches_its_end() {
    let mut j = journal();
    assert!(!j.fills_extent(0), "nothing is pending");
    j.append(&map(0, 1));
    assert!(!j.fills_extent(0), "one page of two");
    j.take();
    assert!(!j.fills_extent(0));
    j.append(&map(2, 1));
    assert!(j.fills_extent(2 * 4096) && !j.fills_extent(3 * 4096));
    let taken = j.take().groups;
    assert_eq!(j.segments(taken[0].position, taken[0].bytes.len()).len(), 1);
    // The next extent is one page, and behind it is the first one.
    j.append(&map(4, 1));
    assert!(j.fills_extent(4096));
    let here = j.mark();
    j.take();
    j.released(here);
    j.append(&map(6, 1));
    assert!(!j.fills_extent(0), "wrapped");
}

#[test]
fn it_goes_round_through_its_extents() {
    let mut j = journal();
    assert_eq!(j.length(), 3 * 4096);
    j.append(&map(1, 1));
    assert_eq!(j.take().groups[0].position, 0);
    let here = j.mark();
    j.released(here);
    assert_eq!(
        j.segments(4096, 2 * 4096),
        [Segment { offset: 257 * 4096, at: 0, len: 4096 }, Segment { offset: 1000 * 4096, at: 4096, len: 4096 }]
    );
    assert_eq!(j.segments(3 * 4096, 4096)[0].offset, 256 * 4096, "wrapped");
}

#[test]
fn a_full_journal_says_so() {
    let mut j = journal();
    for i in 0..3 {
        j.append(&map(i * 2, i));
        assert!(j.fits());
        j.take();
    }
    j.append(&map(99, 99));
    assert!(!j.fits());
    let here = j.mark();
    j.released(here);
    assert!(j.fits());
}

#[test]
fn it_vouches_for_data_unless_a_record_says_more_or_a_page_changes() {
    let mut j = journal();
    j.append_map(&map(1, 500), Some(7));
    j.append_map(&map(2, 501), Some(8));
    let taken = j.take();
    let Decoded::Group(group, records, checksums) = decode_group(&[1; 16], 0, &taken.groups[0].bytes, 1 << 20) else {
        panic!()
    };
    assert!(taken.covers_data && records.len() == 1, "the records are merged, what they vouch for is not");
    let expected = [(500, 7), (501, 8)].map(|(to, sum)| DataChecksum { to: PageAddr(to), pages: 1, sum });
    assert_eq!(checksums, expected);
    j.set_durable(taken.next);
    assert!(!j.checksums.may_overwrite(PageAddr(501), 1), "the device does not say that it is durable");

    let here = j.mark();
    j.released(here);
    j.append_map(&map(9, 600), Some(9));
    j.append(&Record::Delete { ids: vec![VolumeId(5)] });
    let taken = j.take();
    let Decoded::Group(_, records, checksums) = decode_group(&[1; 16], group.chain, &taken.groups[0].bytes, 1 << 20)
    else {
        panic!()
    };
    assert!(!taken.covers_data && records.len() == 2 && checksums.is_empty());
    assert!(j.checksums.may_overwrite(PageAddr(501), 1) && j.checksums.may_overwrite(PageAddr(600), 1));
}
