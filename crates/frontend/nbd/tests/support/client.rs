//! A blocking client with access to every protocol message.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use forkdisk_nbd::codec::*;
use rustls::{ClientConnection, StreamOwned};

/// Long enough for a server under valgrind; reached only if the server hangs.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Client {
    stream: Transport,
    style: ReplyStyle,
}

/// Number of a context, and length and flags of its extents.
pub type Status = (u32, Vec<(u64, u64)>);

/// Transport of the bytes.
enum Transport {
    Clear(UnixStream),
    Encrypted(Box<StreamOwned<ClientConnection, UnixStream>>),
}

impl Transport {
    fn socket(&self) -> &UnixStream {
        match self {
            Transport::Clear(stream) => stream,
            Transport::Encrypted(stream) => stream.get_ref(),
        }
    }
}

impl Read for Transport {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Transport::Clear(stream) => stream.read(buf),
            Transport::Encrypted(stream) => stream.read(buf),
        }
    }
}

impl Write for Transport {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        match self {
            Transport::Clear(stream) => stream.write(buf),
            Transport::Encrypted(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self {
            Transport::Clear(stream) => stream.flush(),
            Transport::Encrypted(stream) => stream.flush(),
        }
    }
}

/// A chunk of a structured reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub last: bool,
    pub kind: u16,
    pub cookie: u64,
    pub data: Vec<u8>,
}

/// A simple reply without its data.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub error: u32,
    pub cookie: u64,
}

pub fn connect(path: &Path) -> Client {
    let stream = UnixStream::connect(path).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket option");
    stream.set_write_timeout(Some(PATIENCE)).expect("a socket option");
    Client { stream: Transport::Clear(stream), style: ReplyStyle::Simple }
}

impl Client {
    /// Performs the TLS handshake now, whatever was sent before; returns the error if that fails.
    pub fn encrypt(self, session: ClientConnection) -> std::io::Result<Client> {
        let Transport::Clear(stream) = self.stream else { panic!("TLS runs already") };
        let mut tls = StreamOwned::new(session, stream);
        while tls.conn.is_handshaking() {
            tls.conn.complete_io(&mut tls.sock)?;
        }
        Ok(Client { stream: Transport::Encrypted(Box::new(tls)), style: ReplyStyle::Simple })
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server takes it");
    }

