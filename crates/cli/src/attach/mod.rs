//! Volumes as block devices of the kernel.
//!
//! What is attached is known by the kernel alone: devices say whose they are, so nothing is kept here that could be
//! wrong after a crash.

mod attach_lock;
mod by_loop;
mod by_nbd;
mod by_ublk;
mod handshake;
mod links;
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
pub use by_loop::{is_dead, private_mount};
pub use by_ublk::clean_up;
pub use links::{device_behind, is_inside, links_of, refresh};

use crate::cli::Global;

/// How a volume becomes a block device, best first.
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

/// A volume or snapshot that is a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attachment {
    /// `/dev/nbd0`.
    pub device: PathBuf,
    /// The pool's path.
    pub pool: PathBuf,
    /// The volume or snapshot.
    pub object: String,
    /// How.
    pub by: Means,
}

/// What has the pool open.
pub enum Owner {
    /// A daemon, and where its data socket lies.
    Daemon(Box<Client>, Option<PathBuf>),
    /// A process that does nothing but mount it there.
    Mount(PathBuf),
}

/// What is to become a block device.
pub struct Target<'a> {
    pub pool: &'a Path,
    pub object: &'a str,
    pub read_only: bool,
}

impl Target<'_> {
    /// As it is named in lists and by the kernel.
    fn address(&self) -> String {
        format!("{}/{}", self.pool.display(), self.object)
    }
}

/// Attaches by the first of `means` that works. The error says why none does.
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

/// Ends an attachment after everything is written. Refused while something is mounted from the device.
pub fn detach(global: &Global, attachment: &Attachment) -> Result<()> {
    match attachment.by {
        Means::Ublk => by_ublk::detach(global, attachment),
        Means::Nbd => by_nbd::detach(&attachment.device),
        Means::Loop => by_loop::detach(&attachment.device),
    }
}

/// Has a device take on the length of its volume, which is `size` by now. Programs may go on using it.
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

/// Whether the process behind an attachment was killed, so that the device is of no use any more.
pub fn is_left_behind(attachment: &Attachment) -> bool {
    match attachment.by {
        Means::Loop => by_loop::is_left_behind(&attachment.device),
        Means::Nbd => by_nbd::is_left_behind(&attachment.device),
        // The kernel removes it when its daemon ends.
        Means::Ublk => false,
    }
}

/// The devices of the kernel's NBD client and loop driver that a volume or snapshot of a pool is attached as.
///
/// It makes no call on a file system: the pool's own daemon may run it, and would wait for itself.
pub fn devices_of(pool: &Path, private_mount: Option<&Path>, object: &str) -> Vec<PathBuf> {
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let is_it = |name: &std::ffi::OsString| {
        let dir = Path::new("/sys/block").join(name);
        by_nbd::is_of(&dir, pool, object) || private_mount.is_some_and(|mount| by_loop::is_of(&dir, mount, object))
    };
    names.map(|entry| entry.file_name()).filter(is_it).map(|name| Path::new("/dev").join(name)).collect()
}

/// Everything that is attached on this machine, by the names of the devices.
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
/// How long what the kernel does on the side may take.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// Waits until `is_so`; false if it never comes.
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

/// Opens a device exclusively, and writes what the kernel has cached of it.
fn claim(device: &Path) -> Result<fs::File> {
    let file = claim_as_it_is(device)?;
    file.sync_all().with_context(|| format!("{}: writing what is cached", device.display()))?;
    Ok(file)
}

/// Opens a device exclusively, with its cache as it is.
fn claim_as_it_is(device: &Path) -> Result<fs::File> {
    use std::os::unix::fs::OpenOptionsExt;
    let exclusive = rustix::fs::OFlags::EXCL.bits() as i32;
    let start = Instant::now();
    loop {
        match fs::File::options().read(true).custom_flags(exclusive).open(device) {
            // Programs that look at new devices hold them for a moment.
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
