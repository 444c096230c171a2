//! Opening the result of a crash on both disks, and comparing all of it with the model.

use std::rc::Rc;

use forkdisk::{
    Error, ErrorKind, FormatOptions, OpenOptions, OriginPlace, Pool, ProtectOptions, VolatileMemory, Volume,
};

use super::known::Known;
use super::{ORIGIN, Setup, masks};
use crate::disk::{Crash, Fill, Frozen, LyingDevice, Medium, SimDisk};
use crate::driver::{Entrance, Instant, Life, PATIENCE_STEPS, Stats, Violation, judge};
use crate::executor::Executor;
use crate::history::{discard_policy, lasting_options, new_memory, shared_cache, unasked_commits};
use crate::model::{Applied, Control, Key, Listing, Rule};
use crate::rng::{Rng, mix};

/// Bytes read at once when a volume is verified.
const STRIDE_BYTES: u64 = 256 << 10;
/// The recorded path of the origin.
const PATH: &str = "/origin";

/// One life of the engine with both disks.
pub struct Session {
    /// Runs the tasks.
    pub exec: Executor,
    /// The pool's disk and the origin's.
    pub disks: [SimDisk; 2],
    /// The pool.
    pub pool: Pool<LyingDevice>,
    /// The memory that outlives the process, if there is any.
    pub memory: Option<VolatileMemory>,
}

/// What a crash leaves: the pool's disk and the origin's, and the memory that outlives the process.
pub type CrashedDisks = ([Medium; 2], Option<VolatileMemory>);

impl Drop for Session {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.exec.halt();
        }
    }
}

/// Both disks at one instant.
pub struct BothDisks([Frozen; 2]);

impl Instant for BothDisks {
    type Media = [Medium; 2];
    /// The masks of the pool's disk and of the origin's.
    type Mask = (u64, u64);

    fn drawn(&self, mask: u64) -> (u64, u64) {
        masks(mask)
    }

    fn masks(&self) -> u64 {
        self.0[0].masks().saturating_mul(self.0[1].masks())
    }

    fn nth(&self, n: u64) -> (u64, u64) {
        let origin = self.0[1].masks();
        (n / origin, n % origin)
    }

    fn crash(&self, (a, b): (u64, u64)) -> [Medium; 2] {
        [self.0[0].crash(a), self.0[1].crash(b)]
    }

    fn fingerprint(&self, (a, b): (u64, u64)) -> u64 {
        mix(&[self.0[0].fingerprint(a), self.0[1].fingerprint(b)])
    }

    fn describe(&self, (a, b): (u64, u64)) -> String {
        format!("of the pool {}; of the origin {}", self.0[0].describe(a), self.0[1].describe(b))
    }
}

impl Life for Session {
    type Instant = BothDisks;

    fn exec(&self) -> &Executor {
        &self.exec
    }

    fn pool(&self) -> &Pool<LyingDevice> {
        &self.pool
    }

    fn disks(&self) -> &[SimDisk] {
        &self.disks
    }

    fn memory(&self) -> Option<&VolatileMemory> {
        self.memory.as_ref()
    }

    fn freeze(&self, crash: Crash) -> BothDisks {
        BothDisks(self.disks.each_ref().map(|disk| disk.freeze(crash)))
    }
}

fn p6(what: impl Into<String>) -> Violation {
    Violation::new("P6", what)
}

fn options(setup: &Setup, memory: Option<&VolatileMemory>) -> OpenOptions {
    let discard = discard_policy(setup.retain, true, setup.seed);
    let shared = shared_cache(setup.shared, setup.seed);
    let options = lasting_options(memory)
        .with_shared_cache(shared)
        .with_cache(setup.cache)
        .with_dirty(setup.dirty)
        .with_discard(discard);
    unasked_commits(options, setup.seed)
}

/// Returns how an origin is protected in all histories.
pub fn protection(setup: &Setup, draw: u64) -> ProtectOptions {
    let (copy_ahead, when_full) = setup.policy(draw);
    ProtectOptions::new(OriginPlace::at(PATH, 0), 1)
        .with_chunk(setup.chunk)
        .with_copy_ahead(copy_ahead)
        .with_when_full(when_full)
}