    /// Sends as much as the server accepts; returns whether that was everything.
    pub fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("the server answers");
        bytes
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes(4).try_into().expect("4 bytes"))
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes(8).try_into().expect("8 bytes"))
    }

    /// Sends an option.
    pub fn option(&mut self, option: u32, data: &[u8]) {
        self.option_header(option, data.len() as u32);
        self.send(data);
    }

    pub fn option_header(&mut self, option: u32, len: u32) {
        self.send(&IHAVEOPT.to_be_bytes());
        self.send(&option.to_be_bytes());
        self.send(&len.to_be_bytes());
    }

    /// Receives a reply to `option`: its type and data.
    pub fn option_reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!(self.u64(), OPTION_REPLY_MAGIC);
        assert_eq!(self.u32(), option);
        let kind = self.u32();
        let len = self.u32();
        (kind, self.bytes(len as usize))
    }

    /// Sends INFO or GO for `name`, requesting `items`.
    pub fn ask(&mut self, option: u32, name: &str, items: &[u16]) {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(name.as_bytes());
        data.extend_from_slice(&(items.len() as u16).to_be_bytes());
        items.iter().for_each(|item| data.extend_from_slice(&item.to_be_bytes()));
        self.option(option, &data);
    }

    /// Enters transmission; returns size and transmission flags.
    pub fn go(&mut self, name: &str) -> (u64, u16) {
        self.ask(OPT_GO, name, &[]);
        let (kind, info) = self.option_reply(OPT_GO);
        assert_eq!((kind, &info[..2]), (REP_INFO, &[0, 0][..]), "{}", String::from_utf8_lossy(&info));
        assert_eq!(self.option_reply(OPT_GO), (REP_ACK, vec![]));
        let size = u64::from_be_bytes(info[2..10].try_into().expect("8 bytes"));
        (size, u16::from_be_bytes(info[10..].try_into().expect("2 bytes")))
    }

    pub fn request(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, length: u32) {
        self.send_request(Request { style: self.style, flags, command, cookie, offset, length: length.into() });
    }

    pub fn send_request(&mut self, request: Request) {
        self.send(&request.encode());
    }

    /// Requests this style of replies; called before [`go`](Self::go).
    pub fn negotiate(&mut self, style: ReplyStyle) {
        let option = match style {
            ReplyStyle::Simple => return,
            ReplyStyle::Structured => OPT_STRUCTURED_REPLY,
            ReplyStyle::Extended => OPT_EXTENDED_HEADERS,
        };
        self.option(option, &[]);
        assert_eq!(self.option_reply(option), (REP_ACK, vec![]));
        self.style = style;
    }

    /// Sends LIST_META_CONTEXT or SET_META_CONTEXT; returns the contexts, or the error.
    pub fn contexts(&mut self, option: u32, export: &str, queries: &[&str]) -> Result<Vec<(u32, String)>, u32> {
        let text = |s: &str| [&(s.len() as u32).to_be_bytes()[..], s.as_bytes()].concat();
        let mut data = [text(export), (queries.len() as u32).to_be_bytes().to_vec()].concat();
        queries.iter().for_each(|query| data.extend(text(query)));
        self.option(option, &data);
        let mut contexts = Vec::new();
        loop {
            match self.option_reply(option) {
                (REP_ACK, _) => return Ok(contexts),
                (REP_META_CONTEXT, data) => {
                    let (id, name) = data.split_first_chunk::<4>().expect("a number");
                    contexts.push((u32::from_be_bytes(*id), String::from_utf8(name.to_vec()).expect("text")));
                }
                (error, _) => return Err(error),
            }
        }
    }

    /// Receives one chunk of a reply, with a structured or an extended header.
    pub fn chunk(&mut self) -> Chunk {
        let is_extended = self.style == ReplyStyle::Extended;
        assert_eq!(self.u32(), if is_extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC });
        let head = self.u32();
        let cookie = self.u64();
        let len = if is_extended {
            self.u64();
            self.u64()
        } else {
            self.u32().into()
        };
        let last = head >> 16 == u32::from(REPLY_FLAG_DONE);
        Chunk { last, kind: head as u16, cookie, data: self.bytes(len as usize) }
    }

    /// Receives all chunks of one reply, while no other is in flight.
    pub fn chunks(&mut self) -> Vec<Chunk> {
        let mut chunks = vec![self.chunk()];
        while !chunks[chunks.len() - 1].last {
            chunks.push(self.chunk());
        }
        chunks
    }

    /// Returns the extents of every context, or the error.
    pub fn status(&mut self, flags: u16, offset: u64, len: u32) -> Result<Vec<Status>, u32> {
        self.request(CMD_BLOCK_STATUS, flags, 77, offset, len);
        self.chunks().into_iter().map(|chunk| chunk.extents()).collect()
    }

    pub fn reply(&mut self) -> Reply {
        assert_eq!(self.u32(), SIMPLE_REPLY_MAGIC);
        Reply { error: self.u32(), cookie: self.u64() }
    }

    /// Sends a request without data and returns the error of its reply.
    pub fn call(&mut self, command: u16, flags: u16, offset: u64, length: u32) -> u32 {
        let cookie = offset ^ 0x5a5a;
        self.request(command, flags, cookie, offset, length);
        self.answer(cookie)
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, u32> {
        match self.call(CMD_READ, 0, offset, length) {
            0 => Ok(self.bytes(length as usize)),
            error => Err(error),
        }
    }

    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        self.request(CMD_WRITE, flags, 9, offset, data.len() as u32);
        self.send(data);
        self.answer(9)
    }

    pub fn flush(&mut self) -> u32 {
        self.call(CMD_FLUSH, 0, 0, 0)
    }

    /// Checks that the server has closed the connection without sending more.
    pub fn expect_end(&mut self) {
        assert!(self.ends_with(&[]), "more came");
    }

    /// Reads to the end of the connection; returns whether exactly `bytes` came.
    pub fn ends_with(&mut self, bytes: &[u8]) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof) => {}
            Err(e) => panic!("the connection does not end: {e}"),
        }
        rest == bytes
    }

    /// Reads to the end of the connection and ignores data and errors.
    pub fn drain(&mut self) {
        let _ = self.stream.read_to_end(&mut Vec::new());
    }

    /// Returns whether the connection ends now, possibly with a TLS alert.
    pub fn is_turned_away(&mut self) -> bool {
        !matches!(self.stream.read(&mut [0; 1]), Ok(1))
    }

    /// Closes the sending side, and continues to read.
    pub fn finish(&mut self) {
        self.stream.socket().shutdown(Shutdown::Write).expect("a connected socket");
    }

    fn answer(&mut self, cookie: u64) -> u32 {
        let reply = self.reply();
        assert_eq!(reply.cookie, cookie);
        reply.error
    }
}

impl Chunk {
    /// Returns the number of the context, and length and flags of its extents.
    fn extents(&self) -> Result<Status, u32> {
        let short = |at: usize| u32::from_be_bytes(self.data[at..at + 4].try_into().expect("4 bytes"));
        let long = |b: &[u8]| u64::from_be_bytes(b.try_into().expect("8 bytes"));
        match self.kind {
            CHUNK_BLOCK_STATUS => {
                let pair = |b: &[u8]| (long(b) >> 32, long(b) & u64::from(u32::MAX));
                Ok((short(0), self.data[4..].chunks_exact(8).map(pair).collect()))
            }
            CHUNK_BLOCK_STATUS_EXT => {
                let pairs = self.data[8..].chunks_exact(16).map(|b| (long(&b[..8]), long(&b[8..])));
                Ok((short(0), pairs.collect()))
            }
            CHUNK_ERROR | CHUNK_ERROR_OFFSET => Err(short(0)),
            kind => panic!("a chunk of type {kind} where a status was due"),
        }
    }
}
