//! Recognition of an origin's device, after a crash and after it has become longer.

use forkdisk::{Buf, ErrorKind, OpenOptions, OriginChange, OriginFull, OriginPlace, Pool};
use forkdisk_sim::disk::{Config, Crash, Medium, SimDisk, Volatile};

use crate::lab::{CHAINED, CHUNK, MIB, PATIENCE_STEPS, World, options, restarted, run};

fn place() -> OriginPlace {
    OriginPlace::at("/dev/x", 0)
}

/// Returns a disk that is filled with `byte`.
fn disk_of(len: u64, byte: u8) -> Medium {
    let mut medium = Medium::blank(Config { sector: 512, cache: Volatile::Yes }, len);
    medium.damage(|image| image.write(0, &vec![byte; len as usize]));
    medium
}

/// Kills the process, and offers the pool another disk than the origin's; returns the error's text. No write
/// reaches the disk. Afterwards the origin's own is accepted.
fn offered_after_kill(w: &World, other: Medium, seed: u64) -> String {
    let [pool, origin] = w.disks.each_ref().map(|disk| disk.freeze(Crash::Kill).crash(u64::MAX));
    let (exec, [device, other], runtime) = restarted([pool, other], seed);
    let (origin, offered) = (SimDisk::new(origin, &exec, seed), other.clone());
    let refused = exec.run(PATIENCE_STEPS, async move {
        let pool = Pool::open(device, runtime, OpenOptions::default()).await.unwrap();
        let refused = pool.attach_origin("org", offered, &place()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy);
        pool.attach_origin("org", origin, &place()).await.unwrap();
        refused.to_string()
    });
    let counts = other.counts();
    assert_eq!((counts.writes, counts.flushes, counts.discards), (0, 0, 0));
    exec.halt();
    refused.unwrap()
}

#[test]
fn after_a_crash_another_disk_of_the_same_length_is_refused_before_any_write() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::Error), |w| async move {
        w.write("org", 2 * MIB, MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", 0, 512, 2).await;
        w.write("org", 5 * MIB, MIB, 3).await;
        w.pool.volume("org").unwrap().flush().await.unwrap();
        let refused = offered_after_kill(&w, disk_of(8 * MIB, 9), 1);
        assert!(refused.contains("contents have changed since it was opened last"), "{refused}");
    });
}

#[test]
fn another_disk_is_refused_in_the_middle_of_a_rollback() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::Error), |w| async move {
        w.write("org", 0, 3 * MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", 0, 3 * MIB, 2).await;
        w.pool.volume("org").unwrap().flush().await.unwrap();
        w.disks[1].slow_flushes();
        w.pool.rollback("org", "a").await.unwrap();
        assert!(w.pool.origins()[0].rolling.is_some(), "it is under way");
        let refused = offered_after_kill(&w, disk_of(8 * MIB, 9), 2);
        assert!(refused.contains("contents have changed"), "{refused}");
    });
}

#[test]
fn what_was_written_before_a_crash_makes_no_other_disk() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::Error), |w| async move {
        w.snapshot("a", CHAINED).await;
        // Everything but the second MiB.
        w.write("org", 0, MIB, 1).await;
        w.write("org", 2 * MIB, 6 * MIB, 1).await;
        for mask in 0..16 {
            let media = w.disks.each_ref().map(|disk| disk.freeze(Crash::Power).crash(mask * 0x9e37_79b9));
            let (exec, [device, origin], runtime) = restarted(media, mask);
            let comparable_zones = exec.run(PATIENCE_STEPS, async move {
                let pool = Pool::open(device, runtime, OpenOptions::default()).await.unwrap();
                let comparable_zones = pool.origins()[0].comparable_zones;
                pool.attach_origin("org", origin, &place()).await.unwrap();
                // Once it is open everything is known again.
                (comparable_zones, pool.origins()[0].comparable_zones)
            });
            let (crashed, opened) = comparable_zones.unwrap();
            assert!(crashed < opened && opened > 20, "{crashed} {opened}");
            exec.halt();
        }
    });
}

