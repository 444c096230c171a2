//! Devices that clone: what is still read and written, what is merged, what fails.

use super::super::{CopyError, ProvidedBytes};
use super::*;

const MIB: u64 = 1 << 20;

fn cloning(settings: CopierSettings) -> CopierSettings {
    CopierSettings { offload: true, ..settings }
}

fn given(at: u64, len: usize, fill: u8) -> ProvidedBytes {
    ProvidedBytes { at, range: 0..len, bytes: Rc::new(Buf::copy_of(&vec![fill; len])) }
}

/// Returns the source's contents with some bytes replaced.
fn patched(from: u64, len: u64, patches: &[(u64, usize, u8)]) -> Vec<u8> {
    let mut bytes = pattern(from, len);
    patches.iter().for_each(|&(at, len, fill)| bytes[at as usize..at as usize + len].fill(fill));
    bytes
}

#[test]
fn what_is_cloned_is_neither_read_nor_written() {
    let lab = Lab::new(cloning(ample()), 3);
    let ticket = lab.copier.submit(&lab.client, lab.job(0, HALF, MIB), vec![given(200 * KIB, 8192, 9)]);
    lab.clock.run(ticket.wait_done()).expect("copied");
    let seen = lab.disk.take();
    assert_eq!(seen.count(RequestKind::Read), 0);
    assert_eq!(places(&seen, RequestKind::WriteData), [(HALF + 200 * KIB, 8192)]);
    let clones: Vec<(u64, u64)> = (0..16).map(|i| (HALF + i * 64 * KIB, 64 * KIB)).collect();
    assert_eq!(places(&seen, RequestKind::Clone), clones, "one for each sub-job, in order");
    assert_eq!(lab.contents(HALF, MIB), patched(0, MIB, &[(200 * KIB, 8192, 9)]));
    let stats = lab.client.stats();
    assert_eq!((stats.bytes_offloaded, stats.bytes_read, stats.bytes_written), (MIB, 0, 8192));
    assert_eq!(ticket.moved(), super::super::Moved { read: 0, written: 8192, offloaded: MIB });
    assert!(lab.copier.0.is_idle());
}

#[test]
fn off_means_that_nothing_is_cloned() {
    let lab = Lab::new(ample(), 3);
    lab.clock.run(lab.submit(lab.job(0, HALF, MIB)).wait_done()).expect("copied");
    assert_eq!(lab.disk.take().count(RequestKind::Clone), 0);
    assert_eq!((lab.client.stats().bytes_offloaded, lab.client.stats().bytes_read), (0, MIB));
}

#[test]
fn pages_that_are_given_in_part_are_completed_from_the_source() {
    let lab = Lab::new(cloning(ample()), 5);
    // Within a page; over an edge; a page that two make whole; two in one page.
    let patches = [(4096 + 10, 20, 1), (4 * 4096 - 7, 100, 2), (8 * 4096, 1000, 3), (8 * 4096 + 1000, 3096, 4)];
    let more = [(12 * 4096, 1, 5), (12 * 4096 + 4000, 96, 6), (64 * KIB - 1, 2, 7)];
    let all: Vec<(u64, usize, u8)> = patches.into_iter().chain(more).collect();
    let givens = all.iter().map(|&(at, len, fill)| given(at, len, fill)).collect();
    let ticket = lab.copier.submit(&lab.client, lab.job(0, HALF, 128 * KIB), givens);
    lab.clock.run(ticket.wait_done()).expect("copied");
    let seen = lab.disk.take();
    let pages = |list: &[u64], base: u64| list.iter().map(|p| base + p * 4096).collect::<Vec<u64>>();
    let read: Vec<u64> = seen
        .requests
        .iter()
        .filter(|r| r.kind == RequestKind::Read)
        .flat_map(|r| (r.offset..r.offset + r.len).step_by(4096))
        .collect();
    assert_eq!(read, pages(&[1, 3, 4, 12, 15, 16], 0));
    let written: u64 = places(&seen, RequestKind::WriteData).iter().map(|w| w.1).sum();
    assert_eq!(written, 7 * 4096);
    assert_eq!(lab.contents(HALF, 128 * KIB), patched(0, 128 * KIB, &all));
}

