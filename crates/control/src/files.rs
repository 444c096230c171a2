//! Callers' files: images that are read, targets that are written. Every function here may block and runs
//! on a thread of its own; a thread whose caller has gone ends at its next step.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::time::Duration;

use forkdisk::{MAX_VOLUME_SIZE, PAGE_SIZE};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Advice, FlockOperation, fadvise, fcntl_lock};
use rustix::io::Errno;

use crate::bridge::{Gone, Receiver, Sender};
use crate::failure::{Failure, FailureKind};
use crate::sparse::{DataRuns, nonzero_pages};

/// Bytes moved at a time.
pub const STEP: usize = 1 << 20;
/// How long a thread waits for a pipe before it looks whether its caller is still there.
const PATIENCE: Duration = Duration::from_millis(200);
/// What a pipe that can be written to takes without blocking.
const PIPE_BUF: usize = 4096;

/// What an image consists of, in rising order.
pub enum Part {
    /// Its length, if it is known beforehand. Comes first.
    Length(u64),
    /// Bytes at an offset; never all zero.
    Data { offset: u64, bytes: Vec<u8> },
    /// Everything before this offset has come.
    Reached(u64),
    /// The end of the image.
    End(u64),
}

/// Reads `image` and sends its parts; the last one is its end or why it could not be read.
pub fn read_image(image: File, parts: &Sender<Result<Part, Failure>>) {
    let outcome = read_all(image, parts);
    if let Err(Some(failure)) = outcome {
        // Nobody to tell when the caller has gone.
        let _ = parts.send_blocking(Err(failure));
    }
}

/// What went wrong; nothing when it is only that nobody wants more.
type Stopped = Option<Failure>;

fn send(parts: &Sender<Result<Part, Failure>>, part: Part) -> Result<(), Stopped> {
    parts.send_blocking(Ok(part)).map_err(|Gone| None)
}

fn read_all(mut image: File, parts: &Sender<Result<Part, Failure>>) -> Result<(), Stopped> {
    let kind = image.metadata().map_err(|e| Failure::file("the image cannot be looked at", e))?;
    if kind.is_dir() {
        return Err(Some(Failure::new(FailureKind::Invalid, "the image is a directory: name a raw image")));
    }
    match image.seek(SeekFrom::End(0)) {
        Ok(len) => {
            if len > MAX_VOLUME_SIZE {
                return Err(Some(too_long(len)));
            }
            // Only advice: reading works without it.
            let _ = fadvise(&image, 0, None, Advice::Sequential);
            send(parts, Part::Length(len))?;
            read_file(&image, len, parts)
        }
        Err(_) => read_stream(image, parts),
    }
}

fn too_long(len: u64) -> Failure {
    let text = format!("the image is {len} bytes long or more: a volume has at most {MAX_VOLUME_SIZE}");
    Failure::new(FailureKind::Invalid, text)
}

fn read_file(image: &File, len: u64, parts: &Sender<Result<Part, Failure>>) -> Result<(), Stopped> {
    let mut done = 0;
    for run in DataRuns::new(image, len) {
        let run = run.map_err(|e| Failure::file("looking for data in the image", e))?;
        let run = page_aligned(run, done);
        let mut at = run.start;
        while at < run.end {
            let n = (run.end - at).min(STEP as u64) as usize;
            let mut bytes = vec![0; n];
            let read = image.read_exact_at(&mut bytes, at);
            read.map_err(|e| Failure::file(format!("the image cannot be read at byte {at}"), e))?;
            send_data(parts, at, bytes)?;
            at += n as u64;
            done = at;
        }
    }
    send(parts, Part::End(len))
}

/// Lets a run begin at a page, but not before what is done already.
fn page_aligned(run: Range<u64>, done: u64) -> Range<u64> {
    let start = run.start - run.start % PAGE_SIZE as u64;
    start.max(done)..run.end
}

fn read_stream(mut image: File, parts: &Sender<Result<Part, Failure>>) -> Result<(), Stopped> {
    let mut at = 0;
    loop {
        let mut bytes = vec![0; STEP];
        let n = fill(&mut image, &mut bytes, || parts.send_blocking(Ok(Part::Reached(at))).is_ok())?;
        bytes.truncate(n);
        if at + n as u64 > MAX_VOLUME_SIZE {
            return Err(Some(too_long(at + n as u64)));
        }
        send_data(parts, at, bytes)?;
        at += n as u64;
        if n < STEP {
            return send(parts, Part::End(at));
        }
    }
}

