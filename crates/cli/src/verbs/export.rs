//! `export`: writes a volume or snapshot as a raw image.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::{Buf, Volume};
use forkdisk_uring::UringDevice;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;

use crate::cli::Global;
use crate::progress::Progress;
use crate::session::{Access, Session, with_pool};
use crate::sparse::nonzero_pages;
use crate::window::Window;

/// Bytes read at a time.
const STEP: u64 = 1 << 20;
/// Reads in flight.
const DEPTH: usize = 8;
/// Bytes of a volume whose extents are looked up at a time.
const LOOK_AHEAD: u64 = 1 << 30;

/// Write a volume or snapshot as a raw image, with holes where it has none
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
    let pool = address.pool.clone();
    with_pool(&pool, Access::Read, |session| async move {
        let volume = session.pool.volume(&address.name)?;
        let is_new = args.target != Path::new("-") && !args.target.exists();
        let exported = match Target::open(&args, volume.size()) {
            Ok(mut target) => copy(&session, &volume, &mut target).await,
            Err(error) => Err(error),
        };
        if exported.is_err() && is_new {
            // Half an image is worth less than none; the first error is the one to report.
            let _ = std::fs::remove_file(&args.target);
        }
        exported
    })
}

enum Target {
    /// A file that reads as zeroes where nothing is written.
    Sparse(File),
    /// Whatever takes every byte in its turn: a pipe, a block device.
    Dense { out: Box<dyn Write>, at: u64, device: Option<File> },
}

impl Target {
    fn open(args: &ExportArgs, size: u64) -> Result<Target> {
        let path = args.target.as_path();
        if path == Path::new("-") {
            return Ok(Target::Dense { out: Box::new(io::stdout().lock()), at: 0, device: None });
        }
        let shown = path.display();
        let kind = std::fs::metadata(path).ok();
        if kind.as_ref().is_some_and(|found| !found.is_file()) {
            return Target::open_device(args, size);
        }
        if !args.force && kind.is_some_and(|found| found.len() > 0) {
            bail!("{shown} exists and is not empty: name another file, or --force overwrites it");
        }
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.with_context(|| format!("{shown}: cannot be written"))?;
        refuse_in_use(&file, path)?;
        let made = file.set_len(0).and_then(|()| file.set_len(size));
        made.with_context(|| format!("{shown}: cannot be made {size} bytes long"))?;
        Ok(Target::Sparse(file))
    }

    fn open_device(args: &ExportArgs, size: u64) -> Result<Target> {
        let shown = args.target.display();
        let failed = || format!("{shown}: cannot be written");
        let mut file = OpenOptions::new().write(true).open(&args.target).with_context(failed)?;
        if !file.metadata()?.file_type().is_block_device() {
            return Ok(Target::Dense { out: Box::new(file), at: 0, device: None });
        }
        if !args.force {
            bail!("{shown} is a block device: --force overwrites it");
        }
        refuse_in_use(&file, &args.target)?;
        let room = file.seek(SeekFrom::End(0)).with_context(failed)?;
        if room < size {
            bail!("{shown} has {room} bytes, too few for {size}");
        }
        file.seek(SeekFrom::Start(0)).with_context(failed)?;
        let device = Some(file.try_clone()?);
        Ok(Target::Dense { out: Box::new(file), at: 0, device })
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            Target::Sparse(file) => {
                let mut runs = nonzero_pages(bytes).into_iter();
                runs.try_for_each(|run| file.write_all_at(&bytes[run.clone()], offset + run.start as u64))
            }
            Target::Dense { out, at, .. } => {
                io::copy(&mut io::Read::take(io::repeat(0), offset - *at), out)?;
                *at = offset + bytes.len() as u64;
                out.write_all(bytes)
            }
        }
    }

    fn finish(&mut self, size: u64) -> io::Result<()> {
        self.write(size, &[])?;
        match self {
            Target::Sparse(file) => file.sync_all(),
            Target::Dense { out, device, .. } => {
                out.flush()?;
                device.as_ref().map_or(Ok(()), File::sync_all)
            }
        }
    }
}

type ReadTask = (u64, forkdisk::Result<()>, Buf);

/// Refuses what is locked: the pool that is exported from, or any other in use.
fn refuse_in_use(target: &File, path: &Path) -> Result<()> {
    match fcntl_lock(target, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::ACCESS | Errno::AGAIN) => {
            bail!("{} is in use, by this command or another: name another target", path.display())
        }
        // A file system without locks has no pool in use either.
        _ => Ok(()),
    }
}

async fn copy(session: &Session, volume: &Volume<UringDevice>, target: &mut Target) -> Result<()> {
    let size = volume.size();
    let progress = Progress::bytes("exporting", size);
    let mut window: Window<ReadTask> = Window::new(session.runtime.clone(), DEPTH);
    let mut outcome = Ok(());
    let mut from = 0;
    while from < size && outcome.is_ok() {
        let len = LOOK_AHEAD.min(size - from);
        outcome = copy_part(session, volume, from, len, &mut window, target).await;
        progress.add(len);
        from += len;
    }
    while let Some(ended) = window.pop().await {
        outcome = outcome.and_then(|()| store(target, ended));
    }
    outcome?;
    target.finish(size).context("writing the image")
}

async fn copy_part(
    session: &Session,
    volume: &Volume<UringDevice>,
    from: u64,
    len: u64,
    window: &mut Window<ReadTask>,
    target: &mut Target,
) -> Result<()> {
    for extent in volume.extents(from, len).await?.iter().filter(|extent| extent.data) {
        let mut done = 0;
        while done < extent.len {
            let n = STEP.min(extent.len - done);
            let (offset, volume) = (extent.offset + done, volume.clone());
            let buf = session.pool.buffer(n as usize);
            let task = async move {
                let (result, buf) = volume.read(offset, buf).await;
                (offset, result, buf)
            };
            if let Some(ended) = window.push(task).await {
                store(target, ended)?;
            }
            done += n;
        }
    }
    Ok(())
}

fn store(target: &mut Target, (offset, result, buf): ReadTask) -> Result<()> {
    result?;
    target.write(offset, &buf).context("writing the image")
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Rc<RefCell<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.borrow_mut().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_pipe_gets_zeroes_for_what_is_not_there() {
        let sink = Sink::default();
        let mut target = Target::Dense { out: Box::new(sink.clone()), at: 0, device: None };
        target.write(3, b"ab").unwrap();
        target.write(5, b"c").unwrap();
        target.finish(8).unwrap();
        assert_eq!(*sink.0.borrow(), b"\0\0\0abc\0\0");
    }
}
