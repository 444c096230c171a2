//! One request from its submission to its last completion: its operation, the memory it lends to
//! the kernel, and the meaning of a completion (done, or a remainder to submit again).
//!
//! Invariant: all memory that an entry points to belongs to the operation (on the heap, at an
//! address that does not change when the operation is moved) and is neither accessed nor freed
//! before the last completion.

use std::io;
use std::rc::Rc;
use std::task::Waker;

use forkdisk::Buf;
use forkdisk::device::Segments;
use io_uring::opcode;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::FsyncFlags;

use crate::fuse_command::FuseCommand;
use crate::handle::Handle;
use crate::net::Message;
use crate::sys::SockAddr;

/// Most bytes of one entry: a multiple of every block size below the kernel's
/// limit of 2 GiB less a page.
const MAX_ENTRY_BYTES: usize = 1 << 30;

/// Bytes from which a worker thread of the kernel copies the data of a send: one core copies about
/// 2 GB/s, and the ring's thread can serve others meanwhile.
const LARGE_SEND_BYTES: usize = 256 << 10;

/// What is added to an eventfd.
static ONE: [u8; 8] = 1u64.to_ne_bytes();

pub(crate) struct Op {
    pub(crate) work: Work,
    pub(crate) file: Rc<Handle>,
    pub(crate) waker: Option<Waker>,
    /// Outstanding completions.
    pub(crate) pending: u32,
    /// Result of the operation: a negative errno or a count. The first error is kept.
    pub(crate) result: i32,
    /// It is to end as it is, instead of being continued.
    pub(crate) ends: bool,
    /// The ticket was dropped.
    pub(crate) abandoned: bool,
    /// Its success has no completion.
    pub(crate) silent: bool,
}

pub(crate) enum Work {
    Transfer(Transfer),
    Flush {
        datasync: bool,
    },
    Punch {
        offset: u64,
        len: u64,
    },
    Allocate {
        offset: u64,
        len: u64,
    },
    Zero {
        offset: u64,
        len: u64,
    },
    Recv {
        buf: Buf,
        base: *mut u8,
        len: u32,
        flags: i32,
    },
    Send(Box<Message>),
    Connect(Box<SockAddr>),
    Accept,
    Readable,
    /// Waits for readiness, and stays: each change of it has a completion.
    Watch,
    /// Adds 1 to an eventfd.
    Raise,
    /// Adds 1 to an eventfd that does not block; fails if that is not possible at once.
    RaiseNow,
    /// A driver's command, which is lent no memory. It ends when the driver completes it.
    Command {
        number: u32,
        data: [u8; 16],
    },
    /// A command of FUSE. It ends with a request of the kernel, or with the mount.
    Fuse(FuseCommand),
}

/// Reads or writes between a buffer and the segments of a file.
pub(crate) struct Transfer {
    pub(crate) buf: Buf,
    pub(crate) base: *mut u8,
    /// Remaining parts of the segments.
    pub(crate) segments: Segments,
    pub(crate) write: bool,
    /// Slot of the registered buffer, if it is one.
    pub(crate) slot: Option<u16>,
    /// Alignment of a continued request, in bytes.
    pub(crate) block: usize,
    pub(crate) rw_flags: i32,
}

/// Meaning of a completion.
pub(crate) enum Step {
    Done(i32),
    Again(Entry),
}

impl Work {
    /// Returns how many entries it is submitted as.
    pub(crate) fn parts(&self) -> usize {
        match self {
            Work::Transfer(t) => t.segments.len(),
            _ => 1,
        }
    }

    /// Returns whether it may wait forever, so that it is cancelled when its ticket is
    /// dropped. Requests to disks always end and are never cancelled.
    pub(crate) fn is_cancellable(&self) -> bool {
        let of_disk = matches!(self, Work::Punch { .. } | Work::Allocate { .. } | Work::Zero { .. });
        let of_driver = matches!(self, Work::Command { .. } | Work::Fuse(_));
        !of_disk && !of_driver && !self.is_silent() && !matches!(self, Work::Transfer(_) | Work::Flush { .. })
    }

