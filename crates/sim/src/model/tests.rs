use super::*;

const PAGE: usize = 4096;

/// Creates one volume `v` of 16 pages.
fn one() -> (Model, Key) {
    let mut model = Model::new();
    let create = model.begin(Control::Create("v".into(), 16 * PAGE as u64));
    model.apply(&create);
    (model, 1)
}

fn write(model: &mut Model, key: Key, op: u32, len: u64) -> RecId {
    model.write(key, 0, len, What::Mark(op))
}

fn flush(model: &mut Model) {
    let start = model.tick();
    model.flushed(None, start);
}

/// Returns the operations whose marks sector 0 may show; 0 stands for zeroes.
fn shows(model: &Model, key: Key, rule: Rule) -> Vec<u32> {
    let values = model.values(key, 0, rule);
    let mut ops: Vec<u32> =
        (0..20).filter(|&op| values.contains(&if op == 0 { Value::ZERO } else { Value::mark(op, 1, 0) })).collect();
    ops.sort_unstable();
    ops
}

fn now(model: &mut Model) -> Rule {
    Rule::Since(model.tick())
}

fn page(model: &Model, key: Key, op: u32) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    if op > 0 {
        model.bytes(key, 0, op, &mut bytes);
    }
    bytes
}

#[test]
fn a_crash_may_take_back_what_no_flush_covers() {
    let (mut m, v) = one();
    let a = write(&mut m, v, 1, 4096);
    m.end(a, true, false);
    assert_eq!(shows(&m, v, Rule::Crash), [0, 1]);
    let early = m.tick();
    let b = write(&mut m, v, 2, 4096);
    let rule = now(&mut m);
    assert_eq!(shows(&m, v, rule), [1, 2], "in flight: either");
    m.end(b, true, false);
    let rule = now(&mut m);
    assert_eq!(shows(&m, v, rule), [2]);
    m.flushed(Some(v), early);
    assert_eq!(shows(&m, v, Rule::Crash), [1, 2], "the flush began before the second write");
    flush(&mut m);
    assert_eq!(shows(&m, v, Rule::Crash), [2]);
}

#[test]
fn fua_is_durable_by_itself_and_a_failed_write_for_ever_in_doubt() {
    let (mut m, v) = one();
    let a = write(&mut m, v, 1, 4096);
    m.end(a, true, true);
    assert_eq!(shows(&m, v, Rule::Crash), [1]);
    let b = write(&mut m, v, 2, 4096);
    m.end(b, false, true);
    flush(&mut m);
    let rule = now(&mut m);
    assert_eq!((shows(&m, v, rule), shows(&m, v, Rule::Crash)), (vec![1, 2], vec![1, 2]));
    let c = write(&mut m, v, 3, 4096);
    m.end(c, true, true);
    assert_eq!(shows(&m, v, Rule::Crash), [3]);
}

#[test]
fn a_snapshot_is_frozen_and_durable_though_its_volume_is_not() {
    let (mut m, v) = one();
    let a = write(&mut m, v, 1, 4096);
    m.end(a, true, false);
    let snap = m.begin(Control::Snapshot(vec![(v, "s".into())]));
    let b = write(&mut m, v, 2, 4096);
    m.apply(&snap);
    m.end(b, true, false);
    assert_eq!(m.name(2), "v@s");
    assert_eq!(shows(&m, 2, Rule::Crash), [1, 2]);
    assert_eq!(shows(&m, v, Rule::Crash), [0, 1, 2], "nobody has flushed the volume");
    m.check(2, 0, &page(&m, 1, 2), Rule::Crash).unwrap();
    assert_eq!(shows(&m, 2, Rule::Crash), [2], "seen once, it stays");
    let bad = m.check(2, 0, &page(&m, 1, 1), Rule::Crash).unwrap_err();
    assert_eq!(bad.promise, "P5", "{}", bad.what);
}

#[test]
fn a_group_of_snapshots_has_to_be_one_instant() {
    let (mut m, v) = one();
    let create = m.begin(Control::Create("w".into(), 4096));
    m.apply(&create);
    let group = m.begin(Control::Snapshot(vec![(v, "s".into()), (2, "s".into())]));
    let a = write(&mut m, v, 1, 4096);
    m.end(a, true, false);
    let b = write(&mut m, 2, 2, 4096);
    m.end(b, true, false);
    m.apply(&group);
    let (without_a, with_b) = (page(&m, v, 0), page(&m, 2, 2));
    m.check(4, 0, &with_b, Rule::Crash).unwrap();
    let bad = m.check(3, 0, &without_a, Rule::Crash).unwrap_err();
    assert!(bad.what.contains("no point in time"), "{}", bad.what);
}

