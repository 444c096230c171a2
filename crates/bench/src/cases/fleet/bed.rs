//! What the cases of fleets share: a served pool on a loop device, file systems and images on others, clients.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use rustix::fs::{Advice, copy_file_range, fadvise, ioctl_ficlone};
use serde_json::{Value, json};

use crate::cases::file;
use crate::cases::pools::{Daemon, Place, PoolAt};
use crate::cases::w5::peers::KINDS;
use crate::control::Control;
use crate::limits::output_of;
use crate::mounted::{DeviceCounts, LoopDevice, Mounted};
use crate::nbd::Nbd;
use crate::rows::Samples;
use crate::runner::Context;

use super::PAGE;

/// How long the space of deleted volumes may take to be freed.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(5);

/// Creates a pool on a loop device over a file that was completely written, as the file systems beside it have.
pub fn pool(context: &Context<'_>, name: &str, size: u64, volumes: (&[&str], u64)) -> Result<PoolAt> {
    PoolAt::new(&context.disk(&format!("{name}.pool")), Place::Loop, size, volumes)
}

/// A daemon that serves a pool, with its sockets.
pub struct Served {
    pub daemon: Daemon,
    pub socket: PathBuf,
    pub control: Control,
}

impl Served {
    /// Starts a daemon with `flags`; its sockets begin with `name`.
    pub fn start(context: &Context<'_>, pool: &PoolAt, name: &str, flags: &[&str]) -> Result<Served> {
        let (socket, control) = (context.ram(&format!("{name}.sock")), context.ram(&format!("{name}.control")));
        let flags: Vec<&std::ffi::OsStr> = flags.iter().map(|flag| flag.as_ref()).collect();
        let is_ready = || Ok(socket.exists() && control.exists() && Control::connect(&control).is_ok());
        let daemon = Daemon::serve(context, pool.path(), name, &flags, is_ready)?;
        let control = Control::connect(&daemon.control)?;
        Ok(Served { daemon, socket, control })
    }

    pub fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.control.call(method, params)
    }

    /// Makes children of a volume, a snapshot or a folder, all in one call.
    pub fn fork(&mut self, source: &str, children: &[String]) -> Result<()> {
        self.call("fork", json!({"source": source, "children": children})).map(drop)
    }

    pub fn nbd(&self, export: &str) -> Result<Nbd> {
        Nbd::connect(&self.socket, export)
    }

    /// Returns the pool's own counts of what it has sent to its device.
    pub fn activity(&mut self) -> Result<Activity> {
        let statistics = self.call("statistics", json!({}))?;
        let activity = &statistics["activity"];
        let number = |value: &Value| value.as_u64().context("the counts of a pool");
        let bytes = |name: &str| number(&activity[name]["bytes"]);
        Ok(Activity {
            flushes: number(&activity["flushes"])?,
            commits: number(&activity["commit_group"]["count"])?,
            written: bytes("data_write")? + bytes("metadata_write")? + bytes("journal_write")?,
        })
    }

    /// Waits until the space of all deleted volumes is free.
    pub fn wait_until_freed(&mut self) -> Result<()> {
        let start = Instant::now();
        while self.call("stats", json!({}))?["freeing"].as_u64() != Some(0) {
            ensure!(start.elapsed() < PATIENCE, "the space of deleted volumes is not freed");
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    pub fn stop(self) -> Result<()> {
        self.daemon.process.stop()
    }
}

/// Returns the bytes of memory that a process has.
pub fn memory(process: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map(|kib: u64| kib << 10).context("the memory of a process")
}

/// What a pool has sent to its device.
#[derive(Clone, Copy, Debug)]
pub struct Activity {
    pub flushes: u64,
    pub commits: u64,
    pub written: u64,
}

/// Creates a file system with clones, XFS or btrfs, on a loop device over a file of `size` bytes that was completely
/// written. Its files begin with `name`.
pub fn file_system(context: &Context<'_>, kind: &str, name: &str, size: u64) -> Result<Mounted> {
    let kind = KINDS.iter().find(|of| of.name == kind).with_context(|| format!("there is no file system {kind}"))?;
    let backing = context.disk(&format!("{name}.disk"));
    file::plain(&backing, size)?;
    Mounted::new(&open(&backing)?, context.disk(&format!("{name}.mnt")), kind.mkfs, &["-o", "noatime"])
}

/// Opens a file for reading and writing.
pub fn open(path: &Path) -> Result<File> {
    File::options().read(true).write(true).open(path).with_context(|| path.display().to_string())
}

/// Makes `clone` a clone of `source` by the file system.
pub fn reflink(source: &Path, clone: &Path) -> Result<File> {
    let new = File::options().read(true).write(true).create_new(true).open(clone);
    let new = new.with_context(|| clone.display().to_string())?;
    ioctl_ficlone(&new, File::open(source)?)?;
    Ok(new)
}

/// Makes a new file a clone of another one of the same mount, as `cp` does.
pub fn clone_file(source: &Path, clone: &Path) -> Result<File> {
    let (from, to) = (File::open(source)?, File::options().read(true).write(true).create_new(true).open(clone)?);
    let len = from.metadata()?.len();
    let copied = copy_file_range(&from, None, &to, None, usize::try_from(len)?)?;
    ensure!(copied as u64 == len, "{copied} bytes of {len} were copied");
    Ok(to)
}

/// Makes what was created or removed in a folder durable.
pub fn sync_folder(folder: &Path) -> Result<()> {
    Ok(File::open(folder)?.sync_all()?)
}

/// Drops what the kernel has cached of a file.
pub fn drop_cache(path: &Path) -> Result<()> {
    let file = open(path)?;
    file.sync_all()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

/// Makes `overlay` a qcow2 image over `base`, which has the format `format`.
pub fn overlay(base: &Path, format: &str, overlay: &Path) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", format, "-b"]).arg(base).arg(overlay);
    output_of(&mut command).map(drop)
}

/// What one client reads, writes and makes durable.
pub trait Disk: Send {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<()>;
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()>;
    fn flush(&mut self) -> Result<()>;
}

impl Disk for Nbd {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Nbd::read(self, offset, buf)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        Nbd::write(self, offset, data)
    }

    fn flush(&mut self) -> Result<()> {
        Nbd::flush(self)
    }
}

