//! Chunks that will be written soon are copied out together with the first copy that a snapshot needs.

use forkdisk::{Buf, CreateOptions, OpenOptions, OriginFull, OriginPlace, Pool};
use forkdisk_sim::disk::{Crash, Fault, ReadDamage, Request, When};

use crate::lab::{CHAINED, CHUNK, MIB, PATIENCE_STEPS, options, restarted, run};

#[test]
fn what_is_written_again_and_again_is_kept_with_the_first_copy_for_a_snapshot() {
    run(64 * MIB, 32 * MIB, options(8 * MIB, OriginFull::Error), |w| async move {
        for _ in 0..2 {
            w.write("org", 7 * CHUNK, 4096, 1).await;
            w.write("org", 90 * CHUNK, 4096, 1).await;
        }
        w.snapshot("s", CHAINED).await;
        let (pool, origin) = w.counts(w.write("org", 20 * MIB, 4096, 2)).await;
        assert_eq!((pool.flushes, origin.bytes_read), (1, 3 * CHUNK), "{pool:?}");
        let (pool, origin) = w
            .counts(async {
                w.write("org", 7 * CHUNK, 4096, 2).await;
                w.write("org", 90 * CHUNK, 4096, 2).await;
            })
            .await;
        assert_eq!((pool.flushes, pool.bytes_written, origin.bytes_read), (0, 0, 0));
        assert_eq!((w.byte("org@s", 7 * CHUNK, 4096).await, w.byte("org", 90 * CHUNK, 4096).await), (1, 2));
        let (pool, _) = w.counts(w.write("org", 2 * MIB, 4096, 2)).await;
        assert_eq!(pool.flushes, 1, "once for each snapshot");
    });
}

#[test]
fn where_a_log_will_go_on_is_kept_with_the_first_copy_for_a_snapshot() {
    run(64 * MIB, 32 * MIB, options(8 * MIB, OriginFull::Error), |w| async move {
        for i in 0..4 {
            w.write("org", 5 * MIB + i * 8192, 8192, 1).await;
            w.write("org", 9 * MIB + i * MIB, 4096, 1).await;
        }
        w.snapshot("s", CHAINED).await;
        w.write("org", 20 * MIB, 4096, 2).await;
        let (pool, origin) = w.counts(w.write("org", 5 * MIB + 4 * 8192, 8192, 2)).await;
        assert_eq!((pool.flushes, pool.bytes_written, origin.bytes_read), (0, 0, 0));
        assert_eq!((w.byte("org@s", 5 * MIB, 4 * 8192).await, w.byte("org@s", 5 * MIB + 4 * 8192, 8192).await), (1, 0));
    });
}

#[test]
fn what_was_kept_along_with_a_copy_that_failed_is_durable_before_it_is_believed() {
    run(64 * MIB, 32 * MIB, options(8 * MIB, OriginFull::Error), |w| async move {
        w.write("org", 90 * CHUNK, CHUNK, 1).await;
        for _ in 0..2 {
            w.write("org", 7 * CHUNK, 4096, 1).await;
            w.write("org", 90 * CHUNK, 4096, 1).await;
        }
        w.snapshot("s", CHAINED).await;
        let bad = 20 * MIB..20 * MIB + CHUNK;
        w.disks[1].arm(Fault { on: Request::Read, harm: ReadDamage::Eio, when: When::From(1), within: Some(bad) });
        let volume = w.pool.volume("org").unwrap();
        volume.write(20 * MIB, Buf::copy_of(&[2; 4096]), false).await.0.unwrap_err();
        w.disks[1].disarm();
        let (pool, _) = w.counts(w.write("org", 90 * CHUNK, 4096, 2)).await;
        assert_eq!((pool.flushes, pool.bytes_written), (0, 0), "it is kept");
        // Data written to the origin survives the power cut, what the pool has not flushed does not.
        let media = [w.disks[0].freeze(Crash::Power).crash(0), w.disks[1].freeze(Crash::Kill).crash(0)];
        let (exec, [device, origin], runtime) = restarted(media, 1);
        let bytes = exec.run(PATIENCE_STEPS, async move {
            let pool = Pool::open(device, runtime, OpenOptions::default()).await.unwrap();
            pool.attach_origin("org", origin, &OriginPlace::at("/dev/x", 0)).await.unwrap();
            let mut bytes = Vec::new();
            for name in ["org", "org@s"] {
                let (result, buf) = pool.volume(name).unwrap().read(90 * CHUNK, Buf::zeroed(4096)).await;
                result.unwrap();
                bytes.push(buf[0]);
            }
            bytes
        });
        assert_eq!(bytes.unwrap(), [2, 1]);
        exec.halt();
    });
}

/// Returns whether a first write finds space in a pool with `free` free pages, with or without chunks that
/// will be written soon.
fn finds_room(free: u64, soon: bool) -> bool {
    let found = std::rc::Rc::new(std::cell::Cell::new(false));
    let out = found.clone();
    run(16 * MIB, 32 * MIB, options(8 * MIB, OriginFull::Error), move |w| async move {
        let places = [7, 90, 200, 300].map(|chunk| chunk * CHUNK);
        for _ in 0..if soon { 2 } else { 0 } {
            for at in places {
                w.write("org", at, 4096, 1).await;
            }
        }
        w.snapshot("s", CHAINED).await;
        w.pool.create("fill", &CreateOptions::new(64 * MIB, 1)).await.unwrap();
        w.pool.wait_freed().await.unwrap();
        let fill = (w.pool.info().unused / 4096).saturating_sub(free);
        w.write("fill", 0, fill * 4096, 1).await;
        w.pool.wait_freed().await.unwrap();
        let volume = w.pool.volume("org").unwrap();
        out.set(volume.write(20 * MIB, Buf::copy_of(&[2; 4096]), false).await.0.is_ok());
    });
    found.get()
}

#[test]
fn what_nobody_has_asked_for_takes_no_space_from_who_has() {
    let levels = (60..400).step_by(10);
    let without: Vec<u64> = levels.clone().filter(|&free| finds_room(free, false)).collect();
    assert!(without.len() > 4 && without.len() < levels.clone().count(), "{without:?}");
    assert_eq!(levels.filter(|&free| finds_room(free, true)).collect::<Vec<_>>(), without);
}
