//! Sources of imports: recognises an image's format and reads its parts in order. Every function here may
//! block and runs on a separate thread; a thread whose caller has disconnected ends at its next step.

mod decompress;
pub mod format;
mod nbd;

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

use forkdisk::{ErrorKind, MAX_VOLUME_SIZE, PAGE_SIZE};
use forkdisk_uring::lock_image;
use rustix::event::PollFlags;
use rustix::fs::{Advice, fadvise};

use crate::bridge::{Gone, Sender};
use crate::failure::Failure;
use crate::files::{STEP_BYTES, is_ready};
use crate::sparse::{DataRuns, nonzero_pages};

use decompress::decompressed;
use format::{Format, Kind, LOOKED_AT_BYTES};

/// Bytes requested from an NBD server at a time: where there is data, and after a hole.
const NBD_STEP_BYTES: u64 = 4 << 20;
const NBD_LONG_STEP_BYTES: u64 = 32 << 20;
/// Format name for the socket of an NBD server.
pub const NBD: &str = "nbd";

/// A part of an image; parts come in rising order.
pub(crate) enum Part {
    /// The image's length, if it is known beforehand. Comes first.
    Length(u64),
    /// Bytes at an offset; never all zero.
    Data { offset: u64, bytes: Vec<u8> },
    /// Everything before this offset was sent.
    Reached(u64),
    /// End of the image, with its length.
    End(u64),
}

/// Properties of an image that its caller gave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    /// Format; `None`: recognise it.
    pub format: Option<String>,
    /// Name of the image in messages.
    pub shown: Option<String>,
    /// Import the image even if it is in use.
    pub force: bool,
}

impl Source {
    fn shown(&self) -> &str {
        self.shown.as_deref().unwrap_or("the image")
    }
}

type Parts = Sender<Result<Part, Failure>>;

/// Why reading stopped: a failure, or `None` if the receiver is gone.
type Stopped = Option<Failure>;

/// Reads `image` and sends its parts. The last message is the end of the image or the failure.
pub(crate) fn read_image(image: File, source: &Source, parts: &Parts) {
    if let Err(Some(failure)) = read_all(image, source, parts) {
        // If the caller has gone, the failure is dropped.
        let _ = parts.send_blocking(Err(failure));
    }
}

fn send(parts: &Parts, part: Part) -> Result<(), Stopped> {
    parts.send_blocking(Ok(part)).map_err(|Gone| None)
}

fn invalid(text: impl Into<String>) -> Stopped {
    Some(Failure::new(ErrorKind::Invalid, text))
}

fn read_all(mut image: File, source: &Source, parts: &Parts) -> Result<(), Stopped> {
    let shown = source.shown();
    let wanted = source.format.as_deref();
    let found = image.metadata().map_err(|e| Failure::file(format!("{shown}: cannot be looked at"), e))?;
    let kind = found.file_type();
    if kind.is_dir() {
        return Err(invalid(format!("{shown}: is a directory, not an image")));
    }
    if kind.is_char_device() {
        let text = "is a character device, which has no length: name a file, a block device or a pipe";
        return Err(invalid(format!("{shown}: {text}")));
    }
    if wanted == Some(NBD) {
        return read_nbd(UnixStream::from(OwnedFd::from(image)), parts);
    }
    let unknown = || invalid(format!("there is no format {:?}", wanted.unwrap_or_default()));
    let given = wanted.map(|name| format::named(name).ok_or_else(unknown)).transpose()?;
    let is_disk = kind.is_file() || kind.is_block_device();
    if is_disk {
        lock(&image, shown, source.force)?;
    }
    let coming = DataProgress { parts, at: Cell::new(0), unwanted: Cell::new(false) };
    let failed = |e| coming.failed(shown, e);
    let Ok(len) = image.seek(SeekFrom::End(0)) else {
        let mut stream = RetryingReader { file: &image, coming: &coming, head: Cursor::default() };
        let mut head = vec![0; LOOKED_AT_BYTES];
        let n = fill(&mut stream, &mut head).map_err(failed)?;
        head.truncate(n);
        if head.is_empty() {
            return Err(empty(shown));
        }
        let format = given.or_else(|| format::recognise(&head, &[])).unwrap_or(Format::RAW);
        stream.head = Cursor::new(head);
        return read_stream(stream, format, source);
    };
    if len == 0 {
        return Err(empty(shown));
    }
    let (head, tail) = ends(&image, len).map_err(failed)?;
    let format = given.or_else(|| format::recognise(&head, &tail)).unwrap_or(Format::RAW);
    if format.kind != Kind::Raw {
        image.seek(SeekFrom::Start(0)).map_err(failed)?;
        return read_stream(RetryingReader { file: &image, coming: &coming, head: Cursor::default() }, format, source);
    }
    if len > MAX_VOLUME_SIZE {
        return Err(too_long(shown, len));
    }
    // The advice may fail: reading works without it.
    let _ = fadvise(&image, 0, None, Advice::Sequential);
    send(parts, Part::Length(len))?;
    read_file(&image, len, shown, parts)
}