#[test]
fn holes_become_zeroes_and_what_is_given_whole_is_only_written() {
    let lab = Lab::new(cloning(ample()), 7);
    let stale = Buf::copy_of(&vec![0xee; 256 << 10]);
    let segment = smallvec![Segment { offset: HALF, at: 0, len: 256 << 10 }];
    lab.clock.run(lab.memory.write(stale, segment, false)).0.unwrap();
    let piece = |len, from| Piece { len, from };
    let source = vec![
        piece(64 * KIB, CopySource::Device(lab.place(MIB))),
        piece(128 * KIB, CopySource::Zeroes),
        piece(16 * KIB, CopySource::Given),
        piece(48 * KIB, CopySource::Device(lab.place(2 * MIB))),
    ];
    let givens = vec![given(192 * KIB, 16 << 10, 1), given(100 * KIB + 5, 10, 2)];
    let ticket = lab.copier.submit(&lab.client, Job { source, ..lab.job(0, HALF, 1) }, givens);
    lab.clock.run(ticket.wait_done()).expect("copied");
    let seen = lab.disk.take();
    assert_eq!((seen.bytes(RequestKind::Clone), seen.bytes(RequestKind::Zero)), (112 * KIB, 128 * KIB));
    assert_eq!((seen.bytes(RequestKind::Read), seen.bytes(RequestKind::WriteData)), (0, 20 * KIB));
    let mut expected = [pattern(MIB, 64 * KIB), vec![0; 128 << 10], vec![1; 16 << 10]].concat();
    expected.extend(pattern(2 * MIB, 48 * KIB));
    expected[(100 << 10) + 5..(100 << 10) + 15].fill(2);
    assert!(lab.contents(HALF, 256 * KIB) == expected);
}

#[test]
fn a_piece_of_which_every_page_is_written_is_not_cloned_before() {
    let lab = Lab::new(cloning(ample()), 7);
    let piece = |len, from| Piece { len, from };
    let source = vec![
        piece(4096, CopySource::Zeroes),
        piece(8192, CopySource::Device(lab.place(MIB))),
        piece(8192, CopySource::Device(lab.place(2 * MIB))),
    ];
    let givens = vec![given(5, 10, 1), given(4096 + 100, 8000, 2)];
    let ticket = lab.copier.submit(&lab.client, Job { source, ..lab.job(0, HALF, 1) }, givens);
    lab.clock.run(ticket.wait_done()).expect("copied");
    let seen = lab.disk.take();
    assert_eq!((places(&seen, RequestKind::Clone), seen.count(RequestKind::Zero)), (vec![(HALF + 12288, 8192)], 0));
    let mut expected = [vec![0; 4096], pattern(MIB, 8192), pattern(2 * MIB, 8192)].concat();
    expected[5..15].fill(1);
    expected[4196..12196].fill(2);
    assert_eq!(lab.contents(HALF, 20 * KIB), expected);
}

#[test]
fn bytes_given_while_the_device_clones_are_written_when_that_has_ended() {
    let lab = Lab::with_pace(cloning(scarce()), 9, 50);
    let ticket = lab.submit(lab.job(0, HALF, 64 * KIB));
    lab.clock.run_until_idle();
    assert!(ticket.give(given(8192, 4096, 1)) && ticket.give(given(20_000, 300, 2)));
    lab.clock.run_until_idle();
    let seen = lab.disk.take();
    assert_eq!((seen.count(RequestKind::Clone), seen.transfers()), (1, 0), "nothing on top of what is cloned now");
    lab.clock.run(ticket.wait_submitted());
    assert!(!ticket.give(given(0, 4096, 3)), "written already");
    lab.clock.run(ticket.wait_done()).expect("copied");
    assert_eq!(lab.contents(HALF, 64 * KIB), patched(0, 64 * KIB, &[(8192, 4096, 1), (20_000, 300, 2)]));
    assert_eq!(lab.client.stats().bytes_written, 8192);
}

#[test]
fn what_was_given_is_written_in_the_order_of_submission() {
    for (settings, seed) in [(scarce(), 3), (ample(), 4), (ample(), 5)] {
        let lab = Lab::with_pace(cloning(settings), seed, 200);
        let jobs = |i: u64| lab.job(i * 192 * KIB, HALF + i * 192 * KIB, 128 * KIB);
        let tickets: Vec<JobHandle> =
            (0..24).map(|i| lab.copier.submit(&lab.client, jobs(i), vec![given(i * 4 * KIB, 4096, i as u8)])).collect();
        lab.clock.run(async {
            for ticket in &tickets {
                ticket.wait_done().await.expect("copied");
            }
        });
        let seen = lab.disk.take();
        let (clones, writes) = (places(&seen, RequestKind::Clone), places(&seen, RequestKind::WriteData));
        assert_eq!((clones.len(), writes.len(), seen.count(RequestKind::Read)), (48, 24, 0));
        // Clones wait for admission, too: nothing of a job goes before all that was submitted before it.
        assert!(seen.requests.is_sorted_by_key(|r| r.offset), "{settings:?}");
        for i in 0..24 {
            let expected = patched(i * 192 * KIB, 128 * KIB, &[(i * 4 * KIB, 4096, i as u8)]);
            assert!(lab.contents(HALF + i * 192 * KIB, 128 * KIB) == expected, "job {i}");
        }
    }
}

