use std::collections::BTreeSet;

use smallvec::smallvec;

use super::*;
use crate::executor::Step;

const DISK: Config = Config { sector: 512, cache: Volatile::Yes };

fn disk(config: Config, seed: u64) -> (Executor, SimDisk) {
    let exec = Executor::new(seed);
    let disk = SimDisk::new(Medium::blank(config, 1 << 20), &exec, seed);
    (exec, disk)
}

fn segs(offset: u64, len: usize) -> Segments {
    smallvec![Segment { offset, at: 0, len }]
}

async fn put(disk: &SimDisk, offset: u64, byte: u8, sectors: usize, fua: bool) -> io::Result<()> {
    disk.write(Buf::copy_of(&vec![byte; 512 * sectors]), segs(offset, 512 * sectors), fua).await.0
}

/// Returns the first byte of each of the first `n` sectors.
fn heads(medium: &Medium, n: u64) -> Vec<u8> {
    (0..n)
        .map(|i| {
            let mut b = [0];
            medium.image().read(i * 512, &mut b);
            b[0]
        })
        .collect()
}

fn outcomes(frozen: &Frozen, n: u64) -> BTreeSet<Vec<u8>> {
    (0..frozen.masks()).map(|mask| heads(&frozen.crash(mask), n)).collect()
}

#[test]
fn between_flushes_every_sector_keeps_any_of_its_values() {
    let (exec, disk) = disk(DISK, 1);
    let d = disk.clone();
    exec.run(1000, async move {
        put(&d, 0, 1, 2, false).await.unwrap();
        d.flush().await.unwrap();
        put(&d, 0, 2, 2, false).await.unwrap();
        put(&d, 0, 3, 1, false).await.unwrap();
    })
    .unwrap();
    let frozen = disk.freeze(Crash::Power);
    assert_eq!(frozen.pending(), 3);
    let expected = [[1, 1], [1, 2], [2, 1], [2, 2], [3, 1], [3, 2]].map(|v| v.to_vec());
    assert_eq!(outcomes(&frozen, 2), BTreeSet::from(expected));
    let prints: BTreeSet<u64> = (0..frozen.masks()).map(|m| frozen.fingerprint(m)).collect();
    assert_eq!(prints.len(), 6, "one fingerprint per distinct image");
    assert_eq!(heads(&disk.freeze(Crash::Kill).crash(0), 2), [3, 2], "a kill loses nothing that completed");
}

#[test]
fn a_flush_covers_what_had_completed_when_it_was_submitted() {
    let mut late_survives = BTreeSet::new();
    for seed in 0..20 {
        let (exec, disk) = disk(DISK, seed);
        let d = disk.clone();
        exec.run(1000, async move {
            let early = d.write(Buf::copy_of(&[1; 512]), segs(0, 512), false);
            early.await.0.unwrap();
            let late = d.write(Buf::copy_of(&[2; 512]), segs(512, 512), false);
            let flush = d.flush();
            late.await.0.unwrap();
            flush.await.unwrap();
        })
        .unwrap();
        late_survives.extend(outcomes(&disk.freeze(Crash::Power), 2));
    }
    assert_eq!(late_survives, BTreeSet::from([vec![1, 0], vec![1, 2]]));
}

#[test]
fn fua_is_durable_alone_and_supersedes_what_the_cache_holds() {
    let (exec, disk) = disk(DISK, 1);
    let d = disk.clone();
    exec.run(1000, async move {
        put(&d, 0, 1, 3, false).await.unwrap();
        put(&d, 512, 2, 1, true).await.unwrap();
    })
    .unwrap();
    let all = outcomes(&disk.freeze(Crash::Power), 3);
    assert_eq!(all, BTreeSet::from([[0, 2, 0], [0, 2, 1], [1, 2, 0], [1, 2, 1]].map(|v| v.to_vec())));
    let d = disk.clone();
    exec.run(1000, async move { d.flush().await.unwrap() }).unwrap();
    assert_eq!(outcomes(&disk.freeze(Crash::Power), 3), BTreeSet::from([vec![1, 2, 1]]));
}

#[test]
fn without_a_volatile_cache_only_requests_in_flight_are_in_doubt() {
    let (exec, disk) = disk(Config { cache: Volatile::No, ..DISK }, 1);
    let d = disk.clone();
    exec.run(1000, async move { put(&d, 0, 1, 2, false).await.unwrap() }).unwrap();
    assert_eq!(outcomes(&disk.freeze(Crash::Power), 2), BTreeSet::from([vec![1, 1]]));
    let flying = disk.write(Buf::copy_of(&[2; 1024]), segs(0, 1024), false);
    assert_eq!(outcomes(&disk.freeze(Crash::Power), 2).len(), 4, "a write in flight is torn at sectors");
    drop(flying);
    while exec.step() == Step::Ran {}
    assert_eq!(outcomes(&disk.freeze(Crash::Power), 2), BTreeSet::from([vec![2, 2]]));
}

