//! Thin safe wrappers around system calls that neither `std` nor `io-uring` offers. Every
//! wrapper owns or borrows its file descriptors and turns -1 into an `io::Error`.

use std::ffi::CString;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libc::{c_int, c_ulong};

pub(crate) fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub(crate) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Takes ownership of a descriptor that a system call or a completion has just returned, or that
/// was passed to this process at its start.
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the callers pass a descriptor that the kernel returned in this very call or
    // completion, or one that the process was started with and that is taken once (see
    // `inherited`), so it has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(crate) fn open(path: &Path, flags: c_int, mode: libc::mode_t) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    loop {
        // SAFETY: `path` is a NUL-terminated string that lives across the call.
        match check(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, libc::c_uint::from(mode)) }) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(own),
        }
    }
}

/// Returns the kernel's release, such as `6.1.0-18-amd64`; empty if it is unknown.
pub(crate) fn kernel_release() -> String {
    let mut names = MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: `names` has room for one utsname, which was zeroed, so that every field ends with a NUL whether the
    // call fills it or not; any bytes are valid for this struct of characters.
    let names = unsafe {
        libc::uname(names.as_mut_ptr());
        names.assume_init()
    };
    let bytes = names.release.iter().map(|&c| c as u8).take_while(|&byte| byte != 0).collect::<Vec<_>>();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the flags of a descriptor; fails if it is not open.
pub(crate) fn descriptor_flags(fd: BorrowedFd<'_>) -> io::Result<c_int> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) })
}

/// Returns whether reads and writes of a file fail instead of waiting (`O_NONBLOCK`). It can change at any time.
pub(crate) fn is_nonblocking(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: takes no pointers.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) }).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0)
}

/// Sets close-on-exec for a descriptor.
pub(crate) fn close_at_exec(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) }).map(drop)
}

pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(own)
}

/// Adds one to an eventfd. Only a full counter can refuse, and that one wakes as well.
pub(crate) fn eventfd_raise(fd: BorrowedFd<'_>) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: `one` holds the eight bytes that are written.
    unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// Resets an eventfd to zero.
pub(crate) fn eventfd_clear(fd: BorrowedFd<'_>) {
    let mut count = [0u8; 8];
    // SAFETY: `count` has room for the eight bytes that are read; the descriptor does not block.
    unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
}

/// Resets an eventfd to zero without waiting, even if the descriptor blocks; returns whether it was not zero.
pub(crate) fn eventfd_take(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut count = [0u8; 8];
    let into = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: count.len() };
    // SAFETY: `into` describes `count`, and both live across the call.
    let read = unsafe { libc::preadv2(fd.as_raw_fd(), &raw const into, 1, -1, libc::RWF_NOWAIT) };
    match read {
        0.. => Ok(true),
        _ => match io::Error::last_os_error() {
            e if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(false),
            e => Err(e),
        },
    }
}

/// Installs a handler for a signal of faulting accesses; returns the action before.
pub(crate) fn set_fault_handler(
    signal: c_int,
    handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void),
) -> io::Result<libc::sigaction> {
    // SAFETY: all zeroes is a valid sigaction.
    let (mut action, mut before): (libc::sigaction, libc::sigaction) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    action.sa_sigaction = handler as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both structs live across the call; the handler does what a signal handler may do.
    check(unsafe { libc::sigaction(signal, &raw const action, &raw mut before) })?;
    Ok(before)
}

/// Restores the action of a signal, or its default if `action` is null. May be used in a signal handler.
pub(crate) fn restore_action(signal: c_int, action: *const libc::sigaction) {
    // SAFETY: all zeroes is a valid sigaction: the default.
    let default: libc::sigaction = unsafe { std::mem::zeroed() };
    let action = if action.is_null() { &raw const default } else { action };
    // SAFETY: it points to a sigaction that is never freed, or to `default`.
    unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
}

