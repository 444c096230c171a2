//! What the pool reports, compared with the facts: differences between volumes, and what deleting frees.

use forkdisk::{DiffClass, ErrorKind, Mode};

use super::delete::delete;
use crate::disk::PAGE;
use crate::driver::{Op, Operation, PATIENCE_STEPS, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::Key;
use crate::rng::Rng;

pub static AUDIT: Operation<Volumes> = Operation {
    name: "audit",
    weight: |profile| match profile {
        Forks => 3,
        Large => 2,
        Mixed | Calm | Crowd | Files | Ranges => 1,
        _ => 0,
    },
    launch: audit,
};

/// Volumes up to this size are compared with others.
const MAX_AUDITED_BYTES: u64 = 4 << 20;

/// Nothing else runs meanwhile, and nothing fails.
fn audit(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.drain()?;
    let sound = run.session.disk.faults_hit() == 0 && run.trouble.armed.is_none();
    if !sound || run.session.pool.info().mode != Mode::ReadWrite {
        return Ok(());
    }
    let mut rng = Rng::new(op.draws[0]);
    compare_two(run, &mut rng)?;
    foretell(run, &mut rng)
}

/// `diff` never reports different ranges as equal, nor a hole as data.
fn compare_two(run: &mut Run, rng: &mut Rng) -> Result<(), Violation> {
    let small = run.known.model.volumes().filter(|(_, v)| v.size <= MAX_AUDITED_BYTES);
    let keys: Vec<Key> = small.map(|(key, _)| key).collect();
    if keys.is_empty() {
        return Ok(());
    }
    let names = [*rng.pick(&keys), *rng.pick(&keys)].map(|key| run.known.model.name(key));
    let [left, right] = [&names[0], &names[1]].map(|name| whole(run, name));
    let (left, right) = (left?, right?);
    let (pool, [a, b]) = (run.session.pool.clone(), names.clone());
    let runs = run.session.exec.run(PATIENCE_STEPS, async move { pool.diff(&a, &b).await })?;
    let runs = runs.map_err(|e| Violation::new("P6", format!("diff of {names:?} failed: {e}")))?;
    let mut at = 0;
    for run in &runs {
        let part = |all: &[u8]| {
            let range = (run.offset as usize).min(all.len())..((run.offset + run.len) as usize).min(all.len());
            all[range].to_vec()
        };
        let (l, r) = (part(&left), part(&right));
        let zero = |bytes: &[u8]| bytes.iter().all(|&b| b == 0);
        let longer = l.len().max(r.len());
        let padded = |bytes: &[u8]| [bytes, &vec![0; longer - bytes.len()]].concat();
        let right_class = match run.class {
            DiffClass::Same => padded(&l) == padded(&r),
            DiffClass::LeftOnly => zero(&r),
            DiffClass::RightOnly => zero(&l),
            DiffClass::Different => true,
        };
        if !right_class || run.offset != at || run.len == 0 {
            return Err(Violation::new("P5", format!("diff of {names:?} says {run:?}, and that is wrong")));
        }
        at = run.offset + run.len;
    }
    if at != left.len().max(right.len()) as u64 {
        return Err(Violation::new("P5", format!("diff of {names:?} ends at {at}")));
    }
    changes_in_a_range(run, rng, &names, &left, &right)
}

/// Ranges reported as unchanged since another volume are equal in both, for a range that begins anywhere
/// and is queried in portions of any size.
fn changes_in_a_range(
    run: &Run,
    rng: &mut Rng,
    names: &[String; 2],
    left: &[u8],
    right: &[u8],
) -> Result<(), Violation> {
    let wrong = |what: String| Violation::new("P5", format!("changes of {} since {}: {what}", names[0], names[1]));
    let [a, b] = [&names[0], &names[1]].map(|name| run.session.pool.volume(name));
    let (a, b) = (a.map_err(|e| wrong(e.to_string()))?, b.map_err(|e| wrong(e.to_string()))?);
    let a = std::rc::Rc::new(a);
    let b = std::rc::Rc::new(b);
    let end = left.len();
    let mut at = rng.index(end + 1);
    while at < end {
        let (looks, from, len) = (1 + rng.index(9), at as u64, (end - at) as u64);
        let (x, y) = (a.clone(), b.clone());
        let runs = run.session.exec.run(PATIENCE_STEPS, async move { x.changed_since(&y, from, len, looks).await })?;
        let runs = runs.map_err(|e| wrong(e.to_string()))?;
        if runs.is_empty() {
            return Err(wrong(format!("nothing is said of {len} bytes at {at}")));
        }
        for run in runs {
            let stop = at + run.len as usize;
            let same = |i: usize| left[i] == right.get(i).copied().unwrap_or(0);
            if run.len == 0 || stop > end || (!run.value && !(at..stop).all(same)) {
                return Err(wrong(format!("{run:?} at {at}")));
            }
            at = stop;
        }
    }
    Ok(())
}

pub fn whole(run: &Run, name: &str) -> Result<Vec<u8>, Violation> {
    let size = run.session.pool.find(name).map_err(|e| Violation::new("P4", e.to_string()))?.size;
    Ok(run.session.read(name, 0, size)?.to_vec())
}

/// Deleting frees exactly the predicted space.
fn foretell(run: &mut Run, rng: &mut Rng) -> Result<(), Violation> {
    let mut victims = place::snapshots(&run.known.model, None);
    rng.shuffle(&mut victims);
    victims.truncate(rng.index(4));
    let volumes = place::volumes(&run.known.model);
    if volumes.len() > 1 && (victims.is_empty() || rng.one_in(3)) {
        let volume = *rng.pick(&volumes);
        victims.retain(|&key| run.known.model.get(key).is_some_and(|v| v.of != Some(volume)));
        victims.extend(place::snapshots(&run.known.model, Some(volume)));
        victims.push(volume);
    }
    if victims.is_empty() || !settled(run)? {
        return Ok(());
    }
    let names: Vec<String> = victims.iter().map(|&key| run.known.model.name(key)).collect();
    let (pool, list) = (run.session.pool.clone(), names.clone());
    let foretold = run.session.exec.run(PATIENCE_STEPS, async move {
        let list: Vec<&str> = list.iter().map(String::as_str).collect();
        pool.freed_by(&list).await
    })?;
    let foretold = foretold.map_err(|e| Violation::new("P6", format!("du of {names:?} failed: {e}")))?;
    let before = run.session.pool.info();
    delete(run, victims)?;
    run.drain()?;
    if !settled(run)? {
        return Ok(());
    }
    let after = run.session.pool.info();
    let freed = before.used as i64 - after.used as i64;
    // Pages of the directory are allocated and freed with what they list.
    let slack = (2 + names.len() as i64 / 4) * PAGE as i64;
    if (freed - foretold as i64).abs() > slack {
        let what = format!("deleting {names:?} freed {freed} bytes, but {foretold} were foretold");
        return Err(Violation::new("P6", what));
    }
    Ok(())
}

/// Waits until all space is accounted for; returns false if the pool is too full for that.
fn settled(run: &mut Run) -> Result<bool, Violation> {
    let pool = run.session.pool.clone();
    match run.session.exec.run(PATIENCE_STEPS, async move { pool.wait_freed().await })? {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NoSpace => Ok(false),
        Err(e) => Err(Violation::new("P6", format!("the pool does not settle: {e}"))),
    }
}