/// Reads until `buf` is full or the stream ends; asks `is_wanted` whenever nothing comes for a while.
fn fill(stream: &mut File, buf: &mut [u8], is_wanted: impl Fn() -> bool) -> Result<usize, Stopped> {
    let failed = |e: io::Error| Some(Failure::file("the image cannot be read", e));
    let mut filled = 0;
    while filled < buf.len() {
        if !is_ready(stream, PollFlags::IN).map_err(failed)? {
            if !is_wanted() {
                return Err(None);
            }
            continue;
        }
        match stream.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(filled)
}

/// Whether a read or write would not block, after waiting for that a little. What cannot be asked is ready.
fn is_ready(file: &File, wanted: PollFlags) -> io::Result<bool> {
    let time = rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(PATIENCE.subsec_nanos()) };
    match poll(&mut [PollFd::new(file, wanted)], Some(&time)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn send_data(parts: &Sender<Result<Part, Failure>>, offset: u64, bytes: Vec<u8>) -> Result<(), Stopped> {
    let end = offset + bytes.len() as u64;
    let runs = nonzero_pages(&bytes);
    if runs.len() == 1 && runs[0].len() == bytes.len() {
        return send(parts, Part::Data { offset, bytes });
    }
    for run in runs {
        send(parts, Part::Data { offset: offset + run.start as u64, bytes: bytes[run].to_vec() })?;
    }
    send(parts, Part::Reached(end))
}

/// A file that an image is written to.
pub enum Target {
    /// A file that reads as zeroes where nothing is written.
    Sparse(File),
    /// Whatever takes every byte in its turn: a pipe, a block device.
    Dense { file: File, at: u64, is_device: bool },
}

impl Target {
    /// Prepares `file`, which messages call `shown`, for an image of `size` bytes.
    pub fn open(file: File, shown: &str, size: u64, force: bool) -> Result<Target, Failure> {
        let found = file.metadata().map_err(|e| Failure::file(format!("{shown}: cannot be looked at"), e))?;
        if found.file_type().is_block_device() {
            return Target::open_device(file, shown, size, force);
        }
        if !found.is_file() {
            return Ok(Target::Dense { file, at: 0, is_device: false });
        }
        if !force && found.len() > 0 {
            let text = format!("{shown} exists and is not empty: name another file, or --force overwrites it");
            return Err(Failure::new(FailureKind::Exists, text));
        }
        refuse_in_use(&file, shown)?;
        let made = file.set_len(0).and_then(|()| file.set_len(size));
        made.map_err(|e| Failure::file(format!("{shown}: cannot be made {size} bytes long"), e))?;
        Ok(Target::Sparse(file))
    }

    fn open_device(mut file: File, shown: &str, size: u64, force: bool) -> Result<Target, Failure> {
        if !force {
            let text = format!("{shown} is a block device: --force overwrites it");
            return Err(Failure::new(FailureKind::Exists, text));
        }
        refuse_in_use(&file, shown)?;
        let failed = |e: io::Error| Failure::file(format!("{shown}: cannot be written"), e);
        let room = file.seek(SeekFrom::End(0)).map_err(failed)?;
        if room < size {
            let text = format!("{shown} has {room} bytes, too few for {size}");
            return Err(Failure::new(FailureKind::NoSpace, text));
        }
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        Ok(Target::Dense { file, at: 0, is_device: true })
    }

    fn write(&mut self, offset: u64, bytes: &[u8], wanted: &dyn Fn() -> bool) -> io::Result<()> {
        match self {
            Target::Sparse(file) => {
                let mut runs = nonzero_pages(bytes).into_iter();
                runs.try_for_each(|run| file.write_all_at(&bytes[run.clone()], offset + run.start as u64))
            }
            Target::Dense { file, at, is_device } => {
                const ZEROES: &[u8] = &[0; 64 << 10];
                let piece = if *is_device { STEP } else { PIPE_BUF };
                while *at < offset {
                    let n = (offset - *at).min(ZEROES.len() as u64) as usize;
                    write_pieces(file, &ZEROES[..n], piece, wanted)?;
                    *at += n as u64;
                }
                *at += bytes.len() as u64;
                write_pieces(file, bytes, piece, wanted)
            }
        }
    }

    fn finish(&mut self, size: u64, wanted: &dyn Fn() -> bool) -> io::Result<()> {
        self.write(size, &[], wanted)?;
        match self {
            Target::Sparse(file) | Target::Dense { file, is_device: true, .. } => file.sync_all(),
            Target::Dense { .. } => Ok(()),
        }
    }
}

fn write_pieces(file: &mut File, bytes: &[u8], piece: usize, wanted: &dyn Fn() -> bool) -> io::Result<()> {
    let mut left = bytes;
    while !left.is_empty() {
        if !is_ready(file, PollFlags::OUT)? {
            if !wanted() {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "nobody waits for it any more"));
            }
            continue;
        }
        match file.write(&left[..left.len().min(piece)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => left = &left[n..],
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Refuses what is locked: the pool that is exported from, or any other in use.
fn refuse_in_use(target: &File, shown: &str) -> Result<(), Failure> {
    match fcntl_lock(target, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::ACCESS | Errno::AGAIN) => {
            let text = format!("{shown} is in use, by this pool or another: name another target");
            Err(Failure::new(FailureKind::Busy, text))
        }
        // A file system without locks has no pool in use either.
        _ => Ok(()),
    }
}

/// What is written: bytes at an offset, in rising order.
pub type Chunk = (u64, Vec<u8>);

/// Prepares `file` and writes what comes, up to `size`, while `wanted` says that somebody waits for it.
/// The end of the chunks before `complete` was said is a caller who gave up.
pub fn write_image(
    file: File,
    shown: &str,
    size: u64,
    force: bool,
    chunks: &Receiver<Option<Chunk>>,
    wanted: &dyn Fn() -> bool,
) -> Result<(), Failure> {
    let mut target = Target::open(file, shown, size, force)?;
    let failed = |e| Failure::file("writing the image", e);
    loop {
        match chunks.receive_blocking() {
            Some(Some((offset, bytes))) => target.write(offset, &bytes, wanted).map_err(failed)?,
            Some(None) => return target.finish(size, wanted).map_err(failed),
            None => return Err(Failure::new(FailureKind::Cancelled, "the export was given up")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_until_the_buffer_is_full_in_spite_of_pauses() {
        let (reader, mut writer) = io::pipe().unwrap();
        let dribble = std::thread::spawn(move || {
            for _ in 0..25 {
                writer.write_all(&[7]).unwrap();
                std::thread::yield_now();
            }
        });
        let mut stream = File::from(std::os::fd::OwnedFd::from(reader));
        let mut buf = [0; 10];
        let mut fill = |buf: &mut [u8]| super::fill(&mut stream, buf, || true).unwrap();
        assert_eq!([fill(&mut buf), fill(&mut buf), fill(&mut buf), fill(&mut buf)], [10, 10, 5, 0]);
        dribble.join().unwrap();
    }

    #[test]
    fn a_stream_that_nobody_wants_is_given_up_though_it_never_ends() {
        let (reader, _writer) = io::pipe().unwrap();
        let mut stream = File::from(std::os::fd::OwnedFd::from(reader));
        assert!(matches!(fill(&mut stream, &mut [0; 10], || false), Err(None)));
    }

    #[test]
    fn runs_begin_at_pages_and_never_overlap() {
        assert_eq!(page_aligned(5000..9000, 0), 4096..9000);
        assert_eq!(page_aligned(5000..9000, 4500), 4500..9000);
        assert_eq!(page_aligned(8192..9000, 4096), 8192..9000);
    }

    #[test]
    fn a_pipe_gets_zeroes_for_what_is_not_there() {
        let (mut reader, writer) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let mut target = Target::Dense { file, at: 0, is_device: false };
        target.write(3, b"ab", &|| true).unwrap();
        target.write(5, b"c", &|| true).unwrap();
        target.finish(8, &|| true).unwrap();
        drop(target);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"\0\0\0abc\0\0");
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_given_up_when_nobody_waits() {
        let (_reader, writer) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let mut target = Target::Dense { file, at: 0, is_device: false };
        assert!(target.write(0, &vec![1; 4 << 20], &|| false).is_err());
    }
}