#[test]
fn rollback_comes_before_or_after_the_writes_beside_it() {
    let (mut m, v) = one();
    let a = write(&mut m, v, 1, 4096);
    m.end(a, true, true);
    let snap = m.begin(Control::Snapshot(vec![(v, "s".into())]));
    m.apply(&snap);
    let b = write(&mut m, v, 2, 4096);
    m.end(b, true, false);
    let back = m.begin(Control::Rollback(v, 2));
    let c = write(&mut m, v, 3, 4096);
    m.apply(&back);
    assert_eq!(shows(&m, v, Rule::Crash), [1, 3]);
    m.end(c, true, false);
    let rule = now(&mut m);
    assert_eq!(shows(&m, v, rule), [1, 3]);
}

#[test]
fn a_range_clone_shows_its_source_at_some_time_between() {
    let (mut m, v) = one();
    let a = write(&mut m, v, 1, 512);
    m.end(a, true, false);
    let far = 8 * 512;
    let r = m.clone_range((v, 0), (v, far), 512);
    let b = write(&mut m, v, 2, 512);
    m.end(b, true, false);
    m.end(r, true, false);
    let at = m.tick();
    let mut seen = m.values(v, 8, Rule::Since(at));
    seen.sort();
    assert_eq!(seen, [Value::mark(1, v, 0), Value::mark(2, v, 0)]);
    assert!(m.values(v, 8, Rule::Crash).contains(&Value::ZERO), "not flushed");
}

#[test]
fn interrupted_control_operations_are_whole() {
    let (mut m, v) = one();
    let group = m.begin(Control::Snapshot(vec![(v, "a".into()), (v, "b".into())]));
    let size = 16 * PAGE as u64;
    let mut found = m.listing();
    assert_eq!(m.applied(&group, &found).unwrap(), Applied::No);
    found.insert("v@a".into(), size.into());
    assert_eq!(m.applied(&group, &found).unwrap_err().promise, "P4");
    found.insert("v@b".into(), size.into());
    assert_eq!(m.applied(&group, &found).unwrap(), Applied::Yes);
    m.apply(&group);
    assert_eq!(m.listing(), found);
    let back = m.begin(Control::Rollback(v, 2));
    assert_eq!(m.applied(&back, &found).unwrap(), Applied::Unknown);
}

#[test]
fn accusations_name_the_promise_and_the_source() {
    let (mut m, v) = one();
    let create = m.begin(Control::Create("w".into(), 4096));
    m.apply(&create);
    for (op, key) in [(1, v), (2, v), (3, 2)] {
        let rec = write(&mut m, key, op, 4096);
        m.end(rec, true, true);
    }
    let bad = |m: &mut Model, bytes: &[u8]| m.check(v, 0, bytes, Rule::Crash).unwrap_err();
    let (stale, foreign) = (page(&m, v, 1), page(&m, 2, 3));
    let stale = bad(&mut m, &stale);
    assert_eq!(stale.promise, "P1");
    assert!(stale.what.contains("op 1 (volume #1, sector 0)") && stale.what.contains("legal: op 2"), "{}", stale.what);
    assert_eq!(bad(&mut m, &foreign).promise, "P2");
    assert_eq!(bad(&mut m, &[0x77; PAGE]).promise, "P2");
    let mut torn = page(&m, v, 2);
    torn[..100].fill(0);
    assert_eq!(bad(&mut m, &torn).promise, "P3");
}

#[test]
fn what_was_recovered_is_the_truth_from_then_on() {
    let (mut m, v) = one();
    let a = write(&mut m, v, 1, 4096);
    m.end(a, true, false);
    let half = write(&mut m, v, 2, 700);
    let bytes = page(&m, v, 1);
    m.check(v, 0, &bytes, Rule::Crash).unwrap();
    m.adopt(v, 0, &bytes);
    m.adopted();
    assert_eq!(shows(&m, v, Rule::Crash), [1]);
    assert!(m.unsettled().is_empty());
    let _ = half;
}

#[test]
fn small_writes_blend_and_shrinking_forgets() {
    let (mut m, v) = one();
    let a = write(&mut m, v, 1, 4096);
    m.end(a, true, true);
    let b = m.write(v, 100, 50, What::Mark(2));
    m.end(b, true, true);
    let mut expected = page(&m, v, 1);
    let over = page(&m, v, 2);
    expected[100..150].copy_from_slice(&over[100..150]);
    m.check(v, 0, &expected, Rule::Crash).unwrap();
    m.check(v, 90, &expected[90..700], Rule::Crash).unwrap();
    for size in [512, 16 * PAGE as u64] {
        let resize = m.begin(Control::Resize(v, size));
        m.apply(&resize);
    }
    expected[512..].fill(0);
    m.check(v, 0, &expected, Rule::Crash).unwrap();
}
