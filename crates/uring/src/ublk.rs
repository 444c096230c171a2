//! The kernel's ublk driver: a block device whose requests this thread's ring receives.
//!
//! Control commands go through a separate small ring on a separate thread, because starting and stopping
//! a device waits for its requests to be served. A request's data is copied with `pread` and `pwrite` on
//! the device's character node (`UBLK_F_USER_COPY`, Linux 6.5), so the kernel is lent no memory.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::executor::Rt;
use crate::handle::Handle;
use crate::helper::Helper;
use crate::op::{Work, outcome};
use crate::sys::Mapping;

const CONTROL: &str = "/dev/ublk-control";
/// Timeout of a control command.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(10);

/// Encodes `_IOWR('u', number, …)` of a control command (32 bytes) or an I/O command (16 bytes).
const fn command(number: u32, bytes: u32) -> u32 {
    3 << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

/// `_IOR('u', 2, …)`.
const GET_INFO: u32 = 2 << 30 | 32 << 16 | (b'u' as u32) << 8 | 2;
const ADD: u32 = command(0x04, 32);
const DELETE: u32 = command(0x05, 32);
const START: u32 = command(0x06, 32);
const STOP: u32 = command(0x07, 32);
const SET_PARAMS: u32 = command(0x08, 32);
const START_RECOVERY: u32 = command(0x10, 32);
const END_RECOVERY: u32 = command(0x11, 32);
const UPDATE_SIZE: u32 = command(0x15, 32);
const FETCH: u32 = command(0x20, 16);
const COMMIT_AND_FETCH: u32 = command(0x21, 16);

const CMD_IOCTL_ENCODE: u64 = 1 << 6;
const USER_COPY: u64 = 1 << 7;
/// The device outlives its server: requests are queued for the next one, and those in flight are sent to it again.
const USER_RECOVERY: u64 = 1 << 3 | 1 << 4;

const INFO: usize = 64;
const PARAMS: usize = 60;
const BASIC: u32 = 1;
const DISCARD: u32 = 2;
const READ_ONLY: u32 = 1;
const VOLATILE_CACHE: u32 = 4;
const FUA: u32 = 8;
const OP_FUA: u32 = 1 << 13;
/// Offset in the character device of the data of request `tag` of a queue.
const DATA: u64 = 0x8000_0000;
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = 41;
const DESCRIPTOR: usize = 24;
/// Descriptors per queue in the mapping, for any depth.
const MOST_DEPTH: usize = 4096;

const SECTOR: u64 = 512;
/// Number of queues, and of requests at a time in each.
const QUEUES: u16 = 2;
const DEPTH: u16 = 64;
/// Longest request, in bytes.
const LONGEST: u32 = 512 << 10;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UblkOperation {
    /// Read; the data goes to [`UblkDevice::give`].
    Read,
    /// Write; the data comes from [`UblkDevice::take`].
    Write,
    /// Make earlier writes durable.
    Flush,
    /// Discard the range.
    Discard,
    /// Make the range read as zeroes.
    WriteZeroes,
    /// Any other operation.
    Unknown,
}

/// One request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkRequest {
    queue: u16,
    tag: u16,
    /// Operation.
    pub operation: UblkOperation,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Make it durable before the answer.
    pub fua: bool,
}

/// A block device of the kernel that is served here. End it with [`stop`](Self::stop) and, when its
/// slots are not served any more, [`delete`](Self::delete).
pub struct UblkDevice {
    rt: Rt,
    number: u32,
    file: File,
    handle: Rc<Handle>,
    descriptors: Vec<Mapping>,
    helper: Helper,
}

/// Returns why this machine has no ublk driver; `None` if it has one.
pub fn ublk_missing() -> Option<String> {
    let exists = Path::new(CONTROL).exists();
    (!exists)
        .then(|| format!("{CONTROL} does not exist: this kernel has no ublk driver (modprobe ublk_drv; Linux 6.5)"))
}

