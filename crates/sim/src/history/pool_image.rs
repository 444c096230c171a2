//! Images of real pools that are then damaged: their contents are known to the byte.
//!
//! An image is the end of a short history. Its last commit may be lost unnoticed when the journal pages that
//! it wrote are damaged, because it then looks like a commit that a crash cut off; so the contents before
//! that commit are kept as well.

use std::collections::{BTreeMap, BTreeSet};

use super::known::Known;
use super::ops::{create::create, flush::flush, target::size_of, write::write};
use super::recover::{Session, recover};
use super::run::Run;
use super::{Op, Profile, Setup, Stats, Violation};
use crate::disk::{Crash, Medium, PAGE};
use crate::driver::{Entrance, PATIENCE_STEPS};
use crate::model::Key;
use crate::pattern::{Blends, Found, SECTOR, is_zero};
use crate::rng::{Rng, mix};

/// Contents of all volumes and snapshots, by name.
pub type Contents = BTreeMap<String, Vec<u8>>;

/// Length of the pools of images in bytes.
const POOL_BYTES: u64 = 12 << 20;

/// A pool at rest.
pub struct PoolImage {
    /// How it is opened.
    pub setup: Setup,
    /// The disk.
    pub medium: Medium,
    /// An earlier state of the disk: source of stale pages.
    pub earlier: Medium,
    /// Contents of the pool.
    pub contents: Contents,
    /// Contents before its last commit.
    pub before: Contents,
    /// Pages that hold or held metadata.
    pub pages: Vec<u64>,
    /// Of these, the ones that the last commit wrote.
    pub last: BTreeSet<u64>,
}

impl PoolImage {
    /// Creates the image of a seed, in a pool with the given identity.
    ///
    /// # Errors A violation by the history, before anything is damaged.
    pub fn new(seed: u64, uuid: [u8; 16]) -> Result<PoolImage, Violation> {
        let mut rng = Rng::new(mix(&[seed, 20]));
        let profile = *rng.pick(&[Profile::Forks, Profile::Mixed, Profile::Blocks]);
        let setup = Setup {
            pool: POOL_BYTES,
            journal: 1 << 20,
            uuid,
            pages: if profile == Profile::Blocks { 300 } else { *rng.pick(&[8, 24, 64]) },
            discard: false,
            slow: None,
            cut_every: 0,
            ..Setup::new(seed, Some(profile))
        };
        let steps = 20 + rng.index(60);
        let closed = rng.one_in(3);
        let mut image = None;
        let (_, violation, _) = Run::conduct(&setup, None, false, |run| {
            image = Some(image_of(run, &setup.operations(steps), closed)?);
            Ok(())
        });
        match (image, violation) {
            (Some(image), None) => Ok(image),
            (_, Some(v)) => Err(Violation { what: format!("before any damage: {}", v.what), ..v }),
            (None, None) => Err(Violation::new("P6", "a history ended without a pool")),
        }
    }
}

pub fn image_of(run: &mut Run, ops: &[Op], closed: bool) -> Result<PoolImage, Violation> {
    let half = ops.len() / 2;
    some(run, &ops[..half])?;
    let pool = run.session.pool.clone();
    run.session.exec.run(PATIENCE_STEPS, async move { pool.wait_freed().await })?.map_err(unsettled)?;
    let earlier = at_rest(run)?;
    some(run, &ops[half..])?;
    flush(run, None)?;
    run.drain()?;
    // A commit without data. It tells that those before it are durable; otherwise the last one tells that, and losing
    // it unnoticed undoes the one before it, too, when a page with a checksum in it has been overwritten.
    create(run, "quiet".into(), PAGE as u64)?;
    run.drain()?;
    let before = at_rest(run)?;
    touch_all(run)?;
    if closed {
        let pool = run.session.pool.clone();
        let done = run.session.exec.run(PATIENCE_STEPS, async move { pool.close().await })?;
        done.map_err(|e| Violation::new("P6", format!("the pool cannot be closed: {e}")))?;
    }
    let medium = run.session.disk.freeze(Crash::Power).crash(0);
    let contents = contents_of(run, &medium, true)?;
    let pages = metadata(&medium, run.known.model.blends());
    let changed = |page: &u64| page_of(&medium, *page) != page_of(&before, *page);
    let last = if closed { BTreeSet::new() } else { pages.iter().copied().filter(changed).collect() };
    let before = contents_of(run, &before, false)?;
    Ok(PoolImage { setup: run.setup.clone(), medium, earlier, contents, before, pages, last })
}

