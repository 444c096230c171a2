//! A pool as a set of exports: every volume is `volume`, every snapshot `volume@snapshot`.

use std::time::Duration;

use forkdisk::{Buf, Device, Error, ErrorKind, Operation, PAGE_SIZE, Pool, Result, Volume};

use super::export::{Export, Exports};
use crate::codec::ExportInfo;

impl<D: Device> Exports for Pool<D> {
    type Export = Volume<D>;

    fn list(&self) -> Vec<(String, String)> {
        let volumes = Pool::list(self).into_iter();
        volumes.map(|v| (v.name, description(v.snapshot))).collect()
    }

    fn open(&self, name: &str) -> Result<Volume<D>> {
        if name.is_empty() { self.volume(&only_volume(self)?) } else { self.volume(name) }
    }

    fn buffer(&self, len: usize) -> Buf {
        Pool::buffer(self, len)
    }
}

/// The default export: the pool's only volume, whatever snapshots it has.
fn only_volume<D: Device>(pool: &Pool<D>) -> Result<String> {
    let mut volumes = Pool::list(pool).into_iter().filter(|v| !v.snapshot);
    match (volumes.next(), volumes.next()) {
        (Some(only), None) => Ok(only.name),
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

/// The parts of a range that do not cover their page, each from where to where; either may be empty.
fn ragged_ends(offset: u64, len: u64) -> [(u64, u64); 2] {
    let (page, end) = (PAGE_SIZE as u64, offset + len);
    let head = offset.next_multiple_of(page).min(end);
    [(offset, head), ((end / page * page).max(head), end)]
}

impl<D: Device> Export for Volume<D> {
    fn info(&self) -> ExportInfo {
        let name = self.name();
        ExportInfo {
            description: description(name.contains('@')),
            name,
            size: self.size(),
            read_only: self.read_only(),
        }
    }

    async fn read(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        Volume::read(self, offset, buf).await
    }

    async fn write(&self, offset: u64, buf: Buf, fua: bool) -> (Result<()>, Buf) {
        Volume::write(self, offset, buf, fua).await
    }

    /// A thin volume does not keep zeroes provisioned: what is free again is free for all, and a
    /// snapshot would undo any promise. Like a thin pool's own device, it takes `no_hole` as a
    /// hint.
    async fn write_zeroes(&self, offset: u64, len: u64, fua: bool, _no_hole: bool) -> Result<()> {
        Volume::write_zeroes(self, offset, len, fua).await
    }

    /// NBD lets a trimmed range hold anything. Clients that pass on a hole punched into a file
    /// (nbdfuse) promise zeroes to the byte, so its ragged ends are zeroed where there is space.
    async fn trim(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.discard(offset, len).await?;
        for (from, to) in ragged_ends(offset, len).into_iter().filter(|(from, to)| from < to) {
            match self.write_zeroes(from, to - from, false).await {
                Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error),
                _ => {}
            }
        }
        if fua { Volume::flush(self).await } else { Ok(()) }
    }

    async fn flush(&self) -> Result<()> {
        Volume::flush(self).await
    }

    fn took(&self, operation: Operation, time: Duration) {
        Volume::took(self, operation, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }
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
