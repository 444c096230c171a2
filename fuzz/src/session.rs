//! The model of the transmission phase: what each request must lead to, and whether what comes
//! back is that.

use std::ops::Range;

use forkdisk_nbd::codec::*;

use super::contents::Contents;
use super::disk;
use super::wire::{Body, Piece, Wire, number};

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;

/// A request as it was sent.
#[derive(Clone, Debug)]
pub struct Ask {
    pub command: u16,
    pub flags: u16,
    pub cookie: u64,
    pub offset: u64,
    pub length: u64,
    pub payload: Vec<u8>,
}

pub struct Session {
    pub style: ReplyStyle,
    pub is_writable: bool,
    pub size: u64,
    /// Reads of it fail.
    pub bad: Option<Range<u64>>,
    /// Numbers and names of the contexts.
    pub contexts: Vec<(u32, String)>,
    pub contents: Contents,
}

#[derive(Debug)]
enum Due {
    /// One of these errors.
    Error(Vec<u32>),
    Data,
    Status,
    Done,
}

/// A request that has not been answered entirely.
struct Open<'a> {
    ask: &'a Ask,
    due: Due,
    /// Parts of a read that came, in the order in which they came.
    parts: Vec<Range<u64>>,
    /// Contexts that came.
    contexts: Vec<u32>,
}

impl Session {
    /// How many bytes of data follow a request, from its header alone.
    pub fn payload(style: ReplyStyle, command: u16, flags: u16, length: u64) -> u64 {
        let follows =
            if style == ReplyStyle::Extended { flags & CMD_FLAG_PAYLOAD_LEN != 0 } else { command == CMD_WRITE };
        if follows { length } else { 0 }
    }

    fn due(&self, ask: &Ask) -> Due {
        let has_chunks = self.style != ReplyStyle::Simple;
        let (offset, length) = (ask.offset, ask.length);
        let mut errors = Vec::new();
        let own = match ask.command {
            CMD_READ if has_chunks => CMD_FLAG_DF,
            CMD_WRITE if self.style == ReplyStyle::Extended => CMD_FLAG_PAYLOAD_LEN,
            CMD_WRITE_ZEROES => CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO,
            CMD_BLOCK_STATUS if has_chunks => CMD_FLAG_REQ_ONE,
            CMD_READ | CMD_WRITE | CMD_TRIM | CMD_CACHE | CMD_FLUSH => 0,
            _ => return Due::Error(vec![EINVAL]),
        };
        let without_data = ask.command == CMD_WRITE && ask.payload.len() as u64 != length;
        if ask.flags & !(own | CMD_FLAG_FUA) != 0 || without_data {
            errors.push(EINVAL);
        }
        if ask.command == CMD_FLUSH {
            let reserved = offset != 0 || length != 0;
            return if reserved || !errors.is_empty() { Due::Error(vec![EINVAL]) } else { Due::Done };
        }
        let changes = matches!(ask.command, CMD_WRITE | CMD_TRIM | CMD_WRITE_ZEROES);
        if changes && !self.is_writable {
            errors.push(EPERM);
        }
        match offset.checked_add(length) {
            Some(end) if end <= self.size => {}
            Some(_) if matches!(ask.command, CMD_WRITE | CMD_WRITE_ZEROES) => errors.push(ENOSPC),
            _ => errors.push(EINVAL),
        }
        if ask.command == CMD_BLOCK_STATUS && (length == 0 || self.contexts.is_empty()) {
            errors.push(EINVAL);
        }
        if !errors.is_empty() {
            return Due::Error(errors);
        }
        let meets = |bad: &Range<u64>| length > 0 && offset < bad.end && offset + length > bad.start;
        match ask.command {
            CMD_READ if self.bad.as_ref().is_some_and(meets) => Due::Error(vec![EIO]),
            CMD_READ => Due::Data,
            CMD_BLOCK_STATUS => Due::Status,
            CMD_WRITE_ZEROES if ask.flags & CMD_FLAG_FAST_ZERO != 0 && (1..disk::FAST).contains(&length) => {
                Due::Error(vec![ENOTSUP])
            }
            _ => Due::Done,
        }
    }

