//! A device in memory: sparse, any length, for tests, benchmarks and programs that want no file.
//!
//! Only pages that hold something other than zeroes take memory. A request takes effect when it is submitted
//! and ends at the second poll, so that concurrent tasks alternate as they do on a real device. Nothing is
//! ever lost: there is no cache, and a flush does nothing.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use rustc_hash::FxHashMap;

use crate::device::{Buf, Device, IoResult, Segment, Segments};
use crate::types::PAGE_SIZE;

type Page = Box<[u8; PAGE_SIZE]>;

/// A sparse device in memory. Clones are the same device.
#[derive(Clone)]
pub struct MemoryDevice {
    state: Rc<State>,
}

struct State {
    len: Cell<u64>,
    pages: RefCell<FxHashMap<u64, Page>>,
}

impl MemoryDevice {
    /// Creates a device of `len` bytes that reads as zeroes.
    pub fn new(len: u64) -> MemoryDevice {
        MemoryDevice { state: Rc::new(State { len: Cell::new(len), pages: RefCell::default() }) }
    }

    /// Returns the bytes of memory that its contents take.
    pub fn resident(&self) -> u64 {
        self.state.pages.borrow().len() as u64 * PAGE_SIZE as u64
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.state.len.get() => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes at {offset} lie beyond the device's end at {}", self.state.len.get()),
            )),
        }
    }

    fn get(&self, segment: &Segment, buf: &mut Buf) -> io::Result<()> {
        self.check(segment.offset, segment.len as u64)?;
        let pages = self.state.pages.borrow();
        for (page, within, at, len) in pieces(segment) {
            let to = &mut buf[at..at + len];
            match pages.get(&page) {
                Some(bytes) => to.copy_from_slice(&bytes[within..within + len]),
                None => to.fill(0),
            }
        }
        Ok(())
    }

    fn put(&self, segment: &Segment, buf: &[u8]) -> io::Result<()> {
        self.check(segment.offset, segment.len as u64)?;
        let mut pages = self.state.pages.borrow_mut();
        for (page, within, at, len) in pieces(segment) {
            let from = &buf[at..at + len];
            if len == PAGE_SIZE && is_zero(from) {
                pages.remove(&page);
                continue;
            }
            pages.entry(page).or_insert_with(|| Box::new([0; PAGE_SIZE]))[within..within + len].copy_from_slice(from);
        }
        Ok(())
    }
}

/// Yields the pages of a segment: number, offset in the page, offset in the buffer, bytes.
fn pieces(segment: &Segment) -> impl Iterator<Item = (u64, usize, usize, usize)> + use<> {
    let (start, end) = (segment.offset, segment.offset + segment.len as u64);
    let (base, page) = (segment.at, PAGE_SIZE as u64);
    (start / page..end.div_ceil(page)).map(move |number| {
        let from = start.max(number * page);
        let to = end.min((number + 1) * page);
        (number, (from % page) as usize, base + (from - start) as usize, (to - from) as usize)
    })
}

/// Whether all bytes are zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.first().is_none_or(|&first| first == 0) && bytes.chunks(64).all(|c| c.iter().fold(0, |a, b| a | b) == 0)
}

/// Resolves at its second poll.
struct NextTurn<T>(Option<T>, bool);

impl<T: Unpin> Future for NextTurn<T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        if !self.1 {
            self.1 = true;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(self.0.take().expect("polled after it was ready"))
    }
}

fn next_turn<T: Unpin>(outcome: T) -> NextTurn<T> {
    NextTurn(Some(outcome), false)
}

impl Device for MemoryDevice {
    crate::plain_device! { stripe allocate }

    fn buffer(&self, len: usize) -> Buf {
        Buf::zeroed(len)
    }

    fn cork(&self, _more: bool) {}

    fn len(&self) -> u64 {
        self.state.len.get()
    }

    fn block_size(&self) -> usize {
        512
    }

    fn read(&self, mut buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        let outcome = segments.iter().try_for_each(|segment| self.get(segment, &mut buf));
        next_turn((outcome, buf))
    }