/// Creates a pool that protects an origin of zeroes, with one volume beside it.
pub fn make(setup: &Setup) -> Result<Session, Violation> {
    let exec = Executor::new(mix(&[setup.seed, 33]));
    let media = [0, 1].map(|i| Medium::blank(setup.disks[i], [setup.pool, setup.origin][i]));
    let disks = media.map(|medium| SimDisk::new(medium, &exec, mix(&[setup.seed, 34])));
    slow_down(setup, &disks);
    let (device, runtime) = (disks[0].clone(), Rc::new(exec.clone()));
    let origin = LyingDevice::of_origin(disks[1].clone());
    let memory = new_memory(setup.lasting);
    let (open, protect) = (options(setup, memory.as_ref()), protection(setup, setup.seed));
    let format = FormatOptions::new(setup.pool, [9; 16], 1).with_journal(Some(1 << 20));
    let volume = forkdisk::CreateOptions::new(super::run::VOLUME_BYTES, 1);
    let made = exec.run(PATIENCE_STEPS, async move {
        Pool::format(&device, &format).await?;
        let pool = Pool::open(LyingDevice::of_pool(device), runtime, open).await?;
        pool.protect(ORIGIN, origin, &protect).await?;
        pool.create("vol", &volume).await?;
        Ok::<_, forkdisk::Error>(pool)
    })?;
    let pool = made.map_err(|e| p6(format!("an origin cannot be protected: {e}")))?;
    Ok(Session { exec, disks, pool, memory })
}

impl Session {
    /// Opens the pool and its origin, after `cuts` power cuts during that; if memory is left that a power cut
    /// would lose, after killing the process.
    pub fn open(setup: &Setup, (mut media, memory): CrashedDisks, seed: u64, cuts: u32) -> Result<Session, Violation> {
        let mut rng = Rng::new(seed);
        let kind = if memory.is_some() { Crash::Kill } else { Crash::Power };
        let find = || memory.clone().or_else(|| new_memory(setup.lasting));
        for _ in 0..cuts {
            let (exec, disks) = spin_up(setup, &media, &mut rng);
            let opening = attach(disks.clone(), exec.clone(), options(setup, find().as_ref()));
            exec.spawn(Box::pin(async move {
                let pool = opening.await;
                if let Ok(pool) = &pool {
                    let _ = pool.checkpoint().await;
                }
                std::future::pending::<()>().await;
                drop(pool);
            }));
            for _ in 0..1 + rng.below(200) {
                exec.step();
            }
            let frozen = BothDisks(disks.map(|disk| disk.freeze(kind)));
            media = frozen.crash(frozen.drawn(rng.next()));
            exec.halt();
        }
        let (exec, disks) = spin_up(setup, &media, &mut rng);
        let memory = find();
        let opening = attach(disks.clone(), exec.clone(), options(setup, memory.as_ref()));
        let opened = match rng.one_in(4) {
            true => {
                let other = another(&media[1], &exec, rng.next());
                let refusing = refuse_another(disks[0].clone(), other, exec.clone(), options(setup, memory.as_ref()));
                exec.run(PATIENCE_STEPS, async move {
                    refusing.await?;
                    opening.await
                })
            }
            false => exec.run(PATIENCE_STEPS, opening),
        };
        match opened {
            Ok(Ok(pool)) => Ok(Session { exec, disks, pool, memory }),
            Ok(Err(e)) => {
                exec.halt();
                Err(p6(format!("the pool or its origin does not open: {e}")))
            }
            Err(stuck) => {
                exec.halt();
                Err(p6(format!("the pool or its origin does not open: {stuck}")))
            }
        }
    }

    /// Returns what the pool lists.
    pub fn listing(&self) -> Listing {
        self.pool.list().into_iter().map(|v| (v.name, v.size.into())).collect()
    }

    /// Compares a whole volume with the model, and lets the model adopt it if `adopt` is set; unless it has
    /// been dropped for space.
    pub fn compare(&self, known: &mut Known, key: Key, rule: Rule, adopt: bool) -> Result<(), Violation> {
        let (name, size) = (known.model.name(key), known.model.get(key).map_or(0, |v| v.size));
        let volume = match self.pool.volume(&name) {
            Ok(volume) => volume,
            Err(e) if e.kind() == ErrorKind::NotFound && known.is_droppable(key) => return Ok(()),
            Err(e) => return Err(p6(format!("{name} cannot be opened: {e}"))),
        };
        for offset in (0..size).step_by(STRIDE_BYTES as usize) {
            let unreadable = |e| p6(format!("{name} cannot be read at {offset}: {e}"));
            let buf = self.read(&volume, offset, STRIDE_BYTES.min(size - offset))?.map_err(unreadable)?;
            known.model.check(key, offset, &buf, rule)?;
            if adopt {
                known.model.adopt(key, offset, &buf);
            }
        }
        Ok(())
    }

