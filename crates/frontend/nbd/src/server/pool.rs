//! A pool as a set of exports: every volume is `volume`, every snapshot `volume@snapshot`.
//! BLOCK_STATUS is computed from the maps, so it is correct after any crash.

use std::time::Duration;

use forkdisk::{
    Buf, Device, Error, ErrorKind, Operation, PAGE_SIZE, Pool, Result, Sharing, StatusRun, Volume, WriteFlags,
    WriteIntent,
};

use super::contexts::{ALLOCATION, CHANGED, DEPTH, DEPTH_HOLE, DEPTH_OWN, DEPTH_SHARED};
use super::export::{Export, Exports};
use crate::codec::{ExportInfo, STATE_DIRTY, STATE_HOLE, STATE_ZERO, StatusExtent};

const PAGE: u64 = PAGE_SIZE as u64;
/// Length in bytes from which zeroing by the map is faster than writing, including its unaligned ends.
const FAST_ZERO_BYTES: u64 = 64 << 10;
/// Most runs of the map that CACHE examines.
const CACHE_LOOKUPS: usize = 1024;
/// Most generations of clones that are followed.
const MAX_DESCENT_LEVELS: usize = 64;
/// Most snapshots whose contexts a list names; the others can be used, too. With all of them,
/// listing the contexts of all snapshots of a volume would take quadratic time.
const LISTED_COUNT: usize = 100;
/// The same limit for an export that is a snapshot: a list of all exports contains these for each of them.
const LISTED_OF_SNAPSHOT_COUNT: usize = 10;

/// An open volume or snapshot, and its pool.
pub struct PoolExport<D: Device> {
    pool: Pool<D>,
    volume: Volume<D>,
}

/// A metadata context of a volume or snapshot.
pub enum PoolContext<D: Device> {
    /// Data or hole.
    Allocation,
    /// Hole, exclusive or shared.
    Depth,
    /// Changes since this snapshot, which stays open meanwhile.
    Changed(Volume<D>),
}

impl<D: Device> Exports for Pool<D> {
    type Export = PoolExport<D>;

    fn list(&self, after: &str, most: usize) -> Vec<(String, String)> {
        let described = |name: String| {
            let description = description(name.contains('@'));
            (name, description)
        };
        self.names_after(after, most).into_iter().map(described).collect()
    }

    fn open(&self, name: &str) -> Result<PoolExport<D>> {
        let volume = if name.is_empty() { self.volume(&only_volume(self)?) } else { self.volume(name) };
        Ok(PoolExport { pool: self.clone(), volume: volume? })
    }

    fn buffer(&self, len: usize) -> Buf {
        Pool::buffer(self, len)
    }
}

/// Returns the default export: the pool's only volume, whether it has snapshots or not.
fn only_volume<D: Device>(pool: &Pool<D>) -> Result<String> {
    let mut volumes = pool.volume_names_after("", 2).into_iter();
    match (volumes.next(), volumes.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => Err(Error::new(ErrorKind::NotFound, "the pool has no volume yet")),
        (Some(_), Some(_)) => {
            let text = "the pool has several volumes: name the export";
            Err(Error::new(ErrorKind::NotFound, text))
        }
    }
}

fn description(snapshot: bool) -> String {
    if snapshot { "forkdisk snapshot" } else { "forkdisk volume" }.to_owned()
}

/// Returns the parts of a range that do not cover their page, as pairs of start and end; either may be empty.
fn ragged_ends(offset: u64, len: u64) -> [(u64, u64); 2] {
    let end = offset + len;
    let head = offset.next_multiple_of(PAGE).min(end);
    [(offset, head), ((end / PAGE * PAGE).max(head), end)]
}

/// Returns the volume of a name: itself, or the volume of the snapshot.
fn volume_of(name: &str) -> &str {
    name.split_once('@').map_or(name, |(volume, _)| volume)
}

impl<D: Device> PoolExport<D> {
    /// Creates the export of an open volume.
    pub fn new(pool: &Pool<D>, volume: Volume<D>) -> PoolExport<D> {
        PoolExport { pool: pool.clone(), volume }
    }

    /// Returns the volumes with whose snapshots this one can be compared: its own, the one from
    /// which it was cloned, and so on, under their current names.
    fn line(&self) -> Vec<String> {
        self.pool.line_of(self.volume.id(), MAX_DESCENT_LEVELS)
    }

    /// Opens the snapshot that the name after `qemu:dirty-bitmap:` means.
    fn snapshot(&self, name: &str) -> Option<Volume<D>> {
        let line = self.line();
        let full = if name.contains('@') { name.to_owned() } else { format!("{}@{name}", line.first()?) };
        let is_known = line.iter().any(|volume| volume == volume_of(&full));
        if is_known { self.pool.volume(&full).ok() } else { None }
    }
}

impl<D: Device> Export for PoolExport<D> {
    type Context = PoolContext<D>;

    fn info(&self) -> ExportInfo {
        let name = self.volume.name();
        ExportInfo {
            description: description(name.contains('@')),
            name,
            size: self.volume.size(),
            read_only: self.volume.read_only(),
            multi_conn: true,
        }
    }