impl UblkDevice {
    /// Creates a device of `size` bytes, rounded down to whole sectors. It becomes visible when it
    /// is [started](Self::start).
    ///
    /// # Errors
    /// The driver is missing or too old, this user may not use it, or the kernel refuses the parameters.
    pub async fn add(rt: &Rt, size: u64, read_only: bool) -> io::Result<UblkDevice> {
        let helper = Helper::default();
        let number = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(u32::MAX));
        let told = number.clone();
        let made = helper.run(move || {
            let mut info = new_info();
            control(ADD, u32::MAX, &mut info, 0)?;
            let id = u32::from_ne_bytes([info[12], info[13], info[14], info[15]]);
            told.store(id, std::sync::atomic::Ordering::SeqCst);
            control(SET_PARAMS, id, &mut parameters(size, read_only), 0)
        });
        let made = made.await;
        let number = number.load(std::sync::atomic::Ordering::SeqCst);
        match made.and_then(|()| UblkDevice::open(rt, number)) {
            Ok((file, handle, descriptors)) => {
                Ok(UblkDevice { rt: rt.clone(), number, file, handle, descriptors, helper })
            }
            Err(error) => {
                if number != u32::MAX {
                    let _ = helper.run(move || control(DELETE, number, &mut [], 0)).await;
                }
                helper.shut_down();
                Err(error)
            }
        }
    }

    /// Takes over device `number` after its server was killed. Its slots must be [fetched](Self::fetch); then
    /// [`resume`](Self::resume) lets its requests arrive.
    ///
    /// # Errors
    /// There is no such device, it has a server, or it was made without this feature of the driver.
    pub async fn recover(rt: &Rt, number: u32) -> io::Result<UblkDevice> {
        let helper = Helper::default();
        let started = helper.run(move || {
            let start = Instant::now();
            loop {
                match control(START_RECOVERY, number, &mut [], 0) {
                    // The kernel has not released the killed server yet.
                    Err(e) if e.kind() == io::ErrorKind::ResourceBusy && start.elapsed() < Duration::from_secs(5) => {
                        std::thread::sleep(PAUSE);
                    }
                    outcome => return outcome,
                }
            }
        });
        match started.await.and_then(|()| UblkDevice::open(rt, number)) {
            Ok((file, handle, descriptors)) => {
                Ok(UblkDevice { rt: rt.clone(), number, file, handle, descriptors, helper })
            }
            Err(error) => {
                helper.shut_down();
                Err(error)
            }
        }
    }

    /// Opens the node by which device `number` is served.
    fn open(rt: &Rt, number: u32) -> io::Result<(File, Rc<Handle>, Vec<Mapping>)> {
        let file = open_node(number)?;
        let len = (usize::from(DEPTH) * DESCRIPTOR).next_multiple_of(4096);
        let apart = ((MOST_DEPTH * DESCRIPTOR) as u64).next_multiple_of(4096);
        let maps = (0..u64::from(QUEUES)).map(|queue| Mapping::new(file.as_fd(), queue * apart, len));
        let descriptors = maps.collect::<io::Result<Vec<_>>>()?;
        let handle = Handle::new(rt.driver(), OwnedFd::from(file.try_clone()?));
        Ok((file, handle, descriptors))
    }

    /// Returns its path, such as `/dev/ublkb0`.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/ublkb{}", self.number))
    }

    /// Returns all slots for requests, each a queue and a tag. Each of them must be [fetched](Self::fetch).
    pub fn places(&self) -> impl Iterator<Item = (u16, u16)> + use<> {
        (0..QUEUES).flat_map(|queue| (0..DEPTH).map(move |tag| (queue, tag)))
    }

    /// Waits for the first request in this slot.
    ///
    /// # Errors
    /// The device has been stopped.
    pub async fn fetch(&self, (queue, tag): (u16, u16)) -> io::Result<UblkRequest> {
        self.next(FETCH, queue, tag, 0).await
    }

    /// Answers a request, with a count of bytes or a negative errno, and waits for the next one in
    /// its slot. Fails when the device has been stopped.
    ///
    /// # Errors
    /// The device has been stopped.
    pub async fn answer(&self, request: UblkRequest, result: i32) -> io::Result<UblkRequest> {
        self.next(COMMIT_AND_FETCH, request.queue, request.tag, result).await
    }

    async fn next(&self, number: u32, queue: u16, tag: u16, result: i32) -> io::Result<UblkRequest> {
        let mut data = [0; 16];
        data[..2].copy_from_slice(&queue.to_ne_bytes());
        data[2..4].copy_from_slice(&tag.to_ne_bytes());
        data[4..8].copy_from_slice(&result.to_ne_bytes());
        let op = self.rt.driver().start(&self.handle, Work::Command { number, data }).await;
        outcome(op.result)?;
        let bytes: [u8; DESCRIPTOR] = self.descriptors[usize::from(queue)].read(usize::from(tag) * DESCRIPTOR);
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let sector = u64::from(word(8)) | u64::from(word(12)) << 32;
        let operation = match word(0) & 0xff {
            0 => UblkOperation::Read,
            1 => UblkOperation::Write,
            2 => UblkOperation::Flush,
            3 => UblkOperation::Discard,
            5 => UblkOperation::WriteZeroes,
            _ => UblkOperation::Unknown,
        };
        // A flush has no range: its sector is undefined.
        let (offset, len) = match operation {
            UblkOperation::Flush => (0, 0),
            _ => (sector.saturating_mul(SECTOR), u64::from(word(4)) * SECTOR),
        };
        Ok(UblkRequest { queue, tag, operation, offset, len, fua: word(0) & OP_FUA != 0 })
    }

    fn data_of(request: &UblkRequest) -> u64 {
        DATA + (u64::from(request.queue) << QUEUE_SHIFT | u64::from(request.tag) << TAG_SHIFT)
    }

    /// Fills `buf` with the data of a write request.
    ///
    /// # Errors
    /// The device has been stopped, or the request was aborted.
    pub fn take(&self, request: &UblkRequest, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, UblkDevice::data_of(request))
    }

    /// Passes the data of a read request to the kernel.
    ///
    /// # Errors
    /// The device has been stopped, or the request was aborted.
    pub fn give(&self, request: &UblkRequest, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, UblkDevice::data_of(request))
    }

    /// Makes the block device visible. Its first requests arrive before this returns.
    ///
    /// # Errors
    /// The kernel refuses it, for example as a slot is not served.
    pub async fn start(&self) -> io::Result<()> {
        let (number, pid) = (self.number, std::process::id());
        self.helper.run(move || control(START, number, &mut [], pid.into())).await
    }

    /// Lets the requests of a [recovered](Self::recover) device arrive: first those that its killed server had taken.
    ///
    /// # Errors
    /// The kernel refuses it, for example as a slot is not served.
    pub async fn resume(&self) -> io::Result<()> {
        let (number, pid) = (self.number, std::process::id());
        self.helper.run(move || control(END_RECOVERY, number, &mut [], pid.into())).await
    }

    /// Removes the block device. Its last requests arrive before this returns; then every slot that
    /// waits for a request fails.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub async fn stop(&self) -> io::Result<()> {
        let number = self.number;
        self.helper.run(move || control(STOP, number, &mut [], 0)).await
    }

    /// Deletes a stopped device whose slots are not served any more.
    ///
    /// # Errors
    /// The kernel refuses it: slots are still served.
    pub async fn delete(self) -> io::Result<()> {
        let UblkDevice { rt, number, file, handle, descriptors, helper } = self;
        drop((descriptors, handle, file));
        // The ring releases the node after its last request.
        rt.sleep_for(PAUSE).await;
        let gone = helper.run(move || control(DELETE, number, &mut [], 0)).await;
        helper.shut_down();
        gone
    }
}

