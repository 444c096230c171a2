//! The break policy `copy`: a first write to a shared chunk copies the chunk. What the device counts, the
//! contents afterwards, and the effect of a failure.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod lab;
mod table;

use forkdisk::testing::RequestKind;
use forkdisk::{BreakPolicy, CopierSettings, ErrorKind, Throttle};
use lab::{KIB, Lab, MIB, places};

#[test]
fn a_break_reads_and_writes_every_byte_of_the_chunk_at_most_once() {
    let lab = Lab::new();
    let v = lab.shared(8 * MIB, MIB, BreakPolicy::Copy, 1);
    lab.write(&v, MIB + 512 * KIB, 4 * KIB, 0).expect("written");
    let seen = lab.disk.take();
    assert_eq!(seen.bytes(RequestKind::Read), MIB, "what it covers is read through: that saves a request");
    let written = places(&seen, RequestKind::WriteData);
    assert_eq!(written.iter().map(|w| w.1).sum::<u64>(), MIB);
    let last = written.last().expect("written");
    assert_eq!(last.0 + last.1 - written[0].0, MIB, "in one piece: {written:?}");
    assert_eq!(seen.count(RequestKind::Flush), 0);
    // From now on the chunk is exclusive.
    lab.write(&v, MIB, 512 * KIB, 0).expect("written");
    assert_eq!(lab.counts(), (0, 512 * KIB, 0));
    let mut expected = vec![1; 8 << 20];
    expected[1 << 20..3 << 19].fill(0);
    expected[3 << 19..(3 << 19) + 4096].fill(0);
    assert_eq!(lab.read(&v, 0, 8 * MIB), expected);
    assert_eq!(lab.read(&lab.pool.volume("v@s").expect("there"), 0, 8 * MIB), vec![1; 8 << 20]);
    lab.assert_sound();
}

#[test]
fn where_the_device_clones_nothing_is_read_and_only_the_write_is_written() {
    for (at, len, read, written) in [(512 * KIB, 4 * KIB, 0, 4 * KIB), (100, 1000, 4 * KIB, 4 * KIB)] {
        let lab = Lab::new();
        let v = lab.shared(8 * MIB, MIB, BreakPolicy::Copy, 1);
        let settings = CopierSettings::default().with_offload(true);
        lab.clock.run(lab.pool.set_copier(settings)).expect("set");
        lab.disk.take();
        let before = lab.pool.statistics();
        lab.write(&v, MIB + at, len, 0).expect("written");
        let (seen, after) = (lab.disk.take(), lab.pool.statistics());
        assert_eq!(
            (seen.bytes(RequestKind::Read), seen.bytes(RequestKind::WriteData)),
            (read, written),
            "{len} at {at}"
        );
        // The completed page is written whole.
        let cloned = MIB - read;
        assert_eq!((seen.bytes(RequestKind::Clone), seen.count(RequestKind::Clone)), (cloned, 2), "one per sub-job");
        let data = (after.data, before.data);
        assert_eq!((data.0.read.bytes - data.1.read.bytes, data.0.write.bytes - data.1.write.bytes), (read, written));
        assert_eq!(lab.pool.copying("v").expect("there").stats.bytes_offloaded, cloned);
        let mut expected = vec![1; 8 << 20];
        expected[(MIB + at) as usize..(MIB + at + len) as usize].fill(0);
        assert_eq!(lab.read(&v, 0, 8 * MIB), expected);
        assert_eq!(lab.read(&lab.pool.volume("v@s").expect("there"), 0, 8 * MIB), vec![1; 8 << 20]);
        // The clone is exclusive: writes to it reach no other volume.
        lab.write(&v, MIB, 64 * KIB, 2).expect("written");
        assert_eq!(lab.read(&lab.pool.volume("v@s").expect("there"), 0, 8 * MIB), vec![1; 8 << 20]);
        lab.assert_sound();
    }
}

