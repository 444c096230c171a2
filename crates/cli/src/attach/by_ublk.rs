//! Attaching by the kernel's ublk driver, served by the daemon on the pool's own thread.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use forkdisk_control::params;
use forkdisk_uring::{ublk_forget, ublk_missing, ublk_resize};

use super::{Attachment, Means, Owner, Target, claim, number, wait_until};
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
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    let number = u32::try_from(number(&name)).context("the number of the device")?;
    let resized = ublk_resize(number, size);
    let is_too_old = |error: &std::io::Error| error.kind() == std::io::ErrorKind::Unsupported;
    ensure!(!resized.as_ref().is_err_and(is_too_old), "this kernel's ublk driver cannot change it (Linux 6.16 can)");
    resized.context("the ublk driver")
}

pub fn detach(global: &Global, attachment: &Attachment) -> Result<()> {
    let device = &attachment.device;
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

/// Removes devices of dead daemons from the kernel, and their records.
pub fn clean_up() {
    for entry in fs::read_dir(RECORDS).into_iter().flatten().flatten() {
        let path = entry.path();
        let Some((pid, _, _)) = read_record(&path) else { continue };
        let is_ours = fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("forkdisk"));
        let Some(number) = path.file_name().and_then(|name| name.to_str()?.parse().ok()).filter(|_| !is_ours) else {
            continue;
        };
        if let Err(error) = ublk_forget(number) {
            tracing::debug!(number, %error, "the kernel knows no such device any more");
        }
        let _ = fs::remove_file(path);
    }
}
