//! `import`: creates a volume from an image.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use clap::builder::PossibleValuesParser;
use forkdisk_control::image::format::{FORMATS, Format, Kind, named};
use forkdisk_control::{image, params};

use crate::global::Global;
use crate::qemu;
use crate::session::{Access, with_pool};
use crate::size;
use crate::verbs::create::ChunkArg;
use crate::verbs::examples::examples;
use crate::verbs::lifetime::{NewVolumeArgs, created_by};

/// Create a volume from an image
///
/// The format is recognised by the first bytes. A raw image is taken as it is, a compressed one (gzip,
/// xz, zstd, bzip2) is decompressed. Disks of virtual machines (qcow2 with its backing files, vmdk,
/// vhdx, vdi, vhd) are read through qemu-nbd, if it is installed. Holes and zeroes take no space.
///
/// The volume appears when it is complete: an import that fails or is killed leaves none.
#[derive(Args)]
#[command(after_help = examples!["forkdisk import debian.qcow2 /srv/pool.img/base"])]
pub struct ImportArgs {
    /// The image, a file or block device; - reads standard input
    #[arg(value_name = "FILE|-")]
    image: PathBuf,

    #[arg(value_name = "POOL/VOLUME")]
    volume: String,

    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(FORMATS.iter().map(|f| f.name)))]
    format: Option<String>,

    #[arg(long, value_parser = size::parse, value_name = "SIZE")]
    size: Option<u64>,

    #[arg(long)]
    force: bool,

    #[command(flatten)]
    chunk: ChunkArg,

    #[command(flatten)]
    new: NewVolumeArgs,
}

/// Imports; a failure leaves nothing behind.
pub fn run(args: ImportArgs, global: &Global) -> Result<()> {
    let address = global.volume(&args.volume)?;
    let is_stdin = args.image == Path::new("-");
    let shown = if is_stdin { "standard input".to_string() } else { args.image.display().to_string() };
    let (expires, labels, [diverge, reserve]) = args.new.given();
    let mut method = params::Import {
        volume: address.name,
        chunk: args.chunk.chunk,
        format: args.format.clone(),
        size: args.size,
        source: Some(shown.clone()),
        force: args.force,
        diverge,
        reserve,
        expires,
        labels,
        created_by: created_by(),
    };
    let import = |method, fd| {
        with_pool(global, &address.pool, Access::Write, async |caller| Ok(caller.call(method, Some(fd)).await?))
    };
    if is_stdin {
        let stdin = io::stdin().as_fd().try_clone_to_owned().context("standard input cannot be used")?;
        return global.print_if_json(&import(method, stdin)?);
    }
    let file = File::open(&args.image).with_context(|| format!("{shown}: cannot be read"))?;
    let kind = file.metadata().with_context(|| format!("{shown}: cannot be looked at"))?.file_type();
    let is_disk = kind.is_file() || kind.is_block_device();
    if is_disk {
        // A daemon checks this too, but its message would name "this process".
        image::lock(&file, &shown, args.force)?;
    }
    let format = match args.format.as_deref().and_then(named) {
        None if is_disk => image::format_of(&file).with_context(|| format!("{shown}: cannot be read"))?,
        given => given,
    };
    let Some(Format { name, kind: Kind::Disk { driver }, .. }) = format else {
        return global.print_if_json(&import(method, OwnedFd::from(file))?);
    };
    let reader = qemu::Reader::start(&args.image, &file, name, driver, args.force)?;
    method.format = Some(image::NBD.to_string());
    let socket = reader.socket()?;
    let imported = import(method, socket);
    let said = reader.end();
    global.print_if_json(&imported.map_err(|error| qemu::explain(error, &shown, name, said))?)
}
