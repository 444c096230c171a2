//! Opening the result of a crash, and comparing all of it with the model.
//!
//! Recovery itself is sometimes cut and started over. The findings resolve everything that was in flight;
//! from then on the model knows only them.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forkdisk::{
    DiscardPolicy, EarlyGroups, MIN_VOLATILE_BYTES, OpenOptions, Pool, SUPERBLOCK_AT, VolatileLog, VolatileMemory,
    VolumeInfo,
};

use super::known::Known;
use super::op::Profile;
use super::ops::lifetime::lifetime_of;
use super::ops::properties::properties_of;
use super::shadow::{Shadow, ShadowedMemory};
use super::{Setup, Stats, Violation};
use crate::disk::{Crash, Fault, LyingDevice, Medium, PAGE, ReadDamage, Request, SimDisk, When};
use crate::driver::{Entrance, PATIENCE_STEPS, judge};
use crate::executor::Executor;
use crate::model::{Applied, Control, Key, Listed, Listing, Model, PREFIX, Properties, Rule};
use crate::pattern::SECTOR;
use crate::rng::{Rng, mix};

/// The commit interval, in runs with memory that outlives the process.
pub const INTERVAL: Duration = Duration::from_secs(5);
/// Bytes read at once when a volume is verified.
const STRIDE_BYTES: u64 = 256 << 10;
/// Volumes up to this size are read completely.
const WHOLE_BYTES: u64 = 2 << 20;

/// One life of the engine: an executor, a disk and the open pool.
pub struct Session {
    /// Runs the tasks.
    pub exec: Executor,
    /// The disk.
    pub disk: SimDisk,
    /// The pool.
    pub pool: Pool<LyingDevice>,
    /// The memory that outlives the process, if there is any.
    pub memory: Option<VolatileMemory>,
    /// What the memory was in the middle of a step.
    pub shadow: Option<Rc<Shadow>>,
    lists_properties: bool,
}

impl Drop for Session {
    fn drop(&mut self) {
        // Tasks hold the pool and the pool holds the executor: the cycle must be broken here. Not after a
        // panic, though: the tasks may be in no state to be dropped, and leak instead.
        if !std::thread::panicking() {
            self.exec.halt();
        }
    }
}

/// Bytes of the memory that outlives the process: few, so that it is sometimes full.
const MEMORY_BYTES: usize = MIN_VOLATILE_BYTES;

/// Returns memory with the same contents that notes what a kill in the middle of a step would leave.
fn shadowed(memory: &VolatileMemory) -> (VolatileMemory, Rc<Shadow>) {
    let shadow = Rc::<Shadow>::default();
    (VolatileMemory::new(ShadowedMemory::new(memory.bytes(), shadow.clone())), shadow)
}

/// Returns new memory that outlives the process, if the run has any.
pub fn new_memory(lasting: bool) -> Option<VolatileMemory> {
    lasting.then(|| VolatileMemory::new(vec![0; MEMORY_BYTES]))
}

/// Returns the options that go with such memory.
pub fn lasting_options(memory: Option<&VolatileMemory>) -> OpenOptions {
    let log = |memory: &VolatileMemory| VolatileLog::new(memory.clone(), [1; 32]);
    let interval = if memory.is_some() { INTERVAL } else { Duration::ZERO };
    OpenOptions::default().with_volatile(memory.map(log)).with_commit_interval(interval)
}

/// Returns when freed space is discarded: if it is retained, with limits so small that it is discarded often.
pub fn discard_policy(retain: bool, discard: bool, seed: u64) -> DiscardPolicy {
    if !retain {
        return discard.into();
    }
    let mut rng = Rng::new(mix(&[seed, 42]));
    let bytes = *rng.pick(&[64 << 10, 1 << 20, 8 << 20, 1 << 30]);
    DiscardPolicy::Later { bytes, time: Duration::from_millis(*rng.pick(&[0, 1, 20, 500, 600_000])) }
}

/// Returns the bytes of the shared cache: if there is one, few pages.
pub fn shared_cache(shared: bool, seed: u64) -> u64 {
    if shared { *Rng::new(mix(&[seed, 45])).pick(&[1, 16, 256, 4096]) << 12 } else { 0 }
}

/// Lets a third of the runs begin a background commit every few records, and half of them write the group of each first
/// write early.
pub fn unasked_commits(options: OpenOptions, seed: u64) -> OpenOptions {
    let options = options.with_early_groups(match mix(&[seed, 44]) % 4 {
        0 | 1 => EarlyGroups::Always,
        2 => EarlyGroups::Expected,
        _ => EarlyGroups::Never,
    });
    let bytes = match mix(&[seed, 42]) % 9 {
        0 => 40,
        1 => 200,
        2 => 1000,
        _ => return options,
    };
    options.with_background_commit(bytes)
}

