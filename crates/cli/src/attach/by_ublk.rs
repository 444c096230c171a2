//! Attaching by the kernel's ublk driver, served by the daemon on the pool's own thread.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use forkdisk_control::params;
use forkdisk_uring::{ublk_forget, ublk_is_left, ublk_missing, ublk_resize};

use super::{Attachment, Means, Owner, Target, claim, claim_as_it_is, number, wait_until};
use crate::global::Global;
use crate::session::daemon;

/// Directory with a file for each device, named by its number, of three lines: process, pool,
/// volume or snapshot. The daemon that serves the device writes it.
pub const RECORDS: &str = "/run/forkdisk/ublk";

pub fn attach(owner: &mut Owner, target: &Target<'_>) -> Result<PathBuf> {
    if ublk_missing().is_some() {
        let mut probe = Command::new("modprobe");
        let _ = probe.arg("ublk_drv").stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
    if let Some(why) = ublk_missing() {
        bail!(why);
    }
    let Owner::Daemon(client, _) = owner else { bail!("the pool is mounted and not served") };
    let attach = params::Attach { object: target.object.to_string(), read_only: target.read_only };
    let device = PathBuf::from(client.call(attach, None, |_| {})?.device);
    ensure!(wait_until(|| device.exists()), "{} does not appear", device.display());
    Ok(device)
}

pub fn grow(device: &Path, size: u64) -> Result<()> {
    let resized = ublk_resize(number_of(device)?, size);
    let is_too_old = |error: &std::io::Error| error.kind() == std::io::ErrorKind::Unsupported;
    ensure!(!resized.as_ref().is_err_and(is_too_old), "this kernel's ublk driver cannot change it (Linux 6.16 can)");
    resized.context("the ublk driver")
}

pub fn detach(global: &Global, attachment: &Attachment) -> Result<()> {
    let device = &attachment.device;
    if is_left_behind(device) {
        // Requests are queued until there is a daemon, so nothing can be written here.
        let (pool, object) = (attachment.pool.display(), &attachment.object);
        let claimed = claim_as_it_is(device);
        drop(claimed.with_context(|| format!("it has no daemon; `forkdisk attach {pool}/{object}` serves it again"))?);
        ublk_forget(number_of(device)?).context("the ublk driver")?;
        let _ = fs::remove_file(Path::new(RECORDS).join(number_of(device)?.to_string()));
        ensure!(wait_until(|| !device.exists()), "{} does not go", device.display());
        return Ok(());
    }
    // Fails while the device is in use; writes what is cached.
    drop(claim(device)?);
    let mut client = daemon(global, &attachment.pool)?
        .with_context(|| format!("{}: no daemon serves it any more", attachment.pool.display()))?;
    client.call(params::Detach { device: device.display().to_string() }, None, |_| {})?;
    ensure!(wait_until(|| !device.exists()), "{} does not go", device.display());
    Ok(())
}

/// Returns the attachment of device `name` if a forkdisk daemon serves it.
pub fn look(name: &str) -> Option<Attachment> {
    name.strip_prefix("ublkb")?;
    let (_, pool, object) = read_record(&Path::new(RECORDS).join(number(name).to_string()))?;
    Some(Attachment { device: Path::new("/dev").join(name), pool, object, by: Means::Ublk })
}

fn read_record(path: &Path) -> Option<(u32, PathBuf, String)> {
    let text = fs::read_to_string(path).ok()?;
    let mut lines = text.lines();
    Some((lines.next()?.parse().ok()?, PathBuf::from(lines.next()?), lines.next()?.to_string()))
}

fn number_of(device: &Path) -> Result<u32> {
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    u32::try_from(number(&name)).context("the number of the device")
}

/// A device without a daemon: its own was killed.
pub struct LeftBehind {
    pub number: u32,
    pub device: PathBuf,
    pub pool: PathBuf,
    pub object: String,
}

/// Returns the devices of `pool` without a daemon. Their requests are queued until the pool has one again.
pub fn left_behind(pool: &Path) -> Vec<LeftBehind> {
    all_left_behind().into_iter().filter(|left| left.pool == pool).collect()
}

/// Returns whether the daemon of a device was killed.
pub fn is_left_behind(device: &Path) -> bool {
    all_left_behind().iter().any(|left| left.device == device)
}

fn all_left_behind() -> Vec<LeftBehind> {
    let entries = fs::read_dir(RECORDS).into_iter().flatten().flatten();
    let left = entries.filter_map(|entry| {
        let (_, pool, object) = read_record(&entry.path())?;
        // A device that the kernel does not know any more has left its record behind.
        let is_left = |number: &u32| ublk_is_left(*number).unwrap_or(true);
        let number = entry.file_name().to_str()?.parse().ok().filter(is_left)?;
        Some(LeftBehind { number, device: PathBuf::from(format!("/dev/ublkb{number}")), pool, object })
    });
    left.collect()
}

/// Removes devices without a daemon and without a pool, and records of devices that do not exist.
pub fn clean_up() {
    for left in all_left_behind() {
        if left.device.exists() && left.pool.exists() {
            continue;
        }
        if let Err(error) = ublk_forget(left.number) {
            tracing::debug!(number = left.number, %error, "the kernel knows no such device any more");
        }
        let _ = fs::remove_file(Path::new(RECORDS).join(left.number.to_string()));
    }
}
