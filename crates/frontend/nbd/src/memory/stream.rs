//! Connections within one thread, without system calls: their behaviour depends only
//! on the order in which tasks run.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::rc::Rc;

use forkdisk::Buf;
use forkdisk_uring::{ByteStream, Piece, WakeCell};

/// One end of a connection in memory. Clones are the same end; it is closed when the last clone and
/// the last operation on it are dropped.
#[derive(Clone)]
pub struct MemoryStream {
    end: Rc<End>,
}

struct End {
    incoming: Rc<Direction>,
    outgoing: Rc<Direction>,
}

/// One direction of a connection.
struct Direction {
    bytes: RefCell<VecDeque<u8>>,
    /// Most bytes in transit.
    capacity: usize,
    /// The sender has finished.
    is_finished: Cell<bool>,
    /// The receiver has stopped.
    is_broken: Cell<bool>,
    readable: WakeCell,
    writable: WakeCell,
}

impl MemoryStream {
    /// Creates both ends of a connection that holds up to `capacity` bytes in each direction.
    pub fn pair(capacity: usize) -> (MemoryStream, MemoryStream) {
        let [there, back] = [0; 2].map(|_| Rc::new(Direction::new(capacity.max(1))));
        let end = |incoming: &Rc<Direction>, outgoing: &Rc<Direction>| {
            let (incoming, outgoing) = (incoming.clone(), outgoing.clone());
            MemoryStream { end: Rc::new(End { incoming, outgoing }) }
        };
        (end(&back, &there), end(&there, &back))
    }
}

impl Direction {
    fn new(capacity: usize) -> Direction {
        let (bytes, is_finished, is_broken) = Default::default();
        let (readable, writable) = Default::default();
        Direction { bytes, capacity, is_finished, is_broken, readable, writable }
    }

    fn finish(&self) {
        self.is_finished.set(true);
        self.readable.wake();
        self.writable.wake();
    }

    fn break_off(&self) {
        self.is_broken.set(true);
        self.bytes.borrow_mut().clear();
        self.readable.wake();
        self.writable.wake();
    }

    /// Takes at least one byte out; `None` if there is none yet.
    fn take(&self, to: &mut [u8]) -> Option<usize> {
        let mut bytes = self.bytes.borrow_mut();
        let n = bytes.len().min(to.len());
        if n == 0 {
            let is_over = to.is_empty() || self.is_finished.get() || self.is_broken.get();
            return is_over.then_some(0);
        }
        let (front, back) = bytes.as_slices();
        let cut = n.min(front.len());
        to[..cut].copy_from_slice(&front[..cut]);
        to[cut..n].copy_from_slice(&back[..n - cut]);
        bytes.drain(..n);
        self.writable.wake();
        Some(n)
    }

    /// Puts at least one byte in; `None` if there is no room yet.
    fn put(&self, from: &[u8]) -> Option<io::Result<usize>> {
        if self.is_broken.get() || self.is_finished.get() {
            return Some(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let mut bytes = self.bytes.borrow_mut();
        let n = from.len().min(self.capacity - bytes.len());
        bytes.extend(&from[..n]);
        self.readable.wake();
        (n > 0).then_some(Ok(n))
    }
}

impl ByteStream for MemoryStream {
    fn recv(&self, mut buf: Buf, at: usize, max: usize) -> impl Future<Output = (io::Result<usize>, Buf)> + 'static {
        let end = self.end.clone();
        async move {
            let to = &mut buf[at..at + max];
            let n = end.incoming.readable.until(|| end.incoming.take(to)).await;
            (Ok(n), buf)
        }
    }

    fn send_vectored(&self, pieces: Vec<Piece>) -> impl Future<Output = (io::Result<()>, Vec<Piece>)> + 'static {
        let end = self.end.clone();
        async move {
            for piece in &pieces {
                let mut rest = piece.bytes();
                while !rest.is_empty() {
                    match end.outgoing.writable.until(|| end.outgoing.put(rest)).await {
                        Ok(n) => rest = &rest[n..],
                        Err(e) => return (Err(e), pieces),
                    }
                }
            }
            (Ok(()), pieces)
        }
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if how != Shutdown::Write {
            self.end.incoming.break_off();
        }
        if how != Shutdown::Read {
            self.end.outgoing.finish();
        }
        Ok(())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.outgoing.finish();
        self.incoming.break_off();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn now<F: Future>(future: F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    fn recv(stream: &MemoryStream, max: usize) -> Option<Vec<u8>> {
        let (result, buf) = now(stream.recv(Buf::zeroed(max), 0, max))?;
        Some(buf[..result.expect("no error")].to_vec())
    }

    #[test]
    fn bytes_arrive_in_order_and_the_end_behind_them() {
        let (a, b) = MemoryStream::pair(100);
        let sent = now(a.send_vectored(vec![b"one".to_vec().into(), b"two".to_vec().into()]));
        assert!(sent.expect("there is room").0.is_ok());
        drop(a);
        assert_eq!(recv(&b, 4), Some(b"onet".to_vec()));
        assert_eq!(recv(&b, 4), Some(b"wo".to_vec()));
        assert_eq!(recv(&b, 4), Some(vec![]));
        assert!(now(b.send_vectored(vec![b"x".to_vec().into()])).expect("at once").0.is_err());
    }

    #[test]
    fn a_sender_waits_for_room() {
        let (a, b) = MemoryStream::pair(2);
        let mut send = pin!(a.send_vectored(vec![b"12345".to_vec().into()]));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(send.as_mut().poll(&mut cx).is_pending());
        assert_eq!(recv(&b, 9), Some(b"12".to_vec()));
        assert!(send.as_mut().poll(&mut cx).is_pending());
        assert_eq!(recv(&b, 9), Some(b"34".to_vec()));
        assert!(send.as_mut().poll(&mut cx).is_ready());
        assert_eq!(recv(&b, 9), Some(b"5".to_vec()));
        assert_eq!(recv(&b, 9), None);
    }

    #[test]
    fn shutting_down_ends_both_sides() {
        let (a, b) = MemoryStream::pair(2);
        a.shutdown(Shutdown::Both).expect("it cannot fail");
        assert_eq!(recv(&a, 1), Some(vec![]));
        assert_eq!(recv(&b, 1), Some(vec![]));
        assert!(now(b.send_vectored(vec![b"x".to_vec().into()])).expect("at once").0.is_err());
    }
}