/// Replaces a mapping by private zeroes; returns whether it could. May be used in a signal handler.
pub(crate) fn replace_by_zeroes(start: usize, len: usize) -> bool {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the caller owns the mapping of this range, which is accessed by volatile accesses only.
    let map = unsafe {
        libc::mmap(start as *mut libc::c_void, len, protection, flags | libc::MAP_FIXED | libc::MAP_NORESERVE, -1, 0)
    };
    map != libc::MAP_FAILED
}

fn signal_set(signals: &[c_int]) -> io::Result<libc::sigset_t> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set it is given a valid pointer to.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for &signal in signals {
        // SAFETY: the set was initialised above.
        check(unsafe { libc::sigaddset(set.as_mut_ptr(), signal) })?;
    }
    // SAFETY: initialised above.
    Ok(unsafe { set.assume_init() })
}

/// Blocks `signals` in this thread; returns the previous mask.
pub(crate) fn block_signals(signals: &[c_int]) -> io::Result<libc::sigset_t> {
    let set = signal_set(signals)?;
    let mut old = set;
    // SAFETY: both sets are initialised and live across the call.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut old) } {
        0 => Ok(old),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

pub(crate) fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: `old` came from `block_signals`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old, std::ptr::null_mut()) };
}

pub(crate) fn signalfd(signals: &[c_int]) -> io::Result<OwnedFd> {
    let set = signal_set(signals)?;
    // SAFETY: `set` is initialised and lives across the call.
    check(unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) }).map(own)
}

/// Returns the next pending signal, if there is one.
pub(crate) fn signalfd_next(fd: BorrowedFd<'_>) -> io::Result<Option<c_int>> {
    let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
    let size = size_of::<libc::signalfd_siginfo>();
    // SAFETY: `info` has room for `size` bytes.
    let n = unsafe { libc::read(fd.as_raw_fd(), info.as_mut_ptr().cast(), size) };
    if n == size as isize {
        // SAFETY: the kernel filled all of it, and any bytes are valid for this struct of integers.
        return Ok(Some(unsafe { info.assume_init() }.ssi_signo as c_int));
    }
    match io::Error::last_os_error() {
        e if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        e => Err(e),
    }
}

/// Memory of a driver, mapped read-only.
pub(crate) struct Mapping {
    base: *const u8,
    len: usize,
}

impl Mapping {
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Mapping> {
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_POPULATE);
        // SAFETY: a new mapping at an address that the kernel chooses affects no memory in use.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd.as_raw_fd(), offset as libc::off_t) };
        match base {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            base => Ok(Mapping { base: base.cast_const().cast(), len }),
        }
    }

    /// Reads the bytes at `at`, which the driver does not change at this time.
    pub(crate) fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at + N <= self.len, "within the mapping");
        // SAFETY: within the mapping, which lives as long as `self`; bytes need no alignment.
        unsafe { std::ptr::read_volatile(self.base.add(at).cast::<[u8; N]>()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and no pointer into it exists.
        unsafe { libc::munmap(self.base.cast_mut().cast(), self.len) };
    }
}

/// Builds a lock on `len` bytes from `start`; length 0 means up to the end of the file, wherever that is.
fn lock_on(exclusive: bool, start: u64, len: u64) -> libc::flock {
    // SAFETY: all zeroes is a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK } as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    (lock.l_start, lock.l_len) = (start as libc::off_t, len as libc::off_t);
    lock
}

/// Tries to lock a whole file for its open file description. `Ok(false)`: another description has it locked.
pub(crate) fn lock_file(fd: BorrowedFd<'_>, exclusive: bool) -> io::Result<bool> {
    set_lock(fd, lock_on(exclusive, 0, 0))
}

/// As [`lock_file`], shared, for one byte.
pub(crate) fn share_byte(fd: BorrowedFd<'_>, at: u64) -> io::Result<bool> {
    set_lock(fd, lock_on(false, at, 1))
}