impl Disk for File {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Ok(self.read_exact_at(buf, offset)?)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        Ok(self.write_all_at(data, offset)?)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(self.sync_data()?)
    }
}

/// One write of a client.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    pub start: Instant,
    pub end: Instant,
}

impl Write {
    /// Returns its seconds.
    pub fn seconds(&self) -> f64 {
        (self.end - self.start).as_secs_f64()
    }
}

/// Writes 4 KiB at random places of the first `span` bytes until `ended`, with a flush after each if `flush`.
pub fn write_until(disk: &mut dyn Disk, span: u64, flush: bool, ended: &AtomicBool) -> Result<Vec<Write>> {
    let (mut rng, page) = (SmallRng::seed_from_u64(11), [7; PAGE]);
    let mut all = Vec::new();
    while !ended.load(Ordering::Relaxed) {
        let start = Instant::now();
        disk.write(rng.random_range(0..span / PAGE as u64) * PAGE as u64, &page)?;
        if flush {
            disk.flush()?;
        }
        all.push(Write { start, end: Instant::now() });
    }
    Ok(all)
}

/// Runs `work` while a client writes; returns the client's writes and what `work` returned.
pub fn beside<T>(
    disk: &mut dyn Disk,
    span: u64,
    flush: bool,
    work: impl FnOnce() -> Result<T>,
) -> Result<(Vec<Write>, T)> {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_until(disk, span, flush, &ended));
        let done = work();
        ended.store(true, Ordering::Relaxed);
        let writes = writer.join().unwrap_or_else(|_| Err(anyhow!("the writer panicked")))?;
        Ok((writes, done?))
    })
}

/// Returns the durations of `writes`.
pub fn durations(writes: &[Write]) -> Samples {
    writes.iter().map(Write::seconds).collect()
}

/// Returns the seconds of `count` writes of 4 KiB, each with a flush, to a loop device as that of the pools.
pub fn device_flush(context: &Context<'_>, name: &str, count: usize) -> Result<Samples> {
    const SPAN: u64 = 4 << 20;
    let path = context.disk(&format!("{name}.raw"));
    file::plain(&path, SPAN)?;
    let device = LoopDevice::new(&open(&path)?)?;
    let mut disk = Direct::open(device.path())?;
    let (mut rng, page) = (SmallRng::seed_from_u64(5), [7; PAGE]);
    let one = |_| {
        let start = Instant::now();
        disk.write(rng.random_range(0..SPAN / PAGE as u64) * PAGE as u64, &page)?;
        disk.flush()?;
        Ok(start.elapsed().as_secs_f64())
    };
    (0..count).map(one).collect::<Result<Vec<_>>>().map(Samples::from_iter)
}

/// Returns the counts of `device` that `work` causes, and what it returns.
pub fn counted<T>(
    device: impl Fn() -> Result<DeviceCounts>,
    work: impl FnOnce() -> Result<T>,
) -> Result<(DeviceCounts, T)> {
    let before = device()?;
    let done = work()?;
    Ok((device()?.since(before), done))
}

/// A file, bypassing the page cache.
pub struct Direct {
    file: File,
    page: Box<Page>,
}

/// Memory at an address that requests past the page cache need.
#[repr(align(4096))]
struct Page([u8; PAGE]);

impl Direct {
    pub fn open(path: &Path) -> Result<Direct> {
        let file = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        let file = file.with_context(|| path.display().to_string())?;
        Ok(Direct { file, page: Box::new(Page([0; PAGE])) })
    }
}

impl Disk for Direct {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let page = self.page.0.get_mut(..buf.len()).context("a request of one page")?;
        self.file.read_exact_at(page, offset)?;
        buf.copy_from_slice(page);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let page = self.page.0.get_mut(..data.len()).context("a request of one page")?;
        page.copy_from_slice(data);
        Ok(self.file.write_all_at(page, offset)?)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(self.file.sync_data()?)
    }
}
