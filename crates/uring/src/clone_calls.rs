//! `ioctl(FICLONE)` and `ioctl(FICLONERANGE)` of other processes, carried out by this one (seccomp's user
//! notification). The kernel passes neither of them to a FUSE server.
//!
//! Sources: seccomp(2), seccomp_unotify(2), ioctl_ficlonerange(2).

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libc::{c_int, c_ulong, sock_filter};

use crate::sys;

const FICLONE: u32 = 0x4004_9409;
const FICLONERANGE: u32 = 0x4020_940d;

/// `SECCOMP_IOCTL_NOTIF_RECV`.
const RECEIVE: c_ulong = 0xc050_2100;
/// `SECCOMP_IOCTL_NOTIF_SEND`.
const SEND: c_ulong = 0xc018_2101;
/// `SECCOMP_IOCTL_NOTIF_ID_VALID`.
const IS_VALID: c_ulong = 0x4008_2102;

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// Where the lower half of an argument lies.
const fn argument_at(index: usize) -> u32 {
    (offset_of!(libc::seccomp_data, args) + 8 * index) as u32
}

/// A clone that a process has called for. It waits until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloneCall {
    /// Number of the call.
    pub id: u64,
    /// The thread.
    pub thread: u32,
    /// The file that gets the data: a descriptor of the process.
    pub target: i32,
    /// The file or the range that is cloned.
    pub source: CloneSource,
}

/// What a [`CloneCall`] clones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloneSource {
    /// A whole file: a descriptor of the process.
    File(i32),
    /// Address of a `struct file_clone_range` in the process.
    RangeAt(u64),
}

/// How a call ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloneAnswer {
    /// It was carried out.
    Done,
    /// It fails with this errno.
    Failed(i32),
    /// The kernel carries it out itself.
    ByKernel,
}

/// Receives the calls of a process and of all that it starts.
pub struct CloneCalls(OwnedFd);

impl AsFd for CloneCalls {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for CloneCalls {
    fn from(listener: OwnedFd) -> CloneCalls {
        CloneCalls(listener)
    }
}

/// Sends all later calls of this process, and of all that it starts, to the returned descriptor. For
/// [`CloneCalls::from`] in another process.
///
/// # Errors
/// `ResourceBusy` if they go to another one already; errors of the kernel, for example in a container that does not
/// allow it.
pub fn pass_clone_calls() -> io::Result<OwnedFd> {
    let statement = |code: u32, k: u32| sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let jump = |k: u32, jt: u8, jf: u8| sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ) as u16, jt, jf, k };
    let load = |at: u32| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at);
    let mut program = [
        load(offset_of!(libc::seccomp_data, arch) as u32),
        jump(ARCHITECTURE, 0, 5),
        load(offset_of!(libc::seccomp_data, nr) as u32),
        jump(libc::SYS_ioctl as u32, 0, 3),
        load(argument_at(1)),
        jump(FICLONE, 2, 0),
        jump(FICLONERANGE, 1, 0),
        statement(libc::BPF_RET, libc::SECCOMP_RET_ALLOW),
        statement(libc::BPF_RET, libc::SECCOMP_RET_USER_NOTIF),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes no pointers. It is needed to install a filter without root.
    sys::check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: the program and its statements live across the call, which copies them.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    sys::check(listener as c_int).map(sys::own)
}

impl CloneCalls {
    /// Waits for the next call; `None` when its process has been killed meanwhile.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn receive(&self) -> io::Result<Option<CloneCall>> {
        // SAFETY: the struct has integers only, for which zero is a value.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        const { assert!(size_of::<libc::seccomp_notif>() == 80 && size_of::<libc::seccomp_notif_resp>() == 24) };
        // SAFETY: the kernel fills a struct of this size, which its number tells.
        match sys::check(unsafe { libc::ioctl(self.0.as_raw_fd(), RECEIVE, &raw mut call) }) {
            Ok(_) => {}
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => return Ok(None),
            Err(e) => return Err(e),
        }
        let [target, command, argument, ..] = call.data.args;
        let source = match command as u32 {
            FICLONE => CloneSource::File(argument as i32),
            _ => CloneSource::RangeAt(argument),
        };
        Ok(Some(CloneCall { id: call.id, thread: call.pid, target: target as i32, source }))
    }

    /// Whether the call still waits: only then what was read of its process since is of that process.
    pub fn is_waiting(&self, call: &CloneCall) -> bool {
        // SAFETY: the kernel reads the number.
        sys::check(unsafe { libc::ioctl(self.0.as_raw_fd(), IS_VALID, &raw const call.id) }).is_ok()
    }

    /// Ends a call. Without effect if its process has been killed.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn answer(&self, call: &CloneCall, answer: CloneAnswer) -> io::Result<()> {
        let (error, flags) = match answer {
            CloneAnswer::Done => (0, 0),
            CloneAnswer::Failed(errno) => (-errno, 0),
            CloneAnswer::ByKernel => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        };
        let response = libc::seccomp_notif_resp { id: call.id, val: 0, error, flags };
        // SAFETY: the kernel reads a struct of this size, which its number tells.
        match sys::check(unsafe { libc::ioctl(self.0.as_raw_fd(), SEND, &raw const response) }) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            sent => sent.map(drop),
        }
    }
}
