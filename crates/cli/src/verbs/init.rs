//! `init`: makes a pool.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::{Device, FormatOptions, OpenOptions, Pool, PoolInfo};
use forkdisk_control::PoolRecord;
use forkdisk_uring::{Config, DeviceOptions, Rt, UringDevice};

use crate::cli::Global;
use crate::output::print_json;
use crate::pool_lock::PoolLock;
use crate::session::Access;
use crate::{owner, size};

/// Make a pool in a sparse file or on a block device
#[derive(Args)]
pub struct InitArgs {
    /// The file or block device; a file that does not exist is made
    path: Option<PathBuf>,

    /// Size of the pool; a block device is used whole without it
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: Option<u64>,

    /// Length of the journal; chosen by the pool's size without it
    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    journal: Option<u64>,

    /// Overwrite a target that is not empty: everything in it is lost
    #[arg(long)]
    force: bool,
}

/// Makes the pool; a file that did not exist before is removed again when that fails.
pub fn run(args: InitArgs, global: &Global) -> Result<()> {
    let path = global.new_pool(args.path.as_deref())?;
    let is_new = !path.exists();
    let size = args.size.unwrap_or(0);
    if size == 0 && !is_block_device(&path) {
        bail!("{}: a pool in a file needs a size above 0, as in --size 20G", path.display());
    }
    let options = FormatOptions { size, uuid: random_uuid()?, now: now(), journal: args.journal };
    if size > 0 {
        // Before anything that the target holds is lost.
        options.check().with_context(|| path.display().to_string())?;
    }
    let made = forkdisk_uring::block_on(Config::default(), |runtime| make(&runtime, &path, options, args.force))?;
    if made.is_err() && is_new {
        // The reason why the pool could not be made is what the user needs to hear.
        let _ = fs::remove_file(&path);
    }
    let info = made?;
    if global.output.json() { print_json(&PoolRecord::from(&info)) } else { Ok(()) }
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
        // Before a pool is overwritten that is open by another way.
        let _lock = PoolLock::take(&path, Access::Write)?;
        let device = UringDevice::create(&runtime, &path, options.size, force, &DeviceOptions::default())
            .map_err(|e| owner::explain(&path, e))?;
        if options.size == 0 {
            options.size = device.len();
        }
        Pool::format(&device, &options).await.with_context(|| format!("{}: making the pool", path.display()))?;
        let pool = Pool::open(device, Rc::new(runtime), OpenOptions::default()).await?;
        let info = pool.info();
        pool.close().await?;
        Ok(info)
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// A random identity of version 4.
fn random_uuid() -> Result<[u8; 16]> {
    let mut uuid = [0; 16];
    fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut uuid)).context("reading /dev/urandom")?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}