/// Returns whether device `number` has no server since its own was killed.
///
/// # Errors
/// There is no such device.
pub fn ublk_is_left(number: u32) -> io::Result<bool> {
    const QUIESCED: u16 = 2;
    let mut info = new_info();
    control(GET_INFO, number, &mut info, 0)?;
    Ok(u16::from_ne_bytes([info[4], info[5]]) == QUIESCED)
}

/// Deletes device `number` after its server was killed.
///
/// # Errors
/// There is no such device, or the kernel refuses it.
pub fn ublk_forget(number: u32) -> io::Result<()> {
    control(STOP, number, &mut [], 0).and_then(|()| control(DELETE, number, &mut [], 0))
}

/// Sets device `number` to a length of `size` bytes, rounded down to whole sectors. Fails before
/// Linux 6.16.
///
/// # Errors
/// There is no such device, or the kernel is older than Linux 6.16.
pub fn ublk_resize(number: u32, size: u64) -> io::Result<()> {
    control(UPDATE_SIZE, number, &mut [], size / SECTOR)
}

fn new_info() -> [u8; INFO] {
    let mut info = [0; INFO];
    info[..2].copy_from_slice(&QUEUES.to_ne_bytes());
    info[2..4].copy_from_slice(&DEPTH.to_ne_bytes());
    info[8..12].copy_from_slice(&LONGEST.to_ne_bytes());
    info[12..16].copy_from_slice(&u32::MAX.to_ne_bytes());
    info[24..32].copy_from_slice(&(CMD_IOCTL_ENCODE | USER_COPY | USER_RECOVERY).to_ne_bytes());
    info
}

