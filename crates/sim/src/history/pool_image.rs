//! Images of real pools that are then damaged: their contents are known to the byte.
//!
//! An image is the end of a short history. Its last commit may be lost unnoticed when the journal pages that
//! it wrote are damaged, because it then looks like a commit that a crash cut off; so the contents before
//! that commit are kept as well.

use std::collections::{BTreeMap, BTreeSet};

use super::known::Known;
use super::recover::{Session, recover};
use super::run::Run;
use super::{Kind, Op, Profile, Setup, Stats, Violation};
use crate::disk::{Crash, Medium, PAGE};
use crate::driver::{Entrance, PATIENCE_STEPS};
use crate::model::{Control, Key};
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
            image = Some(run.image(&setup.operations(steps), closed)?);
            Ok(())
        });
        match (image, violation) {
            (Some(image), None) => Ok(image),
            (_, Some(v)) => Err(Violation { what: format!("before any damage: {}", v.what), ..v }),
            (None, None) => Err(Violation::new("P6", "a history ended without a pool")),
        }
    }
}

impl Run {
    fn image(&mut self, ops: &[Op], closed: bool) -> Result<PoolImage, Violation> {
        let half = ops.len() / 2;
        self.some(&ops[..half])?;
        let pool = self.session.pool.clone();
        self.session.exec.run(PATIENCE_STEPS, async move { pool.wait_freed().await })?.map_err(unsettled)?;
        let earlier = self.at_rest()?;
        self.some(&ops[half..])?;
        let before = self.at_rest()?;
        self.touch_all()?;
        if closed {
            let pool = self.session.pool.clone();
            let done = self.session.exec.run(PATIENCE_STEPS, async move { pool.close().await })?;
            done.map_err(|e| Violation::new("P6", format!("the pool cannot be closed: {e}")))?;
        }
        let medium = self.session.disk.freeze(Crash::Power).crash(0);
        let contents = self.contents(&medium, true)?;
        let pages = metadata(&medium, self.known.model.blends());
        let changed = |page: &u64| page_of(&medium, *page) != page_of(&before, *page);
        let last = if closed { BTreeSet::new() } else { pages.iter().copied().filter(changed).collect() };
        let before = self.contents(&before, false)?;
        Ok(PoolImage { setup: self.setup.clone(), medium, earlier, contents, before, pages, last })
    }

    fn some(&mut self, ops: &[Op]) -> Result<(), Violation> {
        let tame =
            |kind| !matches!(kind, Kind::Fault | Kind::Cut | Kind::Kill | Kind::Reopen | Kind::Fill | Kind::Grow);
        for op in ops.iter().filter(|op| tame(op.kind)) {
            self.make_way()?;
            self.launch(op)?;
        }
        self.drain()
    }

    /// Flushes, and returns the medium with only flushed data.
    fn at_rest(&mut self) -> Result<Medium, Violation> {
        self.flush(None)?;
        self.drain()?;
        Ok(self.session.disk.freeze(Crash::Power).crash(0))
    }

    /// Makes sure there is a commit (not every write needs a record): a new volume, a write to every one.
    fn touch_all(&mut self) -> Result<(), Violation> {
        let keys: Vec<Key> = super::place::volumes(&self.known.model);
        self.control(Control::Create("last".into(), PAGE as u64))?;
        self.drain()?;
        for (i, key) in keys.into_iter().enumerate() {
            let op = Op { kind: Kind::Write, number: 1_000_000 + i as u32, gap: 0, draws: [1; 5] };
            let place = super::place::Place { offset: 0, len: self.size(key).min(PAGE as u64) };
            self.write(&op, key, Some(place), super::run::AllowedFailure::Nothing)?;
        }
        self.drain()?;
        self.flush(None)?;
        self.drain()
    }

    /// Returns the contents of a medium, compared with the model first if it is the current one.
    fn contents(&self, medium: &Medium, current: bool) -> Result<Contents, Violation> {
        let session = if current {
            let entrance = Entrance { seed: self.setup.seed, cuts: 0, again: false };
            let known = Known::of(self.known.model.clone());
            recover(&self.setup, (medium, None), &known, entrance, &mut Stats::default())?.0
        } else {
            Session::open(&self.setup, medium, self.setup.seed)?
        };
        read_all(&session).map_err(|e| Violation::new("P6", e.to_string()))
    }
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
