//! `protect`: snapshots of a device or file in place. `unprotect`: makes it an ordinary disk again.

use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use forkdisk_control::params;

use crate::address::{self, Address};
use crate::global::Global;
use crate::output::print_line;
use crate::session::{Access, call};
use crate::size;
use crate::verbs::examples::examples;

/// Protect a device or file in place: snapshots of it keep overwritten contents in the pool
///
/// Its data stays where it is. From now on it must be used through forkdisk, under its name.
#[derive(Args)]
#[command(after_help = examples!["forkdisk protect /srv/pool.img/data /dev/disk/by-id/nvme-1"])]
pub struct ProtectArgs {
    /// Name of the origin, in one word or in two (POOL VOLUME), and the device or file; no other
    /// process may have that open for writing
    #[arg(num_args = 2..=3, required = true, value_names = ["POOL/VOLUME", "DEVICE_OR_FILE"])]
    words: Vec<String>,

    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    chunk: Option<u64>,

    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    copy_ahead: Option<u64>,

    #[arg(long, value_name = "POLICY")]
    when_full: Option<String>,
}

/// Protects the device or file.
pub fn run(args: ProtectArgs, global: &Global) -> Result<()> {
    let (device, name) = args.words.split_last().context("a name and a device or file are needed")?;
    let address = volume(name, global)?;
    // Links are kept: after a boot /dev/sdX may be another disk, but /dev/disk/by-id/… is the same one.
    let path = std::fs::metadata(device)
        .and_then(|_| std::path::absolute(device))
        .with_context(|| format!("{device:?}: there is no device or file here that could be protected"))?;
    let path = path.into_os_string().into_string();
    let path = path.map_err(|path| anyhow::anyhow!("{}: the path is not UTF-8", path.display()))?;
    let (chunk, copy_ahead, when_full) = (args.chunk, args.copy_ahead, args.when_full);
    let method = params::Protect { volume: address.name, path, chunk, copy_ahead, when_full };
    global.print_if_json(&call(global, &address.pool, Access::Write, method)?)
}

/// Parses a volume's address: one word, or two words for pool and name.
fn volume(words: &[String], global: &Global) -> Result<Address> {
    match words {
        [pool, name] => {
            let pool = global.pool(Some(Path::new(pool)))?;
            address::parse_volume(name, Some(&pool))
        }
        words => global.volume(&words.concat()),
    }
}

/// Turn an origin into an ordinary disk: its data stays, its snapshots are deleted
#[derive(Args)]
#[command(after_help = examples!["forkdisk unprotect /srv/pool.img/data"])]
pub struct UnprotectArgs {
    /// The origin, in one word or in two (POOL VOLUME)
    #[arg(num_args = 1..=2, required = true, value_name = "POOL/VOLUME")]
    words: Vec<String>,

    #[arg(short, long)]
    recursive: bool,

    #[arg(short = 'n', long)]
    dry_run: bool,
}

/// Ends the protection.
pub fn run_unprotect(args: UnprotectArgs, global: &Global) -> Result<()> {
    let address = volume(&args.words, global)?;
    let method = params::Unprotect { volume: address.name, recursive: args.recursive, dry_run: args.dry_run };
    let gone = call(global, &address.pool, Access::Write, method)?;
    if let Some(why) = &gone.waits {
        tracing::warn!("{why}");
    }
    if args.dry_run && !global.output.json() {
        return gone.deleted.iter().try_for_each(|name| print_line(name));
    }
    global.print_if_json(&gone)
}
