//! The request log: requests are received into memory that outlives the process. On kernels that cannot send requests
//! again (before Linux 6.9) the next process finds there what was received and not answered.
//!
//! Invariants: the slot of a request is occupied until its reply was written, or refused by the kernel; requests
//! without a reply are not repeated: a reference that the kernel dropped must not be dropped twice.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkdisk::Buf;
use forkdisk_uring::{RequestMemory, RequestSizes};
use rustix::io::Errno;

use super::State;
use crate::codec::{Decoded, HEAD, MAX_WRITE, Operation, Request};

/// Slots. When all are occupied, requests are received without the log: a kill loses those.
const SLOTS_COUNT: usize = 1024;
/// Slots that keep the memory of a large request. The first slots are used first.
const LARGE_COUNT: usize = 16;
/// Bytes of the data of a request that the other slots keep.
const SMALL_BYTES: usize = 64 << 10;
const WORDS_COUNT: usize = SLOTS_COUNT / 64;

/// Bit in the id of a reply: it is one to an interruption of the request.
const INTERRUPTION_BITS: u64 = 1;

/// Requests of one mount that were received and not answered.
pub struct RequestLog {
    memory: RequestMemory,
    /// A bit for each slot: whether it is free.
    free: [Cell<u64>; WORDS_COUNT],
    /// The same: whether its memory is there.
    populated: [Cell<u64>; WORDS_COUNT],
}

/// A slot with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(u16);

/// A received message: its head is in the caller's memory.
pub(super) struct Received {
    pub len: usize,
    pub body: Buf,
    /// Where it is logged.
    pub slot: Option<Slot>,
}

fn sizes() -> RequestSizes {
    RequestSizes::new(SLOTS_COUNT, HEAD, MAX_WRITE)
}

impl RequestLog {
    /// Allocates the memory.
    ///
    /// # Errors
    /// There is no free descriptor or no room in the address space.
    pub fn new() -> io::Result<RequestLog> {
        Ok(RequestLog::of(RequestMemory::new(sizes())?))
    }

    /// Continues with what another process has left.
    ///
    /// # Errors
    /// It is of another version, or there is no room in the address space.
    pub fn again(file: OwnedFd) -> io::Result<RequestLog> {
        Ok(RequestLog::of(RequestMemory::again(file, sizes())?))
    }

    fn of(memory: RequestMemory) -> RequestLog {
        let free = [const { Cell::new(u64::MAX) }; WORDS_COUNT];
        RequestLog { memory, free, populated: [const { Cell::new(0) }; WORDS_COUNT] }
    }

    /// Returns the memory's descriptor, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    /// Returns the first free slot, with its memory.
    fn free_slot(&self) -> Option<Slot> {
        let word = self.free.iter().position(|word| word.get() != 0)?;
        let slot = word * 64 + self.free[word].get().trailing_zeros() as usize;
        let bit = 1 << (slot % 64);
        if self.populated[word].get() & bit == 0 {
            let body = if slot < LARGE_COUNT { MAX_WRITE } else { SMALL_BYTES };
            if let Err(error) = self.memory.populate(slot, body) {
                tracing::debug!(%error, "no memory for the request log");
                return None;
            }
            self.populated[word].set(self.populated[word].get() | bit);
        }
        Some(Slot(slot as u16))
    }

    fn set_free(&self, Slot(slot): Slot, is_free: bool) {
        let (word, bit) = (&self.free[usize::from(slot) / 64], 1 << (slot % 64));
        word.set(if is_free { word.get() | bit } else { word.get() & !bit });
    }

    /// Empties a slot: its request was answered.
    fn release(&self, slot: Slot) {
        let at = usize::from(slot.0);
        let is_large = at >= LARGE_COUNT && self.memory.len_of(at) > HEAD + SMALL_BYTES;
        self.memory.free(at);
        if is_large && let Err(error) = self.memory.shrink(at, SMALL_BYTES) {
            tracing::debug!(%error, "memory of the request log stays allocated");
        }
        self.set_free(slot, true);
    }

    /// Receives a request from `connection`; `None` if no slot is free.
    fn receive(
        &self,
        connection: BorrowedFd<'_>,
        head: &mut [u8; HEAD],
        take: impl FnOnce(usize) -> Buf,
    ) -> Option<rustix::io::Result<Received>> {
        let slot = self.free_slot()?;
        let len = match self.memory.receive(usize::from(slot.0), connection) {
            Ok(len) => len,
            Err(error) => return Some(Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))),
        };
        self.set_free(slot, false);
        let body = self.copy(slot, len, head, take);
        Some(Ok(Received { len, body, slot: Some(slot) }))
    }

    /// Copies a request of `len` bytes.
    fn copy(&self, Slot(slot): Slot, len: usize, head: &mut [u8; HEAD], take: impl FnOnce(usize) -> Buf) -> Buf {
        self.memory.copy_head(usize::from(slot), head);
        let rest = len.saturating_sub(HEAD).min(MAX_WRITE);
        let mut body = if rest > 0 { take(rest) } else { Buf::zeroed(0) };
        self.memory.copy_body(usize::from(slot), &mut body[..rest]);
        body
    }

    /// Returns the requests that were received and not answered, with their slots, which stay occupied.
    pub(super) fn left(&self, connection: BorrowedFd<'_>, take: impl Fn(usize) -> Buf) -> Vec<(Request, Slot)> {
        let mut left = Vec::new();
        for slot in (0..SLOTS_COUNT as u16).map(Slot) {
            let len = self.memory.len_of(usize::from(slot.0));
            if len == 0 {
                continue;
            }
            match self.request_in(slot, len, connection, &take) {
                Some(request) => {
                    self.set_free(slot, false);
                    left.push((request, slot));
                }
                None => self.release(slot),
            }
        }
        left
    }

    /// Returns the request of `len` bytes in a slot if it has to be repeated.
    fn request_in(
        &self,
        slot: Slot,
        len: usize,
        connection: BorrowedFd<'_>,
        take: impl Fn(usize) -> Buf,
    ) -> Option<Request> {
        let mut head = [0; HEAD];
        let body = self.copy(slot, len, &mut head, &take);
        let Some(Decoded::Request(mut request, _)) = Request::decode(&head, body, len, take) else { return None };
        let has_reply = !matches!(request.operation, Operation::Forget(_) | Operation::Interrupt | Operation::Init(_));
        if !has_reply || !is_waiting(connection, request.header.unique) {
            return None;
        }
        request.header.resent = true;
        Some(request)
    }
}

