use super::*;
use crate::format::{DirectorySlot, SLOTS_PER_PAGE, decode_directory_page, encode_directory_page};
use crate::types::{PAGE_SIZE, PageAddr};

fn sample() -> VolumeRecord {
    VolumeRecord {
        id: VolumeId(u64::MAX),
        state: VolumeState::Snapshot,
        parent: VolumeId(3),
        name: "n".repeat(MAX_NAME_BYTES).into(),
        origin: "o".repeat(MAX_ORIGIN_BYTES),
        source: VolumeId((1 << 56) - 1),
        size: MAX_VOLUME_SIZE,
        trim_end: 1,
        chunk: 65536,
        referenced: 12,
        seams: 11,
        estimated: true,
        level: 4,
        root: MapEntry::table(super::super::TableRef::on_disk(PageAddr(77)), Epoch(5), 0xdead_beef),
        shared_at: Epoch(4),
        created: 1_700_000_000,
        cursor: 1 << 38,
        flags: SnapshotFlags { independent: true, droppable: true, writable: true },
        base: VolumeId(u64::MAX),
        origin_record: None,
        stamp: None,
        break_policy: BreakPolicy::Copy,
        throttle: Throttle { percent: 1, bytes_per_second: u64::from(u32::MAX) * 1024 },
        gather: GatherPolicy::Above(99),
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
fn an_origin_with_the_longest_path_fits_its_slot() {
    let kept = TreeRoot {
        entry: MapEntry::table(super::super::TableRef::on_disk(PageAddr(78)), Epoch(6), 0xdead_beef),
        height: 3,
    };
    let protects = OriginRecord {
        exceptions: kept,
        copy_ahead: 8 << 20,
        when_full: OriginFull::Wait(u32::MAX),
        clean: true,
        identity: Identity { modified: u64::MAX, fingerprint: u64::MAX },
        rollback_to: VolumeId(77),
    };
    let (state, base, flags) = (VolumeState::Origin, NO_VOLUME, SnapshotFlags::default());
    let origin = "/".repeat(MAX_ORIGIN_TEXT_BYTES - MAX_NAME_BYTES);
    let record = VolumeRecord { state, base, flags, origin, origin_record: Some(Box::new(protects)), ..sample() };
    let (mut page, mut slots) = (vec![0; PAGE_SIZE], [None; SLOTS_PER_PAGE]);
    let record = DirectorySlot::Volume(record);
    slots[0] = Some(&record);
    encode_directory_page(&slots, &mut page);
    assert_eq!(decode_directory_page(&page, 1000).expect("valid")[0].as_ref(), Some(&record));
    assert!(decode_directory_page(&page, 78).is_err(), "kept chunks outside the pool");
}

#[test]
fn an_origin_with_the_longest_texts_and_zones_fits_its_slot() {
    let protects = OriginRecord {
        exceptions: TreeRoot::default(),
        copy_ahead: 0,
        when_full: OriginFull::Error,
        clean: false,
        identity: Identity::default(),
        rollback_to: NO_VOLUME,
    };
    let (name, device) = ("n".repeat(60), "d".repeat(66));
    let origin = "/".repeat(MAX_STAMPED_TEXT_BYTES - name.len() - device.len());
    let hashes = std::array::from_fn(|i| u16::MAX - i as u16);
    let stamp = Some(Box::new(Stamp { device, hashes, written: 1 << 31 | 1 }));
    let (state, base, flags) = (VolumeState::Origin, NO_VOLUME, SnapshotFlags::default());
    let record = VolumeRecord {
        state,
        base,
        flags,
        name: name.into(),
        origin,
        origin_record: Some(Box::new(protects)),
        stamp,
        ..sample()
    };
    let (mut page, mut slots) = (vec![0; PAGE_SIZE], [None; SLOTS_PER_PAGE]);
    let record = DirectorySlot::Volume(record);
    slots[0] = Some(&record);
    encode_directory_page(&slots, &mut page);
    assert_eq!(decode_directory_page(&page, 1000).expect("valid")[0].as_ref(), Some(&record));
    page[FLAGS_AT] &= !4;
    assert!(decode_directory_page(&page, 1000).is_err(), "zones of what is not an origin");
}

#[test]
fn a_chunk_that_no_volume_can_have_is_damage() {
    for (chunk, sound) in [(4096, true), (64 << 20, true), (1, false), (2048, false), (12288, false), (1 << 27, false)]
    {
        let record = VolumeRecord { chunk, ..sample() };
        let (mut page, mut slots) = (vec![0; PAGE_SIZE], [None; SLOTS_PER_PAGE]);
        let record = DirectorySlot::Volume(record);
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
        let record = DirectorySlot::Volume(record);
        slots[3] = Some(&record);
        encode_directory_page(&slots, &mut page);
        assert_eq!(decode_directory_page(&page, 1000).is_ok(), sound, "{quota}");
    }
}

#[test]
fn a_record_with_the_longest_names_fits_its_slot() {
    let record = DirectorySlot::Volume(sample());
    let mut page = vec![1u8; PAGE_SIZE];
    let mut slots = [None; SLOTS_PER_PAGE];
    slots[7] = Some(&record);
    encode_directory_page(&slots, &mut page);
    let again = decode_directory_page(&page, 1000).expect("valid");
    assert_eq!(again[7].as_ref(), Some(&record));
    assert!(again[..7].iter().all(Option::is_none));
    page[7 * DIRECTORY_SLOT_BYTES + 1] = 9;
    assert!(decode_directory_page(&page, 1000).is_err());
}