fn set_lock(fd: BorrowedFd<'_>, lock: libc::flock) -> io::Result<bool> {
    // SAFETY: `lock` lives across the call.
    match check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Returns whether another description has a lock on any of `len` bytes from `start` (0: all of
/// them): an exclusive one, or with `also_shared` any.
pub(crate) fn is_locked(fd: BorrowedFd<'_>, also_shared: bool, start: u64, len: u64) -> io::Result<bool> {
    let mut lock = lock_on(also_shared, start, len);
    // SAFETY: `lock` lives across the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) })?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

/// Alignment that direct I/O on a file needs.
pub(crate) struct DirectAlign {
    /// Of addresses in memory, in bytes.
    pub(crate) memory: u32,
    /// Of offsets and lengths, in bytes; 0 when the file cannot do direct I/O.
    pub(crate) offset: u32,
}

/// Returns the alignment for direct I/O on this file; `None` if the kernel does not report it.
pub(crate) fn direct_align(fd: BorrowedFd<'_>) -> Option<DirectAlign> {
    let mut st = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is an empty NUL-terminated string and `st` has room for one statx.
    let done = check(unsafe {
        libc::statx(fd.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, st.as_mut_ptr())
    });
    // SAFETY: zeroed before, and any bytes are valid for this struct of integers.
    let st = unsafe { st.assume_init() };
    (done.is_ok() && st.stx_mask & libc::STATX_DIOALIGN != 0)
        .then_some(DirectAlign { memory: st.stx_dio_mem_align, offset: st.stx_dio_offset_align })
}

/// Returns device and inode, or the number of a block device (then the others are 0), from the
/// kernel's cache: the server of a network or FUSE file system is not queried.
pub(crate) fn identity(path: &Path) -> Option<(u64, u64, u64)> {
    let path = c_path(path).ok()?;
    let mut st = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: `path` is a NUL-terminated string and `st` has room for one statx; both live across the call.
    let done = check(unsafe {
        let wanted = libc::STATX_TYPE | libc::STATX_INO;
        libc::statx(libc::AT_FDCWD, path.as_ptr(), libc::AT_STATX_DONT_SYNC, wanted, st.as_mut_ptr())
    });
    done.ok()?;
    // SAFETY: zeroed before, and any bytes are valid for this struct of integers.
    let st = unsafe { st.assume_init() };
    let is_block = u32::from(st.stx_mode) & libc::S_IFMT == libc::S_IFBLK;
    Some(match is_block {
        true => (0, 0, libc::makedev(st.stx_rdev_major, st.stx_rdev_minor)),
        false => (libc::makedev(st.stx_dev_major, st.stx_dev_minor), st.stx_ino, 0),
    })
}

/// `struct file_clone_range` of linux/fs.h.
#[repr(C)]
struct FileCloneRange {
    source: i64,
    from: u64,
    len: u64,
    to: u64,
}

const FICLONERANGE: c_ulong = 0x4020_940d;

/// Makes the file system share a range of `source` with `target`. May block.
pub(crate) fn clone_range(
    source: BorrowedFd<'_>,
    from: u64,
    target: BorrowedFd<'_>,
    to: u64,
    len: u64,
) -> io::Result<()> {
    let range = FileCloneRange { source: i64::from(source.as_raw_fd()), from, len, to };
    loop {
        // SAFETY: FICLONERANGE reads one file_clone_range, which lives across the call.
        match check(unsafe { libc::ioctl(target.as_raw_fd(), FICLONERANGE as _, &raw const range) }) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(drop),
        }
    }
}

const BLKSSZGET: c_ulong = 0x1268;
const BLKGETSIZE64: c_ulong = 0x8008_1272;

/// Returns the logical sector size of a block device, in bytes.
pub(crate) fn sector_size(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut size: c_int = 0;
    // SAFETY: BLKSSZGET writes one int.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), BLKSSZGET as _, &raw mut size) })?;
    usize::try_from(size).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Returns the length of a block device, in bytes.
pub(crate) fn block_device_len(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut len: u64 = 0;
    // SAFETY: BLKGETSIZE64 writes one u64.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), BLKGETSIZE64 as _, &raw mut len) })?;
    Ok(len)
}

/// Credentials of the peer of a unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerCred {
    /// Process id at the time of the connect.
    pub pid: i32,
    /// Effective user id at the time of the connect.
    pub uid: u32,
    /// Effective group id at the time of the connect.
    pub gid: u32,
}

pub(crate) fn peer_cred(fd: BorrowedFd<'_>) -> io::Result<PeerCred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` has room for `len` bytes and both live across the call.
    check(unsafe {
        let cred = (&raw mut cred).cast();
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, cred, &mut len)
    })?;
    Ok(PeerCred { pid: cred.pid, uid: cred.uid, gid: cred.gid })
}

pub(crate) fn shutdown(fd: BorrowedFd<'_>, how: std::net::Shutdown) -> io::Result<()> {
    let how = match how {
        std::net::Shutdown::Read => libc::SHUT_RD,
        std::net::Shutdown::Write => libc::SHUT_WR,
        std::net::Shutdown::Both => libc::SHUT_RDWR,
    };
    // SAFETY: takes no pointers.
    check(unsafe { libc::shutdown(fd.as_raw_fd(), how) }).map(drop)
}

/// Creates a stream socket of `domain`.
pub(crate) fn stream_socket(domain: c_int) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::socket(domain, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) }).map(own)
}