/// Returns whether the kernel waits for the reply to a request: the process may have been killed after it had answered.
fn is_waiting(connection: BorrowedFd<'_>, unique: u64) -> bool {
    // The kernel looks the request up, and does nothing with this reply.
    let mut reply = [0; 16];
    reply[..4].copy_from_slice(&16u32.to_ne_bytes());
    reply[8..].copy_from_slice(&(unique | INTERRUPTION_BITS).to_ne_bytes());
    !matches!(rustix::io::write(connection, &reply), Err(Errno::NOENT | Errno::NODEV))
}

impl State {
    /// Receives a request into the log, if there is one, else into `spare` or a new buffer.
    pub(super) fn receive_next(&self, head: &mut [u8; HEAD], spare: &mut Option<Buf>) -> rustix::io::Result<Received> {
        if let Some(log) = self.log.get()
            && let Some(received) = log.receive(self.connection.as_fd(), head, |len| self.memory.buffer(len))
        {
            return received;
        }
        let mut body = spare.take().unwrap_or_else(|| self.memory.buffer(MAX_WRITE));
        match self.receive(head, &mut body) {
            Ok(len) => Ok(Received { len, body, slot: None }),
            Err(error) => {
                *spare = Some(body);
                Err(error)
            }
        }
    }

    /// Marks that a request needs to be logged no longer.
    pub(super) fn release(&self, slot: Option<Slot>) {
        if let (Some(slot), Some(log)) = (slot, self.log.get()) {
            log.release(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A request as the kernel sends it.
    fn message(opcode: u32, unique: u64, rest: &[u8]) -> Vec<u8> {
        let mut all = Vec::new();
        [40 + rest.len() as u32, opcode].into_iter().for_each(|v| all.extend_from_slice(&v.to_ne_bytes()));
        [unique, 1, 0, 0].into_iter().for_each(|v: u64| all.extend_from_slice(&v.to_ne_bytes()));
        all.extend_from_slice(rest);
        all
    }

    fn write(unique: u64, len: usize) -> Vec<u8> {
        let mut rest = vec![0; 40];
        rest[16..20].copy_from_slice(&(len as u32).to_ne_bytes());
        rest.resize(40 + len, 0xaa);
        message(16, unique, &rest)
    }

    fn received(log: &RequestLog, message: &[u8]) -> Received {
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        let all = message.to_vec();
        let writer = std::thread::spawn(move || sender.write_all(&all).unwrap());
        // Large ones arrive in parts by a socket.
        if message.len() < 100_000 {
            writer.join().unwrap();
        }
        log.receive(receiver.as_fd(), &mut [0; HEAD], Buf::zeroed).unwrap().unwrap()
    }

    #[test]
    fn requests_that_were_not_answered_are_left_and_others_are_not() {
        let log = RequestLog::new().unwrap();
        let name = message(1, 4, b"some name\0");
        let slots: Vec<_> = [write(2, 5000), name, message(2, 6, &[1; 8]), message(36, 8, &[0; 8]), write(10, 1)]
            .iter()
            .map(|message| received(&log, message).slot)
            .collect();
        assert_eq!(slots, (0..5).map(|slot| Some(Slot(slot))).collect::<Vec<_>>());
        log.release(Slot(4));
        let next = RequestLog::again(log.file().try_clone_to_owned().unwrap()).unwrap();
        drop(log);
        // Takes every reply, as if all requests were known.
        let (connection, _kernel) = UnixStream::pair().unwrap();
        let left = next.left(connection.as_fd(), Buf::zeroed);
        let ids: Vec<_> = left.iter().map(|(request, slot)| (request.header.unique, *slot)).collect();
        assert_eq!(ids, [(2, Slot(0)), (4, Slot(1))]);
        assert!(left.iter().all(|(request, _)| request.header.resent));
        let Operation::Write { data, .. } = &left[0].0.operation else { panic!("no write") };
        assert!(data.len() == 5000 && data.iter().all(|&byte| byte == 0xaa));
        assert!(matches!(&left[1].0.operation, Operation::Lookup { name } if name == "some name"));
        assert_eq!(next.free_slot(), Some(Slot(2)));
        next.release(Slot(0));
        assert_eq!(next.left(connection.as_fd(), Buf::zeroed).len(), 1);
    }

    #[test]
    fn without_a_free_slot_nothing_is_received() {
        let log = RequestLog::new().unwrap();
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        for n in 0..SLOTS_COUNT as u16 {
            assert_eq!(received(&log, &message(17, 2 * u64::from(n), &[])).slot, Some(Slot(n)));
        }
        sender.write_all(&message(17, 9, &[])).unwrap();
        assert!(log.receive(receiver.as_fd(), &mut [0; HEAD], Buf::zeroed).is_none());
        log.release(Slot(700));
        let received = log.receive(receiver.as_fd(), &mut [0; HEAD], Buf::zeroed).unwrap().unwrap();
        assert_eq!(received.slot, Some(Slot(700)));
    }
}
