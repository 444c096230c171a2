//! `export`: writes a volume or snapshot as an image.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_control::params;
use forkdisk_uring::block_device_user;

use crate::global::Global;
use crate::new_file::NewFile;
use crate::progress::Progress;
use crate::qemu;
use crate::session::{Access, with_pool};
use crate::verbs::examples::examples;

/// Write a volume or snapshot as an image, with holes where it has no data
///
/// Writes during the export of a volume may or may not be in the image: export a snapshot for one instant.
///
/// A new file gets its name when it is complete; an export that fails or is killed leaves none. An
/// overwritten file (--force) is shorter than the volume until it is complete, and empty after a failure.
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk export /srv/pool.img/vm1@monday vm1.raw",
    "forkdisk export /srv/pool.img/vm1 - | zstd",
])]
pub struct ExportArgs {
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    object: String,

    /// The image, a file or block device; - writes to standard output
    #[arg(value_name = "FILE|-")]
    image: PathBuf,

    #[arg(long)]
    force: bool,

    /// Format of the image. All but raw are written by qemu-img, need as much space again
    /// meanwhile, and round the size up to 512 bytes
    #[arg(long, value_name = "FORMAT", default_value = "raw", value_parser = ["raw", "qcow2", "vhdx", "vdi"])]
    format: String,
}

/// Exports; a new file gets its name when it is complete.
pub fn run(args: ExportArgs, global: &Global) -> Result<()> {
    let address = global.object(&args.object)?;
    let target = args.image.as_path();
    if args.format != "raw" {
        return as_disk(&args, global);
    }
    let is_new = target != Path::new("-") && is_free(target);
    // Checked before a file is created for it.
    let exists = params::List { objects: vec![address.name.clone()], ..params::List::default() };
    with_pool(global, &address.pool, Access::Read, async |caller| {
        caller.call(exists, None).await?;
        let new = is_new.then(|| NewFile::beside(target)).transpose()?;
        let file = match &new {
            Some(new) => new.file.try_clone()?.into(),
            None => open_target(target)?,
        };
        let target = Some(shown(target));
        let method = params::Export { object: address.name.clone(), target, force: args.force };
        caller.call(method, Some(file)).await?;
        new.map_or(Ok(()), |new| new.keep(false))
    })
}

/// Exports in another format: writes an unnamed raw image, which `qemu-img` converts.
fn as_disk(args: &ExportArgs, global: &Global) -> Result<()> {
    let address = global.object(&args.object)?;
    let (target, format) = (args.image.as_path(), args.format.as_str());
    let Some(program) = qemu::find("qemu-img") else {
        bail!(
            "{format} is written by qemu-img, which is not installed: install it (Debian: qemu-utils), or export a raw \
             image and convert that elsewhere with `qemu-img convert -f raw -O {format}`"
        );
    };
    let found = std::fs::metadata(target);
    if target == Path::new("-") || found.as_ref().is_ok_and(|found| !found.is_file()) {
        bail!("{}: {format} is written to a file: name one", target.display());
    }
    if !args.force && found.is_ok_and(|found| found.len() > 0) {
        bail!("{} exists and is not empty: name another file, or --force overwrites it", target.display());
    }
    let raw = with_pool(global, &address.pool, Access::Read, async |caller| {
        caller.call(params::List { objects: vec![address.name.clone()], ..params::List::default() }, None).await?;
        let raw = NewFile::beside(target)?;
        let method = params::Export { object: address.name.clone(), target: Some(shown(target)), force: false };
        caller.call(method, Some(raw.file.try_clone()?.into())).await?;
        Ok(raw)
    })?;
    let new = NewFile::beside(target)?;
    {
        let _progress = Progress::spinner("converting");
        let words = ["convert", "-f", "raw", "-O", format];
        let files = [raw.path(), new.path()];
        qemu::run(&program, words.iter().map(Into::into).chain(files.map(Into::into)))?;
    }
    new.file.sync_all().with_context(|| shown(target))?;
    new.keep(!is_free(target))
}

fn shown(target: &Path) -> String {
    if target == Path::new("-") { "standard output".to_string() } else { target.display().to_string() }
}

/// Returns whether the name is unused, even by a dangling link.
fn is_free(target: &Path) -> bool {
    std::fs::symlink_metadata(target).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}

fn open_target(path: &Path) -> Result<OwnedFd> {
    if path == Path::new("-") {
        // A device is reopened exclusively.
        let own = Path::new("/proc/self/fd/1");
        return match is_block_device(own) {
            true => open_alone(own, path),
            false => io::stdout().as_fd().try_clone_to_owned().context("standard output cannot be used"),
        };
    }
    if is_block_device(path) {
        return open_alone(path, path);
    }
    let is_plain = std::fs::metadata(path).map_or(true, |found| found.is_file());
    let file = OpenOptions::new().write(true).create(is_plain).truncate(false).open(path);
    Ok(file.with_context(|| format!("{}: cannot be written", path.display()))?.into())
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

/// Opens the block device at `path`, called `target` in messages, exclusively: `--force` allows to
/// overwrite its contents, but not while it is in use.
fn open_alone(path: &Path, target: &Path) -> Result<OwnedFd> {
    let exclusive = rustix::fs::OFlags::EXCL.bits() as i32;
    match OpenOptions::new().write(true).custom_flags(exclusive).open(path) {
        Ok(file) => Ok(file.into()),
        // Opening a swap device fails like writing a running program.
        Err(e) if matches!(e.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::ExecutableFileBusy) => {
            let (target, user) = (shown(target), block_device_user(path));
            bail!("{target} is in use by {user}; --force does not overwrite what is in use")
        }
        Err(e) => Err(e).with_context(|| format!("{}: cannot be written", shown(target))),
    }
}