/// Returns the options a run opens its pool with.
pub fn open_options(setup: &Setup, memory: Option<&VolatileMemory>) -> OpenOptions {
    // Times of changes are separate records.
    let has_clock = mix(&[setup.seed, 41]).is_multiple_of(3);
    unasked_commits(lasting_options(memory), setup.seed)
        .with_cache(setup.cache)
        .with_shared_cache(shared_cache(setup.shared, setup.seed))
        .with_dirty(setup.dirty)
        .with_when_full(setup.when_full)
        .with_discard(discard_policy(setup.retain, setup.discard, setup.seed))
        .with_clock(has_clock.then_some(|| 1))
}

/// Opens `medium`, verifies everything against what is known, and adopts the findings.
///
/// # Errors The promise that is broken.
pub fn recover(
    setup: &Setup,
    (medium, memory): (&Medium, Option<&VolatileMemory>),
    known: &Known,
    entrance: Entrance,
    stats: &mut Stats,
) -> Result<(Session, Known), Violation> {
    recover_without(setup, None, (medium, memory), known, entrance, stats)
}

/// As [`recover`]; the slot of the superblock that begins at `unreadable` cannot be read.
fn recover_without(
    setup: &Setup,
    unreadable: Option<u64>,
    (medium, memory): (&Medium, Option<&VolatileMemory>),
    known: &Known,
    entrance: Entrance,
    stats: &mut Stats,
) -> Result<(Session, Known), Violation> {
    let mut rng = Rng::new(mix(&[entrance.seed, 3]));
    let session = open(setup, unreadable, (medium, memory), &mut rng, entrance.cuts, stats)?;
    let known = Known::of(verify(&session, known)?);
    if !entrance.again {
        return Ok((session, known));
    }
    let frozen = session.disk.freeze(Crash::Power);
    let mask = if rng.one_in(3) { 0 } else { rng.next() };
    stats.cuts += 1;
    stats.crash_states += 1;
    stats.distinct += 1;
    let medium = frozen.crash(mask);
    drop(session);
    let second = Entrance { seed: rng.next(), cuts: 0, again: false };
    // Both slots are whole, and what the first recovery has shown is in each of them or in its journal.
    let unreadable = (mask == 0).then(|| SUPERBLOCK_AT[second.seed as usize % SUPERBLOCK_AT.len()]);
    recover_without(setup, unreadable, (&medium, None), &known, second, stats).map_err(|mut v| {
        v.what = format!("a second recovery differs from the first: {}", v.what);
        v
    })
}

/// Opens the pool, and sometimes cuts the power during that, or, if memory is left that a power cut would
/// lose, kills the process.
fn open(
    setup: &Setup,
    unreadable: Option<u64>,
    (medium, memory): (&Medium, Option<&VolatileMemory>),
    rng: &mut Rng,
    cuts: u32,
    stats: &mut Stats,
) -> Result<Session, Violation> {
    let (mut medium, kind) = (medium.clone(), if memory.is_some() { Crash::Kill } else { Crash::Power });
    let memory = memory.map(VolatileMemory::copy);
    let find = || memory.clone().or_else(|| new_memory(setup.lasting));
    for left in (0..=cuts).rev() {
        let exec = Executor::new(rng.next());
        let disk = SimDisk::new(medium, &exec, rng.next());
        if left > 0 && rng.one_in(2) {
            let reach = *rng.pick(&[8, 40, 200]);
            let steps = 1 + rng.below(reach);
            if rng.one_in(3) {
                // Failures during the open must do no more harm than the cut that follows.
                let on = *rng.pick(&[Request::Read, Request::Write, Request::Flush]);
                // After a failed flush the memory is no longer valid.
                let on = if memory.is_some() && on == Request::Flush { Request::Write } else { on };
                disk.arm(Fault { on, harm: ReadDamage::Eio, when: When::Once(1 + rng.below(12)), within: None });
            }
            let memory = find();
            let (device, runtime) = (LyingDevice::of_pool(disk.clone()), Rc::new(exec.clone()));
            let options = open_options(setup, memory.as_ref());
            let writes = rng.one_in(2);
            exec.spawn(Box::pin(async move {
                // Keeps the pool open, so that its background work continues until the cut.
                let pool = Pool::open(device, runtime, options).await;
                if writes && let Ok(pool) = &pool {
                    // The first superblocks of this life, without a visible change of the pool.
                    let _ = pool.checkpoint().await;
                }
                std::future::pending::<()>().await;
                drop(pool);
            }));
            for _ in 0..steps {
                exec.step();
            }
            let mask = if rng.one_in(4) { rng.below(2) } else { rng.next() };
            medium = disk.freeze(kind).crash(mask);
            exec.halt();
            stats.faults += disk.faults_hit();
            stats.cuts += 1;
            stats.crash_states += 1;
            stats.distinct += 1;
            continue;
        }
        if let Some(slot) = unreadable {
            let within = Some(slot..slot + PAGE as u64);
            disk.arm(Fault { on: Request::Read, harm: ReadDamage::Eio, when: When::Once(1), within });
        }
        return start_with(setup, exec, disk, find());
    }
    let exec = Executor::new(rng.next());
    let disk = SimDisk::new(medium, &exec, rng.next());
    start_with(setup, exec, disk, find())
}

