//! A verb is one transaction: a crash leaves all of it or nothing, whatever it names, and it costs one commit.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod lab;

use std::collections::BTreeMap;

use forkdisk::testing::MemoryDevice;
use forkdisk::{
    BreakPolicy, Changes, CreateOptions, Device, ErrorKind, ForkOptions, GatherPolicy, MIN_VOLATILE_BYTES, OriginFull,
    OriginPlace, Pool, ProtectOptions, SnapshotFlags,
};

use lab::Lab;

const MIB: u64 = 1 << 20;
/// Names of a large verb.
const NAMES: usize = 1500;

fn names(prefix: &str, count: usize, length: usize) -> Vec<String> {
    (0..count).map(|i| format!("{prefix}/{i:0length$}")).collect()
}

fn strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

fn options() -> CreateOptions {
    let (break_policy, quota, gather) = (BreakPolicy::Copy, 3 * MIB, GatherPolicy::Idle);
    CreateOptions::new(MIB, 7).with_break_policy(break_policy).with_quota(quota).with_gather(gather)
}

/// The names of a pool, with everything that verbs change.
fn state<D: Device>(pool: &Pool<D>) -> BTreeMap<String, String> {
    let info = |v: forkdisk::VolumeInfo| {
        let copying = pool.copying(&v.name).map(|copying| copying.break_policy);
        (v.name, format!("{} {} {} {:?} {} {:?}", v.size, v.chunk, v.quota, v.gather, v.origin, copying.ok()))
    };
    pool.list().into_iter().map(info).collect()
}

/// The verbs of many names or properties.
#[derive(Clone, Copy, Debug)]
enum Verb {
    Create,
    Clone,
    Snapshot,
    Delete,
    RenameFolder,
    Set,
    SnapshotFolder,
    Fork,
    ForkSnapshot,
    RollbackFolder,
    Swap,
}

const VERBS: [Verb; 11] = [
    Verb::Create,
    Verb::Clone,
    Verb::Snapshot,
    Verb::Delete,
    Verb::RenameFolder,
    Verb::Set,
    Verb::SnapshotFolder,
    Verb::Fork,
    Verb::ForkSnapshot,
    Verb::RollbackFolder,
    Verb::Swap,
];

impl Verb {
    /// Prepares a pool for it.
    async fn prepare<D: Device>(self, pool: &Pool<D>, names: &[String]) {
        pool.create("source", &options()).await.unwrap();
        if !matches!(self, Verb::Create | Verb::Clone | Verb::Set) {
            pool.create_all(&strs(names), &options()).await.unwrap();
        }
        if matches!(self, Verb::ForkSnapshot | Verb::RollbackFolder) {
            pool.snapshot_folder("v", "x", SnapshotFlags::default(), 9).await.unwrap();
        }
        if matches!(self, Verb::RollbackFolder) {
            for name in names {
                pool.resize(name, 2 * MIB).await.unwrap();
            }
        }
    }

    async fn carry_out<D: Device>(self, pool: &Pool<D>, names: &[String]) {
        match self {
            Verb::Create => drop(pool.create_all(&strs(names), &options()).await.unwrap()),
            Verb::Clone => drop(pool.clone_all("source", &strs(names), 8).await.unwrap()),
            Verb::Snapshot => {
                let all: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "x")).collect();
                pool.snapshot(&all, 9).await.unwrap();
            }
            Verb::Delete => pool.delete(&strs(names)).await.unwrap(),
            Verb::RenameFolder => {
                pool.rename_folder("v", "w").unwrap();
                pool.flush().await.unwrap();
            }
            Verb::Set => {
                let changes = Changes::default()
                    .with_chunk(128 << 10)
                    .with_break_policy(BreakPolicy::Split)
                    .with_quota(5 * MIB)
                    .with_gather(GatherPolicy::Off);
                pool.set("source", &changes).await.unwrap();
            }
            Verb::SnapshotFolder => {
                let made = pool.snapshot_folder("v", "x", SnapshotFlags::default(), 9).await.unwrap();
                assert_eq!(made.len(), names.len());
            }
            Verb::Fork => {
                let changes = Changes::default().with_quota(5 * MIB).with_break_policy(BreakPolicy::Split);
                let options = ForkOptions::new(9).with_changes(changes).with_uid(5).with_gid(6).with_mode(0o600);
                assert_eq!(pool.fork("v", &["w"], &options).await.unwrap().len(), names.len());
            }
            Verb::ForkSnapshot => {
                assert_eq!(pool.fork("v@x", &["w"], &ForkOptions::new(9)).await.unwrap().len(), names.len());
            }
            Verb::Swap => pool.swap("v", "source").await.unwrap(),
            Verb::RollbackFolder => assert_eq!(pool.rollback_folder("v", "x").await.unwrap(), names),
        }
    }
}

/// Runs a verb; judges every crash of it. Returns their number, how many have nothing of it, and its cost.
fn crash_everywhere(mut lab: Lab, verb: Verb, names: &[String]) -> (usize, usize, lab::Cost) {
    lab.tasks.run(verb.prepare(&lab.pool, names));
    lab.tasks.run(lab.pool.checkpoint()).unwrap();
    lab.mark();
    let before = state(&lab.pool);
    lab.tasks.run(verb.carry_out(&lab.pool, names));
    let (cost, after) = (lab.cost(), state(&lab.pool));
    assert!(before != after, "{verb:?} changes something");
    let (mut none, mut judged, mut last) = (0, 0, BTreeMap::new());
    let count = lab.crashes(|tasks, pool| {
        last = state(pool);
        assert!(last == before || last == after, "{verb:?} took place in part: {} names", last.len());
        none += usize::from(last == before);
        judged += 1;
        if judged % 64 == 1 {
            let report = tasks.run(pool.check()).unwrap();
            assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
        }
    });
    assert!(last == after, "{verb:?} is durable when it has returned");
    (count, none, cost)
}

