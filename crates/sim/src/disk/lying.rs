//! A device that acknowledges what it does not do, to plant bugs. Without a planted lie it passes everything on.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::rc::Rc;

use forkdisk::device::{Buf, IoResult, Segments};
use forkdisk::{Device, SUPERBLOCK_AT};

use super::SimDisk;
use crate::planted::{Lie, is_told};

/// What a group of the journal begins with.
const GROUP_MAGIC: &[u8] = b"fkdjrnl1";

/// What was written since the last flush.
#[derive(Clone, Copy, Default)]
struct Unflushed {
    journal: bool,
    superblock: bool,
}

#[derive(Default)]
struct State {
    unflushed: Cell<Unflushed>,
    flushes: Cell<u64>,
    /// A length that was acknowledged, not set.
    promised: Cell<Option<u64>>,
}

/// A simulated disk behind the lies that are planted; clones are handles to the same one.
#[derive(Clone)]
pub struct LyingDevice {
    disk: SimDisk,
    is_origin: bool,
    state: Rc<State>,
}

impl LyingDevice {
    /// Returns the device of a pool.
    pub fn of_pool(disk: SimDisk) -> LyingDevice {
        LyingDevice { disk, is_origin: false, state: Rc::default() }
    }

    /// Returns the device of an origin.
    pub fn of_origin(disk: SimDisk) -> LyingDevice {
        LyingDevice { disk, is_origin: true, state: Rc::default() }
    }

    fn lies(&self, lie: Lie) -> bool {
        (self.is_origin == (lie == Lie::StampedUnflushed)) && is_told(lie)
    }

    /// Whether this flush is acknowledged without being done.
    fn skips_flush(&self) -> bool {
        let Unflushed { journal, superblock } = self.state.unflushed.take();
        let before = self.state.flushes.replace(self.state.flushes.get() + 1);
        self.lies(Lie::DataFlushSkipped) && !journal && !superblock
            || self.lies(Lie::JournalFlushSkipped) && journal
            || self.lies(Lie::StampedUnflushed) && before == 0
    }

    fn note(&self, buf: &Buf, segments: &Segments) {
        let Unflushed { journal, superblock } = self.state.unflushed.get();
        let is_group = segments.iter().any(|s| buf[s.at..s.at + s.len].starts_with(GROUP_MAGIC));
        let is_superblock = segments.iter().any(|s| SUPERBLOCK_AT.contains(&s.offset));
        self.state.unflushed.set(Unflushed { journal: journal || is_group, superblock: superblock || is_superblock });
    }

    /// Sets the promised length if a write to this byte needs it.
    fn set_promised_len(&self, end: u64) -> Option<impl Future<Output = io::Result<()>> + 'static> {
        let promised = self.state.promised.get().filter(|_| end > self.disk.len())?;
        self.state.promised.set(None);
        Some(self.disk.set_len(promised))
    }
}

impl Device for LyingDevice {
    fn len(&self) -> u64 {
        self.state.promised.get().unwrap_or_else(|| self.disk.len())
    }

    fn block_size(&self) -> usize {
        self.disk.block_size()
    }

    fn buffer(&self, len: usize) -> Buf {
        self.disk.buffer(len)
    }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        self.disk.read(buf, segments)
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        self.note(&buf, &segments);
        let is_second = segments.iter().any(|s| s.offset == SUPERBLOCK_AT[1]);
        let writes = !(is_second && self.lies(Lie::SecondSuperblockSkipped));
        let lengthened =
            segments.iter().map(|s| s.offset + s.len as u64).max().and_then(|end| self.set_promised_len(end));
        let (disk, mut rest) = (self.disk.clone(), Some((buf, segments)));
        // A request starts when it is called.
        let starts = writes && lengthened.is_none();
        let at_once = rest.take_if(|_| starts).map(|(buf, segments)| self.disk.write(buf, segments, fua));
        async move {
            match (at_once, lengthened, rest) {
                (Some(write), ..) => write.await,
                (None, Some(lengthened), Some((buf, segments))) => match lengthened.await {
                    Ok(()) => disk.write(buf, segments, fua).await,
                    Err(e) => (Err(e), buf),
                },
                (None, _, rest) => (Ok(()), rest.map_or_else(|| disk.buffer(0), |(buf, _)| buf)),
            }
        }
    }

    fn cork(&self, more: bool) {
        self.disk.cork(more);
    }

    fn stripe(&self) -> Option<u64> {
        self.disk.stripe()
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        let first = (!self.skips_flush()).then(|| self.disk.flush());
        let (disk, retries) = (self.disk.clone(), self.lies(Lie::FailedFlushRetried));
        async move {
            let Some(first) = first else { return Ok(()) };
            match first.await {
                Err(_) if retries => disk.flush().await,
                outcome => outcome,
            }
        }
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.disk.discard(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.disk.allocate(offset, len)
    }

    fn can_clone(&self, source: &Self) -> bool {
        self.disk.can_clone(&source.disk)
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        self.disk.clone_range(&source.disk, from, to, len)
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        self.disk.zero_range(offset, len)
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let set = if self.lies(Lie::GrowLengthNotDurable) {
            self.state.promised.set(Some(len));
            None
        } else {
            Some(self.disk.set_len(len))
        };
        async move { if let Some(set) = set { set.await } else { Ok(()) } }
    }
}

#[cfg(test)]
mod tests {
    use forkdisk::device::Segment;

    use super::*;
    use crate::disk::{Config, Crash, Medium, Volatile};
    use crate::executor::Executor;
    use crate::planted::{Planted, plant};

    fn written(device: &LyingDevice, exec: &Executor, offset: u64, bytes: &[u8]) {
        let mut buf = Buf::zeroed(4096);
        buf[..bytes.len()].copy_from_slice(bytes);
        let write = device.write(buf, [Segment { offset, at: 0, len: 4096 }].into_iter().collect(), false);
        exec.run(100, write).unwrap().0.unwrap();
    }

    fn left(disk: &SimDisk, offset: u64) -> u8 {
        let mut byte = [0];
        disk.freeze(Crash::Power).crash(0).image().read(offset, &mut byte);
        byte[0]
    }

    #[test]
    fn a_flush_is_skipped_for_data_or_for_the_journal() {
        for (lie, data_stays, group_stays) in
            [(Lie::DataFlushSkipped, false, true), (Lie::JournalFlushSkipped, true, false)]
        {
            plant(Some(Planted::Device(lie)));
            let exec = Executor::new(1);
            let medium = Medium::blank(Config { sector: 4096, cache: Volatile::Yes }, 1 << 20);
            let disk = SimDisk::new(medium, &exec, 1);
            let device = LyingDevice::of_pool(disk.clone());
            written(&device, &exec, 1 << 16, b"data");
            exec.run(100, device.flush()).unwrap().unwrap();
            assert_eq!(left(&disk, 1 << 16) == b'd', data_stays, "{lie:?}");
            written(&device, &exec, 1 << 17, GROUP_MAGIC);
            exec.run(100, device.flush()).unwrap().unwrap();
            assert_eq!(left(&disk, 1 << 17) == GROUP_MAGIC[0], group_stays, "{lie:?}");
            plant(None);
        }
    }
}