/// Sets an integer socket option.
pub(crate) fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: `value` is an int that lives across the call.
    check(unsafe {
        let value = (&raw const value).cast();
        libc::setsockopt(fd.as_raw_fd(), level, name, value, size_of::<c_int>() as libc::socklen_t)
    })
    .map(drop)
}

pub(crate) fn bind(fd: BorrowedFd<'_>, addr: &SockAddr) -> io::Result<()> {
    // SAFETY: `addr` holds an address of `addr.len` bytes.
    check(unsafe { libc::bind(fd.as_raw_fd(), addr.as_ptr(), addr.len) }).map(drop)
}

pub(crate) fn listen(fd: BorrowedFd<'_>, backlog: c_int) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::listen(fd.as_raw_fd(), backlog) }).map(drop)
}

/// Sets the permissions that a unix socket's file gets when it is bound.
pub(crate) fn set_mode(fd: BorrowedFd<'_>, mode: libc::mode_t) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::fchmod(fd.as_raw_fd(), mode) }).map(drop)
}

/// A socket address in the kernel's form.
pub(crate) struct SockAddr {
    storage: libc::sockaddr_storage,
    pub(crate) len: libc::socklen_t,
}

impl SockAddr {
    pub(crate) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    /// Builds a unix socket's address; fails if the path exceeds the 107 bytes that the kernel has for it.
    pub(crate) fn unix(path: &Path) -> io::Result<SockAddr> {
        let bytes = path.as_os_str().as_bytes();
        // SAFETY: all zeroes is a valid sockaddr_un.
        let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        if bytes.is_empty() || bytes.contains(&0) || bytes.len() >= addr.sun_path.len() {
            let text = format!("a socket's path has 1 to {} bytes, this one {}", addr.sun_path.len() - 1, bytes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in addr.sun_path.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        Ok(SockAddr::of(&addr))
    }

    pub(crate) fn inet(addr: std::net::SocketAddr) -> SockAddr {
        match addr {
            std::net::SocketAddr::V4(a) => {
                // SAFETY: all zeroes is a valid sockaddr_in.
                let mut sin: libc::sockaddr_in = unsafe { std::mem::zeroed() };
                sin.sin_family = libc::AF_INET as libc::sa_family_t;
                sin.sin_port = a.port().to_be();
                sin.sin_addr.s_addr = u32::from_ne_bytes(a.ip().octets());
                SockAddr::of(&sin)
            }
            std::net::SocketAddr::V6(a) => {
                // SAFETY: all zeroes is a valid sockaddr_in6.
                let mut sin: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
                sin.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                sin.sin6_port = a.port().to_be();
                sin.sin6_flowinfo = a.flowinfo();
                sin.sin6_addr.s6_addr = a.ip().octets();
                sin.sin6_scope_id = a.scope_id();
                SockAddr::of(&sin)
            }
        }
    }

    fn of<T: Copy>(addr: &T) -> SockAddr {
        const { assert!(size_of::<T>() <= size_of::<libc::sockaddr_storage>()) };
        // SAFETY: all zeroes is a valid sockaddr_storage.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        // SAFETY: the storage is large enough (asserted), suitably aligned for every address, and
        // `T` is one of the kernel's address structs.
        unsafe { (&raw mut storage).cast::<T>().write(*addr) };
        SockAddr { storage, len: size_of::<T>() as libc::socklen_t }
    }
}

/// Sends a signal to a process, if there is one.
pub(crate) fn send_signal(pid: u32, signal: c_int) {
    // SAFETY: takes no pointers.
    let _ = unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// Returns whether an open file uses direct I/O.
pub(crate) fn is_direct(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: takes no pointers.
    Ok(check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })? & libc::O_DIRECT != 0)
}

/// Switches direct I/O on or off for an open file.
pub(crate) fn set_direct(fd: BorrowedFd<'_>, direct: bool) -> io::Result<()> {
    // SAFETY: takes no pointers.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    let flags = if direct { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
    // SAFETY: takes no pointers.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) }).map(drop)
}

/// Settings of a loop device: `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    numbers: [u64; 5],
    kind: [u32; 3],
    flags: u32,
    names: [[u8; 64]; 2],
    key: [u8; 32],
    init: [u64; 2],
}