#[test]
fn a_crash_of_the_machine_leaves_all_of_a_verb_of_1500_names_or_nothing() {
    for verb in VERBS {
        let (count, none, _) = crash_everywhere(Lab::new(64, 0), verb, &names("v", NAMES, 60));
        assert!(none > 0 && count > none, "{verb:?}: {none} of {count}");
    }
}

#[test]
fn a_kill_leaves_all_of_a_verb_of_1500_names_or_nothing() {
    // With space for all of it in the volatile log, and without.
    for (memory, verb) in [2 * MIB as usize, MIN_VOLATILE_BYTES].into_iter().flat_map(|m| VERBS.map(|v| (m, v))) {
        let (count, none, _) = crash_everywhere(Lab::new(64, memory), verb, &names("v", NAMES, 60));
        assert!(none > 0 && count > none, "{verb:?}: {none} of {count}");
    }
}

#[test]
fn a_verb_longer_than_the_journal_of_the_smallest_pool_is_all_or_nothing() {
    let names = names("v", 3700, 240);
    for verb in [Verb::Create, Verb::Clone] {
        let (count, none, _) = crash_everywhere(Lab::new(8, MIN_VOLATILE_BYTES), verb, &names);
        assert!(none > 100 && count > none, "{verb:?}: {none} of {count}");
    }
}

#[test]
fn a_verb_that_a_pool_has_no_space_for_is_refused_and_the_pool_goes_on() {
    let mut lab = Lab::new(8, 0);
    let many = names("v", 9000, 240);
    let error = lab.tasks.run(lab.pool.create_all(&strs(&many), &options())).unwrap_err();
    assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("9000 new volumes need"), "{error}");
    assert!(state(&lab.pool).is_empty());
    lab.mark();
    lab.tasks.run(lab.pool.create("a", &options())).unwrap();
    lab.tasks.run(lab.pool.close()).unwrap();
}

#[test]
fn a_verb_of_many_names_costs_as_many_requests_as_one_of_one_name() {
    for verb in VERBS {
        let (_, _, one) = crash_everywhere(Lab::new(64, 0), verb, &names("v", 1, 60));
        let (_, _, many) = crash_everywhere(Lab::new(64, 0), verb, &names("v", NAMES, 60));
        assert_eq!(one, many, "{verb:?}");
        assert_eq!(many, lab::Cost { writes: 1, flushes: 1 }, "{verb:?}: no data comes first");
    }
}

#[test]
fn protecting_a_device_with_its_options_and_setting_them_is_one_commit_each() {
    let mut lab = Lab::new(16, 0);
    let options = ProtectOptions::new(OriginPlace::at("/dev/x", 0), 1).with_copy_ahead(MIB);
    let other = Lab::new(8, 0);
    lab.tasks.run(lab.pool.protect("o", other.pool.device().clone(), &options)).unwrap();
    assert_eq!(lab.cost(), lab::Cost { writes: 1, flushes: 1 });
    let found = |pool: &Pool<MemoryDevice>| pool.origins().pop().map(|o| (o.copy_ahead, o.when_full));
    let mut states = Vec::new();
    lab.crashes(|_, pool| states.push(found(pool)));
    states.dedup();
    assert_eq!(states, [None, Some((MIB, OriginFull::Error))]);
    lab.mark();
    let (copy_ahead, when_full) = (Some(2 * MIB), Some(OriginFull::Wait(5)));
    let changes =
        Changes::default().with_copy_ahead(copy_ahead).with_when_full(when_full).with_break_policy(BreakPolicy::Copy);
    lab.tasks.run(lab.pool.set("o", &changes)).unwrap();
    assert_eq!(lab.cost(), lab::Cost { writes: 1, flushes: 1 });
    let mut states = Vec::new();
    lab.crashes(|_, pool| states.push(found(pool)));
    states.dedup();
    assert_eq!(states, [Some((MIB, OriginFull::Error)), Some((2 * MIB, OriginFull::Wait(5)))]);
}

#[test]
fn names_that_do_not_fit_together_are_refused_before_anything_changes() {
    let lab = Lab::new(16, 0);
    lab.tasks.run(lab.pool.create("taken", &options())).unwrap();
    let before = state(&lab.pool);
    for bad in [["a", "a"], ["a/b", "a"], ["a", "a/b/c"], ["b", "taken"], ["b", "taken/c"], ["b", "b@x"]] {
        let created = lab.tasks.run(lab.pool.create_all(&bad, &options())).unwrap_err();
        let cloned = lab.tasks.run(lab.pool.clone_all("taken", &bad, 1)).unwrap_err();
        assert!(matches!(created.kind(), ErrorKind::Exists | ErrorKind::Invalid), "{bad:?}: {created}");
        assert_eq!(created.to_string(), cloned.to_string());
    }
    let bad = Changes::default().with_chunk(128 << 10).with_quota(u64::MAX);
    assert_eq!(lab.tasks.run(lab.pool.set("taken", &bad)).unwrap_err().kind(), ErrorKind::Invalid);
    let of_origins = Changes::default().with_chunk(128 << 10).with_copy_ahead(0);
    assert_eq!(lab.tasks.run(lab.pool.set("taken", &of_origins)).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(state(&lab.pool), before);
    assert_eq!(lab.tasks.run(lab.pool.create_all(&["b/c", "b/d", "b-e"], &options())).unwrap().len(), 3);
    assert!(lab.tasks.run(lab.pool.create_all(&[], &options())).unwrap().is_empty());
}
