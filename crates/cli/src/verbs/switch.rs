//! `switch`: points an export, a socket or a device at another volume, under its clients.

use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use forkdisk_control::params;

use crate::address::same_pool;
use crate::attach;
use crate::global::Global;
use crate::session::{Access, call};
use crate::verbs::examples::examples;

/// Point an export, the socket of a volume, or a device at another volume, under its clients
///
/// Connections, virtual machines and the device stay: requests in flight end with the old volume, later ones go to the
/// new one, and nothing that was acknowledged is less durable than before. It lasts until it is switched back, or the
/// machine restarts. The pool must be served.
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk switch /srv/pool.img/current --to /srv/pool.img/build-42",
    "forkdisk switch /run/vm/vm1.sock --to /srv/pool.img/vm1-b",
    "forkdisk switch /dev/ublkb0 --to /srv/pool.img/kids/2",
])]
pub struct SwitchArgs {
    #[arg(value_name = "POOL/EXPORT|SOCKET|DEVICE")]
    door: String,

    #[arg(long, value_name = "POOL/VOLUME[@SNAPSHOT]")]
    to: String,
}

/// Switches.
pub fn run(args: SwitchArgs, global: &Global) -> Result<()> {
    let to = global.object(&args.to)?;
    let path = Path::new(&args.door);
    let device = attach::device_behind(path);
    let (is_device, is_socket) = (device.is_some() || is_block_device(path), is_socket(path));
    let door = match device {
        Some(device) => device.display().to_string(),
        None if is_device || is_socket => {
            std::path::absolute(path).with_context(|| args.door.clone())?.display().to_string()
        }
        None => {
            let export = global.object(&args.door)?;
            same_pool(&[export.clone(), to.clone()])?;
            export.name
        }
    };
    // No other process looks at devices and changes them meanwhile.
    let _alone = if is_device { Some(attach::alone()?) } else { None };
    let switched = call(global, &to.pool, Access::Write, params::Switch { door, to: to.name })?;
    if is_device {
        attach::refresh();
    }
    global.print_if_json(&switched)
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

fn is_block_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    // A pool may lie on one.
    path.starts_with("/dev") && std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}
