//! Promise P7: damaged metadata is reported or does no harm; nothing wrong is ever read.
//!
//! Every way to damage an image has a number: first every bit of every page of metadata, then whole pages
//! (garbage, zeroes, an earlier version, another pool's, a misdirected write, a read that returns one of
//! these), the length, and the two superblocks exchanged.

use std::collections::BTreeSet;

use forkdisk::{Error, ErrorKind, Pool};

use super::campaign::spread;
use super::{guard, mend};
use crate::disk::{Fault, Fill, LyingDevice, Medium, PAGE, ReadDamage, Request, SimDisk, When};
use crate::executor::Executor;
use crate::history::{Contents, PoolImage, Session, Stats, Violation, page_of};
use crate::rng::{Rng, mix};

const BITS_PER_PAGE: u64 = PAGE as u64 * 8;
/// Where the superblocks lie.
const SUPERBLOCKS: [u64; 2] = [0, 128];
/// Kinds of damage to a page as a whole.
const PAGE_KINDS_COUNT: u64 = 9;
/// Kinds of damage to the pool as a whole.
const POOL_KINDS_COUNT: u64 = 8;
/// Damages per image.
const EACH_COUNT: u64 = 4000;
/// Steps after which opening or reading counts as hanging.
pub(super) const PATIENCE_STEPS: u64 = 300_000;

/// Behaviour of a damaged pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It was reported.
    Reported,
    /// Everything is correct all the same.
    Harmless,
}

/// One damage of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The image's seed.
    pub seed: u64,
    /// Number of the damage.
    pub number: u64,
}

impl Damage {
    /// Returns the flags that replay it.
    pub fn flags(self) -> String {
        format!("--seed {} --damage {}", self.seed, self.number)
    }

    /// Runs it alone.
    pub fn run(self) -> (Stats, Option<Violation>, Vec<String>) {
        let mut subject = match Subject::new(self.seed) {
            Ok(subject) => subject,
            Err(v) => return (Stats::default(), Some(v), Vec::new()),
        };
        let result = subject.judge(self.number);
        let account = vec![subject.told.clone(), format!("{result:?}")];
        (Stats { flips: 1, ..Stats::default() }, result.err(), account)
    }
}

/// A search for unnoticed damage.
pub struct Damages {
    /// Number of damages to try.
    pub count: u64,
    /// Seed of the first image; the others follow.
    pub seed: u64,
    /// Threads.
    pub jobs: usize,
}

/// Results.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Numbers for the summary.
    pub stats: Stats,
    /// Of them, how many were reported; the others did no harm.
    pub reported: u64,
    /// The violations.
    pub failures: Vec<(Damage, Violation)>,
}

impl Damages {
    /// Runs them all, and calls `progress` with the number tried.
    pub fn run(&self, mut progress: impl FnMut(u64)) -> Outcome {
        let (images, mut all) = (self.count.div_ceil(EACH_COUNT) as usize, Outcome::default());
        let share = self.count.div_ceil(images.max(1) as u64);
        let work = |i: usize| sample(self.seed + i as u64, share, 3);
        spread(self.jobs, images, work, |_, outcome| {
            all.stats.add(&outcome.stats);
            all.reported += outcome.reported;
            all.failures.extend(outcome.failures);
            progress(all.stats.flips);
            all.failures.len() < 8
        });
        all
    }
}

