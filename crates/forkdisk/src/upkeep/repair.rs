//! Repair: rebuilds the counts from the maps.
//!
//! The maps say what is in use; the counts say the same in another form, so that a writer need not read all
//! maps to find a free page. If count pages or their log are damaged, nothing is lost: every reference is
//! counted again, as `check` does, and all counts are written anew.
//!
//! The state is that of the last checkpoint. The journal stays, and the next open replays it on the new
//! counts. Count pages have fixed places, so nothing is allocated: the new ones overwrite the old ones, then
//! both superblocks refer to them. A crash in between leaves damaged counts, as before; the maps are
//! unchanged, and the repair can be repeated.

use std::rc::Rc;

use smallvec::smallvec;

use crate::device::{CachedDevice, Device, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{CountEntry, CountLog, Layout, SUPERBLOCK_PAGES, Superblock};
use crate::origin::Origins;
use crate::planted::correct;
use crate::runtime::Runtime;
use crate::space::{Space, Step, count_images};
use crate::store::{OpenOptions, OpenedPool, Store, open, read_superblock};
use crate::types::{PAGE_SIZE, PageAddr};

use super::Upkeep;
use super::check::tally;

/// Count pages made in one step.
const COUNT_PAGES_PER_STEP: usize = 256;

/// A page of the pool that a repair writes: its offset in bytes, and what it will hold.
pub type Replacement = (u64, Box<[u8; PAGE_SIZE]>);

/// A planned repair.
pub struct Repair<D> {
    device: Rc<CachedDevice<D>>,
    /// Identity of the pool.
    pub uuid: [u8; 16],
    /// Volumes and snapshots whose maps were read.
    pub volumes: u64,
    /// Pages that they refer to.
    pub pages: u64,
    /// What is to be written, in this order: count pages, then the superblocks, each durable before the next
    /// page.
    pub replacements: Vec<Replacement>,
}

/// Computes the counts of the pool on `device` from its maps without writing. All new count pages are
/// held in memory: one page per seven MiB in use. `Corrupt`, with the place, if a map or the directory is
/// damaged.
pub async fn plan_repair<D: Device>(device: D, runtime: Rc<dyn Runtime>) -> Result<Repair<D>> {
    let found = read_superblock(&device).await?;
    let (superblock, chosen) = (found.superblock.clone(), found.slot);
    let layout = Layout::new(superblock.size);
    let nothing =
        || Space::new(layout, superblock.checksum_uuid, vec![CountEntry::default(); layout.count_nodes(3) as usize]);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let store = Store::assemble(device, runtime, options, OpenedPool { flaw: None, ..found }, nothing())?;
    open::load_directory(&store).await?;
    let upkeep = Upkeep::new(&store, &Origins::new(&store));
    let tally = upkeep.walk(async |walk| tally(&upkeep, walk).await).await?;
    if let [first, more @ ..] = &tally.report.damage[..] {
        let more = if more.is_empty() { String::new() } else { format!(" (and {} places more)", more.len()) };
        let why = format!(
            "only counts can be repaired, and the maps are damaged, too: {first}{more}; export what can be read"
        );
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    let mut space = nothing();
    let mut pages = 0;
    for (&block, counts) in &tally.blocks {
        if layout.is_reserved(block) {
            let why = format!("a map refers to {block:?}, which cannot hold data; export what can be read");
            return Err(Error::new(ErrorKind::Corrupt, why));
        }
        pages += if counts.whole > 0 { 256 } else { counts.pages.iter().filter(|&&n| n > 0).count() as u64 };
        correct!(
            space.set_counts(block, counts),
            Bug::RepairCountsOnce => space.incr_pages(block.page(0), 256)
        );
    }
    count_images::freeze(&mut space);
    let mut replacements = Vec::new();
    let counted = loop {
        let missing = |_| Error::new(ErrorKind::Corrupt, "new counts are missing");
        match count_images::checkpoint_step(&mut space, COUNT_PAGES_PER_STEP).map_err(missing)? {
            Step::Write(pages) => replacements.extend(pages.into_iter().map(|(at, bytes)| (at.offset(), bytes))),
            Step::Done(counted) => break counted,
        }
    };
    let next = Superblock {
        generation: superblock.generation + 1,
        counts: counted.roots,
        large_counts: counted.large,
        count_log: correct!(CountLog::default(), Bug::RepairKeepsLog => superblock.count_log),
        ..superblock
    };
    for slot in [1 - chosen, chosen] {
        let mut bytes = Box::new([0; PAGE_SIZE]);
        next.encode(SUPERBLOCK_PAGES[slot], &mut bytes[..]);
        replacements.push((SUPERBLOCK_PAGES[slot].offset(), bytes));
    }
    let volumes = tally.report.volumes;
    Ok(Repair { device: store.device.clone(), uuid: next.uuid, volumes, pages, replacements })
}

impl<D: Device> Repair<D> {
    /// The pages that it would overwrite, in the same order. An unreadable page counts as zeroes.
    pub async fn replaced(&self) -> Vec<Replacement> {
        let mut out = Vec::with_capacity(self.replacements.len());
        for &(offset, _) in &self.replacements {
            let segment = Segment { offset, at: 0, len: PAGE_SIZE };
            let (result, buf) = self.device.read(self.device.buffer(PAGE_SIZE), smallvec![segment]).await;
            let mut bytes = Box::new([0; PAGE_SIZE]);
            if result.is_ok() {
                bytes.copy_from_slice(&buf[..PAGE_SIZE]);
            }
            out.push((offset, bytes));
        }
        out
    }

    /// Carries the repair out. Nothing else may have the pool open.
    ///
    /// # Errors
    /// `Io` and `NoSpace` if the device fails; a repair can be repeated.
    pub async fn apply(&self) -> Result<()> {
        replace_pages(&*self.device, &self.replacements).await
    }
}

/// Writes pages of a pool that nothing has open, in order; each superblock is durable before the next page.
///
/// # Errors
/// `Io` and `NoSpace` if the device fails.
pub async fn replace_pages<D: Device>(device: &D, replacements: &[Replacement]) -> Result<()> {
    let flush = async || device.flush().await.map_err(|e| Error::io("flushing the pool's device", e));
    let is_superblock = |offset: u64| SUPERBLOCK_PAGES.iter().any(|at| at.offset() == offset);
    for (offset, bytes) in replacements {
        if is_superblock(*offset) {
            flush().await?;
        }
        let mut buf = device.buffer(PAGE_SIZE);
        buf.copy_from_slice(&bytes[..]);
        let segment = Segment { offset: *offset, at: 0, len: PAGE_SIZE };
        let (result, _) = device.write(buf, smallvec![segment], false).await;
        result.map_err(|e| Error::io(format!("writing {:?}", PageAddr(offset / PAGE_SIZE as u64)), e))?;
    }
    flush().await
}
