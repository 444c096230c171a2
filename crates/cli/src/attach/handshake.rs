//! The handshake of an NBD connection, as far as the kernel's client needs it done: the kernel
//! takes over in the transmission phase.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail, ensure};

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Fixed newstyle, no zeroes.
const CLIENT_FLAGS: u32 = 3;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// Bit of replies that are errors.
const ERROR: u32 = 1 << 31;
/// Longest reply that is accepted.
const LONGEST: usize = 64 << 10;

/// Properties of an export, as the server reports them.
#[derive(Debug, PartialEq, Eq)]
pub struct Export {
    /// Length in bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
}

/// Opens the export `name`; then the stream is in the transmission phase, with simple replies.
pub fn choose(stream: &mut UnixStream, name: &str) -> Result<Export> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).context("waiting for the server's greeting")?;
    ensure!(greeting.starts_with(GREETING), "the server does not speak fixed newstyle NBD");
    let mut request = CLIENT_FLAGS.to_be_bytes().to_vec();
    request.extend_from_slice(b"IHAVEOPT");
    request.extend_from_slice(&OPT_GO.to_be_bytes());
    request.extend_from_slice(&(name.len() as u32 + 6).to_be_bytes());
    request.extend_from_slice(&(name.len() as u32).to_be_bytes());
    request.extend_from_slice(name.as_bytes());
    request.extend_from_slice(&0u16.to_be_bytes());
    stream.write_all(&request).context("asking for the export")?;
    let mut export = None;
    loop {
        match reply(stream).context("waiting for the server's answer")? {
            (REP_ACK, _) => return export.context("the server did not report the export's length"),
            (REP_INFO, body) if body.len() == 12 && body[..2] == INFO_EXPORT.to_be_bytes() => {
                let size = u64::from_be_bytes(body[2..10].try_into()?);
                export = Some(Export { size, flags: u16::from_be_bytes([body[10], body[11]]) });
            }
            (REP_INFO, _) => {}
            (kind, body) if kind & ERROR != 0 => {
                bail!("the server refuses the export {name}: {}", String::from_utf8_lossy(&body))
            }
            (kind, _) => bail!("the server answers with {kind:#x}"),
        }
    }
}

fn reply(stream: &mut UnixStream) -> io::Result<(u32, Vec<u8>)> {
    let mut head = [0; 20];
    stream.read_exact(&mut head)?;
    let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (kind, len) = (word(12), word(16) as usize);
    if head[..8] != REPLY_MAGIC.to_be_bytes() || word(8) != OPT_GO || len > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a reply to another option"));
    }
    let mut body = vec![0; len];
    stream.read_exact(&mut body)?;
    Ok((kind, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: u32, body: &[u8]) -> Vec<u8> {
        let head = [&REPLY_MAGIC.to_be_bytes()[..], &OPT_GO.to_be_bytes(), &kind.to_be_bytes()].concat();
        [&head[..], &(body.len() as u32).to_be_bytes(), body].concat()
    }

    fn choose_from(answers: Vec<u8>) -> Result<Export> {
        let (mut ours, mut its) = UnixStream::pair().unwrap();
        its.write_all(&[&GREETING[..], &[0, 3]].concat()).unwrap();
        its.write_all(&answers).unwrap();
        let chosen = choose(&mut ours, "vm/1");
        let mut asked = [0; 30];
        its.read_exact(&mut asked).unwrap();
        assert_eq!(&asked[20..28], b"\0\0\0\x04vm/1");
        chosen
    }

    #[test]
    fn size_and_flags_come_from_the_answers() {
        let info = [&[0, 0][..], &(7u64 << 30).to_be_bytes(), &[1, 0x2d]].concat();
        let limits = [0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0];
        let answers = [answer(REP_INFO, &limits), answer(REP_INFO, &info), answer(REP_ACK, &[])].concat();
        assert_eq!(choose_from(answers).unwrap(), Export { size: 7 << 30, flags: 0x12d });
    }

    #[test]
    fn a_refusal_is_passed_on_with_its_reason() {
        let error = choose_from(answer(ERROR | 6, b"vm/1 is closed")).unwrap_err();
        assert!(error.to_string().contains("vm/1 is closed"), "{error}");
        assert!(choose_from(answer(REP_ACK, &[])).is_err(), "no length");
    }
}
