//! `export`: writes a volume or snapshot as a raw image.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use forkdisk_control::params;

use crate::cli::Global;
use crate::session::{Access, with_pool};

/// Write a volume or snapshot as a raw image, with holes where it has none
///
/// A volume that clients write meanwhile shows some of what they write: export a snapshot for one instant.
#[derive(Args)]
pub struct ExportArgs {
    /// What to export
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    address: String,

    /// The image, a file or block device; - writes to standard output
    #[arg(value_name = "FILE|-")]
    target: PathBuf,

    /// Overwrite a file that is not empty, or a block device
    #[arg(long)]
    force: bool,
}

/// Exports; a file that did not exist before is removed again when that fails.
pub fn run(args: ExportArgs, global: &Global) -> Result<()> {
    let address = global.object(&args.address)?;
    let target = args.target.as_path();
    let is_new = target != Path::new("-") && !target.exists();
    let exported = with_pool(global, &address.pool, Access::Read, async |caller| {
        // What does not exist is not worth a file.
        caller.call(params::List { objects: vec![address.name.clone()] }, None).await?;
        let file = open_target(target)?;
        let shown = target.display().to_string();
        let method = params::Export { object: address.name.clone(), target: Some(shown), force: args.force };
        Ok(caller.call(method, Some(file)).await?)
    });
    if exported.is_err() && is_new {
        // Half an image is worth less than none; the first error is the one to report.
        let _ = std::fs::remove_file(target);
    }
    exported.map(drop)
}

fn open_target(path: &Path) -> Result<OwnedFd> {
    if path == Path::new("-") {
        return io::stdout().as_fd().try_clone_to_owned().context("standard output cannot be used");
    }
    let is_plain = std::fs::metadata(path).map_or(true, |found| found.is_file());
    let file = OpenOptions::new().write(true).create(is_plain).truncate(false).open(path);
    Ok(file.with_context(|| format!("{}: cannot be written", path.display()))?.into())
}