    /// Takes replies from `wire` until each of `asks` has one, and checks them. Cookies differ.
    pub async fn exchange(&mut self, wire: &mut Wire, asks: &[Ask]) {
        let mut open: Vec<Open<'_>> = Vec::new();
        for ask in asks {
            let due = self.due(ask);
            if matches!(due, Due::Done) {
                match ask.command {
                    CMD_WRITE => self.contents.change(ask.offset, ask.length, Some(ask.payload.clone())),
                    CMD_TRIM | CMD_WRITE_ZEROES => self.contents.change(ask.offset, ask.length, None),
                    _ => {}
                }
            }
            open.push(Open { ask, due, parts: Vec::new(), contexts: Vec::new() });
        }
        while !open.is_empty() {
            let Piece { cookie, body } = wire.piece(self.style).await;
            let place = open.iter().position(|open| open.ask.cookie == cookie);
            let place = place.unwrap_or_else(|| panic!("a reply to {cookie:#x}, which nobody asked or which had one"));
            let is_last = match body {
                Body::Simple { error } => {
                    self.simple(&open[place], error, wire).await;
                    true
                }
                Body::Chunk { flags, kind, offset, data } => {
                    let of = &mut open[place];
                    assert!(flags & !REPLY_FLAG_DONE == 0, "flags {flags:#x} of a chunk");
                    assert!(offset.is_none_or(|offset| offset == of.ask.offset), "{:?}: another offset", of.ask);
                    let is_last = flags == REPLY_FLAG_DONE;
                    if !self.chunk(of, kind, &data, is_last) && is_last {
                        self.end(of);
                    }
                    is_last
                }
            };
            if is_last {
                open.swap_remove(place);
            }
        }
    }

    async fn simple(&mut self, open: &Open<'_>, error: u32, wire: &mut Wire) {
        let Open { ask, due, .. } = open;
        let is_structured = matches!(ask.command, CMD_READ | CMD_BLOCK_STATUS) && self.style != ReplyStyle::Simple;
        assert!(!is_structured, "{ask:?}: a simple reply");
        match due {
            Due::Error(codes) => assert!(codes.contains(&error), "{ask:?}: error {error}, not {codes:?}"),
            _ => assert!(error == 0, "{ask:?}: error {error} where nothing is wrong"),
        }
        if matches!(due, Due::Data) {
            self.contents.check(ask.offset, &wire.take(ask.length as usize).await);
        }
    }

    /// Checks one chunk; whether it was an error.
    fn chunk(&mut self, open: &mut Open<'_>, kind: u16, data: &[u8], is_last: bool) -> bool {
        let Open { ask, due, parts, contexts } = open;
        let is_whole = ask.flags & CMD_FLAG_DF != 0;
        match (kind, &due) {
            (CHUNK_NONE, _) => assert!(data.is_empty() && is_last, "{ask:?}: an empty chunk that is not the end"),
            (CHUNK_OFFSET_DATA, Due::Data) => {
                assert!(data.len() > 8, "{ask:?}: a chunk of data without data");
                let (at, data) = (number(&data[..8]), &data[8..]);
                parts.push(at..at + data.len() as u64);
                assert_inside(ask, parts);
                assert!(!is_whole || data.len() as u64 == ask.length, "{ask:?}: cut");
                self.contents.check(at, data);
            }
            (CHUNK_OFFSET_HOLE, Due::Data) => {
                assert!(data.len() == 12 && !is_whole, "{ask:?}: a hole of {} bytes", data.len());
                let (at, len) = (number(&data[..8]), number(&data[8..]));
                assert!(len > 0, "{ask:?}: an empty hole");
                parts.push(at..at + len);
                assert_inside(ask, parts);
                self.contents.check(at, &vec![0; len as usize]);
            }
            (CHUNK_BLOCK_STATUS | CHUNK_BLOCK_STATUS_EXT, Due::Status) => contexts.push(self.status(ask, kind, data)),
            (CHUNK_ERROR | CHUNK_ERROR_OFFSET, Due::Error(codes)) => {
                self.error(ask, codes, kind, data);
                assert!(is_last, "{ask:?}: more is said to follow an error");
                return true;
            }
            _ => panic!("{ask:?}: a chunk of type {kind:#x} where {due:?} was due: {data:02x?}"),
        }
        false
    }