#[test]
fn what_a_kill_leaves_in_the_cache_a_power_cut_may_still_take() {
    let (exec, disk) = disk(DISK, 1);
    let d = disk.clone();
    exec.run(1000, async move { put(&d, 0, 1, 1, false).await.unwrap() }).unwrap();
    let medium = disk.freeze(Crash::Kill).crash(0);
    assert_eq!(heads(&medium, 1), [1]);
    let exec = Executor::new(2);
    let disk = SimDisk::new(medium, &exec, 2);
    assert_eq!(outcomes(&disk.freeze(Crash::Power), 1), BTreeSet::from([vec![0], vec![1]]));
    let d = disk.clone();
    exec.run(1000, async move { d.flush().await.unwrap() }).unwrap();
    assert_eq!(outcomes(&disk.freeze(Crash::Power), 1), BTreeSet::from([vec![1]]));
}

#[test]
fn discarded_bytes_are_old_zero_or_garbage_and_old_no_more_after_a_flush() {
    let mut seen = BTreeSet::new();
    for seed in 0..40 {
        let (exec, disk) = disk(DISK, seed);
        let d = disk.clone();
        exec.run(1000, async move {
            put(&d, 0, 1, 8, true).await.unwrap();
            d.discard(0, 4096).await.unwrap();
        })
        .unwrap();
        let class = |h: Vec<u8>| {
            if h.iter().all(|&b| b == 1) { 1 } else { u8::from(h.iter().any(|&b| b > 1)) * 2 }
        };
        let before: BTreeSet<u8> = outcomes(&disk.freeze(Crash::Power), 8).into_iter().map(class).collect();
        assert!(before.contains(&1) && before.len() == 2, "old or new: {before:?}");
        let d = disk.clone();
        exec.run(1000, async move { d.flush().await.unwrap() }).unwrap();
        seen.extend(outcomes(&disk.freeze(Crash::Power), 8).into_iter().map(class));
    }
    assert_eq!(seen, BTreeSet::from([0, 2]), "zero or garbage");
}

#[test]
fn the_length_is_an_item_of_its_own() {
    let (exec, disk) = disk(DISK, 1);
    let d = disk.clone();
    exec.run(1000, async move {
        d.set_len(2 << 20).await.unwrap();
        put(&d, 1 << 20, 1, 1, true).await.unwrap();
    })
    .unwrap();
    assert_eq!(disk.len(), 2 << 20);
    let lens: BTreeSet<u64> = (0..2).map(|m| disk.freeze(Crash::Power).crash(m).len()).collect();
    assert_eq!(lens, BTreeSet::from([1 << 20, 2 << 20]));
    let short = disk.freeze(Crash::Power).crash(0);
    assert!(short.image().pages().is_empty(), "what lay beyond the old end is gone, FUA or not");
    let d = disk.clone();
    exec.run(1000, async move { d.flush().await.unwrap() }).unwrap();
    assert_eq!(disk.freeze(Crash::Power).crash(0).len(), 2 << 20);
}

#[test]
fn a_failed_flush_is_not_mended_by_a_later_one() {
    let (exec, disk) = disk(DISK, 1);
    disk.arm(Fault { on: Request::Flush, harm: ReadDamage::Eio, when: When::Once(1), within: None });
    let d = disk.clone();
    exec.run(1000, async move {
        put(&d, 0, 1, 1, false).await.unwrap();
        assert!(d.flush().await.is_err());
        d.flush().await.unwrap();
    })
    .unwrap();
    assert_eq!(outcomes(&disk.freeze(Crash::Power), 1), BTreeSet::from([vec![0], vec![1]]));
    assert_eq!((disk.faults_hit(), disk.flush_faults_hit()), (1, 1));
    let d = disk.clone();
    exec.run(1000, async move { put(&d, 0, 2, 1, true).await.unwrap() }).unwrap();
    assert_eq!(outcomes(&disk.freeze(Crash::Power), 1), BTreeSet::from([vec![2]]));
}

#[test]
fn damaged_reads_succeed_and_failed_writes_land_in_part() {
    let mut landed = BTreeSet::new();
    for seed in 0..30 {
        let (exec, disk) = disk(DISK, seed);
        let d = disk.clone();
        let flips = exec
            .run(1000, async move {
                put(&d, 0, 0xff, 4, true).await.unwrap();
                d.arm(Fault { on: Request::Read, harm: ReadDamage::BitFlip, when: When::Once(1), within: None });
                d.arm(Fault { on: Request::Write, harm: ReadDamage::Eio, when: When::Once(1), within: None });
                let (result, buf) = d.read(Buf::zeroed(2048), segs(0, 2048)).await;
                result.unwrap();
                assert_eq!(put(&d, 0, 1, 4, false).await.unwrap_err().raw_os_error(), Some(5));
                buf.iter().map(|b| b.count_zeros()).sum::<u32>()
            })
            .unwrap();
        assert_eq!(flips, 1);
        landed.insert(heads(&disk.freeze(Crash::Kill).crash(0), 4).iter().filter(|&&b| b == 1).count());
    }
    assert!(landed.len() > 3, "{landed:?}");
}

