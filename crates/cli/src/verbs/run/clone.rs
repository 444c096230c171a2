//! One call of FICLONE or FICLONERANGE, made by `copy_file_range`, which is a clone on mounts of pools.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use forkdisk_uring::{CloneAnswer, CloneCall, CloneCalls, CloneSource};
use rustix::fs::{FileType, OFlags, copy_file_range, fcntl_getfl, fstat, major, minor};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Units in which data is shared.
const PAGE_BYTES: u64 = 4096;
/// Length of `struct file_clone_range`.
const RANGE_BYTES: usize = 32;
/// Most bytes of one request: the kernel takes no more.
const STEP_BYTES: u64 = 0x7fff_f000;

/// A range to clone; length 0: to the end of the source.
struct Range {
    source: i32,
    from: u64,
    len: u64,
    to: u64,
}

/// Carries out a call. Files on other file systems are left to the kernel.
pub fn carry_out(calls: &CloneCalls, call: &CloneCall) -> CloneAnswer {
    match make(calls, call) {
        Ok(answer) => answer,
        Err(errno) => CloneAnswer::Failed(errno.raw_os_error()),
    }
}

fn make(calls: &CloneCalls, call: &CloneCall) -> Result<CloneAnswer, Errno> {
    let process = process_of(call.thread).ok_or(Errno::SRCH)?;
    let pidfd = pidfd_open(process, PidfdFlags::empty())?;
    let range = match call.source {
        CloneSource::File(source) => Range { source, from: 0, len: 0, to: 0 },
        CloneSource::RangeAt(address) => range_at(process, address)?,
    };
    let file = |fd: i32| pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty());
    let target = file(call.target)?;
    // What was found by the number of the thread is of another process if this one has been killed.
    if !calls.is_waiting(call) {
        return Err(Errno::SRCH);
    }
    if !is_on_pool(call.thread, &target)? {
        return Ok(CloneAnswer::ByKernel);
    }
    share(&file(range.source)?, &target, &range).map(|()| CloneAnswer::Done)
}

/// Returns the process of a thread.
fn process_of(thread: u32) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let number = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    Pid::from_raw(number.trim().parse().ok()?)
}

fn range_at(process: Pid, address: u64) -> Result<Range, Errno> {
    let mut bytes = [0; RANGE_BYTES];
    let memory = File::open(format!("/proc/{}/mem", process.as_raw_nonzero())).map_err(|_| Errno::FAULT)?;
    memory.read_exact_at(&mut bytes, address).map_err(|_| Errno::FAULT)?;
    let word = |index: usize| u64::from_ne_bytes(std::array::from_fn(|at| bytes[8 * index + at]));
    let source = i32::try_from(word(0)).map_err(|_| Errno::BADF)?;
    Ok(Range { source, from: word(1), len: word(2), to: word(3) })
}

/// Returns whether the file is on a mount of a pool, as the thread sees its mounts.
fn is_on_pool(thread: u32, file: &OwnedFd) -> Result<bool, Errno> {
    let device = fstat(file)?.st_dev;
    let device = format!("{}:{}", major(device), minor(device));
    let mounts = fs::read_to_string(format!("/proc/{thread}/mountinfo")).map_err(|_| Errno::SRCH)?;
    let is_it = |line: &str| {
        let kind = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').next());
        line.split(' ').nth(2) == Some(device.as_str()) && kind == Some("fuse.forkdisk")
    };
    Ok(mounts.lines().any(is_it))
}

fn share(source: &OwnedFd, target: &OwnedFd, range: &Range) -> Result<(), Errno> {
    let (from, to) = (fstat(source)?, fstat(target)?);
    for stat in [&from, &to] {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::INVAL),
        }
    }
    if from.st_dev != to.st_dev {
        return Err(Errno::XDEV);
    }
    let flags = fcntl_getfl(target)?;
    if flags & OFlags::ACCMODE == OFlags::RDONLY || flags.contains(OFlags::APPEND) {
        return Err(Errno::BADF);
    }
    if fcntl_getfl(source)? & OFlags::ACCMODE == OFlags::WRONLY {
        return Err(Errno::BADF);
    }
    let size = from.st_size.cast_unsigned();
    let len = if range.len == 0 { size.saturating_sub(range.from) } else { range.len };
    let end = range.from.checked_add(len).filter(|&end| end <= size).ok_or(Errno::INVAL)?;
    let is_whole = |at: u64| at.is_multiple_of(PAGE_BYTES);
    if !is_whole(range.from) || !is_whole(range.to) || (!is_whole(end) && end != size) {
        return Err(Errno::INVAL);
    }
    let (mut at, mut to) = (range.from, range.to);
    while at < end {
        let step = (end - at).min(STEP_BYTES) as usize;
        if copy_file_range(source, Some(&mut at), target, Some(&mut to), step)? == 0 {
            // The source was made shorter meanwhile.
            return Err(Errno::INVAL);
        }
    }
    Ok(())
}