/// Tries `count` damages of one image: all of those to whole pages first, then bits.
pub fn sample(seed: u64, count: u64, enough: usize) -> Outcome {
    let mut outcome = Outcome::default();
    let mut subject = match Subject::new(seed) {
        Ok(subject) => subject,
        Err(v) => {
            outcome.failures.push((Damage { seed, number: 0 }, v));
            return outcome;
        }
    };
    let mut rng = Rng::new(mix(&[seed, 21]));
    let (bits, all) = (subject.bits(), subject.count());
    let everything = count >= all;
    let mut pages: Vec<u64> = (bits..all).collect();
    rng.shuffle(&mut pages);
    for i in 0..count.min(all) {
        let number = match i {
            _ if everything => i,
            i if i < all - bits && i < count / 2 => pages[i as usize],
            // Everything depends on the superblocks, and most pages have most of their contents at the
            // beginning.
            _ if rng.one_in(8) => rng.below(2) * BITS_PER_PAGE + rng.below(512 * 8),
            _ if rng.one_in(2) => rng.below(bits) / BITS_PER_PAGE * BITS_PER_PAGE + rng.below(512 * 8),
            _ => rng.below(bits),
        };
        outcome.stats.flips += 1;
        match subject.judge(number) {
            Ok(verdict) => outcome.reported += u64::from(verdict == Verdict::Reported),
            Err(v) => outcome.failures.push((Damage { seed, number }, v)),
        }
        if outcome.failures.len() >= enough {
            break;
        }
    }
    outcome
}

/// An image with what is needed to damage it.
struct Subject {
    image: PoolImage,
    /// The same pool under another identity.
    other: PoolImage,
    told: String,
}

/// A damaged medium.
pub(super) struct DamagedDisk {
    pub medium: Medium,
    pub read: Option<Fault>,
    pub pages: Vec<u64>,
    what: String,
}

impl Subject {
    fn new(seed: u64) -> Result<Subject, Violation> {
        let made = guard::catch(|| Ok((PoolImage::new(seed, [7; 16])?, PoolImage::new(seed, [8; 16])?)));
        let (image, other) = made.and_then(|made| made)?;
        Ok(Subject { image, other, told: String::new() })
    }

    fn bits(&self) -> u64 {
        self.image.pages.len() as u64 * BITS_PER_PAGE
    }

    fn count(&self) -> u64 {
        self.bits() + self.image.pages.len() as u64 * PAGE_KINDS_COUNT + POOL_KINDS_COUNT
    }

    fn judge(&mut self, number: u64) -> Result<Verdict, Violation> {
        let harmed = self.harm(number);
        self.told.clone_from(&harmed.what);
        let older = harmed.pages.iter().any(|page| self.image.last.contains(page));
        let result = guard::catch(|| {
            let verdict = examine(&self.image, &harmed, older, number)?;
            mend::examine(&self.image, &harmed, older, number)?;
            Ok(verdict)
        });
        let result = result.and_then(|verdict| verdict);
        result.map_err(|v| Violation { what: format!("{}: {}", harmed.what, v.what), ..v })
    }

    fn harm(&self, number: u64) -> DamagedDisk {
        let (medium, pages) = (&self.image.medium, &self.image.pages);
        let number = number % self.count();
        if number < self.bits() {
            let (page, bit) = (pages[(number / BITS_PER_PAGE) as usize], number % BITS_PER_PAGE);
            return self.page(page, format!("bit {bit} of page {page} flipped"), |bytes| {
                bytes[bit as usize / 8] ^= 1 << (bit % 8);
            });
        }
        let number = number - self.bits();
        if number >= pages.len() as u64 * PAGE_KINDS_COUNT {
            return self.whole(number - pages.len() as u64 * PAGE_KINDS_COUNT);
        }
        let (page, kind) = (pages[(number / PAGE_KINDS_COUNT) as usize], number % PAGE_KINDS_COUNT);
        match kind {
            0 => self.page(page, format!("garbage in page {page}"), |bytes| {
                crate::disk::fill_bytes(Fill::Garbage(number), page * PAGE as u64, bytes);
            }),
            1 => self.page(page, format!("zeroes in page {page}"), |bytes| bytes.fill(0)),
            2 => self.page(page, format!("an earlier version in page {page}"), |bytes| {
                *bytes = page_of(&self.image.earlier, page);
            }),
            3 => self.page(page, format!("another pool's page in page {page}"), |bytes| {
                *bytes = page_of(&self.other.medium, page);
            }),
            4 => {
                let drawn = pages[Rng::new(number).index(pages.len())];
                // The last commit overwrote what a write had misplaced before.
                let last = &self.image.last;
                let to = if last.contains(&drawn) && !last.contains(&page) { page } else { drawn };
                let strayed = page_of(medium, page);
                let mut harmed = self.page(page, format!("page {page} was written to page {to} instead"), |bytes| {
                    *bytes = page_of(&self.image.earlier, page);
                });
                if to != page {
                    harmed.medium.damage(|image| image.write(to * PAGE as u64, &strayed));
                    harmed.pages.push(to);
                }
                harmed
            }
            _ => {
                let harm = [ReadDamage::BitFlip, ReadDamage::Zeroed, ReadDamage::Misdirected, ReadDamage::Eio]
                    [kind as usize - 5];
                let at = page * PAGE as u64;
                let fault = Fault { on: Request::Read, harm, when: When::Once(1), within: Some(at..at + PAGE as u64) };
                let what = format!("the first read of page {page} returns {harm:?}");
                DamagedDisk { medium: medium.clone(), read: Some(fault), pages: vec![page], what }
            }
        }
    }