#[test]
fn what_a_write_covers_is_not_read() {
    for (at, len, read) in [
        (0, MIB, 0),
        (0, 256 * KIB, 768 * KIB),
        (768 * KIB, 256 * KIB, 768 * KIB),
        (256 * KIB, 512 * KIB, 512 * KIB),
        (100, 1000, MIB),
        (4 * KIB - 512, MIB - 4 * KIB, 8 * KIB),
    ] {
        let lab = Lab::new();
        let v = lab.shared(4 * MIB, MIB, BreakPolicy::Copy, 1);
        lab.write(&v, MIB + at, len, 0).expect("written");
        assert_eq!(lab.counts(), (read, MIB, 0), "{len} bytes at {at}");
        let mut expected = vec![1; 4 << 20];
        expected[(MIB + at) as usize..(MIB + at + len) as usize].fill(0);
        assert_eq!(lab.read(&v, 0, 4 * MIB), expected);
    }
}

#[test]
fn a_write_over_several_chunks_copies_the_two_it_covers_in_part() {
    let lab = Lab::new();
    let v = lab.shared(8 * MIB, 64 * KIB, BreakPolicy::Copy, 1);
    lab.write(&v, MIB + 60 * KIB, 136 * KIB, 0).expect("written");
    assert_eq!(lab.counts(), (120 * KIB, 256 * KIB, 0), "60 KiB before and 60 KiB behind");
    let mut expected = vec![1; 8 << 20];
    expected[(MIB + 60 * KIB) as usize..(MIB + 196 * KIB) as usize].fill(0);
    assert_eq!(lab.read(&v, 0, 8 * MIB), expected);
    lab.assert_sound();
}

#[test]
fn what_was_never_written_stays_a_hole() {
    let lab = Lab::new();
    let v = lab.shared(4 * MIB, MIB, BreakPolicy::Copy, 1);
    lab.clock.run(v.discard(MIB + 128 * KIB, 256 * KIB)).expect("discarded");
    lab.clock.run(v.discard(MIB + 512 * KIB, 256 * KIB)).expect("discarded");
    lab.clock.run(lab.pool.snapshot(&[("v", "t")], 1)).expect("taken");
    lab.disk.take();
    lab.write(&v, MIB + 130 * KIB, KIB, 0).expect("written");
    let (_, written, _) = lab.counts();
    assert_eq!(written, 516 * KIB, "what is mapped, and the page that is written");
    let extents = lab.clock.run(v.extents(MIB, MIB)).expect("listed");
    let holes: u64 = extents.iter().filter(|e| !e.data).map(|e| e.len).sum();
    assert_eq!(holes, 508 * KIB);
    let mut expected = vec![1; 1 << 20];
    expected[128 << 10..384 << 10].fill(0);
    expected[512 << 10..768 << 10].fill(0);
    assert_eq!(lab.read(&v, MIB, MIB), expected);
    lab.assert_sound();
}

#[test]
fn writes_that_find_the_chunk_being_copied_go_along() {
    let lab = Lab::new();
    let v = lab.shared(4 * MIB, MIB, BreakPolicy::Copy, 1);
    // Contiguous, a gap, over the edge of a sub-job, less than a page, the end of the chunk.
    let writes = [
        (MIB, 4 * KIB, 2),
        (MIB + 4 * KIB, 4 * KIB, 3),
        (MIB + 9 * KIB, 4 * KIB, 4),
        (MIB + 510 * KIB, 4 * KIB, 5),
        (MIB + 600 * KIB + 100, 50, 6),
        (2 * MIB - 4 * KIB, 4 * KIB, 7),
    ];
    let ended = lab.write_all(&v, &writes);
    lab.await_all(&ended, writes.len());
    assert!(ended.borrow().iter().all(|(_, result)| result.is_ok()));
    let (read, written, flushes) = lab.counts();
    assert_eq!((read <= MIB, written, flushes), (true, MIB, 0), "one copy carries them all");
    let mut expected = vec![1; 1 << 20];
    for (at, len, fill) in writes {
        expected[(at - MIB) as usize..(at - MIB + len) as usize].fill(fill);
    }
    assert_eq!(lab.read(&v, MIB, MIB), expected);
    let stats = lab.pool.copying("v").expect("there").stats;
    assert_eq!((stats.jobs, stats.bytes_given), (1, writes.iter().map(|w| w.1).sum()));
    lab.assert_sound();
}

