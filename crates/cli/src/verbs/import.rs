//! `import`: makes a volume out of a raw image.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_control::params;

use crate::cli::Global;
use crate::output::print_if_json;
use crate::session::{Access, with_pool};
use crate::verbs::create::ChunkArg;

/// Make a volume out of a raw image
#[derive(Args)]
pub struct ImportArgs {
    /// The image, a file or block device; - reads standard input
    #[arg(value_name = "FILE|-")]
    source: PathBuf,

    /// The new volume
    #[arg(value_name = "POOL/VOLUME")]
    address: String,

    #[command(flatten)]
    chunk: ChunkArg,
}

/// Imports; on failure nothing of it stays behind.
pub fn run(args: ImportArgs, global: &Global) -> Result<()> {
    let address = global.volume(&args.address)?;
    let image = open_image(&args.source)?;
    let method = params::Import { volume: address.name, chunk: args.chunk.chunk };
    let made =
        with_pool(global, &address.pool, Access::Write, async |caller| Ok(caller.call(method, Some(image)).await?))?;
    print_if_json(global, &made)
}

fn open_image(path: &Path) -> Result<OwnedFd> {
    let shown = path.display();
    if path == Path::new("-") {
        return io::stdin().as_fd().try_clone_to_owned().context("standard input cannot be used");
    }
    let file = File::open(path).with_context(|| format!("{shown}: cannot be read"))?;
    if file.metadata()?.is_dir() {
        bail!("{shown} is a directory: name a raw image");
    }
    Ok(file.into())
}
