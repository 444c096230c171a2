//! `init`: creates a pool.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::device::Segment;
use forkdisk::{Buf, Device, FormatOptions, Pool, PoolInfo};
use forkdisk_control::{Observer, Step, runtime_dir};
use forkdisk_uring::{Config, DeviceOptions, Rt, UringDevice};

use crate::global::Global;
use crate::host;
use crate::output::print_json;
use crate::pool_lock::PoolLock;
use crate::progress::Progress;
use crate::session::{Access, open_device};
use crate::verbs::examples::examples;
use crate::{owner, size};

/// Length of the writes of zeroes.
const PREALLOCATED_AT_ONCE_BYTES: usize = 4 << 20;

/// Create a pool in a sparse file or on a block device
#[derive(Args)]
#[command(after_help = examples!["forkdisk init /srv/pool.img --size 100G", "forkdisk init /dev/sdb"])]
pub struct InitArgs {
    /// The file or block device; creates a missing file
    path: Option<PathBuf>,

    /// Size of the pool [default: the whole block device]
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: Option<u64>,

    /// Length of the journal [default: depends on the pool's size]
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    journal: Option<u64>,

    /// Write zeroes over the whole file, so that no later write has to wait for the file system to allocate space
    ///
    /// Takes the time to write SIZE. The pool keeps its space then: what is freed becomes a hole only with
    /// `discard = yes`. For files; of no use on a file system that never overwrites in place (btrfs, ZFS).
    #[arg(long)]
    preallocate: bool,

    /// Overwrite a target that is not empty: everything in it is lost
    ///
    /// A pool that has volumes needs --destroy as well. A pool or device in use is never overwritten.
    #[arg(long)]
    force: bool,

    /// Overwrite the pool that has this UUID, with its volumes and snapshots
    #[arg(long, value_name = "UUID")]
    destroy: Option<String>,
}

/// Creates the pool; removes a new file again if that fails.
pub fn run(args: InitArgs, global: &Global) -> Result<()> {
    let path = global.new_pool(args.path.as_deref())?;
    let is_new = !path.exists();
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
        bail!("{}: the folder {} does not exist", path.display(), folder.display());
    }
    let size = args.size.unwrap_or(0);
    if size == 0 && !is_block_device(&path) {
        bail!("{}: a pool in a file needs a size above 0, as in --size 20G", path.display());
    }
    if args.preallocate && is_block_device(&path) {
        bail!("{}: a block device has all of its space: --preallocate is for files", path.display());
    }
    let options =
        FormatOptions::new(size, random_uuid()?, now()).with_journal(args.journal).with_preallocated(args.preallocate);
    if size > 0 {
        // Checked before any contents of the target are lost.
        options.check().with_context(|| path.display().to_string())?;
    }
    let (force, destroy) = (args.force || args.destroy.is_some(), args.destroy.as_deref());
    if force {
        // In a separate runtime, which releases the device when it ends.
        let path = path.as_path();
        let spare = |runtime: Rt| async move { spare_volumes(&runtime, path, destroy).await };
        forkdisk_uring::block_on(Config::default(), spare)??;
    }
    let made = forkdisk_uring::block_on(Config::default(), |runtime| make(&runtime, &path, options, force))?;
    if made.is_err() && is_new {
        // The error to report is why the pool could not be created.
        let _ = fs::remove_file(&path);
    }
    let info = made?;
    if global.output.json() { print_json(&info) } else { Ok(()) }
}

/// Refuses to overwrite a pool that has volumes, unless its UUID is `destroy`. A pool that cannot
/// be read may be overwritten.
async fn spare_volumes(runtime: &Rt, path: &Path, destroy: Option<&str>) -> Result<()> {
    let found = runtime_dir::pool_identity(path).map(|uuid| forkdisk::uuid_text(&uuid));
    let shown = path.display();
    if let Some(destroy) = destroy {
        return match found {
            Some(uuid) if uuid.eq_ignore_ascii_case(destroy) => Ok(()),
            Some(uuid) => bail!("{shown} is the pool {uuid}, not {destroy}: nothing is overwritten"),
            None => bail!("{shown} is no pool, so not {destroy}: nothing is overwritten"),
        };
    }
    let Some(uuid) = found else { return Ok(()) };
    let (device, _lock) = open_device(runtime, path, Access::Read)?;
    let options = host::open_options().with_read_only(true);
    let pool = match Pool::open(device, Rc::new(runtime.clone()), options).await {
        Ok(pool) => pool,
        Err(error) => {
            tracing::warn!("{shown} was the pool {uuid}, which cannot be read any more, and is overwritten: {error}");
            return Ok(());
        }
    };
    let (snapshots, volumes): (Vec<_>, Vec<_>) = pool.list().into_iter().partition(|info| info.name.contains('@'));
    pool.close().await.with_context(|| format!("{shown}: closing the pool"))?;
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    match volumes.len() + snapshots.len() {
        0 => Ok(()),
        _ => bail!(
            "{shown} is the pool {uuid} with {} and {}, which would be lost: --destroy {uuid} overwrites it",
            count(volumes.len(), "volume"),
            count(snapshots.len(), "snapshot")
        ),
    }
}

fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

fn make(
    runtime: &Rt,
    path: &Path,
    mut options: FormatOptions,
    force: bool,
) -> impl Future<Output = Result<PoolInfo>> + use<> {
    let (runtime, path) = (runtime.clone(), path.to_path_buf());
    async move {
        // Taken first, so that a pool open by another path is not overwritten.
        let _lock = PoolLock::take(&path, Access::Write)?;
        let device = UringDevice::create(&runtime, &path, options.size, force, &DeviceOptions::default())
            .map_err(|e| owner::explain(&path, e))?;
        if options.size == 0 {
            options.size = device.len();
        }
        if options.preallocated {
            preallocate(&device, options.size).await.with_context(|| format!("{}: preallocating", path.display()))?;
        }
        Pool::format(&device, &options).await.with_context(|| format!("{}: making the pool", path.display()))?;
        let pool = Pool::open(device, Rc::new(runtime), host::open_options()).await?;
        let info = pool.info();
        pool.close().await?;
        Ok(info)
    }
}

/// Writes zeroes over a new file of `len` bytes. Space that was only reserved for it would cost its first write as much
/// as a hole: the file system has to note that it is written.
async fn preallocate(device: &UringDevice, len: u64) -> io::Result<()> {
    let progress = Progress::new();
    // Fails at once if the file system does not have the space.
    device.allocate(0, len).await?;
    let mut zeroes = Buf::zeroed(PREALLOCATED_AT_ONCE_BYTES);
    let mut done = 0;
    while done < len {
        progress.reached(Step::bytes("writing zeroes", done, Some(len)));
        let part = (len - done).min(PREALLOCATED_AT_ONCE_BYTES as u64) as usize;
        let segment = Segment { offset: done, at: 0, len: part };
        let (written, buf) = device.write(zeroes, [segment].into_iter().collect(), false).await;
        written?;
        (zeroes, done) = (buf, done + part as u64);
    }
    device.flush().await
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// Returns a random UUID of version 4.
pub fn random_uuid() -> Result<[u8; 16]> {
    let mut uuid = host::random().context("reading /dev/urandom")?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}