#[test]
fn a_write_before_those_that_joined_waits_for_its_turn() {
    let lab = Lab::new();
    let v = lab.shared(4 * MIB, MIB, BreakPolicy::Copy, 1);
    let writes = [(MIB + 8 * KIB, 4 * KIB, 2), (MIB + 4 * KIB, 4 * KIB, 3), (MIB + 16 * KIB, 4 * KIB, 4)];
    let ended = lab.write_all(&v, &writes);
    lab.await_all(&ended, 3);
    let seen = lab.disk.take();
    let written = places(&seen, RequestKind::WriteData);
    let chunk = written[0].0;
    assert_eq!(written[2..], [(chunk + 4 * KIB, 4 * KIB), (chunk + 16 * KIB, 4 * KIB)], "in order, in place");
    let mut expected = vec![1; 1 << 20];
    for (at, len, fill) in writes {
        expected[(at - MIB) as usize..(at - MIB + len) as usize].fill(fill);
    }
    assert_eq!(lab.read(&v, MIB, MIB), expected);
}

#[test]
fn nobody_joins_a_copy_past_those_who_wait_for_it() {
    let lab = Lab::new();
    let v = lab.shared(4 * MIB, MIB, BreakPolicy::Copy, 1);
    let first = lab.write_all(&v, &[(MIB, 4 * KIB, 2)]);
    // It cannot join: a part of it lies in the next chunk.
    let second = lab.write_all(&v, &[(2 * MIB - 8 * KIB, 16 * KIB, 3)]);
    let third = lab.write_all(&v, &[(2 * MIB - 8 * KIB, 4 * KIB, 4)]);
    for ended in [&first, &second, &third] {
        lab.await_all(ended, 1);
    }
    let mut expected = vec![1; 2 << 20];
    expected[..4 << 10].fill(2);
    expected[(1 << 20) - (8 << 10)..(1 << 20) + (8 << 10)].fill(3);
    expected[(1 << 20) - (8 << 10)..(1 << 20) - (4 << 10)].fill(4);
    assert_eq!(lab.read(&v, MIB, 2 * MIB), expected, "in the order in which they came");
    lab.assert_sound();
}

#[test]
fn a_copy_that_fails_leaves_the_old_chunk_and_no_space_taken() {
    for kind in [RequestKind::Read, RequestKind::WriteData] {
        for nth in 0..4 {
            let lab = Lab::new();
            let settings = CopierSettings::default().with_subjob_size(256 << 10);
            lab.clock.run(lab.pool.set_copier(settings)).expect("set");
            let v = lab.shared(4 * MIB, MIB, BreakPolicy::Copy, 1);
            lab.clock.run(lab.pool.checkpoint()).expect("written");
            let used = lab.pool.info().used;
            let mut seen = 0;
            // The failing device reports every write as data.
            lab.refuse(move |request| {
                let hit = request.kind == kind && request.len >= 200 * KIB;
                seen += u32::from(hit);
                hit && seen == nth + 1
            });
            let writes = [(MIB, 4 * KIB, 2), (MIB + 900 * KIB, 4 * KIB, 3), (3 * MIB, 4 * KIB, 4)];
            let ended = lab.write_all(&v, &writes);
            lab.await_all(&ended, 3);
            let results = ended.borrow().clone();
            let outcome = |i: usize| &results.iter().find(|r| r.0 == i).expect("ended").1;
            let error = outcome(0).clone().expect_err("a part of its copy failed");
            assert!(error.kind() == ErrorKind::Io && error.to_string().contains("refused"), "{error}");
            // The second had joined; it was then written separately.
            assert!(outcome(1).is_ok() && outcome(2).is_ok(), "{results:?}");
            let mut expected = vec![1; 4 << 20];
            expected[(MIB + 900 * KIB) as usize..(MIB + 904 * KIB) as usize].fill(3);
            expected[3 << 20..(3 << 20) + 4096].fill(4);
            assert_eq!(lab.read(&v, 0, 4 * MIB), expected);
            lab.write(&v, MIB, 4 * KIB, 2).expect("the next one is written");
            lab.clock.run(lab.pool.checkpoint()).expect("written");
            lab.clock.run(lab.pool.checkpoint()).expect("written");
            let grown = lab.pool.info().used - used;
            assert!((2 * MIB..2 * MIB + 128 * KIB).contains(&grown), "two chunks and tables: {grown}");
            lab.assert_sound();
        }
    }
}

