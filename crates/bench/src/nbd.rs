//! A client of an NBD server that blocks: one request at a time.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

const EXPORT_NAME: u32 = 1;
/// The handshake's flags of the client: fixed newstyle, no zeroes after the export's size and flags.
const CLIENT_FLAGS: u32 = 3;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to an export.
pub struct Nbd {
    stream: UnixStream,
    cookie: u64,
}

impl Nbd {
    /// Connects to the export of a server that listens at `socket`.
    pub fn connect(socket: &Path, export: &str) -> Result<Nbd> {
        let mut stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let (mut greeting, mut answer) = ([0; 18], [0; 10]);
        stream.read_exact(&mut greeting)?;
        ensure!(greeting.starts_with(b"NBDMAGICIHAVEOPT"), "{}: no NBD server", socket.display());
        let mut option = CLIENT_FLAGS.to_be_bytes().to_vec();
        option.extend_from_slice(b"IHAVEOPT");
        option.extend_from_slice(&EXPORT_NAME.to_be_bytes());
        option.extend_from_slice(&(export.len() as u32).to_be_bytes());
        option.extend_from_slice(export.as_bytes());
        stream.write_all(&option)?;
        // Its size and flags.
        stream.read_exact(&mut answer).with_context(|| format!("opening the export {export}"))?;
        Ok(Nbd { stream, cookie: 0 })
    }

    /// Reads `buf.len()` bytes at `offset`.
    pub fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.send(READ, offset, buf.len(), &[])?;
        self.answer()?;
        Ok(self.stream.read_exact(buf)?)
    }

    /// Writes `data` at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.send(WRITE, offset, data.len(), data)?;
        self.answer()
    }

    /// Makes what was written durable.
    pub fn flush(&mut self) -> Result<()> {
        self.send(FLUSH, 0, 0, &[])?;
        self.answer()
    }

    /// Ends the connection, and waits until the server has closed it.
    pub fn disconnect(mut self) -> Result<()> {
        self.send(DISCONNECT, 0, 0, &[])?;
        let left = self.stream.read(&mut [0])?;
        ensure!(left == 0, "an answer to a disconnect");
        Ok(())
    }

    fn send(&mut self, kind: u16, offset: u64, len: usize, data: &[u8]) -> Result<()> {
        self.cookie += 1;
        let mut request = Vec::with_capacity(28 + data.len());
        request.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        request.extend_from_slice(&0u16.to_be_bytes());
        request.extend_from_slice(&kind.to_be_bytes());
        request.extend_from_slice(&self.cookie.to_be_bytes());
        request.extend_from_slice(&offset.to_be_bytes());
        request.extend_from_slice(&u32::try_from(len)?.to_be_bytes());
        request.extend_from_slice(data);
        Ok(self.stream.write_all(&request)?)
    }

    fn answer(&mut self) -> Result<()> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).context("the answer of an NBD server")?;
        let [a, b, c, d, e, f, g, h, cookie @ ..] = reply;
        ensure!(u32::from_be_bytes([a, b, c, d]) == REPLY_MAGIC, "an answer that is none of NBD");
        let error = u32::from_be_bytes([e, f, g, h]);
        ensure!(error == 0, "the NBD server answers with error {error}");
        ensure!(u64::from_be_bytes(cookie) == self.cookie, "the answer to another request");
        Ok(())
    }
}
