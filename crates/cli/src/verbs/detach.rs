//! `detach`: removes a block device that `attach` created.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_control::params;
use forkdisk_fuse::{MountPoint, mounted_at};

use super::umount;
use crate::attach::{self, private_mount};
use crate::global::Global;
use crate::left_mount::is_dead;
use crate::session::daemon;
use crate::verbs::examples::examples;

/// Remove a block device that `attach` created, after everything is written
///
/// Refused while a file system is mounted from it.
#[derive(Args)]
#[command(after_help = examples!["forkdisk detach /dev/ublkb0"])]
pub struct DetachArgs {
    /// The device, or the volume or snapshot
    #[arg(value_name = "DEVICE|ADDRESS")]
    what: String,
}

/// Detaches, and ends the mount and daemon that were started for the device.
pub fn run(args: DetachArgs, global: &Global) -> Result<()> {
    let _alone = attach::alone()?;
    let what = Path::new(&args.what);
    // Resolved first, since links to devices that are gone are removed next.
    let device = attach::device_behind(what).unwrap_or_else(|| what.to_path_buf());
    attach::clean_up();
    attach::refresh();
    let attachments = attach::list();
    let found = match attachments.iter().find(|a| a.device == device) {
        Some(found) => found,
        None if device.parent() == Some(Path::new("/dev")) || attach::is_inside(what) => {
            bail!("{}: forkdisk attached nothing there", args.what)
        }
        None => {
            let address = global.object(&args.what)?;
            let pool = address.pool.canonicalize().with_context(|| address.pool.display().to_string())?;
            let found = attachments.iter().find(|a| a.pool == pool && a.object == address.name);
            found.with_context(|| format!("{} is not attached", address.show()))?
        }
    };
    attach::detach(global, found)?;
    attach::refresh();
    tidy_up(global, &found.pool)
}

/// Ends the mount and the daemon that were started for devices of the pool, if no device is left.
pub fn tidy_up(global: &Global, pool: &Path) -> Result<()> {
    if attach::list().iter().any(|a| a.pool == pool) {
        return Ok(());
    }
    let dir = private_mount(pool)?;
    if mounted_at(&dir).is_some_and(|mount: MountPoint| mount.is_pool()) {
        let ended = match is_dead(&dir) {
            true => forkdisk_fuse::unmount(&dir, true).map_err(anyhow::Error::from),
            false => umount::end(global, &dir),
        };
        // Removes the unused folder. Fails while it is still mounted.
        let _ = std::fs::remove_dir(&dir);
        ended?;
    }
    if let Some(mut client) = daemon(global, pool)? {
        let status = client.call(params::Status {}, None, |_| {})?;
        if status.until_detached && status.clients.is_empty() && status.mounts.is_empty() {
            super::stop::end(client, super::stop::Clients::Disconnect)?;
        }
    }
    Ok(())
}