/// Returns the format of a file or block device by its first and last bytes; `None` if it is taken as raw.
///
/// # Errors
/// The image cannot be read.
pub fn format_of(image: &File) -> io::Result<Option<&'static Format>> {
    let mut image = image;
    let len = image.seek(SeekFrom::End(0))?;
    image.seek(SeekFrom::Start(0))?;
    let (head, tail) = ends(image, len)?;
    Ok(format::recognise(&head, &tail))
}

/// Returns the first and the last bytes of a file of `len` bytes.
fn ends(image: &File, len: u64) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut head = vec![0; len.min(LOOKED_AT_BYTES as u64) as usize];
    image.read_exact_at(&mut head, 0)?;
    let mut tail = vec![0; head.len()];
    image.read_exact_at(&mut tail, len - head.len() as u64)?;
    Ok((head, tail))
}

/// Locks `image` against writers that respect QEMU's locks for as long as it is open. Fails, unless
/// `force`, if another program writes it.
///
/// # Errors
/// `Busy` if another program writes the image; `Io` if the lock cannot be examined.
pub fn lock(image: &File, shown: &str, force: bool) -> Result<(), Failure> {
    match force {
        true => Ok(()),
        false => lock_image(image, Path::new(shown)).map_err(|error| {
            let failure = Failure::from(error);
            let way = "what is imported while it is written may be torn; end that first, or --force imports it anyway";
            Failure::new(failure.kind, format!("{}: {way}", failure.message))
        }),
    }
}

fn empty(shown: &str) -> Stopped {
    invalid(format!("{shown}: is empty (0 bytes), which is no image: check the program that should have written it"))
}

fn too_long(shown: &str, len: u64) -> Stopped {
    invalid(format!("{shown}: is {len} bytes long or more: a volume has at most {MAX_VOLUME_SIZE}"))
}

fn read_file(image: &File, len: u64, shown: &str, parts: &Parts) -> Result<(), Stopped> {
    let mut done = 0;
    for run in DataRuns::new(image, len) {
        let run = run.map_err(|e| Failure::file(format!("{shown}: looking for data"), e))?;
        let run = page_aligned(run, done);
        let mut at = run.start;
        while at < run.end {
            let n = (run.end - at).min(STEP_BYTES as u64) as usize;
            let mut bytes = vec![0; n];
            let read = image.read_exact_at(&mut bytes, at);
            read.map_err(|e| Failure::file(format!("{shown}: cannot be read at byte {at}"), e))?;
            send_data(parts, at, bytes)?;
            at += n as u64;
            done = at;
        }
    }
    send(parts, Part::End(len))
}

/// Moves the start of `run` down to a page boundary, but not below `done`.
fn page_aligned(run: Range<u64>, done: u64) -> Range<u64> {
    let start = run.start - run.start % PAGE_SIZE as u64;
    start.max(done)..run.end
}

/// Reads the export of the NBD server (QEMU) behind `stream`.
fn read_nbd(stream: UnixStream, parts: &Parts) -> Result<(), Stopped> {
    let mut export = nbd::Export::open(stream)?;
    let size = export.size;
    if size > MAX_VOLUME_SIZE {
        return Err(too_long("the image", size));
    }
    send(parts, Part::Length(size))?;
    let (mut at, mut step) = (0, NBD_STEP_BYTES);
    while at < size {
        let len = step.min(size - at);
        let mut has_data = false;
        export.read(at, len as u32, |piece| {
            let (offset, bytes) = match piece {
                nbd::Piece::Hole { end } => return send(parts, Part::Reached(end)),
                nbd::Piece::Data { offset, bytes } => (offset, bytes),
            };
            has_data = true;
            let mut steps = bytes.chunks(STEP_BYTES).zip(0..);
            steps.try_for_each(|(step, i)| send_data(parts, offset + i * STEP_BYTES as u64, step.to_vec()))
        })?;
        at += len;
        step = if has_data { NBD_STEP_BYTES } else { NBD_LONG_STEP_BYTES };
    }
    send(parts, Part::End(size))
}

