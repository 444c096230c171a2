//! `import`: makes a volume out of a raw image.
//!
//! Data goes to a volume under a provisional name, which gets its real one when everything is
//! durable: a volume with the wanted name is always whole.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::{Buf, MAX_VOLUME_SIZE, PAGE_SIZE, Volume, VolumeInfo};
use forkdisk_uring::UringDevice;
use rustix::fs::{Advice, fadvise};

use crate::address::Address;
use crate::cli::Global;
use crate::output::print_json;
use crate::progress::Progress;
use crate::record::VolumeRecord;
use crate::session::{Access, Session, settle, with_pool};
use crate::sparse::{DataRuns, nonzero_pages};
use crate::verbs::create::ChunkArg;
use crate::window::Window;

/// Bytes read at a time.
const STEP: usize = 1 << 20;
/// Writes in flight.
const DEPTH: usize = 8;
/// First size of a volume whose length is not known yet; it doubles when it is full.
const FIRST_SIZE: u64 = 64 << 20;

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

enum Source {
    /// Length known, readable anywhere.
    File { file: File, len: u64 },
    /// Read to its end, once.
    Stream(Box<dyn Read>),
}

/// Imports; on failure nothing of it stays behind.
pub fn run(args: ImportArgs, global: &Global) -> Result<()> {
    let address = global.volume(&args.address)?;
    let source = open_source(&args.source)?;
    let pool = address.pool.clone();
    let info = with_pool(&pool, Access::Write, |session| import(session, source, address, args.chunk))?;
    if global.output.json() { print_json(&VolumeRecord::from(&info)) } else { Ok(()) }
}

fn open_source(path: &Path) -> Result<Source> {
    if path == Path::new("-") {
        return Ok(Source::Stream(Box::new(io::stdin().lock())));
    }
    let shown = path.display();
    let mut file = File::open(path).with_context(|| format!("{shown}: cannot be read"))?;
    if file.metadata()?.is_dir() {
        bail!("{shown} is a directory: name a raw image");
    }
    match file.seek(SeekFrom::End(0)) {
        Ok(len) => {
            // Only advice: reading works without it.
            let _ = fadvise(&file, 0, None, Advice::Sequential);
            Ok(Source::File { file, len })
        }
        Err(_) => Ok(Source::Stream(Box::new(file))),
    }
}

async fn import(session: Session, source: Source, address: Address, chunk: ChunkArg) -> Result<VolumeInfo> {
    check_free(&session.pool.list(), &address)?;
    let size = match &source {
        Source::File { len, .. } => *len,
        Source::Stream(_) => FIRST_SIZE,
    };
    if size > MAX_VOLUME_SIZE {
        bail!("the image is {size} bytes long: a volume has at most {MAX_VOLUME_SIZE}");
    }
    clear_away(&session).await?;
    let partial = format!("import-{}.partial", std::process::id());
    session.pool.create(&partial, &chunk.options(size)).await.context("making the volume")?;
    let filled = fill(&session, &partial, source).await;
    let named = match filled {
        Ok(()) => session.pool.rename(&partial, &address.name).await.map_err(anyhow::Error::from),
        Err(error) => Err(error),
    };
    if let Err(error) = named {
        return Err(undo(&session, &partial, error).await);
    }
    Ok(session.pool.find(&address.name)?)
}

/// Deletes what imports that were killed have left: the pool is ours alone, so no other runs.
async fn clear_away(session: &Session) -> Result<()> {
    let all = session.pool.list();
    let has_snapshots = |name: &str| all.iter().any(|info| info.name.split_once('@').is_some_and(|(of, _)| of == name));
    let left: Vec<&str> = all.iter().map(|info| info.name.as_str()).filter(|name| is_partial(name)).collect();
    let left: Vec<&str> = left.into_iter().filter(|name| !has_snapshots(name)).collect();
    if left.is_empty() {
        return Ok(());
    }
    tracing::warn!("deleting {}: left by an import that was killed", left.join(", "));
    Ok(session.pool.delete(&left).await?)
}