    fn write(&self, buf: Buf, segments: Segments, _fua: bool) -> impl Future<Output = IoResult> + 'static {
        let outcome = segments.iter().try_for_each(|segment| self.put(segment, &buf));
        next_turn((outcome, buf))
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        next_turn(Ok(()))
    }

    /// Discarded ranges read as zeroes.
    #[expect(clippy::disallowed_methods, reason = "what is retained depends on each key alone, not on the order")]
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let page = PAGE_SIZE as u64;
        let outcome = self.check(offset, len).map(|()| {
            let whole = offset.div_ceil(page)..(offset + len) / page;
            let mut pages = self.state.pages.borrow_mut();
            if whole.end.saturating_sub(whole.start) < pages.len() as u64 {
                whole.for_each(|number| drop(pages.remove(&number)));
            } else {
                pages.retain(|number, _| !whole.contains(number));
            }
        });
        next_turn(outcome)
    }

    fn can_clone(&self, _source: &Self) -> bool {
        true
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        let mut buf = Buf::zeroed(len as usize);
        let segment = |offset| Segment { offset, at: 0, len: len as usize };
        let copied = source.get(&segment(from), &mut buf).and_then(|()| self.put(&segment(to), &buf));
        next_turn(copied)
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        next_turn(self.put(&Segment { offset, at: 0, len: len as usize }, &Buf::zeroed(len as usize)))
    }

    fn set_len(&self, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        let shorter = len < self.state.len.get();
        if !shorter {
            self.state.len.set(len);
        }
        next_turn(if shorter { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(()) })
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::super::run;
    use super::*;

    fn segment(offset: u64, len: usize) -> Segments {
        smallvec![Segment { offset, at: 0, len }]
    }

    #[test]
    fn what_was_written_is_read_at_the_end_of_a_device_of_4_pib() {
        let device = MemoryDevice::new(1 << 52);
        let at = (1 << 52) - 1536;
        run(device.write(Buf::copy_of(&[7; 1536]), segment(at, 1536), false)).0.unwrap();
        let (result, buf) = run(device.read(Buf::zeroed(2048), segment(at - 512, 2048)));
        result.unwrap();
        assert!(buf[..512].iter().all(|&b| b == 0) && buf[512..].iter().all(|&b| b == 7));
        assert_eq!(device.resident(), 4096);
    }

    #[test]
    fn zeroes_and_discards_take_no_memory() {
        let device = MemoryDevice::new(1 << 30);
        run(device.write(Buf::copy_of(&[1; 16384]), segment(8192, 16384), false)).0.unwrap();
        run(device.write(Buf::zeroed(4096), segment(8192, 4096), false)).0.unwrap();
        assert_eq!(device.resident(), 3 * 4096);
        run(device.discard(12288 + 512, 1 << 20)).unwrap();
        assert_eq!(device.resident(), 4096, "a page that is discarded in part stays");
    }

    #[test]
    fn a_range_is_cloned_between_devices_and_made_zero() {
        let (a, b) = (MemoryDevice::new(1 << 20), MemoryDevice::new(1 << 20));
        run(a.write(Buf::copy_of(&[7; 8192]), segment(4096, 8192), false)).0.unwrap();
        run(b.clone_range(&a, 4608, 512, 8192)).unwrap();
        run(b.zero_range(1024, 512)).unwrap();
        let (result, buf) = run(b.read(Buf::zeroed(8704), segment(512, 8704)));
        result.unwrap();
        let expected = [[7; 512].to_vec(), vec![0; 512], vec![7; 6656], vec![0; 1024]].concat();
        assert!(*buf == expected);
        run(a.clone_range(&b, 1 << 19, 4096, 8192)).unwrap();
        assert_eq!(a.resident(), 0, "what holds nothing takes no memory");
        assert!(run(a.clone_range(&b, 0, 1 << 20, 4096)).is_err());
    }

    #[test]
    fn nothing_lies_beyond_the_end() {
        let device = MemoryDevice::new(8192);
        assert!(run(device.write(Buf::copy_of(&[1; 4096]), segment(8192, 4096), false)).0.is_err());
        assert!(run(device.read(Buf::zeroed(4096), segment(u64::MAX - 100, 4096))).0.is_err());
        assert!(run(device.set_len(4096)).is_err());
        run(device.set_len(12288)).unwrap();
        run(device.write(Buf::copy_of(&[1; 4096]), segment(8192, 4096), false)).0.unwrap();
    }
}