/// Progress of an image that is read as a stream: position, and whether the receiver still takes parts.
struct DataProgress<'a> {
    parts: &'a Parts,
    at: Cell<u64>,
    unwanted: Cell<bool>,
}

impl DataProgress<'_> {
    fn is_wanted(&self) -> bool {
        let is_wanted = self.parts.send_blocking(Ok(Part::Reached(self.at.get()))).is_ok();
        self.unwanted.set(!is_wanted);
        is_wanted
    }

    fn failed(&self, shown: &str, error: io::Error) -> Stopped {
        match self.unwanted.get() {
            true => None,
            false => Some(Failure::file(format!("{shown}: cannot be read"), error)),
        }
    }
}

/// A stream whose `read` ends with an error once the image is not wanted any more, even if no data arrives.
struct RetryingReader<'a> {
    file: &'a File,
    coming: &'a DataProgress<'a>,
    /// Bytes that were read ahead.
    head: Cursor<Vec<u8>>,
}

impl Read for RetryingReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let ahead = self.head.read(buf)?;
        if ahead > 0 || buf.is_empty() {
            return Ok(ahead);
        }
        loop {
            if !is_ready(self.file, PollFlags::IN)? {
                if !self.coming.is_wanted() {
                    return Err(io::Error::other("the import was cancelled"));
                }
                continue;
            }
            match self.file.read(buf) {
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                outcome => return outcome,
            }
        }
    }
}

/// Reads a stream in a format that does not need seeking.
fn read_stream(stream: RetryingReader<'_>, format: &Format, source: &Source) -> Result<(), Stopped> {
    let (shown, coming) = (source.shown(), stream.coming);
    let by_hand = match format.kind {
        Kind::Raw => return read_bytes(stream, coming, |e| coming.failed(shown, e), |_, _| Ok(())),
        Kind::Disk { .. } => return Err(invalid(format::not_read(format, shown))),
        Kind::Compressed { by_hand } => by_hand,
    };
    let name = format.name;
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::UnexpectedEof => {
            invalid(format!("{shown}: the {name} stream is cut off: nothing of it was imported; get it again"))
        }
        _ => coming.failed(&format!("{shown}: decompressing {name}"), e),
    };
    let inner = decompressed(name, stream).ok_or_else(|| invalid(format!("{name} is not read here")))?;
    let mut inner = inner.map_err(failed)?;
    // The converter for other disk formats needs to seek: it cannot read a stream.
    let look = |head: &[u8], tail: &[u8]| match format::recognise(head, tail) {
        None => Ok(()),
        Some(found) if matches!(found.kind, Kind::Disk { .. }) => Err(invalid(format!(
            "{shown}: what is compressed with {name} is in the format {}, not a raw image: decompress it with \
             `{by_hand} FILE >DISK`, then import DISK",
            found.name
        ))),
        Some(found) => Err(invalid(format!(
            "{shown}: is compressed twice, with {name} and {}: decompress it with `{by_hand} FILE >IMAGE`, then import \
             IMAGE",
            found.name
        ))),
    };
    read_bytes(&mut inner, coming, failed, look)
}

/// Reads the bytes of a disk. `look` checks the first bytes, and at the end the first and last bytes.
fn read_bytes(
    mut stream: impl Read,
    coming: &DataProgress<'_>,
    failed: impl Fn(io::Error) -> Stopped,
    look: impl Fn(&[u8], &[u8]) -> Result<(), Stopped>,
) -> Result<(), Stopped> {
    let (mut at, mut head, mut tail) = (0, Vec::new(), Vec::new());
    loop {
        let mut bytes = vec![0; STEP_BYTES];
        let n = fill(&mut stream, &mut bytes).map_err(&failed)?;
        bytes.truncate(n);
        if at == 0 {
            head = bytes[..n.min(LOOKED_AT_BYTES)].to_vec();
            look(&head, &[])?;
        }
        let end = at + n as u64;
        if end > MAX_VOLUME_SIZE {
            return Err(too_long("the image", end));
        }
        tail.extend_from_slice(&bytes[n.saturating_sub(LOOKED_AT_BYTES)..]);
        tail.drain(..tail.len().saturating_sub(LOOKED_AT_BYTES));
        send_data(coming.parts, at, bytes)?;
        at = end;
        coming.at.set(at);
        if n < STEP_BYTES {
            look(&head, &tail)?;
            return if at == 0 { Err(empty("the image")) } else { send(coming.parts, Part::End(at)) };
        }
    }
}

