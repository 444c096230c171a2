//! Options of the handshake: decoding their data, encoding the replies to them.

use serde::{Deserialize, Serialize};

use super::export::{BlockSizes, ExportInfo};
use super::reply::ReplyStyle;
use super::values::*;

/// Why an option is answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The option is unknown.
    Unsupported,
    /// The option is known, but not allowed here.
    Policy,
    /// Data that does not fit the option.
    Invalid,
    /// TLS must be started first.
    TlsRequired,
    /// No such export.
    Unknown,
    /// The server is shutting down.
    Shutdown,
    /// More data than the server takes.
    TooBig,
    /// Structured replies are not available any more: extended headers were chosen.
    Extended,
}

impl Refusal {
    fn reply_type(self) -> u32 {
        REP_ERROR
            | match self {
                Refusal::Unsupported => 1,
                Refusal::Policy => 2,
                Refusal::Invalid => 3,
                Refusal::TlsRequired => 5,
                Refusal::Unknown => 6,
                Refusal::Shutdown => 7,
                Refusal::TooBig => 9,
                Refusal::Extended => 10,
            }
    }
}

/// Items requested by INFO and GO besides NBD_INFO_EXPORT, which is always sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfoRequests {
    /// The export's own name.
    pub name: bool,
    /// Its description.
    pub description: bool,
    /// Its size constraints.
    pub block_size: bool,
}

/// Decodes a name: UTF-8 without NUL, at most [`MAX_NAME`] bytes.
pub(super) fn decode_name(bytes: &[u8]) -> Result<String, Refusal> {
    if bytes.len() > MAX_NAME {
        return Err(Refusal::TooBig);
    }
    let text = std::str::from_utf8(bytes).map_err(|_| Refusal::Invalid)?;
    if text.contains('\0') { Err(Refusal::Invalid) } else { Ok(text.to_owned()) }
}

/// Decodes the data of INFO and GO: length of the name, name, number of requests, requests.
pub(super) fn decode_info(data: &[u8]) -> Result<(String, InfoRequests), Refusal> {
    let (len, rest) = data.split_first_chunk::<4>().ok_or(Refusal::Invalid)?;
    let len = u32::from_be_bytes(*len) as usize;
    if len > MAX_NAME {
        return Err(Refusal::TooBig);
    }
    let (name, rest) = rest.split_at_checked(len).ok_or(Refusal::Invalid)?;
    let (count, list) = rest.split_first_chunk::<2>().ok_or(Refusal::Invalid)?;
    if list.len() != 2 * u16::from_be_bytes(*count) as usize {
        return Err(Refusal::Invalid);
    }
    let mut requests = InfoRequests::default();
    for item in list.chunks_exact(2) {
        match u16::from_be_bytes([item[0], item[1]]) {
            INFO_NAME => requests.name = true,
            INFO_DESCRIPTION => requests.description = true,
            INFO_BLOCK_SIZE => requests.block_size = true,
            _ => {}
        }
    }
    Ok((decode_name(name)?, requests))
}

/// Decodes the data of LIST_META_CONTEXT and SET_META_CONTEXT: length of the export's name, name,
/// number of queries, and each query with its length.
pub(super) fn decode_meta_context(data: &[u8]) -> Result<(String, Vec<String>), Refusal> {
    let (export, rest) = split_string(data)?;
    let (count, mut rest) = rest.split_first_chunk::<4>().ok_or(Refusal::Invalid)?;
    let count = u32::from_be_bytes(*count) as usize;
    if count > MAX_QUERIES {
        return Err(Refusal::TooBig);
    }
    let mut queries = Vec::with_capacity(count);
    for _ in 0..count {
        let (query, behind) = split_string(rest)?;
        queries.push(query);
        rest = behind;
    }
    if rest.is_empty() { Ok((export, queries)) } else { Err(Refusal::Invalid) }
}

/// Splits off a string with its 32-bit length in front.
fn split_string(data: &[u8]) -> Result<(String, &[u8]), Refusal> {
    let (len, rest) = data.split_first_chunk::<4>().ok_or(Refusal::Invalid)?;
    let len = u32::from_be_bytes(*len) as usize;
    if len > MAX_NAME {
        return Err(Refusal::TooBig);
    }
    let (text, rest) = rest.split_at_checked(len).ok_or(Refusal::Invalid)?;
    Ok((decode_name(text)?, rest))
}