    /// Returns whether its success has no completion. Such an entry never waits: it has failed, with a completion, or
    /// succeeded when the kernel has taken it.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self, Work::RaiseNow)
    }

    /// Returns the result of success.
    pub(crate) fn success(&self) -> i32 {
        0
    }

    pub(crate) fn entry(&mut self, part: usize, file: &Handle) -> Entry {
        let fd = file.target();
        match self {
            Work::Transfer(t) => t.entry(part, file),
            Work::Flush { datasync } => {
                let flags = if *datasync { FsyncFlags::DATASYNC } else { FsyncFlags::empty() };
                opcode::Fsync::new(fd).flags(flags).build()
            }
            Work::Punch { offset, len } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(fd, *len).offset(*offset).mode(mode).build()
            }
            Work::Allocate { offset, len } => {
                opcode::Fallocate::new(fd, *len).offset(*offset).mode(libc::FALLOC_FL_KEEP_SIZE).build()
            }
            Work::Zero { offset, len } => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(fd, *len).offset(*offset).mode(mode).build()
            }
            Work::Recv { base, len, flags, .. } => opcode::Recv::new(fd, *base, *len).flags(*flags).build(),
            Work::Send(message) => {
                let is_large = message.left() >= LARGE_SEND_BYTES;
                let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
                let entry = opcode::SendMsg::new(fd, message.header()).flags(flags).build();
                if is_large { entry.flags(Flags::ASYNC) } else { entry }
            }
            Work::Connect(addr) => opcode::Connect::new(fd, addr.as_ptr(), addr.len).build(),
            Work::Accept => {
                let none = std::ptr::null_mut();
                opcode::Accept::new(fd, none, none.cast()).flags(libc::SOCK_CLOEXEC).build()
            }
            Work::Readable => opcode::PollAdd::new(fd, libc::POLLIN as u32).build(),
            Work::Watch => opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build(),
            Work::RaiseNow => opcode::Write::new(fd, ONE.as_ptr(), ONE.len() as u32).rw_flags(libc::RWF_NOWAIT).build(),
            Work::Raise => opcode::Write::new(fd, ONE.as_ptr(), ONE.len() as u32).build(),
            Work::Command { number, data } => opcode::UringCmd16::new(fd, *number).cmd(*data).build(),
            Work::Fuse(_) => unreachable!("its entry is wide"),
        }
    }

    /// Processes the result of entry `part`. `ends`: it is not to be continued.
    pub(crate) fn step(&mut self, part: usize, result: i32, file: &Handle, ends: bool) -> Step {
        match self {
            Work::Transfer(t) => t.step(part, result, file),
            Work::Fuse(_) => Step::Done(result),
            _ if result == -libc::EINTR && !(ends && self.is_cancellable()) => Step::Again(self.entry(part, file)),
            Work::Send(message) if result >= 0 => match message.advance(result as usize) {
                0 => Step::Done(0),
                _ if result == 0 => Step::Done(-libc::EPIPE),
                _ if ends => Step::Done(-libc::ECANCELED),
                _ => Step::Again(self.entry(part, file)),
            },
            _ => Step::Done(result),
        }
    }
}

impl Transfer {
    fn entry(&self, part: usize, file: &Handle) -> Entry {
        let fd = file.target();
        let s = self.segments[part];
        let at = self.base.wrapping_add(s.at);
        let len = s.len.min(MAX_ENTRY_BYTES) as u32;
        match (self.write, self.slot) {
            (false, Some(slot)) => opcode::ReadFixed::new(fd, at, len, slot).offset(s.offset).build(),
            (false, None) => opcode::Read::new(fd, at, len).offset(s.offset).build(),
            (true, Some(slot)) => {
                opcode::WriteFixed::new(fd, at, len, slot).offset(s.offset).rw_flags(self.rw_flags).build()
            }
            (true, None) => opcode::Write::new(fd, at, len).offset(s.offset).rw_flags(self.rw_flags).build(),
        }
    }

    fn step(&mut self, part: usize, result: i32, file: &Handle) -> Step {
        let left = &mut self.segments[part];
        if result == left.len as i32 {
            return Step::Done(0);
        }
        if result == -libc::EINTR || result == -libc::EAGAIN {
            // Repeated on a worker thread, which may block: otherwise EAGAIN could repeat without end.
            return Step::Again(self.entry(part, file).flags(Flags::ASYNC));
        }
        if result < 0 {
            return Step::Done(result);
        }
        // The continued request must start aligned; repeating a part is harmless.
        let whole = result as usize / self.block * self.block;
        if whole == 0 {
            return Step::Done(if self.write { -libc::ENOSPC } else { SHORT_ERRNO });
        }
        left.offset += whole as u64;
        left.at += whole;
        left.len -= whole;
        Step::Again(self.entry(part, file))
    }
}

/// Result of a read at the end of the file. Not a valid errno.
const SHORT_ERRNO: i32 = -100_000;

/// Converts a negative result to an error.
pub(crate) fn error(result: i32) -> io::Error {
    match result {
        SHORT_ERRNO => io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before the range that was read"),
        _ => io::Error::from_raw_os_error(-result),
    }
}

pub(crate) fn outcome(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| error(result))
}