    fn error(&self, ask: &Ask, codes: &[u32], kind: u16, data: &[u8]) {
        let code = number(&data[..4]) as u32;
        assert!(codes.contains(&code), "{ask:?}: error {code}, not {codes:?}");
        let len = number(&data[4..6]) as usize;
        std::str::from_utf8(&data[6..6 + len]).expect("an error says so in text");
        match &data[6 + len..] {
            [] => assert_eq!(kind, CHUNK_ERROR),
            at => {
                assert!(kind == CHUNK_ERROR_OFFSET && at.len() == 8, "{ask:?}: {} bytes behind a text", at.len());
                let at = number(at);
                let inside = at >= ask.offset && at - ask.offset < ask.length;
                assert!(inside, "{ask:?}: an error at {at}");
                let first = self.bad.as_ref().map_or(ask.offset, |bad| bad.start.max(ask.offset));
                assert!(code != EIO || at == first, "{ask:?}: an error at {at}, not at {first}");
            }
        }
    }

    fn status(&mut self, ask: &Ask, kind: u16, data: &[u8]) -> u32 {
        let is_extended = self.style == ReplyStyle::Extended;
        assert_eq!(kind == CHUNK_BLOCK_STATUS_EXT, is_extended, "{ask:?}: the other kind of status");
        let id = number(&data[..4]) as u32;
        let (list, width) = if is_extended { (&data[8..], 16) } else { (&data[4..], 8) };
        let known = self.contexts.iter().find(|(known, _)| *known == id);
        let (_, name) = known.unwrap_or_else(|| panic!("{ask:?}: no context has the number {id}"));
        let is_stripes = name == disk::STRIPES;
        let count = list.len() / width;
        assert!(count > 0 && list.len() == count * width, "{ask:?}: {} bytes of extents", list.len());
        assert!(!is_extended || number(&data[4..8]) == count as u64, "{ask:?}: a wrong count");
        assert!(ask.flags & CMD_FLAG_REQ_ONE == 0 || count == 1, "{ask:?}: {count} extents");
        let (mut at, mut before) = (ask.offset, None);
        for extent in list.chunks_exact(width) {
            let (len, flags) = (number(&extent[..width / 2]), number(&extent[width / 2..]));
            assert!(len > 0 && at + len <= ask.offset + ask.length, "{ask:?}: {len} bytes at {at}");
            assert!(before.replace(flags) != Some(flags), "{ask:?}: extents at {at} that are one");
            if is_stripes {
                let end = at / disk::STRIPE * disk::STRIPE + disk::STRIPE;
                let end = end.min(ask.offset + ask.length);
                assert!(at + len == end && flags == at / disk::STRIPE % 2, "{ask:?}: {len} bytes of {flags} at {at}");
            } else if flags == u64::from(STATE_HOLE | STATE_ZERO) {
                self.contents.check(at, &vec![0; len as usize]);
            } else {
                assert_eq!(flags, 0, "{ask:?}: flags at {at}");
            }
            at += len;
        }
        id
    }

    /// The last chunk came, and none was an error.
    fn end(&self, open: &mut Open<'_>) {
        let Open { ask, due, parts, contexts } = open;
        match due {
            Due::Done => {}
            Due::Error(codes) => panic!("{ask:?}: a success where one of {codes:?} was due"),
            Due::Data => {
                let came: u64 = parts.iter().map(|part| part.end - part.start).sum();
                assert_eq!(came, ask.length, "{ask:?}: not all of it came");
            }
            Due::Status => {
                contexts.sort_unstable();
                let all: Vec<u32> = self.contexts.iter().map(|(id, _)| *id).collect();
                assert_eq!(*contexts, all, "{ask:?}: contexts that came");
            }
        }
    }
}

/// The last of `parts` lies inside the request's range and meets no other.
fn assert_inside(ask: &Ask, parts: &[Range<u64>]) {
    let [before @ .., last] = parts else { return };
    let inside = last.start >= ask.offset && last.end <= ask.offset + ask.length;
    let meets = before.iter().any(|part| part.start < last.end && last.start < part.end);
    assert!(inside && !meets, "{ask:?}: {last:?} after {before:?}");
}