/// Encodes the replies to one option, appended to a vector.
pub struct OptionReplies<'a> {
    option: u32,
    out: &'a mut Vec<u8>,
}

impl<'a> OptionReplies<'a> {
    /// Creates an encoder that appends replies to `option` to `out`.
    pub fn new(option: u32, out: &'a mut Vec<u8>) -> OptionReplies<'a> {
        OptionReplies { option, out }
    }

    /// Acknowledges the option.
    pub fn ack(&mut self) {
        self.reply(REP_ACK, &[]);
    }

    /// Refuses the option; `text` is the reason for people.
    pub fn refuse(&mut self, why: Refusal, text: &str) {
        self.reply(why.reply_type(), &[text.as_bytes()]);
    }

    /// Appends one export of a list.
    pub fn server(&mut self, name: &str, description: &str) {
        let len = (name.len() as u32).to_be_bytes();
        self.reply(REP_SERVER, &[&len, name.as_bytes(), description.as_bytes()]);
    }

    /// Appends one metadata context; `id` is 0 in a list.
    pub fn context(&mut self, id: u32, name: &str) {
        self.reply(REP_META_CONTEXT, &[&id.to_be_bytes(), name.as_bytes()]);
    }

    /// Appends the requested items about `export`; an acknowledgement must follow.
    pub fn info(&mut self, export: &ExportInfo, style: ReplyStyle, requests: InfoRequests) {
        let flags = export.transmission_flags(style).to_be_bytes();
        self.info_item(INFO_EXPORT, &[&export.size.to_be_bytes(), &flags]);
        if requests.name {
            self.info_item(INFO_NAME, &[export.name.as_bytes()]);
        }
        if requests.description {
            self.info_item(INFO_DESCRIPTION, &[export.description.as_bytes()]);
        }
        if requests.block_size {
            let BlockSizes { minimum, preferred, maximum } = BlockSizes::SERVER;
            let sizes = [minimum, preferred, maximum].map(u32::to_be_bytes);
            self.info_item(INFO_BLOCK_SIZE, &[sizes.as_flattened()]);
        }
    }

    fn info_item(&mut self, item: u16, data: &[&[u8]]) {
        let mut parts: Vec<&[u8]> = Vec::with_capacity(1 + data.len());
        let item = item.to_be_bytes();
        parts.push(&item);
        parts.extend_from_slice(data);
        self.reply(REP_INFO, &parts);
    }

    fn reply(&mut self, kind: u32, data: &[&[u8]]) {
        let len: usize = data.iter().map(|part| part.len()).sum();
        self.out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&self.option.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&(len as u32).to_be_bytes());
        data.iter().for_each(|part| self.out.extend_from_slice(part));
    }
}