/// Opens the pool on a disk.
///
/// # Errors
/// P6 if it does not open.
pub fn start(setup: &Setup, exec: Executor, disk: SimDisk) -> Result<Session, Violation> {
    start_with(setup, exec, disk, new_memory(setup.lasting))
}

fn start_with(
    setup: &Setup,
    exec: Executor,
    disk: SimDisk,
    memory: Option<VolatileMemory>,
) -> Result<Session, Violation> {
    if let Some(range) = &setup.slow {
        disk.slow_down(range.clone());
    }
    let (memory, shadow) = match memory.as_ref().filter(|_| has_large_verbs(setup.profile)).map(shadowed) {
        Some((memory, shadow)) => (Some(memory), Some(shadow)),
        None => (memory, None),
    };
    let (device, runtime) = (LyingDevice::of_pool(disk.clone()), Rc::new(exec.clone()));
    let options = open_options(setup, memory.as_ref());
    let opened = exec.run(PATIENCE_STEPS, Pool::open(device, runtime, options));
    let outcome = match opened {
        Ok(Ok(pool)) => {
            let lists_properties = has_large_verbs(setup.profile);
            return Ok(Session { exec, disk, pool, memory, shadow, lists_properties });
        }
        Ok(Err(e)) => Violation::new("P6", format!("the pool does not open: {e}")),
        Err(stuck) => Violation::new("P6", format!("the pool does not open: {stuck}")),
    };
    exec.halt();
    Err(outcome)
}

impl Session {
    /// Returns a session without memory that outlives the process.
    pub fn plain(exec: Executor, disk: SimDisk, pool: Pool<LyingDevice>) -> Session {
        Session { exec, disk, pool, memory: None, shadow: None, lists_properties: false }
    }

    /// Opens the pool on a medium, undisturbed.
    ///
    /// # Errors
    /// P6 if it does not open.
    pub fn open(setup: &Setup, medium: &Medium, seed: u64) -> Result<Session, Violation> {
        let exec = Executor::new(mix(&[seed, 15]));
        let disk = SimDisk::new(medium.clone(), &exec, mix(&[seed, 16]));
        start(setup, exec, disk)
    }

    /// Returns what the pool lists, without names that are changed by calls that end at once.
    pub fn listing(&self) -> Listing {
        let all = self.pool.list().into_iter().filter(|v| !v.name.starts_with(PREFIX));
        let listed = |v: &VolumeInfo| {
            let of = |v| properties_of(&self.pool, v);
            let properties = if self.lists_properties && !v.is_snapshot() { of(v) } else { Properties::default() };
            Listed { size: v.size, properties, lifetime: lifetime_of(v) }
        };
        all.map(|v| (v.name.clone(), listed(&v))).collect()
    }

    /// Runs the engine's own verification.
    ///
    /// # Errors P6 if it finds an error.
    pub fn check(&self) -> Result<(), Violation> {
        let pool = self.pool.clone();
        let report = self.exec.run(PATIENCE_STEPS, async move { pool.check().await })?;
        match report {
            Ok(report) => judge(&report),
            Err(e) => Err(Violation::new("P6", format!("check could not complete: {e}"))),
        }?;
        self.contract()
    }

    /// Checks that every device request was well-formed.
    ///
    /// # Errors The first that was not.
    pub fn contract(&self) -> Result<(), Violation> {
        self.disk.misuse().map_or(Ok(()), |what| Err(Violation::new("contract", what)))
    }

    /// Reads part of a volume.
    ///
    /// # Errors
    /// P6 if it cannot be read.
    pub fn read(&self, name: &str, offset: u64, len: u64) -> Result<forkdisk::Buf, Violation> {
        let unreadable = |e| Violation::new("P6", format!("{name} cannot be read at {offset}: {e}"));
        let volume = self.pool.volume(name).map_err(unreadable)?;
        let buf = self.pool.buffer(len as usize);
        let (result, buf) = self.exec.run(PATIENCE_STEPS, async move { volume.read(offset, buf).await })?;
        result.map_err(unreadable)?;
        Ok(buf)
    }

