//! `resize`: changes the length of a volume.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use forkdisk_control::{VolumeRecord, params};

use crate::attach::{self, Attachment};
use crate::global::Global;
use crate::session::{Access, call};
use crate::size;
use crate::verbs::examples::examples;

/// Change the size of a volume
///
/// Clients of a served volume can use its new size at once; most query it only when they connect
/// again. A block device attached to the volume grows with it.
#[derive(Args)]
#[command(after_help = examples!["forkdisk resize /srv/pool.img/vm1 --size 40G"])]
pub struct ResizeArgs {
    #[arg(value_name = "POOL/VOLUME")]
    volume: String,

    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: u64,

    #[arg(long)]
    allow_shrink: bool,

    #[arg(long)]
    force: bool,
}

/// Resizes; shrinks only with `--allow-shrink`.
pub fn run(args: ResizeArgs, global: &Global) -> Result<()> {
    let address = global.volume(&args.volume)?;
    let ResizeArgs { size, allow_shrink, force, .. } = args;
    let method = params::Resize { volume: address.name, size, allow_shrink, force };
    let resized = call(global, &address.pool, Access::Write, method)?;
    if let Some(why) = &resized.waits {
        tracing::warn!("{why}");
    }
    grow_devices(&address.pool, &resized);
    global.print_if_json(&resized)
}

/// Sets attached devices to the length of their volume. A failure is logged and leaves the volume as it is.
fn grow_devices(pool: &Path, volume: &VolumeRecord) {
    let Ok(pool) = pool.canonicalize() else { return };
    let is_it = |a: &Attachment| a.pool == pool && a.object == volume.name;
    for attachment in attach::list().into_iter().filter(is_it).filter(|a| !attach::is_left_behind(a)) {
        if let Err(error) = attach::grow(&attachment, volume.size) {
            tracing::warn!(
                "{device} keeps its length: {error:#}. It has the new one once it is unmounted and attached anew \
                 (`forkdisk detach {device}`, `forkdisk attach`); `forkdisk resize` as root with the same size tries \
                 again",
                device = attachment.device.display()
            );
        }
    }
}