/// Encodes the answer to EXPORT_NAME, with 124 zeroes unless the client omits them.
pub fn encode_export_name_reply(export: &ExportInfo, style: ReplyStyle, no_zeroes: bool, out: &mut Vec<u8>) {
    out.extend_from_slice(&export.size.to_be_bytes());
    out.extend_from_slice(&export.transmission_flags(style).to_be_bytes());
    if !no_zeroes {
        out.extend_from_slice(&[0; 124]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export() -> ExportInfo {
        ExportInfo { name: "vm".into(), description: "d".into(), size: 0x0102_0304, read_only: false, multi_conn: true }
    }

    fn golden(encode: impl FnOnce(&mut OptionReplies<'_>)) -> Vec<u8> {
        let mut out = Vec::new();
        encode(&mut OptionReplies::new(7, &mut out));
        out
    }

    const MAGIC: [u8; 8] = [0, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9];

    #[test]
    fn golden_ack() {
        let expected = [&MAGIC[..], &[0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0]].concat();
        assert_eq!(golden(|r| r.ack()), expected);
    }

    #[test]
    fn golden_refusals() {
        let numbers = [
            (Refusal::Unsupported, 1),
            (Refusal::Policy, 2),
            (Refusal::Invalid, 3),
            (Refusal::TlsRequired, 5),
            (Refusal::Unknown, 6),
            (Refusal::Shutdown, 7),
            (Refusal::TooBig, 9),
            (Refusal::Extended, 10),
        ];
        for (why, number) in numbers {
            let tail = [0, 0, 0, 7, 0x80, 0, 0, number, 0, 0, 0, 2, b'n', b'o'];
            assert_eq!(golden(|r| r.refuse(why, "no")), [&MAGIC[..], &tail].concat());
        }
    }

    #[test]
    fn golden_list_entry() {
        let tail = [0, 0, 0, 7, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 2, b'v', b'm', b'd'];
        assert_eq!(golden(|r| r.server("vm", "d")), [&MAGIC[..], &tail].concat());
    }

    #[test]
    fn golden_context() {
        let tail = [0, 0, 0, 7, 0, 0, 0, 4, 0, 0, 0, 7, 0, 0, 0, 2, b'a', b':', b'b'];
        assert_eq!(golden(|r| r.context(2, "a:b")), [&MAGIC[..], &tail].concat());
    }

    #[test]
    fn golden_info() {
        let all = InfoRequests { name: true, description: true, block_size: true };
        let head = |len: u8| [&MAGIC[..], &[0, 0, 0, 7, 0, 0, 0, 3, 0, 0, 0, len]].concat();
        let expected = [
            &head(12)[..],
            &[0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0x0d, 0x6d],
            &head(4),
            &[0, 1, b'v', b'm'],
            &head(3),
            &[0, 2, b'd'],
            &head(14),
            &[0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0],
        ]
        .concat();
        assert_eq!(golden(|r| r.info(&export(), ReplyStyle::Simple, all)), expected);
        let least = golden(|r| r.info(&export(), ReplyStyle::Simple, InfoRequests::default()));
        assert_eq!(least, expected[..32], "what was not asked for is not sent");
    }

    #[test]
    fn golden_export_name_reply() {
        let mut out = Vec::new();
        encode_export_name_reply(&export(), ReplyStyle::Simple, true, &mut out);
        assert_eq!(out, [0, 0, 0, 0, 1, 2, 3, 4, 0x0d, 0x6d]);
        encode_export_name_reply(&export(), ReplyStyle::Simple, false, &mut out);
        assert_eq!(out.len(), 10 + 10 + 124);
        assert!(out[20..].iter().all(|&b| b == 0));
    }

    #[test]
    fn info_data_is_decoded() {
        let data = [0, 0, 0, 2, b'v', b'm', 0, 3, 0, 3, 0, 0, 0x12, 0x34];
        let requests = InfoRequests { block_size: true, ..InfoRequests::default() };
        assert_eq!(decode_info(&data), Ok(("vm".to_owned(), requests)));
    }

    #[test]
    fn info_data_that_contradicts_itself_is_invalid() {
        let cases: [&[u8]; 6] = [
            &[],
            &[0, 0, 0],
            &[0, 0, 0, 9, b'v', b'm', 0, 0],
            &[0, 0, 0, 2, b'v', b'm', 0],
            &[0, 0, 0, 2, b'v', b'm', 0, 1, 0],
            &[0, 0, 0, 2, b'v', b'm', 0, 0, 0, 0],
        ];
        for data in cases {
            assert_eq!(decode_info(data), Err(Refusal::Invalid), "{data:?}");
        }
        assert_eq!(decode_info(&[0xff, 0xff, 0xff, 0xff, 0, 0]), Err(Refusal::TooBig));
        assert_eq!(decode_info(&[0, 0, 0, 1, 0xff, 0, 0]), Err(Refusal::Invalid), "not UTF-8");
    }

    #[test]
    fn queries_of_contexts_are_decoded() {
        let data = [0, 0, 0, 1, b'v', 0, 0, 0, 2, 0, 0, 0, 1, b'a', 0, 0, 0, 0];
        assert_eq!(decode_meta_context(&data), Ok(("v".to_owned(), vec!["a".to_owned(), String::new()])));
        assert_eq!(decode_meta_context(&[0; 8]), Ok((String::new(), vec![])));
        for cut in 0..data.len() {
            assert_eq!(decode_meta_context(&data[..cut]), Err(Refusal::Invalid), "{cut} bytes");
        }
        assert_eq!(decode_meta_context(&[&data[..], b"x"].concat()), Err(Refusal::Invalid), "more than it says");
        let many = [&[0; 4][..], &u32::MAX.to_be_bytes(), &data].concat();
        assert_eq!(decode_meta_context(&many), Err(Refusal::TooBig), "before anything is allocated");
    }
}