    /// Compares a whole volume with the model, and lets the model adopt it if `adopt` is set.
    ///
    /// # Errors The first sector that is wrong.
    pub fn compare(&self, model: &mut Model, key: Key, rule: Rule, adopt: bool) -> Result<(), Violation> {
        let (name, size) = (model.name(key), model.get(key).map_or(0, |v| v.size));
        for (offset, len) in self.stretches(model, key, &name, size)? {
            let buf = self.read(&name, offset, len)?;
            model.check(key, offset, &buf, rule)?;
            if adopt {
                model.adopt(key, offset, &buf);
            }
        }
        Ok(())
    }

    /// Returns the ranges of a volume to read: all of it, but of a large one only what either side does not
    /// report as a hole.
    fn stretches(&self, model: &Model, key: Key, name: &str, size: u64) -> Result<Vec<(u64, u64)>, Violation> {
        if size <= WHOLE_BYTES {
            return Ok((0..size).step_by(STRIDE_BYTES as usize).map(|at| (at, STRIDE_BYTES.min(size - at))).collect());
        }
        let unreadable = |e| Violation::new("P6", format!("the extents of {name} cannot be told: {e}"));
        let volume = self.pool.volume(name).map_err(unreadable)?;
        let found = self.exec.run(PATIENCE_STEPS, async move { volume.extents(0, size).await })?.map_err(unreadable)?;
        let page = PAGE as u64;
        let written = model.get(key).map_or_else(Vec::new, |v| v.written());
        let mut pages: BTreeSet<u64> = written.into_iter().map(|sector| sector * SECTOR as u64).collect();
        for extent in found.iter().filter(|e| e.data) {
            pages.extend((extent.offset / page * page..extent.offset + extent.len).step_by(PAGE));
        }
        let mut out: Vec<(u64, u64)> = Vec::new();
        for at in pages.into_iter().filter(|&at| at < size) {
            let len = page.min(size - at);
            match out.last_mut() {
                Some((from, n)) if *from + *n == at && *n < STRIDE_BYTES => *n += len,
                _ => out.push((at, len)),
            }
        }
        Ok(out)
    }
}

/// Whether the verbs of the profile are longer than the volatile log, and change properties.
fn has_large_verbs(profile: Profile) -> bool {
    matches!(profile, Profile::Transactions | Profile::Folders | Profile::Lifetimes | Profile::Comparing)
}

/// Compares everything; the findings resolve what was in flight.
fn verify(session: &Session, known: &Known) -> Result<Model, Violation> {
    let found = session.listing();
    let mut model = known.model.clone();
    let mut undecided = Vec::new();
    for p in &known.pending {
        match model.applied(p, &found)? {
            Applied::Yes => model.apply(p),
            Applied::No => {}
            Applied::Unknown => undecided.push(p),
        }
    }
    let expected = model.listing();
    if expected != found {
        return Err(Violation::new("P4", listing_fault(&expected, &found)));
    }
    for p in undecided {
        let keys: Vec<Key> = match &p.control {
            Control::Rollback(key, _) | Control::RollbackTo(key, _) | Control::Replace(key, _) => vec![*key],
            Control::RollbackAll(all) => all.iter().map(|&(key, _)| key).collect(),
            Control::Swap(new) => new.iter().map(|&(key, _)| key).collect(),
            _ => Vec::new(),
        };
        if !keys.is_empty() {
            let mut rolled = model.clone();
            rolled.apply(p);
            let is_before = |&key: &Key| session.compare(&mut model.clone(), key, Rule::Crash, false).is_ok();
            if !keys.iter().all(is_before) {
                // Neither of both: the second comparison below reports it.
                model = rolled;
            }
        }
    }
    let keys: Vec<Key> = model.volumes().map(|(key, _)| key).collect();
    for key in keys {
        session.compare(&mut model, key, Rule::Crash, true)?;
    }
    session.compare_names(&mut model)?;
    session.check()?;
    model.adopted();
    Ok(model)
}

fn listing_fault(expected: &Listing, found: &Listing) -> String {
    let names = expected.keys().chain(found.keys().filter(|n| !expected.contains_key(*n)));
    let wrong: Vec<String> = names
        .filter(|n| expected.get(*n) != found.get(*n))
        .map(|n| match (expected.get(n), found.get(n)) {
            (Some(listed), None) => format!("{n} ({listed:?} bytes) is missing"),
            (None, Some(_)) => format!("{n} should not exist"),
            (expected, found) => format!("{n} has {found:?} bytes instead of {expected:?}"),
        })
        .collect();
    format!("the names are not what was acknowledged: {}", wrong.join("; "))
}
