//! Bytes taken for a script, so that most of what a fuzzer makes up is a client's sensible doing.
//! When the bytes are used up, zeroes follow.

use forkdisk_nbd::codec::*;
use forkdisk_nbd::server::ALLOCATION;

use super::disk;
use super::session::{Ask, Session};

pub struct Script<'a> {
    rest: &'a [u8],
    /// Requests so far.
    count: u64,
}

/// Requests that are sent without waiting for replies between them, and what follows them.
#[derive(Default)]
pub struct Batch {
    pub asks: Vec<Ask>,
    pub then: Then,
}

#[derive(Default)]
pub enum Then {
    /// The next batch.
    #[default]
    Next,
    /// The export gets another size.
    Resize(u64),
    /// The client sends this and nothing more; it has no answer, and the connection ends.
    End(Vec<u8>),
}

fn push_text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u32).to_be_bytes());
    out.extend(text);
}

/// An option with its data.
pub fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut out = IHAVEOPT.to_be_bytes().to_vec();
    out.extend(number.to_be_bytes());
    push_text(&mut out, data);
    out
}

/// Data of INFO and GO.
pub fn info(name: &[u8], items: &[u16]) -> Vec<u8> {
    let mut out = Vec::new();
    push_text(&mut out, name);
    out.extend((items.len() as u16).to_be_bytes());
    items.iter().for_each(|item| out.extend(item.to_be_bytes()));
    out
}

/// Data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub fn queries(name: &[u8], queries: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    push_text(&mut out, name);
    out.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| push_text(&mut out, query.as_bytes()));
    out
}