pub fn some(run: &mut Run, ops: &[Op]) -> Result<(), Violation> {
    let is_tame = |name| !["fault", "cut", "kill", "reopen", "fill", "grow"].contains(&name);
    for op in ops.iter().filter(|op| is_tame(op.name)) {
        run.make_way()?;
        run.launch(op)?;
    }
    run.drain()
}

/// Flushes, and returns the medium with only flushed data.
pub fn at_rest(run: &mut Run) -> Result<Medium, Violation> {
    flush(run, None)?;
    run.drain()?;
    Ok(run.session.disk.freeze(Crash::Power).crash(0))
}

/// Makes sure there is a commit (not every write needs a record): a new volume, a write to every one.
pub fn touch_all(run: &mut Run) -> Result<(), Violation> {
    let keys: Vec<Key> = super::place::volumes(&run.known.model);
    create(run, "last".into(), PAGE as u64)?;
    run.drain()?;
    for (i, key) in keys.into_iter().enumerate() {
        let op = Op::part(1_000_000 + i as u32, [1; 5]);
        let place = super::place::Place { offset: 0, len: size_of(run, key).min(PAGE as u64) };
        write(run, &op, key, Some(place), super::run::AllowedFailure::Nothing)?;
    }
    run.drain()?;
    flush(run, None)?;
    run.drain()
}

/// Returns the contents of a medium, compared with the model first if it is the current one.
pub fn contents_of(run: &Run, medium: &Medium, current: bool) -> Result<Contents, Violation> {
    let session = if current {
        let entrance = Entrance { seed: run.setup.seed, cuts: 0, again: false };
        let known = Known::of(run.known.model.clone());
        recover(&run.setup, (medium, None), &known, entrance, &mut Stats::default())?.0
    } else {
        Session::open(&run.setup, medium, run.setup.seed)?
    };
    read_all(&session).map_err(|e| Violation::new("P6", e.to_string()))
}

fn unsettled(e: forkdisk::Error) -> Violation {
    Violation::new("P6", format!("the pool does not settle: {e}"))
}

/// Reads every volume completely.
///
/// # Errors The first read that fails.
pub fn read_all(session: &Session) -> Result<Contents, forkdisk::Error> {
    let mut all = Contents::new();
    for info in session.pool.list() {
        let volume = session.pool.volume(&info.name)?;
        let buf = session.pool.buffer(info.size as usize);
        let (result, buf) = session
            .exec
            .run(PATIENCE_STEPS, async move { volume.read(0, buf).await })
            .map_err(|stuck| forkdisk::Error::new(forkdisk::ErrorKind::Invalid, stuck.to_string()))?;
        result?;
        all.insert(info.name, buf.to_vec());
    }
    Ok(all)
}

/// Returns one page of a medium.
pub fn page_of(medium: &Medium, page: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    medium.image().read(page * PAGE as u64, &mut bytes);
    bytes
}

/// Returns pages that hold something that no client wrote.
fn metadata(medium: &Medium, blends: &Blends) -> Vec<u64> {
    let written = |sector: &[u8]| !is_zero(sector) && !matches!(blends.trace(sector), Found::Foreign(_));
    let foreign = |page: &u64| {
        let bytes = page_of(medium, *page);
        !is_zero(&bytes) && !bytes.chunks(SECTOR).any(written)
    };
    medium.image().pages().into_iter().filter(foreign).collect()
}
