//! A decorator that fails chosen requests instead of passing them on.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::rc::Rc;

use super::recording::{Request, RequestKind};
use crate::device::{Buf, Device, IoResult, Segments};

type Verdict = dyn FnMut(&Request) -> Option<io::Error>;

/// A device that fails on demand. Clones share the verdict function.
pub struct FailingDevice<D> {
    inner: D,
    verdict: Rc<RefCell<Box<Verdict>>>,
}

impl<D: Clone> Clone for FailingDevice<D> {
    fn clone(&self) -> Self {
        FailingDevice { inner: self.inner.clone(), verdict: self.verdict.clone() }
    }
}

impl<D: Device> FailingDevice<D> {
    /// Calls `verdict` for each segment of each request before it reaches `inner`; a request with a failing
    /// segment does not reach it at all. Writes are all [`RequestKind::WriteData`].
    pub fn new(inner: D, verdict: impl FnMut(&Request) -> Option<io::Error> + 'static) -> FailingDevice<D> {
        FailingDevice { inner, verdict: Rc::new(RefCell::new(Box::new(verdict))) }
    }

    /// Returns the device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    fn judge(&self, kind: RequestKind, offset: u64, len: u64) -> io::Result<()> {
        match (self.verdict.borrow_mut())(&Request { kind, offset, len }) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn judge_all(&self, kind: RequestKind, segments: &Segments) -> io::Result<()> {
        segments.iter().try_for_each(|s| self.judge(kind, s.offset, s.len as u64))
    }
}

/// Returns the verdict if it is an error, otherwise the outcome of the submitted request.
async fn outcome<F: Future<Output = io::Result<()>>>(submitted: io::Result<F>) -> io::Result<()> {
    submitted?.await
}

/// As [`outcome`], with the buffer of a refused request.
async fn transfer<F: Future<Output = IoResult>>(submitted: Result<F, (io::Error, Buf)>) -> IoResult {
    match submitted {
        Ok(request) => request.await,
        Err((error, buf)) => (Err(error), buf),
    }
}

impl<D: Device> Device for FailingDevice<D> {
    crate::forward_device! { inner: len block_size buffer cork stripe allocate can_clone set_len }

    fn read(&self, buf: Buf, segments: Segments) -> impl Future<Output = IoResult> + 'static {
        transfer(match self.judge_all(RequestKind::Read, &segments) {
            Ok(()) => Ok(self.inner.read(buf, segments)),
            Err(error) => Err((error, buf)),
        })
    }

    fn write(&self, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + 'static {
        transfer(match self.judge_all(RequestKind::WriteData, &segments) {
            Ok(()) => Ok(self.inner.write(buf, segments, fua)),
            Err(error) => Err((error, buf)),
        })
    }

    fn flush(&self) -> impl Future<Output = io::Result<()>> + 'static {
        outcome(self.judge(RequestKind::Flush, 0, 0).map(|()| self.inner.flush()))
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        outcome(self.judge(RequestKind::Discard, offset, len).map(|()| self.inner.discard(offset, len)))
    }

    fn clone_range(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + 'static {
        let judged = self.judge(RequestKind::Clone, to, len);
        outcome(judged.map(|()| self.inner.clone_range(&source.inner, from, to, len)))
    }

    fn zero_range(&self, offset: u64, len: u64) -> impl Future<Output = io::Result<()>> + 'static {
        outcome(self.judge(RequestKind::Zero, offset, len).map(|()| self.inner.zero_range(offset, len)))
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::super::MemoryDevice;
    use super::super::run;
    use super::*;
    use crate::device::Segment;

    #[test]
    fn a_request_that_is_refused_reaches_nothing_and_the_next_one_does() {
        let memory = MemoryDevice::new(1 << 20);
        let device = FailingDevice::new(memory.clone(), |r| {
            (r.kind == RequestKind::WriteData && r.offset == 8192).then(|| io::Error::other("bad place"))
        });
        let write = |segments| run(device.write(Buf::copy_of(&[7; 8192]), segments, false)).0;
        let at = |offset, at| Segment { offset, at, len: 4096 };
        assert_eq!(write(smallvec![at(0, 0), at(8192, 4096)]).unwrap_err().to_string(), "bad place");
        assert_eq!(memory.resident(), 0, "its other piece did not reach the device either");
        write(smallvec![at(0, 0), at(4096, 4096)]).unwrap();
        let (result, buf) = run(device.read(Buf::zeroed(4096), smallvec![at(4096, 0)]));
        result.unwrap();
        assert!(buf.iter().all(|&b| b == 7));
    }

    #[test]
    fn a_flush_can_fail_once() {
        let mut left = 1;
        let device = FailingDevice::new(MemoryDevice::new(1 << 20), move |r| {
            (r.kind == RequestKind::Flush && std::mem::take(&mut left) == 1).then(|| io::ErrorKind::Other.into())
        });
        assert!(run(device.flush()).is_err());
        run(device.flush()).unwrap();
        run(device.discard(0, 4096)).unwrap();
    }
}
