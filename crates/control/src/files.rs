//! Callers' files that an image is written to. Every function here may block and runs
//! on a separate thread; a thread whose caller has disconnected ends at its next step.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;

use forkdisk::ErrorKind;

use crate::bridge::Receiver;
use crate::failure::{Failure, FailureKind};
use crate::sparse::nonzero_pages;

/// Bytes moved at a time.
pub const STEP_BYTES: usize = 1 << 20;
/// How long a thread waits for a pipe before it checks whether its caller is still connected.
const PATIENCE: Duration = Duration::from_millis(200);
/// Bytes that a writable pipe takes without blocking.
const PIPE_BUF_BYTES: usize = 4096;

/// Waits up to [`PATIENCE`] and returns whether a read or write would not block. A file that cannot
/// be polled is ready.
pub fn is_ready(file: &File, wanted: PollFlags) -> io::Result<bool> {
    let time = rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(PATIENCE.subsec_nanos()) };
    match poll(&mut [PollFd::new(file, wanted)], Some(&time)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// The file that an image is written to.
pub enum Target {
    /// A regular file, where unwritten ranges read as zeroes. It is shorter than the image until
    /// the image is complete. `had`: it was not empty before.
    Sparse { file: File, had: bool },
    /// A pipe or block device: every byte is written in order, zeroes too.
    Dense { file: File, at: u64, is_device: bool },
}

impl Target {
    /// Prepares `file` for an image of `size` bytes; `shown` is its name in messages.
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
            return Err(Failure::new(ErrorKind::Exists, text));
        }
        refuse_in_use(&file, shown)?;
        let had = found.len() > 0;
        // Checks early that the file system allows this length; the file gets it when the image is complete.
        let made = file.set_len(0).and_then(|()| file.set_len(size)).and_then(|()| file.set_len(0));
        made.map_err(|e| Failure::file(format!("{shown}: cannot be made {size} bytes long"), e))?;
        Ok(Target::Sparse { file, had })
    }

    fn open_device(mut file: File, shown: &str, size: u64, force: bool) -> Result<Target, Failure> {
        if !force {
            let text = format!("{shown} is a block device: --force overwrites it");
            return Err(Failure::new(ErrorKind::Exists, text));
        }
        refuse_in_use(&file, shown)?;
        let failed = |e: io::Error| Failure::file(format!("{shown}: cannot be written"), e);
        let room = file.seek(SeekFrom::End(0)).map_err(failed)?;
        if room < size {
            let text = format!("{shown} has {room} bytes, too few for {size}");
            return Err(Failure::new(ErrorKind::NoSpace, text));
        }
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        Ok(Target::Dense { file, at: 0, is_device: true })
    }

    fn write(&mut self, offset: u64, bytes: &[u8], wanted: &dyn Fn() -> bool) -> io::Result<()> {
        match self {
            Target::Sparse { file, .. } => {
                let mut runs = nonzero_pages(bytes).into_iter();
                runs.try_for_each(|run| file.write_all_at(&bytes[run.clone()], offset + run.start as u64))
            }
            Target::Dense { file, at, is_device } => {
                const ZEROES: &[u8] = &[0; 64 << 10];
                let piece = if *is_device { STEP_BYTES } else { PIPE_BUF_BYTES };
                while *at < offset {
                    let n = (offset - *at).min(ZEROES.len() as u64) as usize;
                    write_pieces(file, &ZEROES[..n], piece, at, wanted)?;
                }
                write_pieces(file, bytes, piece, at, wanted)
            }
        }
    }

    fn finish(&mut self, size: u64, wanted: &dyn Fn() -> bool) -> io::Result<()> {
        self.write(size, &[], wanted)?;
        match self {
            Target::Sparse { file, .. } => file.set_len(size).and_then(|()| file.sync_all()),
            Target::Dense { file, is_device: true, .. } => file.sync_all(),
            Target::Dense { .. } => Ok(()),
        }
    }

    /// Extends `error` with the state in which the target is left. The target never looks like a complete image.
    fn failed(self, shown: &str, size: u64, error: Failure) -> Failure {
        let text = match self {
            // A file that cannot be truncated is still shorter than the image.
            Target::Sparse { file, had: true } if file.set_len(0).is_ok() => {
                format!("; what {shown} held before is gone, it is empty now")
            }
            Target::Sparse { file, .. } => {
                // A new file that has no name yet: it is removed when it is closed.
                let _ = file.set_len(0);
                String::new()
            }
            Target::Dense { at, is_device: true, .. } => format!("; {shown} holds {at} of {size} bytes of the image"),
            Target::Dense { at, .. } if error.kind == FailureKind::BrokenPipe => {
                let text = format!("{shown}: the reader went away after {at} of {size} bytes: its copy is incomplete");
                return Failure::new(error.kind, text);
            }
            Target::Dense { at, .. } => format!("; {at} of {size} bytes were written"),
        };
        Failure::new(error.kind, error.message + &text)
    }
}

/// Writes `bytes` in pieces and advances `at` with each.
fn write_pieces(
    file: &mut File,
    bytes: &[u8],
    piece: usize,
    at: &mut u64,
    wanted: &dyn Fn() -> bool,
) -> io::Result<()> {
    let mut left = bytes;
    while !left.is_empty() {
        if !is_ready(file, PollFlags::OUT)? {
            if !wanted() {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "the caller has disconnected"));
            }
            continue;
        }
        match file.write(&left[..left.len().min(piece)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                left = &left[n..];
                *at += n as u64;
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Refuses a locked file: the exported pool itself, or another pool in use.
fn refuse_in_use(target: &File, shown: &str) -> Result<(), Failure> {
    match fcntl_lock(target, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::ACCESS | Errno::AGAIN) => {
            let text = format!("{shown} is in use, by this pool or another: name another target");
            Err(Failure::new(ErrorKind::Busy, text))
        }
        // On a file system without locks no pool can be open either.
        _ => Ok(()),
    }
}

/// Bytes to write and their offset; chunks come in rising order.
pub type Chunk = (u64, Vec<u8>);

/// Prepares `file` and writes all chunks, up to `size`, while `wanted` returns true. If the chunks
/// end without the final `None`, the caller has given up.
pub fn write_image(
    file: File,
    shown: &str,
    size: u64,
    force: bool,
    chunks: &Receiver<Option<Chunk>>,
    wanted: &dyn Fn() -> bool,
) -> Result<(), Failure> {
    let mut target = Target::open(file, shown, size, force)?;
    let failed = |e| Failure::file(format!("{shown}: writing the image"), e);
    let error = loop {
        match chunks.receive_blocking() {
            Some(Some((offset, bytes))) => match target.write(offset, &bytes, wanted) {
                Ok(()) => {}
                Err(e) => break failed(e),
            },
            Some(None) => match target.finish(size, wanted) {
                Ok(()) => return Ok(()),
                Err(e) => break failed(e),
            },
            None => break Failure::new(FailureKind::Cancelled, "the export was cancelled"),
        }
    };
    Err(target.failed(shown, size, error))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

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