impl Default for LoopInfo {
    fn default() -> LoopInfo {
        LoopInfo { numbers: [0; 5], kind: [0; 3], flags: 0, names: [[0; 64]; 2], key: [0; 32], init: [0; 2] }
    }
}

/// `struct loop_config`. A block size of 0 is the driver's default, 512.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

impl LoopConfig {
    /// Creates the configuration for the file `fd`.
    pub fn new(fd: BorrowedFd<'_>, flags: u32) -> LoopConfig {
        let info = LoopInfo { flags, ..LoopInfo::default() };
        LoopConfig { fd: fd.as_raw_fd() as u32, info, ..LoopConfig::default() }
    }
}

const LOOP_CTL_GET_FREE: c_ulong = 0x4c82;
const LOOP_CONFIGURE: c_ulong = 0x4c0a;
const LOOP_CLR_FD: c_ulong = 0x4c01;
const LOOP_SET_CAPACITY: c_ulong = 0x4c07;
/// `BLKFLSBUF`.
const DROP_DEVICE_CACHE: c_ulong = 0x1261;

/// Returns the number of an unused loop device.
pub(crate) fn loop_free(control: BorrowedFd<'_>) -> io::Result<c_int> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })
}

/// Attaches a file to a loop device.
pub(crate) fn loop_configure(device: BorrowedFd<'_>, config: &LoopConfig) -> io::Result<()> {
    // SAFETY: `config` has the layout of `struct loop_config` and lives across the call, which only reads it.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, std::ptr::from_ref(config)) }).map(drop)
}

/// Detaches a loop device from its file.
pub(crate) fn loop_clear(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD) }).map(drop)
}

/// Sets a loop device to the length of its file.
pub(crate) fn loop_set_capacity(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_CAPACITY) }).map(drop)
}

/// Writes and drops what the kernel has cached of a block device.
pub(crate) fn drop_device_cache(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::ioctl(device.as_raw_fd(), DROP_DEVICE_CACHE) }).map(drop)
}

#[cfg(test)]
mod loop_layout {
    use super::*;

    #[test]
    fn the_structs_of_the_loop_driver_have_the_kernels_sizes() {
        assert_eq!((size_of::<LoopInfo>(), size_of::<LoopConfig>()), (232, 304));
        assert_eq!(std::mem::offset_of!(LoopInfo, flags), 52);
    }
}