#[test]
fn a_device_of_another_identity_is_refused_unless_its_contents_were_copied_there() {
    run(64 * MIB, 8 * MIB, options(0, OriginFull::Error), |w| async move {
        let at = |identity: &str| place().with_identity(identity);
        w.write("org", 0, MIB, 1).await;
        w.pool.detach_origin("org", || 0).await.unwrap();
        let attach = async |identity| w.pool.attach_origin("org", w.disks[1].clone(), &at(identity)).await;
        // What was not known before is recorded.
        attach("wwn:1").await.unwrap();
        w.pool.detach_origin("org", || 0).await.unwrap();
        let refused = attach("wwn:2").await.unwrap_err();
        assert!(refused.to_string().contains("it is wwn:2, not wwn:1"), "{refused}");
        for identity in ["wwn:1", "", "serial:2", "wwn:1"] {
            attach(identity).await.unwrap();
            w.pool.detach_origin("org", || 0).await.unwrap();
        }
        assert!(attach("wwn:2").await.is_err(), "a serial number in between says nothing of it");
        let copy = w.disks[1].clone();
        w.pool.attach_changed_origin("org", copy, &at("wwn:3"), OriginChange::Identity).await.unwrap();
        w.pool.detach_origin("org", || 0).await.unwrap();
        assert!(attach("wwn:1").await.is_err());
        attach("wwn:3").await.unwrap();
    });
}

#[test]
fn an_origin_that_grew_is_taken_on_with_its_snapshots() {
    run(64 * MIB, 4 * MIB, options(0, OriginFull::Error), |w| async move {
        w.write("org", 0, 4 * MIB, 1).await;
        w.snapshot("a", CHAINED).await;
        w.write("org", MIB, MIB, 2).await;
        w.pool.clone_volume("org@a", "c", 1).await.unwrap();
        w.pool.detach_origin("org", || 0).await.unwrap();
        let mut longer = w.disks[1].freeze(Crash::Kill).crash(u64::MAX);
        longer.truncate(8 * MIB);
        let longer = SimDisk::new(longer, &w.exec, 9);
        let refused = w.pool.attach_origin("org", longer.clone(), &place()).await.unwrap_err();
        assert!(refused.to_string().contains("resize"), "{refused}");
        let other = SimDisk::new(disk_of(8 * MIB, 7), &w.exec, 9);
        assert!(w.pool.attach_changed_origin("org", other, &place(), OriginChange::Longer).await.is_err());
        w.pool.attach_changed_origin("org", longer.clone(), &place(), OriginChange::Longer).await.unwrap();
        let size = |name: &str| w.pool.find(name).unwrap().size;
        assert_eq!((size("org"), size("org@a"), size("c")), (8 * MIB, 4 * MIB, 4 * MIB));
        // Beyond the end of the old snapshot: for the new one only.
        w.write("org", 6 * MIB, MIB, 3).await;
        w.snapshot("b", CHAINED).await;
        w.write("org", 5 * MIB, 3 * MIB, 4).await;
        assert_eq!((w.byte("org@b", 6 * MIB, MIB).await, w.byte("org@b", 5 * MIB, MIB).await), (3, 0));
        assert_eq!((w.byte("org@a", 0, 4 * MIB).await, w.byte("c", 0, 4 * MIB).await), (1, 1));
        // A clone that becomes longer shows zeroes there, not the origin.
        w.pool.resize("c", 7 * MIB).await.unwrap();
        assert_eq!(w.byte("c", 4 * MIB, 3 * MIB).await, 0);
        w.pool.rollback("org", "a").await.unwrap();
        w.pool.wait_rollback("org", |_, _| true).await.unwrap();
        assert_eq!((size("org"), w.byte("org", 0, 4 * MIB).await), (8 * MIB, 1));
        assert_eq!((w.byte("org", 5 * MIB, 3 * MIB).await, w.byte("org@b", 6 * MIB, MIB).await), (4, 3));
        // The same after a crash.
        let pool = w.disks[0].freeze(Crash::Kill).crash(u64::MAX);
        let medium = longer.freeze(Crash::Kill).crash(u64::MAX);
        let (exec, [device, origin], runtime) = restarted([pool, medium], 4);
        let found = exec.run(PATIENCE_STEPS, async move {
            let pool = Pool::open(device, runtime, OpenOptions::default()).await.unwrap();
            pool.attach_origin("org", origin, &place()).await.unwrap();
            let (result, buf) = pool.volume("org").unwrap().read(8 * MIB - CHUNK, Buf::zeroed(CHUNK as usize)).await;
            result.unwrap();
            buf[0]
        });
        assert_eq!(found.unwrap(), 4);
        exec.halt();
    });
}