/// Whether a volume has a provisional name.
fn is_partial(name: &str) -> bool {
    let pid = name.strip_prefix("import-").and_then(|rest| rest.strip_suffix(".partial"));
    pid.is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Refuses a name that is taken, before the long work rather than after it.
fn check_free(all: &[VolumeInfo], address: &Address) -> Result<()> {
    let wanted = address.name.as_str();
    let below = |outer: &str, inner: &str| inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'));
    for info in all {
        let name = info.name.split('@').next().unwrap_or_default();
        if name == wanted {
            bail!("{} exists already: choose another name, or delete it first", address.show());
        }
        if below(wanted, name) || below(name, wanted) {
            bail!("{}: {name} exists, and a name is never both a volume and a folder", address.show());
        }
    }
    Ok(())
}

async fn undo(session: &Session, partial: &str, error: anyhow::Error) -> anyhow::Error {
    let removed = match session.pool.delete(&[partial]).await {
        Ok(()) => settle(session).await,
        Err(e) => Err(e.into()),
    };
    match removed {
        Ok(()) => error,
        Err(e) => error.context(format!("{partial} holds what was imported so far and could not be removed ({e})")),
    }
}

async fn fill(session: &Session, name: &str, source: Source) -> Result<()> {
    let mut writer = Writer::new(session, session.pool.volume(name)?);
    let copied = match source {
        Source::File { file, len } => copy_file(session, &mut writer, &file, len).await,
        Source::Stream(stream) => copy_stream(session, &mut writer, name, stream).await,
    };
    let ended = writer.end().await;
    copied?;
    ended
}

async fn copy_file(session: &Session, writer: &mut Writer, file: &File, len: u64) -> Result<()> {
    let progress = Progress::bytes("importing", len);
    let mut done = 0;
    for run in DataRuns::new(file, len) {
        let run = page_aligned(run.context("looking for data in the image")?, done);
        let mut at = run.start;
        while at < run.end {
            let n = (run.end - at).min(STEP as u64) as usize;
            let mut buf = session.pool.buffer(n);
            file.read_exact_at(&mut buf, at).with_context(|| format!("the image cannot be read at byte {at}"))?;
            writer.write(at, buf).await?;
            at += n as u64;
            progress.add(at - done);
            done = at;
        }
    }
    progress.add(len - done);
    Ok(())
}

/// Lets a run begin at a page, but not before what is done already.
fn page_aligned(run: Range<u64>, done: u64) -> Range<u64> {
    let start = run.start - run.start % PAGE_SIZE as u64;
    start.max(done)..run.end
}

async fn copy_stream(session: &Session, writer: &mut Writer, name: &str, mut stream: Box<dyn Read>) -> Result<()> {
    let progress = Progress::stream("importing");
    let mut at = 0;
    loop {
        let mut buf = session.pool.buffer(STEP);
        let n = read_full(&mut stream, &mut buf).context("the image cannot be read")?;
        let end = at + n as u64;
        let size = writer.volume.size();
        if end > size {
            let larger = (size * 2).min(MAX_VOLUME_SIZE);
            if end > larger {
                bail!("the image is too long: a volume has at most {MAX_VOLUME_SIZE} bytes");
            }
            session.pool.resize(name, larger).await?;
        }
        if n > 0 {
            buf.set_len(n);
            writer.write(at, buf).await?;
        }
        progress.add(n as u64);
        at = end;
        if n < STEP {
            break;
        }
    }
    writer.drain().await?;
    session.pool.resize(name, at).await?;
    Ok(())
}

fn read_full(stream: &mut dyn Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match stream.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

/// Writes to a volume, several in flight, pages of zeroes left out.
struct Writer {
    session: Session,
    volume: Volume<UringDevice>,
    window: Window<forkdisk::Result<()>>,
}

impl Writer {
    fn new(session: &Session, volume: Volume<UringDevice>) -> Writer {
        let window = Window::new(session.runtime.clone(), DEPTH);
        Writer { session: session.clone(), volume, window }
    }

    /// Starts writing `buf` at `offset`, a multiple of the page; fails if an earlier write failed.
    async fn write(&mut self, offset: u64, buf: Buf) -> Result<()> {
        let runs = nonzero_pages(&buf);
        if runs.len() == 1 && runs[0].len() == buf.len() {
            return self.start(offset, buf).await;
        }
        for run in runs {
            let mut part = self.session.pool.buffer(run.len());
            part.copy_from_slice(&buf[run.clone()]);
            self.start(offset + run.start as u64, part).await?;
        }
        Ok(())
    }

    async fn start(&mut self, offset: u64, buf: Buf) -> Result<()> {
        let volume = self.volume.clone();
        let earlier = self.window.push(async move { volume.write(offset, buf, false).await.0 }).await;
        Ok(earlier.unwrap_or(Ok(()))?)
    }

    /// Waits for all writes; the first failure is the one reported.
    async fn drain(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some(ended) = self.window.pop().await {
            outcome = outcome.and(ended);
        }
        Ok(outcome?)
    }

    /// Waits for all writes and makes them durable.
    async fn end(mut self) -> Result<()> {
        self.drain().await?;
        Ok(self.volume.flush().await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_until_the_buffer_is_full() {
        struct Dribble(usize);
        impl Read for Dribble {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                let n = buf.len().min(3).min(self.0);
                self.0 -= n;
                buf[..n].fill(7);
                Ok(n)
            }
        }
        let mut buf = [0; 10];
        assert_eq!(read_full(&mut Dribble(25), &mut buf).unwrap(), 10);
        assert_eq!(read_full(&mut Dribble(4), &mut buf).unwrap(), 4);
        assert_eq!(read_full(&mut Dribble(0), &mut buf).unwrap(), 0);
    }

    #[test]
    fn only_provisional_names_are_cleared_away() {
        assert!(is_partial("import-123.partial"));
        for name in ["import-.partial", "import-1x.partial", "import-1", "a/import-1.partial", "import-1.partial@x"] {
            assert!(!is_partial(name), "{name}");
        }
    }

    #[test]
    fn runs_begin_at_pages_and_never_overlap() {
        assert_eq!(page_aligned(5000..9000, 0), 4096..9000);
        assert_eq!(page_aligned(5000..9000, 4500), 4500..9000);
        assert_eq!(page_aligned(8192..9000, 4096), 8192..9000);
    }
}