    fn read(
        &self,
        volume: &Volume<LyingDevice>,
        offset: u64,
        len: u64,
    ) -> Result<forkdisk::Result<forkdisk::Buf>, Violation> {
        let (buf, volume) = (self.pool.buffer(len as usize), volume.clone());
        let (result, buf) = self.exec.run(PATIENCE_STEPS, async move { volume.read(offset, buf).await })?;
        Ok(result.map(|()| buf))
    }

    /// Runs the engine's own verification, and checks that every device request was well-formed.
    pub fn check(&self) -> Result<(), Violation> {
        let pool = self.pool.clone();
        let report = self.exec.run(PATIENCE_STEPS, async move { pool.check().await })?;
        judge(&report.map_err(|e| p6(format!("check could not complete: {e}")))?)?;
        match self.disks.iter().find_map(SimDisk::misuse) {
            Some(what) => Err(Violation::new("contract", what)),
            None => Ok(()),
        }
    }
}

/// Starts both disks on a new executor.
fn spin_up(setup: &Setup, media: &[Medium; 2], rng: &mut Rng) -> (Executor, [SimDisk; 2]) {
    let exec = Executor::new(rng.next());
    let disks = media.each_ref().map(|medium| SimDisk::new(medium.clone(), &exec, rng.next()));
    slow_down(setup, &disks);
    (exec, disks)
}

/// Makes the origin's disk slow, so that the pool overtakes it.
fn slow_down(setup: &Setup, disks: &[SimDisk; 2]) {
    if setup.slow_flushes {
        disks[1].slow_flushes();
    }
}

async fn attach(disks: [SimDisk; 2], exec: Executor, options: OpenOptions) -> forkdisk::Result<Pool<LyingDevice>> {
    let [device, origin] = disks;
    let pool = Pool::open(LyingDevice::of_pool(device), Rc::new(exec), options).await?;
    pool.attach_origin(ORIGIN, LyingDevice::of_origin(origin), &OriginPlace::at(PATH, 0)).await?;
    Ok(pool)
}

/// Returns a disk as long as the origin's, with other contents.
fn another(origin: &Medium, exec: &Executor, seed: u64) -> SimDisk {
    let (mut medium, len) = (origin.clone(), origin.len());
    medium.damage(|image| image.fill(0, len as usize, Fill::Garbage(seed)));
    SimDisk::new(medium, exec, seed)
}

/// Checks that a disk that is not the origin's is refused, unless nothing is left that distinguishes them.
async fn refuse_another(device: SimDisk, other: SimDisk, exec: Executor, options: OpenOptions) -> forkdisk::Result<()> {
    let pool = Pool::open(LyingDevice::of_pool(device), Rc::new(exec), options).await?;
    if pool.origins().iter().any(|origin| origin.comparable_zones > 1)
        && pool.attach_origin(ORIGIN, LyingDevice::of_origin(other), &OriginPlace::at(PATH, 0)).await.is_ok()
    {
        return Err(Error::new(ErrorKind::Corrupt, "another disk was taken for the origin's"));
    }
    pool.close().await
}

/// Opens both disks after a crash and compares everything; the findings resolve what was in flight.
pub fn recover(
    setup: &Setup,
    left: CrashedDisks,
    known: &Known,
    entrance: Entrance,
    stats: &mut Stats,
) -> Result<(Session, Known), Violation> {
    stats.cuts += u64::from(entrance.cuts);
    let session = Session::open(setup, left, mix(&[entrance.seed]), entrance.cuts)?;
    let mut known = known.clone();
    let found = session.listing();
    let mut undecided = None;
    for pending in std::mem::take(&mut known.pending) {
        match known.model.applied(&pending, &found)? {
            Applied::Yes => known.apply(&pending),
            Applied::No => {}
            Applied::Unknown => undecided = Some(pending).filter(|p| matches!(p.control, Control::Rollback(..))),
        }
    }
    known.settle_flattened(|name| session.pool.list().iter().any(|v| v.name == name && !v.depends_on.is_empty()));
    known.dropped(&found)?;
    let expected = known.model.listing();
    if expected != found {
        let what = format!("the names are {found:?} instead of {expected:?}");
        return Err(Violation::new("P4", what));
    }
    if let Some(pending) = undecided
        && session.compare(&mut known.clone(), known.origin, Rule::Crash, false).is_err()
    {
        // Neither of both: the second comparison below reports it.
        known.apply(&pending);
    }
    let keys: Vec<Key> = known.model.volumes().map(|(key, _)| key).collect();
    for key in keys {
        session.compare(&mut known, key, Rule::Crash, true)?;
    }
    session.check()?;
    known.model.adopted();
    known.open_again();
    Ok((session, known))
}