#[test]
fn a_request_outside_the_contract_is_refused_and_remembered() {
    let (exec, disk) = disk(Config { sector: 4096, ..DISK }, 1);
    let d = disk.clone();
    exec.run(1000, async move {
        assert!(put(&d, 0, 1, 1, false).await.is_err(), "512 bytes on 4096-byte sectors");
        assert!(d.read(Buf::zeroed(4096), segs(1 << 20, 4096)).await.0.is_err());
    })
    .unwrap();
    assert!(disk.misuse().unwrap().contains("Write of 512 bytes"));
}

#[test]
fn a_place_in_the_buffer_that_direct_io_cannot_use_is_outside_the_contract() {
    let (exec, disk) = disk(DISK, 1);
    let d = disk.clone();
    exec.run(1000, async move {
        let ragged = smallvec![Segment { offset: 512, at: 100, len: 512 }];
        assert!(d.write(Buf::zeroed(1024), ragged, false).await.0.is_err());
    })
    .unwrap();
    assert!(disk.misuse().unwrap().contains("100 bytes into its buffer"));
}

/// A toy engine that keeps a number in two slots, to show that the crashes find what they must:
/// data, then a pointer to it. Returns whether every crash at every step found one whole record.
fn toy_survives(flush_between: bool) -> bool {
    for seed in 0..10 {
        let (exec, disk) = disk(DISK, seed);
        let d = disk.clone();
        exec.spawn(Box::pin(async move {
            for n in 1..4u8 {
                let slot = 1 + u64::from(n % 2) * 8;
                put(&d, slot * 512, n, 4, false).await.unwrap();
                if flush_between {
                    d.flush().await.unwrap();
                }
                put(&d, 0, n, 1, true).await.unwrap();
            }
        }));
        loop {
            let frozen = disk.freeze(Crash::Power);
            for mask in 0..frozen.masks() {
                let found = heads(&frozen.crash(mask), 16);
                let at = 1 + usize::from(found[0] % 2) * 8;
                if found[0] > 0 && found[at..at + 4] != [found[0]; 4] {
                    return false;
                }
            }
            if exec.step() == Step::Idle {
                break;
            }
        }
    }
    true
}

#[test]
fn a_missing_flush_is_found_and_a_correct_order_is_not_accused() {
    assert!(toy_survives(true));
    assert!(!toy_survives(false));
}

/// Clones until the disk does not refuse; sometimes it does.
async fn clone(disk: &SimDisk, from: u64, to: u64, len: u64) {
    while let Err(error) = disk.clone_range(disk, from, to, len).await {
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    }
}

#[test]
fn what_is_cloned_or_made_zero_is_lost_like_a_write() {
    let (exec, disk) = disk(DISK, 4);
    let d = disk.clone();
    exec.run(1000, async move {
        put(&d, 0, 1, 2, false).await.unwrap();
        put(&d, 1024, 3, 3, false).await.unwrap();
        d.flush().await.unwrap();
        clone(&d, 0, 1024, 1024).await;
        while d.zero_range(2048, 512).await.is_err() {}
    })
    .unwrap();
    let frozen = disk.freeze(Crash::Power);
    let states = outcomes(&frozen, 5);
    assert_eq!(states.len(), 8, "three sectors, each changed or not");
    assert!(
        states.iter().all(|s| s[..2] == [1, 1] && s[2..4].iter().all(|b| [1, 3].contains(b)) && [0, 3].contains(&s[4]))
    );
    assert_eq!(heads(&disk.freeze(Crash::Kill).crash(0), 5), [1, 1, 1, 1, 0]);
    assert!(disk.misuse().is_none());
}

#[test]
fn faults_of_writes_hit_clones() {
    let (exec, disk) = disk(DISK, 5);
    disk.arm(Fault { on: Request::Write, harm: ReadDamage::Enospc, when: When::From(1), within: Some(1024..1536) });
    let d = disk.clone();
    exec.run(1000, async move {
        loop {
            match d.clone_range(&d, 0, 1024, 512).await.unwrap_err() {
                error if error.kind() == io::ErrorKind::Unsupported => {}
                error => break assert_eq!(error.raw_os_error(), Some(28)),
            }
        }
        clone(&d, 0, 2048, 512).await;
    })
    .unwrap();
}
