//! NBD client for one export, over a connected socket; QEMU serves images of other formats this
//! way. Holes arrive as such (structured replies).

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use forkdisk::ErrorKind;

use crate::failure::Failure;

const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// Client flags of the handshake: fixed newstyle, no padding.
const FLAGS: u32 = 3;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED: u32 = 8;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_ERROR: u32 = 1 << 31;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
const CHUNK_ERROR: u16 = 1 << 15;
/// Most bytes of an option reply or error text that are accepted.
const LONGEST: u32 = 64 << 10;

/// An open export.
pub struct Export {
    stream: UnixStream,
    /// Length in bytes.
    pub size: u64,
}

/// A part of a read range.
pub enum Piece {
    /// Bytes at an offset.
    Data { offset: u64, bytes: Vec<u8> },
    /// Zeroes up to this offset.
    Hole { end: u64 },
}

fn broken(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            Failure::new(ErrorKind::Io, "the program that reads the image has ended")
        }
        _ => Failure::file("the image cannot be read", error),
    }
}

fn odd(what: &str) -> Failure {
    Failure::new(ErrorKind::Io, format!("the program that reads the image does not speak NBD as expected: {what}"))
}

impl Export {
    /// Opens the default export.
    pub fn open(mut stream: UnixStream) -> Result<Export, Failure> {
        let greeting: [u8; 18] = get(&mut stream)?;
        if greeting[..8] != NBD_MAGIC.to_be_bytes() || greeting[8..16] != OPTION_MAGIC.to_be_bytes() {
            return Err(odd("its greeting"));
        }
        put(&mut stream, &[&FLAGS.to_be_bytes()])?;
        ask(&mut stream, OPT_STRUCTURED, &[])?;
        match answer(&mut stream, OPT_STRUCTURED)? {
            (REPLY_ACK, _) => {}
            _ => return Err(odd("no structured replies")),
        }
        ask(&mut stream, OPT_GO, &[0; 6])?;
        let mut size = None;
        loop {
            match answer(&mut stream, OPT_GO)? {
                (REPLY_ACK, _) => break,
                (REPLY_INFO, info) if info.len() == 12 && info[..2] == [0, 0] => {
                    size = Some(u64::from_be_bytes(info[2..10].try_into().expect("eight bytes")));
                }
                (REPLY_INFO, _) => {}
                (kind, text) if kind & REPLY_ERROR != 0 => return Err(odd(&String::from_utf8_lossy(&text))),
                _ => return Err(odd("an unknown answer")),
            }
        }
        Ok(Export { stream, size: size.ok_or_else(|| odd("no size"))? })
    }

    /// Reads `len` bytes at `offset` and passes their parts to `take`.
    pub fn read<E: From<Failure>>(
        &mut self,
        offset: u64,
        len: u32,
        mut take: impl FnMut(Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        let request = [0, 0, 0, 0];
        let parts: [&[u8]; 5] =
            [&REQUEST_MAGIC.to_be_bytes(), &request, &offset.to_be_bytes(), &offset.to_be_bytes(), &len.to_be_bytes()];
        put(&mut self.stream, &parts)?;
        let inside = |at: u64, n: u64| at >= offset && n <= u64::from(len) && at + n <= offset + u64::from(len);
        let (mut covered, mut failed) = (0, None);
        loop {
            let head: [u8; 20] = get(&mut self.stream)?;
            let field = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
            let (flags, kind) = ((field(4) >> 16) as u16, field(4) as u16);
            let cookie = u64::from_be_bytes(head[8..16].try_into().expect("eight bytes"));
            let n = field(16);
            if field(0) != CHUNK_MAGIC || cookie != offset {
                return Err(odd("the head of a reply").into());
            }
            match kind {
                CHUNK_DATA if n > 8 && n - 8 <= len => {
                    let at = u64::from_be_bytes(get(&mut self.stream)?);
                    let mut bytes = vec![0; n as usize - 8];
                    self.stream.read_exact(&mut bytes).map_err(broken)?;
                    if !inside(at, bytes.len() as u64) {
                        return Err(odd("an offset outside of the request").into());
                    }
                    covered += bytes.len() as u64;
                    take(Piece::Data { offset: at, bytes })?;
                }
                CHUNK_HOLE if n == 12 => {
                    let at = u64::from_be_bytes(get(&mut self.stream)?);
                    let hole = u64::from(u32::from_be_bytes(get(&mut self.stream)?));
                    if !inside(at, hole) {
                        return Err(odd("an offset outside of the request").into());
                    }
                    covered += hole;
                    take(Piece::Hole { end: at + hole })?;
                }
                kind if n <= LONGEST => {
                    let mut text = vec![0; n as usize];
                    self.stream.read_exact(&mut text).map_err(broken)?;
                    if kind & CHUNK_ERROR != 0 && failed.is_none() {
                        let errno = text.first_chunk::<4>().map_or(5, |bytes| u32::from_be_bytes(*bytes));
                        failed = Some(io::Error::from_raw_os_error(errno as i32));
                    }
                }
                _ => return Err(odd("a reply of an unexpected length").into()),
            }
            if flags & 1 != 0 {
                break;
            }
        }
        match failed {
            Some(error) => Err(Failure::file(format!("the image cannot be read near byte {offset}"), error).into()),
            None if covered != u64::from(len) => Err(odd("an incomplete reply").into()),
            None => Ok(()),
        }
    }
}

fn get<const N: usize>(stream: &mut UnixStream) -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map_err(broken)?;
    Ok(bytes)
}