    fn size(&self) -> u64 {
        self.volume.size()
    }

    fn announce_write(&self, offset: u64, len: u64) -> Option<WriteIntent> {
        self.volume.announce_write(offset, len)
    }

    async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        self.volume.read(offset, buf).await
    }

    async fn read_sparse(&self, offset: u64, buf: Buf) -> (Result<Vec<(usize, usize)>>, Buf) {
        self.volume.read_sparse(offset, buf).await
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Result<()>, Buf) {
        self.volume.write(offset, buf, flags).await
    }

    /// A thin volume does not keep zeroes provisioned: freed space is available to all volumes, and
    /// a snapshot would invalidate any promise. As with a thin pool's device, `no_hole` is only a
    /// hint.
    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool, _no_hole: bool) -> Result<()> {
        self.volume.write_zeroes(offset, len, fua).await
    }

    /// Whole pages are removed from the map; unaligned ends are written.
    fn zeroing_is_fast(&self, offset: u64, len: u64) -> bool {
        let end = offset + len;
        let is_whole = offset.is_multiple_of(PAGE) && (end.is_multiple_of(PAGE) || end == self.volume.size());
        is_whole || len >= FAST_ZERO_BYTES
    }

    /// NBD allows any contents after a trim. Clients that forward a hole punched into a file
    /// (nbdfuse) promise zeroes to the byte, so unaligned ends are zeroed if there is space.
    async fn trim(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.volume.discard(offset, len).await?;
        for (from, to) in ragged_ends(offset, len).into_iter().filter(|(from, to)| from < to) {
            match self.volume.write_zeroes(from, to - from, false).await {
                Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error),
                _ => {}
            }
        }
        if fua { self.volume.flush().await } else { Ok(()) }
    }

    /// Loads the map of the range, not the data.
    async fn cache(&self, offset: u64, len: u64) -> Result<()> {
        self.volume.allocation(offset, len, CACHE_LOOKUPS).await.map(drop)
    }

    async fn flush(&self) -> Result<()> {
        self.volume.flush().await
    }

    fn took(&self, operation: Operation, time: Duration) {
        self.volume.record_latency(operation, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    fn contexts(&self) -> Vec<String> {
        let own = self.volume.name();
        let mut names = vec![ALLOCATION.to_owned(), DEPTH.to_owned()];
        let listed = if own.contains('@') { LISTED_OF_SNAPSHOT_COUNT } else { LISTED_COUNT };
        for (generation, volume) in self.line().iter().enumerate() {
            let left = (2 + listed).saturating_sub(names.len());
            let full = |snapshot: &String| format!("{volume}@{snapshot}");
            // One more, since one may be the export itself.
            let mut others = self.pool.last_snapshot_names(volume, left + 1);
            others.retain(|snapshot| full(snapshot) != own);
            let others = others.split_off(others.len().saturating_sub(left));
            names.extend(others.iter().map(|snapshot| match generation {
                0 => format!("{CHANGED}{snapshot}"),
                _ => format!("{CHANGED}{}", full(snapshot)),
            }));
        }
        names
    }

    fn context(&self, name: &str) -> Option<PoolContext<D>> {
        match name {
            ALLOCATION => Some(PoolContext::Allocation),
            DEPTH => Some(PoolContext::Depth),
            _ => self.snapshot(name.strip_prefix(CHANGED)?).map(PoolContext::Changed),
        }
    }

    async fn status(&self, context: &PoolContext<D>, offset: u64, len: u64, looks: usize) -> Result<Vec<StatusExtent>> {
        let volume = &self.volume;
        Ok(match context {
            PoolContext::Allocation => extents(volume.allocation(offset, len, looks).await?, |is_data| match is_data {
                true => 0,
                false => STATE_HOLE | STATE_ZERO,
            }),
            PoolContext::Depth => extents(volume.sharing(offset, len, looks).await?, |sharing| match sharing {
                Sharing::Hole => DEPTH_HOLE,
                Sharing::Own => DEPTH_OWN,
                Sharing::Shared => DEPTH_SHARED,
            }),
            PoolContext::Changed(since) => {
                let runs = volume.changed_since(since, offset, len, looks).await?;
                extents(runs, |is_changed| if is_changed { STATE_DIRTY } else { 0 })
            }
        })
    }
}

fn extents<T: Copy>(runs: Vec<StatusRun<T>>, flags: impl Fn(T) -> u32) -> Vec<StatusExtent> {
    runs.into_iter().map(|run| StatusExtent { len: run.len, flags: flags(run.value) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ragged_ends_of_a_range_are_what_whole_pages_leave() {
        assert_eq!(ragged_ends(4096, 8192), [(4096, 4096), (12288, 12288)]);
        assert_eq!(ragged_ends(100, 9000), [(100, 4096), (8192, 9100)]);
        assert_eq!(ragged_ends(100, 200), [(100, 300), (300, 300)], "within a page");
        assert_eq!(ragged_ends(4000, 200), [(4000, 4096), (4096, 4200)], "no whole page");
        assert_eq!(ragged_ends(4096, 10), [(4096, 4096), (4096, 4106)]);
    }
}