fn parameters(size: u64, read_only: bool) -> [u8; PARAMS] {
    let mut params = [0; PARAMS];
    let mut put = |at: usize, word: u32| params[at..at + 4].copy_from_slice(&word.to_ne_bytes());
    put(0, PARAMS as u32);
    put(4, BASIC | DISCARD);
    put(8, VOLATILE_CACHE | FUA | if read_only { READ_ONLY } else { 0 });
    // Shifts of the logical, physical, optimal and minimal size of a request.
    put(12, u32::from_ne_bytes([9, 12, 12, 12]));
    put(16, LONGEST / SECTOR as u32);
    put(24, (size / SECTOR) as u32);
    put(28, ((size / SECTOR) >> 32) as u32);
    // Discard: alignment, granularity, most sectors, most sectors of zeroes, segments.
    put(44, 4096);
    put(48, u32::MAX >> 9);
    put(52, u32::MAX >> 9);
    put(56, 1);
    params
}

fn open_node(number: u32) -> io::Result<File> {
    let (path, start) = (format!("/dev/ublkc{number}"), Instant::now());
    loop {
        match File::options().read(true).write(true).open(&path) {
            // The node appears a moment later.
            Err(_) if start.elapsed() < Duration::from_secs(5) => std::thread::sleep(PAUSE),
            opened => return opened.map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}"))),
        }
    }
}

/// Runs one control command, with up to [`PATIENCE`] for its answer.
fn control(number: u32, device: u32, data: &mut [u8], value: u64) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(CONTROL);
    let file = file.map_err(|e| io::Error::new(e.kind(), format!("{CONTROL}: {e}")))?;
    let mut ring: IoUring<squeue::Entry128> = IoUring::builder().build(2)?;
    // The kernel writes to memory used by this command only; its answer is copied back.
    let mut lent = data.to_vec().into_boxed_slice();
    let mut bytes = [0; 80];
    bytes[..4].copy_from_slice(&device.to_ne_bytes());
    bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    bytes[6..8].copy_from_slice(&(lent.len() as u16).to_ne_bytes());
    let address = if lent.is_empty() { 0 } else { lent.as_mut_ptr() as u64 };
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes[16..24].copy_from_slice(&value.to_ne_bytes());
    let entry = opcode::UringCmd80::new(Fd(file.as_raw_fd()), number).cmd(bytes).build();
    // SAFETY: `lent` is neither moved nor freed before the completion, and is leaked if there is none in time.
    unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    let (start, limit) = (Instant::now(), Timespec::from(Duration::from_secs(1)));
    loop {
        match ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&limit)) {
            Err(e) if !matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                std::mem::forget(lent);
                return Err(e);
            }
            _ => {}
        }
        if let Some(completion) = ring.completion().next() {
            data.copy_from_slice(&lent);
            return outcome(completion.result()).map(drop);
        }
        if start.elapsed() > PATIENCE {
            std::mem::forget(lent);
            let what = match number {
                START | END_RECOVERY => "to start the device",
                STOP => "for the device's last requests",
                DELETE => "for the device's last user",
                _ => "for the ublk driver's answer",
            };
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("waited {PATIENCE:?} {what}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_kernels_header() {
        assert_eq!((ADD, START, SET_PARAMS), (0xc020_7504, 0xc020_7506, 0xc020_7508));
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
    }

    #[test]
    fn parameters_lie_where_the_kernels_structs_have_them() {
        let params = parameters((5 << 40) + 700, true);
        let word = |at: usize| u32::from_ne_bytes(params[at..at + 4].try_into().unwrap());
        let sectors = u64::from(word(24)) | u64::from(word(28)) << 32;
        assert_eq!((word(0), word(4), word(8), sectors), (60, 3, 13, (5 << 31) + 1));
        assert_eq!((params[12], params[13], word(44), word(56)), (9, 12, 4096, 1));
        assert_eq!(u32::from_ne_bytes(new_info()[12..16].try_into().unwrap()), u32::MAX);
    }

    #[test]
    fn a_machine_without_the_driver_says_so() {
        if let Some(why) = ublk_missing() {
            assert!(why.contains("no ublk driver"), "{why}");
            let failed = crate::block_on(crate::Config::default(), |rt| async move {
                UblkDevice::add(&rt, 1 << 20, false).await.err().map(|e| e.to_string())
            });
            assert!(failed.unwrap().expect("there is no device").contains(CONTROL));
        }
    }
}