#[test]
fn without_room_for_the_chunk_it_is_split() {
    let lab = Lab::new();
    let v = lab.shared(100 * MIB, 64 * MIB, BreakPolicy::Copy, 1);
    let other = forkdisk::CreateOptions::new(200 * MIB, 1);
    lab.clock.run(lab.pool.create("other", &other)).expect("created");
    let other = lab.pool.volume("other").expect("there");
    for at in 0..100 {
        lab.write(&other, at * MIB, MIB, 2).expect("written");
    }
    lab.disk.take();
    lab.write(&v, 0, 4 * KIB, 0).expect("there is room for the page");
    let (read, written, _) = lab.counts();
    assert_eq!((read, written), (0, 4 * KIB));
}

#[test]
fn the_policy_and_the_throttle_last_and_clones_have_them() {
    let mut lab = Lab::new();
    drop(lab.shared(4 * MIB, MIB, BreakPolicy::Copy, 1));
    let throttle = Throttle { percent: 50, bytes_per_second: 3 << 20 };
    lab.clock.run(lab.pool.set_throttle("v", throttle)).expect("set");
    lab.clock.run(lab.pool.clone_volume("v@s", "c", 1)).expect("cloned");
    let settings = CopierSettings::default().with_subjob_size(1 << 20).with_split_count(2).with_throttle(throttle);
    lab.clock.run(lab.pool.set_copier(settings)).expect("set");
    for close in [false, true, true] {
        lab.reopen(close);
        let of = |name| lab.pool.copying(name).expect("there");
        assert_eq!((of("v").break_policy, of("v").throttle), (BreakPolicy::Copy, throttle), "closed: {close}");
        assert_eq!((of("c").break_policy, of("c").throttle), (BreakPolicy::Copy, Throttle::NONE));
        assert_eq!(lab.pool.copier().settings, settings);
    }
    lab.clock.run(lab.pool.set_break_policy("v", BreakPolicy::Split)).expect("set");
    lab.reopen(true);
    let v = lab.pool.volume("v").expect("there");
    lab.disk.take();
    lab.write(&v, MIB, 4 * KIB, 0).expect("written");
    let (_, written, _) = lab.counts();
    assert_eq!(written, 4 * KIB);
    assert_eq!(lab.pool.copying("v@s").expect_err("a snapshot").kind(), ErrorKind::ReadOnly);
    let bad = settings.with_buffers(1);
    assert_eq!(lab.clock.run(lab.pool.set_copier(bad)).expect_err("too few").kind(), ErrorKind::Invalid);
}

#[test]
fn a_throttle_slows_the_copies_of_its_volume_only() {
    let lab = Lab::new();
    let v = lab.shared(8 * MIB, MIB, BreakPolicy::Copy, 1);
    lab.clock.run(lab.pool.clone_volume("v@s", "free", 1)).expect("cloned");
    let throttle = Throttle { percent: 100, bytes_per_second: 1 << 20 };
    lab.clock.run(lab.pool.set_throttle("v", throttle)).expect("set");
    let from = forkdisk::Runtime::now(&lab.clock);
    let slow = lab.write_all(&v, &[(0, 4 * KIB, 0), (2 * MIB, 4 * KIB, 0), (4 * MIB, 4 * KIB, 0)]);
    let free = lab.pool.volume("free").expect("there");
    let fast = lab.write_all(&free, &[(0, 4 * KIB, 0), (2 * MIB, 4 * KIB, 0), (4 * MIB, 4 * KIB, 0)]);
    lab.await_all(&fast, 3);
    assert!((forkdisk::Runtime::now(&lab.clock) - from).as_millis() < 100);
    lab.await_all(&slow, 3);
    let took = (forkdisk::Runtime::now(&lab.clock) - from).as_millis();
    assert!((2400..3000).contains(&took), "3 MiB at 1 MiB/s, the first half MiB at once: {took} ms");
}
