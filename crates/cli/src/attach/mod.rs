//! Volumes as block devices of the kernel.
//!
//! The kernel is the only record of attached devices: each device carries its address, so no state
//! is kept here that could be wrong after a crash.

mod attach_lock;
mod by_loop;
mod by_nbd;
mod by_ublk;
mod handshake;
mod links;
mod many;
mod netlink;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use forkdisk_control::Client;
use serde::Serialize;

pub use attach_lock::{alone, alone_at_once};
pub use by_loop::private_mount;
pub use by_nbd::export_of;
pub use by_ublk::{LeftBehind, RECORDS, clean_up, left_behind};
pub use links::{device_behind, is_inside, links_of, refresh};
pub use many::{attach_all, dirs_for, mount_all};

use crate::global::Global;

/// Means of making a volume a block device, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Means {
    /// The kernel's ublk driver, served by the daemon.
    Ublk,
    /// The kernel's NBD client on the daemon's socket.
    Nbd,
    /// The kernel's loop driver with direct I/O on the file of a mount.
    Loop,
}

impl fmt::Display for Means {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Means::Ublk => "ublk",
            Means::Nbd => "nbd",
            Means::Loop => "loop",
        })
    }
}

/// A volume or snapshot attached as a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attachment {
    /// Path of the device, such as `/dev/nbd0`.
    pub device: PathBuf,
    /// Path of the pool.
    pub pool: PathBuf,
    /// The volume or snapshot.
    pub object: String,
    /// Means by which it is attached.
    pub by: Means,
}

/// The process that has the pool open.
pub enum Owner {
    /// A daemon, and the path of its data socket.
    Daemon(Box<Client>, Option<PathBuf>),
    /// A process that only mounts the pool, and the mount's directory.
    Mount(PathBuf),
}

/// An object to attach.
pub struct Target<'a> {
    pub pool: &'a Path,
    pub object: &'a str,
    pub read_only: bool,
}

impl Target<'_> {
    /// Returns the address, as shown in lists and kept by the kernel.
    fn address(&self) -> String {
        format!("{}/{}", self.pool.display(), self.object)
    }
}

/// Attaches by the first of `means` that works. The error contains the reason of each.
pub fn attach(owner: &mut Owner, target: &Target<'_>, means: &[Means]) -> Result<Attachment> {
    let mut reasons = Vec::new();
    for &by in means {
        let attached = match by {
            Means::Ublk => by_ublk::attach(owner, target),
            Means::Nbd => by_nbd::attach(owner, target),
            Means::Loop => by_loop::attach(owner, target),
        };
        match attached {
            Ok(device) => {
                let (pool, object) = (target.pool.to_path_buf(), target.object.to_string());
                return Ok(Attachment { device, pool, object, by });
            }
            Err(error) => reasons.push(format!("{by}: {error:#}")),
        }
    }
    bail!("{} cannot become a block device here: {}", target.address(), reasons.join("; "))
}

/// Detaches a device after everything is written. Fails while a file system is mounted from it.
pub fn detach(global: &Global, attachment: &Attachment) -> Result<()> {
    match attachment.by {
        Means::Ublk => by_ublk::detach(global, attachment),
        Means::Nbd => by_nbd::detach(&attachment.device),
        Means::Loop => by_loop::detach(&attachment.device),
    }
}

/// Sets a device to the new length of its volume, `size`. The device may stay in use.
pub fn grow(attachment: &Attachment, size: u64) -> Result<()> {
    let device = &attachment.device;
    match attachment.by {
        Means::Ublk => by_ublk::grow(device, size),
        Means::Nbd => by_nbd::grow(attachment, size),
        Means::Loop => by_loop::grow(device),
    }?;
    let sectors = Path::new("/sys/class/block").join(device.file_name().unwrap_or_default()).join("size");
    let sectors: u64 = fs::read_to_string(&sectors).with_context(|| sectors.display().to_string())?.trim().parse()?;
    ensure!(sectors == size / SECTOR, "the kernel still has it {} bytes long", sectors * SECTOR);
    Ok(())
}

/// Returns whether the process behind an attachment is gone. A ublk device is served again by the next daemon of its
/// pool, others are useless.
pub fn is_left_behind(attachment: &Attachment) -> bool {
    match attachment.by {
        Means::Loop => by_loop::is_left_behind(&attachment.device),
        Means::Nbd => by_nbd::is_left_behind(&attachment.device),
        Means::Ublk => by_ublk::is_left_behind(&attachment.device),
    }
}

/// Returns the NBD and loop devices that a volume or snapshot of a pool is attached as.
///
/// Makes no system call on a file system: the pool's own daemon may run this, and would wait for itself.
pub fn devices_of(pool: &Path, private_mount: Option<&Path>, object: &str) -> Vec<PathBuf> {
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let is_it = |name: &std::ffi::OsString| {
        let dir = Path::new("/sys/block").join(name);
        by_nbd::is_of(&dir, pool, object) || private_mount.is_some_and(|mount| by_loop::is_of(&dir, mount, object))
    };
    names.map(|entry| entry.file_name()).filter(is_it).map(|name| Path::new("/dev").join(name)).collect()
}

/// Returns all attachments on this machine, sorted by device name.
pub fn list() -> Vec<Attachment> {
    let mut names: Vec<String> = fs::read_dir("/sys/block")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort_by_key(|name| (name.trim_end_matches(|c: char| c.is_ascii_digit()).to_string(), number(name)));
    let mounts = forkdisk_fuse::mounts();
    let look =
        |name: &String| by_ublk::look(name).or_else(|| by_nbd::look(name)).or_else(|| by_loop::look(name, &mounts));
    names.iter().filter_map(look).collect()
}

fn number(name: &str) -> u64 {
    name.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0)
}

const SECTOR: u64 = 512;
/// How long asynchronous work of the kernel may take.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// Waits until `is_so` returns true; returns false after [`PATIENCE`].
fn wait_until(is_so: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !is_so() {
        if start.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

/// Opens a device exclusively, and writes what the kernel has cached for it.
fn claim(device: &Path) -> Result<fs::File> {
    let file = claim_as_it_is(device)?;
    file.sync_all().with_context(|| format!("{}: writing what is cached", device.display()))?;
    Ok(file)
}

/// Opens a device exclusively and leaves its cache alone.
fn claim_as_it_is(device: &Path) -> Result<fs::File> {
    use std::os::unix::fs::OpenOptionsExt;
    let exclusive = rustix::fs::OFlags::EXCL.bits() as i32;
    let start = Instant::now();
    loop {
        match fs::File::options().read(true).custom_flags(exclusive).open(device) {
            // Programs that examine new devices hold them for a moment.
            Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy && start.elapsed() < Duration::from_secs(1) => {
                std::thread::sleep(PAUSE);
            }
            Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => return Err(in_use(device)),
            opened => return opened.with_context(|| device.display().to_string()),
        }
    }
}

fn in_use(device: &Path) -> anyhow::Error {
    let shown = device.display();
    anyhow::anyhow!("{shown} is in use: unmount what is mounted from it (`lsblk {shown}` shows it) and try again")
}