#[test]
fn where_the_device_cannot_all_of_it_is_read_and_written() {
    let lab = Lab::new(cloning(ample()), 11);
    lab.refuse_to_clone();
    let ticket = lab.copier.submit(&lab.client, lab.job(0, HALF, 256 * KIB), vec![given(70_000, 10_000, 1)]);
    lab.clock.run(ticket.wait_done()).expect("copied");
    assert_eq!(lab.contents(HALF, 256 * KIB), patched(0, 256 * KIB, &[(70_000, 10_000, 1)]));
    let stats = lab.client.stats();
    assert_eq!((stats.bytes_offloaded, stats.bytes_written, stats.failed), (0, 256 * KIB, 0));
}

#[test]
fn a_clone_that_fails_fails_its_job_only_also_when_jobs_are_merged() {
    for bad in 0..4 {
        let lab = Lab::new(cloning(scarce()), 31);
        let place = HALF + MIB + bad * 16 * KIB;
        lab.refuse(move |r| r.kind == RequestKind::Clone && (r.offset..r.offset + r.len).contains(&place));
        let first = lab.submit(lab.job(0, HALF, 64 * KIB));
        let at = |i: u64| MIB + i * 16 * KIB;
        let tickets: Vec<JobHandle> = (0..4)
            .map(|i| {
                let job = lab.job(at(i), HALF + at(i), 16 * KIB);
                lab.copier.submit(&lab.client, job, vec![given(4096, 4096, i as u8)])
            })
            .collect();
        lab.clock.run(async {
            first.wait_done().await.expect("copied");
            for (i, ticket) in tickets.iter().enumerate() {
                match ticket.wait_done().await {
                    Ok(()) => assert_ne!(i as u64, bad),
                    Err(error) => assert!(i as u64 == bad && matches!(error, CopyError::Write(_)), "{error:?}"),
                }
            }
        });
        lab.idle();
        let written = places(&lab.disk.take(), RequestKind::WriteData);
        assert!(!written.iter().any(|w| (place..place + 16 * KIB).contains(&w.0)), "nothing on top of what failed");
        let stats = lab.client.stats();
        assert_eq!((stats.merged, stats.failed, stats.bytes_offloaded), (3, 1, 112 * KIB));
        for i in (0..4).filter(|&i| i != bad) {
            let expected = patched(at(i), 16 * KIB, &[(4096, 4096, i as u8)]);
            assert_eq!(lab.contents(HALF + at(i), 16 * KIB), expected);
        }
    }
}

#[test]
fn a_job_that_is_cancelled_while_it_is_cloned_writes_nothing_on_top() {
    let lab = Lab::with_pace(cloning(scarce()), 13, 50);
    let ticket = lab.copier.submit(&lab.client, lab.job(0, HALF, MIB), vec![given(0, 4096, 1)]);
    lab.clock.run_until_idle();
    ticket.cancel();
    assert!(!ticket.progress.ended.get(), "the clone is under way");
    assert!(matches!(lab.clock.run(ticket.wait_done()), Err(CopyError::Cancelled)));
    lab.idle();
    let seen = lab.disk.take();
    assert_eq!((seen.count(RequestKind::Clone), seen.transfers()), (1, 0));
}

#[test]
fn every_destination_gets_a_clone() {
    let lab = Lab::new(cloning(ample()), 17);
    let mut job = lab.job(4096, HALF, 64 * KIB);
    job.destinations.push(lab.place(HALF + MIB));
    let ticket = lab.copier.submit(&lab.client, job, vec![given(1, 1, 0xab)]);
    lab.clock.run(ticket.wait_done()).expect("copied");
    for at in [HALF, HALF + MIB] {
        assert_eq!(lab.contents(at, 64 * KIB), patched(4096, 64 * KIB, &[(1, 1, 0xab)]));
    }
    let stats = lab.client.stats();
    assert_eq!((stats.bytes_offloaded, stats.bytes_read, stats.bytes_written), (128 * KIB, 4 * KIB, 8 * KIB));
}