/// Reads until `buf` is full or the stream ends.
fn fill(stream: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
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

fn send_data(parts: &Parts, offset: u64, bytes: Vec<u8>) -> Result<(), Stopped> {
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::bridge::{Receiver, queue};

    fn pipe() -> (File, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        (File::from(OwnedFd::from(reader)), writer)
    }

    /// Imports an image; returns its bytes and length, or the failure.
    fn import(image: File, source: Source) -> Result<(Vec<u8>, u64), Failure> {
        let (sender, parts): (_, Receiver<Result<Part, Failure>>) = queue(4);
        let thread = std::thread::spawn(move || read_image(image, &source, &sender));
        let mut out = Vec::new();
        let outcome = loop {
            match parts.receive_blocking() {
                Some(Ok(Part::Data { offset, bytes })) => {
                    out.resize(offset as usize, 0);
                    out.extend(bytes);
                }
                Some(Ok(Part::End(len))) => break Ok((out, len)),
                Some(Ok(_)) => {}
                Some(Err(failure)) => break Err(failure),
                None => panic!("no end"),
            }
        };
        thread.join().unwrap();
        outcome
    }

    fn stream(bytes: &[u8], source: Source) -> Result<(Vec<u8>, u64), Failure> {
        let (reader, mut writer) = pipe();
        let bytes = bytes.to_vec();
        let feeder = std::thread::spawn(move || drop(writer.write_all(&bytes)));
        let outcome = import(reader, source);
        feeder.join().unwrap();
        outcome
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    }

    #[test]
    fn a_stream_is_read_until_the_buffer_is_full_in_spite_of_pauses() {
        let (reader, mut writer) = pipe();
        let dribble = std::thread::spawn(move || {
            for _ in 0..25 {
                writer.write_all(&[7]).unwrap();
                std::thread::yield_now();
            }
        });
        assert_eq!(import(reader, Source::default()).unwrap(), (vec![7; 25], 25));
        dribble.join().unwrap();
    }

    #[test]
    fn a_stream_that_is_not_wanted_is_given_up_though_it_never_ends() {
        let (reader, _writer) = pipe();
        let (sender, receiver) = queue(1);
        drop(receiver);
        read_image(reader, &Source::default(), &sender);
    }

    #[test]
    fn runs_begin_at_pages_and_never_overlap() {
        assert_eq!(page_aligned(5000..9000, 0), 4096..9000);
        assert_eq!(page_aligned(5000..9000, 4500), 4500..9000);
        assert_eq!(page_aligned(8192..9000, 4096), 8192..9000);
    }

    #[test]
    fn a_compressed_stream_is_decompressed_and_raw_takes_the_bytes() {
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i >> 10) as u8).collect();
        let packed = gzip(&bytes);
        assert_eq!(stream(&packed, Source::default()).unwrap(), (bytes, 3_000_000));
        let raw = Source { format: Some("raw".to_string()), ..Source::default() };
        assert_eq!(stream(&packed, raw).unwrap(), (packed.clone(), packed.len() as u64));
        let cut = stream(&packed[..packed.len() - 9], Source::default()).unwrap_err();
        assert!(cut.message.contains("cut off"), "{}", cut.message);
    }

    #[test]
    fn what_cannot_be_read_as_a_stream_is_named_with_a_way_out() {
        let mut vhd = vec![0; 2 << 20];
        vhd.extend(b"conectix");
        vhd.resize((2 << 20) + 512, 0);
        for (bytes, format, way) in [
            (b"QFI\xfb\0\0\0\x03".to_vec(), "qcow2", "qemu-img convert -f qcow2 -O raw"),
            (gzip(b"QFI\xfb\0\0\0\x03"), "qcow2", "gzip -dc FILE >DISK"),
            (gzip(&gzip(b"x")), "twice", "gzip -dc FILE >IMAGE"),
            (gzip(&vhd), "vhd", "gzip -dc FILE >DISK"),
            (Vec::new(), "0 bytes", "check the program"),
            (gzip(b""), "0 bytes", "check the program"),
        ] {
            let message = stream(&bytes, Source::default()).unwrap_err().message;
            assert!(message.contains(format) && message.contains(way), "{message}");
        }
    }
}