    fn page(&self, page: u64, what: String, change: impl FnOnce(&mut [u8; PAGE])) -> DamagedDisk {
        let mut medium = self.image.medium.clone();
        let mut bytes = page_of(&medium, page);
        change(&mut bytes);
        medium.damage(|image| image.write(page * PAGE as u64, &bytes));
        DamagedDisk { medium, read: None, pages: vec![page], what }
    }

    /// Damage to the pool as a whole.
    fn whole(&self, number: u64) -> DamagedDisk {
        let mut medium = self.image.medium.clone();
        let len = medium.len();
        let what = match number {
            0 => {
                let [a, b] = SUPERBLOCKS.map(|page| page_of(&medium, page));
                medium.damage(|image| {
                    image.write(SUPERBLOCKS[0] * PAGE as u64, &b);
                    image.write(SUPERBLOCKS[1] * PAGE as u64, &a);
                });
                "the superblocks exchanged".into()
            }
            n => {
                let shorter = [0, 512, 4096, PAGE as u64 * 2, len / 2, len - (1 << 20), len - 4096][n as usize - 1];
                medium.truncate(shorter);
                format!("the device shortened to {shorter} bytes")
            }
        };
        DamagedDisk { medium, read: None, pages: SUPERBLOCKS.to_vec(), what }
    }
}

/// Opens, lists, reads, checks, and continues to work with the pool.
fn examine(image: &PoolImage, harmed: &DamagedDisk, older: bool, number: u64) -> Result<Verdict, Violation> {
    let exec = Executor::new(mix(&[number, 22]));
    let disk = SimDisk::new(harmed.medium.clone(), &exec, number);
    if let Some(fault) = &harmed.read {
        disk.arm(fault.clone());
    }
    let (device, runtime) = (LyingDevice::of_pool(disk.clone()), std::rc::Rc::new(exec.clone()));
    let options = crate::history::open_options(&image.setup, None);
    let opened = exec.run(PATIENCE_STEPS, Pool::open(device, runtime, options));
    let pool = match opened {
        Ok(Ok(pool)) => pool,
        Ok(Err(e)) => {
            exec.halt();
            return reported(&e);
        }
        Err(stuck) => {
            exec.halt();
            return Err(Violation::new("P7", format!("opening does not end: {stuck}")));
        }
    };
    let session = Session::plain(exec, disk, pool);
    let truths = truths(image, older);
    let mut verdict = compare(&session, &truths, &BTreeSet::new())?;
    let pool = session.pool.clone();
    match session.exec.run(PATIENCE_STEPS, async move { pool.check().await })? {
        Ok(report) if report.damage.is_empty() && report.leaked == 0 => {}
        Ok(_) => verdict = Verdict::Reported,
        Err(e) => verdict = reported(&e)?,
    }
    if number.is_multiple_of(4) {
        let written = use_it(&session, &mut verdict)?;
        if compare(&session, &truths, &written)? == Verdict::Reported {
            verdict = Verdict::Reported;
        }
    }
    Ok(verdict)
}

/// Returns the possible contents: the present ones, and, if its last commit is damaged, those before it.
pub(super) fn truths(image: &PoolImage, older: bool) -> Vec<&Contents> {
    std::iter::once(&image.contents).chain(older.then_some(&image.before)).collect()
}