impl Ask {
    pub fn encode(&self, style: ReplyStyle) -> Vec<u8> {
        let is_extended = style == ReplyStyle::Extended;
        let magic = if is_extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut out = magic.to_be_bytes().to_vec();
        out.extend(self.flags.to_be_bytes());
        out.extend(self.command.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        out.extend(self.offset.to_be_bytes());
        let length = self.length.to_be_bytes();
        out.extend(&length[if is_extended { 0 } else { 4 }..]);
        out.extend(&self.payload);
        out
    }
}

impl<'a> Script<'a> {
    pub fn new(input: &'a [u8]) -> Script<'a> {
        Script { rest: input, count: 0 }
    }

    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub fn is_over(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        *first
    }

    fn number(&mut self, bytes: usize) -> u64 {
        (0..bytes).fold(0, |n, _| n << 8 | u64::from(self.byte()))
    }

    fn name(&mut self) -> Vec<u8> {
        match self.byte() % 8 {
            0..=2 => disk::WRITABLE.into(),
            3 | 4 => disk::READ_ONLY.into(),
            5 => self.number(1).to_string().into(),
            6 => vec![b'n'; MAX_NAME + 1 - usize::from(self.byte() & 1)],
            _ => vec![0xc3; usize::from(self.byte() % 3)],
        }
    }

    /// What a client sends to negotiate, from its flags to a request of each kind.
    pub fn options(&mut self) -> Vec<u8> {
        let mut out = (u32::from(self.byte()) % 5).to_be_bytes().to_vec();
        let mut style = ReplyStyle::Simple;
        while !self.is_over() {
            let kind = self.byte();
            let (number, mut data) = match kind & 15 {
                0 | 1 => (OPT_STRUCTURED_REPLY, vec![]),
                2 => (OPT_EXTENDED_HEADERS, vec![]),
                3 => (OPT_LIST, vec![]),
                4 | 5 => (OPT_INFO, self.info()),
                6 => (OPT_GO, self.info()),
                7 | 8 => (OPT_LIST_META_CONTEXT, self.queries()),
                9..=11 => (OPT_SET_META_CONTEXT, self.queries()),
                12 => (OPT_EXPORT_NAME, self.name()),
                13 => (OPT_ABORT, vec![]),
                14 => (self.number(1) as u32, vec![7; self.number(1) as usize]),
                _ => (self.number(4) as u32, vec![7; self.number(2) as usize]),
            };
            match kind >> 4 {
                15 => drop(data.pop()),
                14 => data.push(self.byte()),
                13 => {
                    let at = usize::from(self.byte());
                    let value = self.byte();
                    data.get_mut(at).into_iter().for_each(|byte| *byte = value);
                }
                _ => {}
            }
            match number {
                OPT_STRUCTURED_REPLY if style == ReplyStyle::Simple => style = ReplyStyle::Structured,
                OPT_EXTENDED_HEADERS => style = ReplyStyle::Extended,
                _ => {}
            }
            out.extend(option(number, &data));
            if matches!(number, OPT_GO | OPT_EXPORT_NAME) {
                (0..8).for_each(|command| {
                    let length = if command == CMD_FLUSH { 0 } else { 600 };
                    let ask = self.ask(style, command, 0, 0, length);
                    out.extend(ask.encode(style));
                });
            }
        }
        out
    }

    fn info(&mut self) -> Vec<u8> {
        let name = self.name();
        let items: Vec<u16> = (0..self.byte() % 6).map(|_| self.byte().into()).collect();
        info(&name, &items)
    }

    fn queries(&mut self) -> Vec<u8> {
        let name = self.name();
        let known = [ALLOCATION, disk::STRIPES, "base:", "fuzz:", "qemu:", "", "base:allocation:", ":"];
        let count = self.byte();
        let count = if count < 250 { count % 6 } else { count - 124 };
        let list: Vec<&str> = (0..count).map(|_| known[usize::from(self.byte()) % known.len()]).collect();
        queries(&name, &list)
    }

    /// A request with the payload it has to have.
    fn ask(&mut self, style: ReplyStyle, command: u16, flags: u16, offset: u64, length: u64) -> Ask {
        self.count += 1;
        let seed = self.count * 37;
        let is_write = command == CMD_WRITE && style == ReplyStyle::Extended;
        let flags = if is_write { flags ^ CMD_FLAG_PAYLOAD_LEN } else { flags };
        let payload = Session::payload(style, command, flags, length).min(MAX_DRAIN + 1);
        let payload = if payload > MAX_DRAIN { vec![] } else { (0..payload).map(|i| (seed + i / 64) as u8).collect() };
        Ask { command, flags, cookie: self.count << 32 | seed, offset, length, payload }
    }

    /// The next requests.
    pub fn batch(&mut self, style: ReplyStyle) -> Batch {
        let mut batch = Batch::default();
        while !self.is_over() {
            let kind = self.byte();
            let (command, flags) = match kind & 15 {
                0 => (CMD_READ, 0),
                1 | 15 => (CMD_WRITE, 0),
                2 => (CMD_WRITE_ZEROES, 0),
                3 => (CMD_TRIM, 0),
                4 => (CMD_FLUSH, 0),
                5 => (CMD_CACHE, 0),
                6 => (CMD_BLOCK_STATUS, 0),
                7 => (CMD_READ, CMD_FLAG_DF),
                8 => (CMD_WRITE, CMD_FLAG_FUA),
                9 => (self.number(2) as u16, 0),
                10 => (CMD_BLOCK_STATUS, CMD_FLAG_REQ_ONE),
                11 => (CMD_WRITE_ZEROES, CMD_FLAG_FAST_ZERO),
                12 => {
                    let huge = self.huge(style);
                    if !self.is_followable(&huge) {
                        return Batch { then: Then::End(huge.encode(style)), ..batch };
                    }
                    batch.asks.push(huge);
                    continue;
                }
                13 => {
                    let size = self.number(2) % (disk::SIZE + 1);
                    return Batch { then: Then::Resize(size), ..batch };
                }
                _ => return Batch { then: Then::End(self.end(style)), ..batch },
            };
            let flags = if kind & 0x40 != 0 { self.number(2) as u16 } else { flags };
            let offset = self.number(if kind & 0x20 != 0 { 8 } else { 2 });
            let length = if kind & 0x10 != 0 { self.number(2) } else { self.number(1) * 5 };
            let is_plain_flush = command == CMD_FLUSH && length & 7 != 7;
            let (offset, length) = if is_plain_flush { (0, 0) } else { (offset, length) };
            let ask = self.ask(style, command, flags, offset, length);
            if !self.is_followable(&ask) {
                return Batch { then: Then::End(ask.encode(style)), ..batch };
            }
            batch.asks.push(ask);
            if kind & 0x80 != 0 {
                break;
            }
        }
        batch
    }

    /// A request with a length that no disk here has.
    fn huge(&mut self, style: ReplyStyle) -> Ask {
        let command = u16::from(self.byte() % 9);
        let most = if style == ReplyStyle::Extended { u64::MAX } else { u32::MAX.into() };
        let length = most - self.number(2);
        let offset = self.number(2);
        self.ask(style, command, 0, offset, length)
    }

    /// Whether the server can go on behind a request.
    fn is_followable(&self, ask: &Ask) -> bool {
        ask.command != CMD_DISC && (ask.command != CMD_WRITE || ask.length <= MAX_DRAIN)
    }

    fn end(&mut self, style: ReplyStyle) -> Vec<u8> {
        let length = self.number(1) + 1;
        match self.byte() % 4 {
            0 => self.ask(style, CMD_DISC, 0, 0, 0).encode(style),
            1 => vec![7; length as usize],
            2 => {
                let mut cut = self.ask(style, CMD_WRITE, 0, 0, length).encode(style);
                cut.truncate(cut.len() - length as usize / 3 - 1);
                cut
            }
            _ => vec![],
        }
    }
}
