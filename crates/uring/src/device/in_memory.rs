//! Files in memory (tmpfs): the ring's thread transfers little data itself.
//!
//! io_uring passes each transfer of such a file to a worker thread of the kernel, which costs more than copying a few
//! pages. A transfer of a file in memory waits for no disk, except if its pages were swapped out.

use forkdisk::Buf;
use forkdisk::device::Segments;

use super::UringDevice;
use crate::at_once;

/// Most bytes of a transfer. From about here on it pays that another processor copies.
const AT_ONCE_BYTES: usize = 64 << 10;
/// Most bytes of all of them in one turn of the loop, so that other tasks and the ring get their turn.
const OF_TURN_BYTES: usize = 1 << 20;

impl UringDevice {
    /// Transfers all segments; `buf` belongs to them. Returns false if the ring has to do it, from the beginning:
    /// there is too much, or an error to report.
    pub(super) fn transfer_at_once(&self, buf: &mut Buf, segments: &Segments, write: bool) -> bool {
        let len: usize = segments.iter().map(|s| s.len).sum();
        let driver = self.rt.driver();
        if len > AT_ONCE_BYTES || !driver.copies_at_once(len, OF_TURN_BYTES) {
            return false;
        }
        let file = self.state.handle.fd();
        segments.iter().all(|s| {
            let part = &mut buf[s.at..s.at + s.len];
            let done =
                if write { at_once::write_at(file, part, s.offset) } else { at_once::read_at(file, part, s.offset) };
            done.is_ok_and(|done| done == s.len)
        })
    }
}

#[cfg(test)]
mod tests {
    use forkdisk::device::{Buf, Device, Segment, Segments};

    use super::OF_TURN_BYTES;
    use crate::{Config, DeviceOptions, UringDevice, block_on};

    const PAGE: usize = 4096;

    fn pieces() -> Segments {
        [(3, 0), (100, 1), (7, 2)]
            .map(|(page, at)| Segment { offset: page * PAGE as u64, at: at * PAGE, len: PAGE })
            .into_iter()
            .collect()
    }

    /// In memory and on the disk of this test: the same contents and the same errors, in this thread and in others.
    #[test]
    fn transfers_at_once_do_what_the_ring_does() {
        let in_memory = tempfile::tempdir_in("/dev/shm").ok();
        let on_disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for dir in in_memory.iter().chain([&on_disk]) {
            let path = dir.path().join("disk");
            block_on(Config::default(), |rt| async move {
                let device = UringDevice::create(&rt, &path, 1 << 20, false, &DeviceOptions::default()).unwrap();
                let mut data = Buf::zeroed(3 * PAGE);
                data.chunks_mut(PAGE).zip(1..).for_each(|(page, n)| page.fill(n));
                let (written, data) = device.write(data, pieces(), false).await;
                written.unwrap();
                let (read, found) = device.read(Buf::zeroed(3 * PAGE), pieces()).await;
                read.unwrap();
                assert!(*found == *data);
                let beyond: Segments = [Segment { offset: 1 << 20, at: 0, len: PAGE }].into_iter().collect();
                assert!(device.read(Buf::zeroed(PAGE), beyond).await.0.is_err());
                // Cut by another program: what is read ends too early, which the ring reports.
                std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(50 * PAGE as u64).unwrap();
                let cut = device.read(Buf::zeroed(3 * PAGE), pieces()).await.0.unwrap_err();
                assert_eq!(cut.kind(), std::io::ErrorKind::UnexpectedEof);
            })
            .unwrap();
        }
    }

    /// A task that finds all its transfers done never waits; others still get their turn.
    #[test]
    fn a_task_without_waits_leaves_turns_to_others() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let path = dir.path().join("disk");
        block_on(Config::default(), |rt| async move {
            let device = UringDevice::create(&rt, &path, 1 << 20, false, &DeviceOptions::default()).unwrap();
            let other = rt.spawn({
                let rt = rt.clone();
                async move { rt.sleep_for(std::time::Duration::from_millis(1)).await }
            });
            let before = rt.driver().turns.get();
            let one: Segments = [Segment { offset: 0, at: 0, len: 16 * PAGE }].into_iter().collect();
            let mut buf = Buf::zeroed(16 * PAGE);
            for _ in 0..4 * OF_TURN_BYTES / (16 * PAGE) {
                buf = device.write(buf, one.clone(), false).await.1;
            }
            assert!(rt.driver().turns.get() >= before + 3);
            other.await;
        })
        .unwrap();
    }
}
