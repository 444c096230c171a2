//! A small NBD client: one request at a time; a crash of the server is a plain error.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion};

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_STARTTLS: u32 = 5;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
/// How long a reply may take.
const PATIENCE: Duration = Duration::from_secs(60);
const FLAG_FUA: u16 = 1;
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const WRITE_ZEROES: u16 = 6;

/// Transmission flags of an export.
pub const HAS_FLUSH: u16 = 1 << 2;

/// What the bytes go over.
trait Transport: Read + Write + Send {}

impl<T: Read + Write + Send> Transport for T {}

/// A connection to one export.
pub struct Client {
    stream: Box<dyn Transport>,
    cookie: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Length of the export in bytes.
    pub size: u64,
    /// Whether it sends DISC at its end.
    polite: bool,
}

impl Client {
    pub fn connect(socket: &Path, export: &str) -> io::Result<Client> {
        Client::over(UnixStream::connect(socket)?, export)
    }

    /// Opens an export by a connection that was just made.
    pub fn over(stream: UnixStream, export: &str) -> io::Result<Client> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut client = Client::greeted(Box::new(stream))?;
        client.choose(export)?;
        Ok(client)
    }

    /// Connects with TLS of this version, with the certificates in `files`.
    pub fn connect_encrypted(
        port: u16,
        (version, files): (&'static SupportedProtocolVersion, &Path),
        export: &str,
    ) -> io::Result<Client> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let mut clear = Client::greeted(Box::new(stream.try_clone()?))?;
        clear.polite = false;
        clear.option(OPTION_STARTTLS, &[])?;
        while !clear.option_reply()? {}
        let certificate = |name: &str| CertificateDer::from_pem_file(files.join(name)).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate("ca-cert.pem")).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let config = config.with_protocol_versions(&[version]).unwrap().with_root_certificates(roots);
        let key = PrivateKeyDer::from_pem_file(files.join("client-key.pem")).unwrap();
        let config = config.with_client_auth_cert(vec![certificate("client-cert.pem")], key).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let session = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
        let stream = Box::new(StreamOwned::new(session, stream));
        let mut client = Client { stream, cookie: 0, flags: 0, size: 0, polite: true };
        client.choose(export)?;
        Ok(client)
    }

    /// Receives the greeting and answers it.
    fn greeted(mut stream: Box<dyn Transport>) -> io::Result<Client> {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        if &greeting[..8] != b"NBDMAGIC" || greeting[8..16] != OPTION_MAGIC.to_be_bytes() {
            return Err(io::Error::other("not a newstyle NBD server"));
        }
        // Fixed newstyle, and no zeroes after the handshake.
        stream.write_all(&3u32.to_be_bytes())?;
        Ok(Client { stream, cookie: 0, flags: 0, size: 0, polite: true })
    }

    fn choose(&mut self, export: &str) -> io::Result<()> {
        let name = export.as_bytes();
        self.option(OPTION_GO, &[&(name.len() as u32).to_be_bytes(), name, &[0, 0]].concat())?;
        while !self.option_reply()? {}
        Ok(())
    }

    fn option(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data];
        self.stream.write_all(&head.concat())
    }

    /// Reads one reply; returns true if it was the last.
    fn option_reply(&mut self) -> io::Result<bool> {
        let mut head = [0; 20];
        self.stream.read_exact(&mut head)?;
        let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
        let mut data = vec![0; u32::from_be_bytes(head[16..20].try_into().unwrap()) as usize];
        self.stream.read_exact(&mut data)?;
        if head[..8] != OPTION_REPLY_MAGIC.to_be_bytes() || (kind != REPLY_ACK && kind != REPLY_INFO) {
            return Err(io::Error::other(format!("refused with {kind:#x}: {}", String::from_utf8_lossy(&data))));
        }
        if kind == REPLY_INFO && data[..2] == [0, 0] {
            self.size = u64::from_be_bytes(data[2..10].try_into().unwrap());
            self.flags = u16::from_be_bytes(data[10..12].try_into().unwrap());
        }
        Ok(kind == REPLY_ACK)
    }

    pub fn read(&mut self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        self.request(READ, 0, offset, len as u32, &[])?;
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    /// Writes; with `fua` it is durable when this returns.
    pub fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> io::Result<()> {
        self.request(WRITE, if fua { FLAG_FUA } else { 0 }, offset, data.len() as u32, data)
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.request(FLUSH, 0, 0, 0, &[])
    }

    pub fn trim(&mut self, offset: u64, len: u32) -> io::Result<()> {
        self.request(TRIM, 0, offset, len, &[])
    }

    /// Sends a write and does not wait for its reply. Stops in the middle of the data if `data` is
    /// shorter than `len`.
    pub fn start_write(&mut self, offset: u64, len: u32, data: &[u8]) -> io::Result<()> {
        self.send(WRITE, 0, offset, len, data)
    }

    /// Sends the rest of the data of a write.
    pub fn start_rest(&mut self, data: &[u8]) -> io::Result<()> {
        self.stream.write_all(data)
    }

    /// Sends a request and does not wait for its reply; returns its cookie.
    pub fn start(&mut self, kind: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> io::Result<u64> {
        self.send(kind, flags, offset, len, data)?;
        Ok(self.cookie)
    }

    /// Receives the next reply, with as much data as `len` returns for its cookie.
    pub fn finish(&mut self, len: impl Fn(u64) -> usize) -> io::Result<(u64, Vec<u8>)> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        if reply[..4] != REPLY_MAGIC.to_be_bytes() {
            return Err(io::Error::other(format!("not a reply: {reply:x?}")));
        }
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error as i32));
        }
        let cookie = u64::from_be_bytes(reply[8..].try_into().unwrap());
        let mut data = vec![0; len(cookie)];
        self.stream.read_exact(&mut data)?;
        Ok((cookie, data))
    }

    /// Requests data and does not receive it.
    pub fn start_read(&mut self, offset: u64, len: u32) -> io::Result<()> {
        self.send(READ, 0, offset, len, &[])
    }

    /// Sends DISC and waits, as long as a reply may take, until the server has closed the connection.
    pub fn leave(mut self) -> io::Result<()> {
        self.polite = false;
        self.send(DISCONNECT, 0, 0, 0, &[])?;
        let mut rest = Vec::new();
        // Unlike a single read, it continues after a signal.
        self.stream.read_to_end(&mut rest)?;
        match rest.len() {
            0 => Ok(()),
            n => Err(io::Error::other(format!("{n} bytes after the end"))),
        }
    }

    /// Closes the connection without DISC, whatever is still in flight.
    pub fn vanish(mut self) {
        self.polite = false;
    }

    fn send(&mut self, kind: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        let mut head = Vec::with_capacity(28 + data.len());
        head.extend(REQUEST_MAGIC.to_be_bytes());
        head.extend(flags.to_be_bytes());
        head.extend(kind.to_be_bytes());
        head.extend(self.cookie.to_be_bytes());
        head.extend(offset.to_be_bytes());
        head.extend(len.to_be_bytes());
        head.extend(data);
        self.stream.write_all(&head)
    }

    fn request(&mut self, kind: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> io::Result<()> {
        self.send(kind, flags, offset, len, data)?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        if reply[..4] != REPLY_MAGIC.to_be_bytes() || reply[8..] != self.cookie.to_be_bytes() {
            return Err(io::Error::other(format!("not the reply to our request: {reply:x?}")));
        }
        if error != 0 { Err(io::Error::from_raw_os_error(error as i32)) } else { Ok(()) }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.polite {
            // The server may be gone.
            let _ = self.send(DISCONNECT, 0, 0, 0, &[]);
        }
    }
}