fn put(stream: &mut UnixStream, parts: &[&[u8]]) -> Result<(), Failure> {
    stream.write_all(&parts.concat()).map_err(broken)
}

fn ask(stream: &mut UnixStream, option: u32, data: &[u8]) -> Result<(), Failure> {
    let len = (data.len() as u32).to_be_bytes();
    put(stream, &[&OPTION_MAGIC.to_be_bytes(), &option.to_be_bytes(), &len, data])
}

fn answer(stream: &mut UnixStream, to: u32) -> Result<(u32, Vec<u8>), Failure> {
    let magic = u64::from_be_bytes(get(stream)?);
    let [option, kind, len] = [get(stream)?, get(stream)?, get(stream)?].map(u32::from_be_bytes);
    if magic != REPLY_MAGIC || option != to || len > LONGEST {
        return Err(odd("the head of an answer"));
    }
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data).map_err(broken)?;
    Ok((kind, data))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of a server whose export has 8,192 bytes: data, then a hole.
    fn script(end: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(NBD_MAGIC.to_be_bytes());
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend([0, 3]);
        let mut reply = |option: u32, kind: u32, data: &[u8]| {
            out.extend(REPLY_MAGIC.to_be_bytes());
            [option, kind, data.len() as u32].iter().for_each(|n| out.extend(n.to_be_bytes()));
            out.extend(data);
        };
        reply(OPT_STRUCTURED, REPLY_ACK, &[]);
        reply(OPT_GO, REPLY_INFO, &[0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 3]);
        reply(OPT_GO, REPLY_ACK, &[]);
        out.extend(end);
        out
    }

    fn chunk(flags: u16, kind: u16, data: &[u8]) -> Vec<u8> {
        let mut out = CHUNK_MAGIC.to_be_bytes().to_vec();
        out.extend(flags.to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend(0_u64.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
        out
    }

    fn read(end: &[u8]) -> Result<Vec<(u64, usize)>, Failure> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&script(end)).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let mut export = Export::open(ours)?;
        assert_eq!(export.size, 8192);
        let mut pieces = Vec::new();
        export.read(0, 8192, |piece| {
            pieces.push(match piece {
                Piece::Data { offset, bytes } => (offset, bytes.len()),
                Piece::Hole { end } => (end, 0),
            });
            Ok::<_, Failure>(())
        })?;
        Ok(pieces)
    }

    #[test]
    fn data_and_holes_arrive_and_half_a_reply_is_an_error() {
        let data = chunk(0, CHUNK_DATA, &[&0_u64.to_be_bytes() as &[u8], &[1; 4096]].concat());
        let hole =
            |flags, at: u64| chunk(flags, CHUNK_HOLE, &[&at.to_be_bytes() as &[u8], &4096_u32.to_be_bytes()].concat());
        assert_eq!(read(&[data.clone(), hole(1, 4096)].concat()).unwrap(), [(0, 4096), (8192, 0)]);
        let text = |end: &[u8]| read(end).unwrap_err().message;
        assert!(text(&data).contains("has ended"));
        assert!(text(&hole(1, 4096)).contains("incomplete"));
        assert!(text(&hole(1, 8192)).contains("outside"));
        let error = chunk(1, 0x8001, &[0, 0, 0, 5, 0, 0]);
        assert!(text(&error).contains("near byte 0"));
        assert!(text(b"").contains("has ended"));
    }
}