/// Compares everything readable, except volumes that were written meanwhile, with its possible contents. Each
/// volume separately: a write in place outlives the commit that it was made durable by.
pub(super) fn compare(
    session: &Session,
    truths: &[&Contents],
    except: &BTreeSet<String>,
) -> Result<Verdict, Violation> {
    let mut verdict = Verdict::Harmless;
    let names: BTreeSet<String> =
        session.pool.list().into_iter().map(|v| v.name).filter(|n| !except.contains(n)).collect();
    if !truths.iter().any(|truth| truth.keys().filter(|n| !except.contains(*n)).eq(names.iter())) {
        return Err(Violation::new("P7", format!("the pool lists {names:?} and reports no damage")));
    }
    for name in names {
        let found = match read_one(session, &name)? {
            Ok(found) => found,
            Err(e) => {
                verdict = reported(&e)?;
                continue;
            }
        };
        if !truths.iter().any(|truth| truth.get(&name) == Some(&found)) {
            return Err(Violation::new("P7", format!("{name} reads wrong, and nothing is reported")));
        }
    }
    Ok(verdict)
}

fn read_one(session: &Session, name: &str) -> Result<Result<Vec<u8>, Error>, Violation> {
    let volume = match session.pool.volume(name) {
        Ok(volume) => volume,
        Err(e) => return Ok(Err(e)),
    };
    let buf = session.pool.buffer(volume.size() as usize);
    let (result, buf) = session.exec.run(PATIENCE_STEPS, async move { volume.read(0, buf).await })?;
    Ok(result.map(|()| buf.to_vec()))
}

/// Works with the pool: that may fail, but not panic or hang. Returns the written volumes.
fn use_it(session: &Session, verdict: &mut Verdict) -> Result<BTreeSet<String>, Violation> {
    let Some(name) =
        session.pool.list().into_iter().find(|v| !v.is_snapshot() && v.size >= PAGE as u64).map(|v| v.name)
    else {
        return Ok(BTreeSet::new());
    };
    let (pool, volume) = (session.pool.clone(), name.clone());
    let work = async move {
        let handle = pool.volume(&volume)?;
        let mut buf = pool.buffer(PAGE);
        buf.fill(0x11);
        handle.write(0, buf, true).await.0?;
        pool.snapshot(&[(&volume, "new")], 2).await?;
        let mut buf = pool.buffer(PAGE);
        buf.fill(0x22);
        handle.write(0, buf, false).await.0?;
        handle.discard(0, handle.size()).await?;
        drop(handle);
        pool.rollback(&volume, "new").await?;
        pool.checkpoint().await?;
        pool.delete(&[&format!("{volume}@new")]).await?;
        pool.wait_freed().await?;
        pool.close().await
    };
    match session.exec.run(PATIENCE_STEPS * 4, work)? {
        Ok(()) => {}
        Err(e) if e.kind() == ErrorKind::NoSpace => {}
        Err(e) => *verdict = reported(&e)?,
    }
    Ok(BTreeSet::from([format!("{name}@new"), name]))
}

/// An error that reports damage is a report; any other is none.
pub(super) fn reported(e: &Error) -> Result<Verdict, Violation> {
    match e.kind() {
        ErrorKind::Corrupt | ErrorKind::Io | ErrorKind::NotAPool | ErrorKind::Unsupported | ErrorKind::Failed => {
            Ok(Verdict::Reported)
        }
        kind => Err(Violation::new("P7", format!("damage is reported as {kind:?}: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_reported_or_does_no_harm() {
        let outcome = sample(7, 1500, 1);
        assert!(outcome.failures.is_empty(), "{:?}", outcome.failures);
        assert_eq!(outcome.stats.flips, 1500);
        assert!((100..1400).contains(&outcome.reported), "{} reported", outcome.reported);
    }

    #[test]
    fn a_damage_is_the_same_whenever_it_is_run() {
        for number in [70_000, 1_245_467] {
            let run = || Damage { seed: 7, number }.run().2;
            assert_eq!(run(), run());
        }
    }
}
