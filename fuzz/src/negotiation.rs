//! The model of the handshake: reads what the client sent and checks what came back for it.

use forkdisk_nbd::codec::*;
use forkdisk_nbd::server::ALLOCATION;

use super::contents::Contents;
use super::disk;
use super::session::Session;
use super::wire::{Wire, number};

const UNSUPPORTED: u32 = REP_ERROR + 1;
const BY_POLICY: u32 = REP_ERROR + 2;
const INVALID: u32 = REP_ERROR + 3;
const UNKNOWN: u32 = REP_ERROR + 6;
const TOO_BIG: u32 = REP_ERROR + 9;
const EXTENDED: u32 = REP_ERROR + 10;
const CONTEXTS: [&str; 2] = [ALLOCATION, disk::STRIPES];

/// What came for an option before its last reply: types and data.
type Replies = Vec<(u64, Vec<u8>)>;

/// The last reply to an option, and what is to be done about it.
enum Outcome {
    Success,
    Refused(&'static [u32]),
}

struct Negotiation<'a> {
    wire: &'a mut Wire,
    style: ReplyStyle,
    no_zeroes: bool,
    /// Contexts as (number, name), and the export that they were chosen for.
    contexts: Option<(String, Vec<(u32, String)>)>,
}

/// The front `n` bytes of what is left.
fn cut<'a>(rest: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (front, behind) = rest.split_at_checked(n)?;
    *rest = behind;
    Some(front)
}

fn cut_number(rest: &mut &[u8], n: usize) -> Option<u64> {
    cut(rest, n).map(number)
}

fn text(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    (bytes.len() <= MAX_NAME && !text.contains('\0')).then(|| text.to_owned())
}

fn cut_text(rest: &mut &[u8]) -> Option<String> {
    let len = cut_number(rest, 4)? as usize;
    text(cut(rest, len)?)
}

fn is_export(name: &str) -> bool {
    name == disk::WRITABLE || name == disk::READ_ONLY
}

/// Follows what a client sent from its flags on. The session and the bytes that belong to it, or
/// `None` when the connection must have ended, which it must have then.
pub async fn negotiate<'a>(input: &'a [u8], wire: &mut Wire) -> Option<(Session, &'a [u8])> {
    let mut rest = input;
    let mut greeting = NBDMAGIC.to_be_bytes().to_vec();
    greeting.extend(IHAVEOPT.to_be_bytes());
    greeting.extend([0, 3]);
    assert_eq!(wire.take(18).await, greeting);
    let flags = cut_number(&mut rest, 4)?;
    if flags & !3 != 0 {
        return None;
    }
    let no_zeroes = flags & 2 != 0;
    let mut negotiation = Negotiation { wire, style: ReplyStyle::Simple, no_zeroes, contexts: None };
    loop {
        if cut_number(&mut rest, 8)? != IHAVEOPT {
            return None;
        }
        let option = cut_number(&mut rest, 4)? as u32;
        let len = cut_number(&mut rest, 4)? as usize;
        if option == OPT_EXPORT_NAME && len > MAX_NAME {
            return None;
        }
        let data = cut(&mut rest, len)?;
        if option == OPT_EXPORT_NAME {
            let name = text(data).filter(|name| is_export(name))?;
            return Some((negotiation.enter_old(name).await, rest));
        }
        if let Some(session) = negotiation.option(option, data).await {
            return Some((session, rest));
        }
        if option == OPT_ABORT {
            return None;
        }
    }
}

impl Negotiation<'_> {
    /// One option other than EXPORT_NAME; the session when it leads there.
    async fn option(&mut self, option: u32, data: &[u8]) -> Option<Session> {
        let takes_data = matches!(option, OPT_INFO | OPT_GO | OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT);
        let replies = match option {
            OPT_ABORT => self.replies(option, Outcome::Success).await,
            OPT_LIST | OPT_STARTTLS | OPT_STRUCTURED_REPLY | OPT_EXTENDED_HEADERS if !data.is_empty() => {
                self.replies(option, Outcome::Refused(&[INVALID])).await
            }
            // This server has no certificate.
            OPT_STARTTLS => self.replies(option, Outcome::Refused(&[BY_POLICY])).await,
            OPT_LIST => {
                let replies = self.replies(option, Outcome::Success).await;
                let mut names: Vec<String> = replies.iter().map(|(kind, data)| server_name(*kind, data)).collect();
                names.sort();
                assert_eq!(names, [disk::WRITABLE, disk::READ_ONLY]);
                return None;
            }
            OPT_STRUCTURED_REPLY | OPT_EXTENDED_HEADERS => self.upgrade(option).await,
            _ if takes_data && data.len() > MAX_OPTION_DATA => self.replies(option, Outcome::Refused(&[TOO_BIG])).await,
            OPT_INFO | OPT_GO => return self.info(option, data).await,
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => return self.meta(option, data).await,
            _ => self.replies(option, Outcome::Refused(&[UNSUPPORTED])).await,
        };
        assert!(replies.is_empty(), "option {option} had replies that mean nothing: {replies:02x?}");
        None
    }

    /// All replies to an option but the last, which must be as `due`.
    async fn replies(&mut self, option: u32, due: Outcome) -> Replies {
        let mut replies = Replies::new();
        loop {
            assert_eq!(self.wire.number(8).await, OPTION_REPLY_MAGIC);
            assert_eq!(self.wire.number(4).await, u64::from(option), "a reply to another option");
            let kind = self.wire.number(4).await as u32;
            let len = self.wire.number(4).await as usize;
            assert!(len <= 2 * MAX_NAME, "a reply of {len} bytes");
            let data = self.wire.take(len).await;
            match (&due, kind) {
                (Outcome::Success, REP_ACK) => assert!(data.is_empty(), "data with an acknowledgement"),
                (Outcome::Refused(codes), _) => {
                    assert!(codes.contains(&kind), "option {option}: {kind:#x} where one of {codes:x?} was due");
                    std::str::from_utf8(&data).expect("a refusal says why in text");
                }
                _ => {
                    assert!(kind & REP_ERROR == 0, "option {option} was refused with {kind:#x}");
                    replies.push((kind.into(), data));
                    continue;
                }
            }
            return replies;
        }
    }

    async fn upgrade(&mut self, option: u32) -> Replies {
        let due = match (option, self.style) {
            (OPT_STRUCTURED_REPLY, ReplyStyle::Extended) => Outcome::Refused(&[EXTENDED, INVALID]),
            (OPT_STRUCTURED_REPLY, ReplyStyle::Structured) | (OPT_EXTENDED_HEADERS, ReplyStyle::Extended) => {
                Outcome::Refused(&[INVALID])
            }
            (OPT_STRUCTURED_REPLY, _) => {
                self.style = ReplyStyle::Structured;
                Outcome::Success
            }
            _ => {
                self.style = ReplyStyle::Extended;
                Outcome::Success
            }
        };
        self.replies(option, due).await
    }

    async fn info(&mut self, option: u32, mut data: &[u8]) -> Option<Session> {
        let parsed = (|| {
            let name = cut_text(&mut data)?;
            let count = cut_number(&mut data, 2)? as usize;
            let items: Vec<u64> = data.chunks(2).map(number).collect();
            (data.len() == 2 * count).then_some((name, items))
        })();
        let Some((name, items)) = parsed else {
            self.replies(option, Outcome::Refused(&[INVALID, TOO_BIG])).await;
            return None;
        };
        if !is_export(&name) {
            self.replies(option, Outcome::Refused(&[UNKNOWN])).await;
            return None;
        }
        let replies = self.replies(option, Outcome::Success).await;
        let mut told = Vec::new();
        for (kind, data) in &replies {
            assert_eq!(*kind, u64::from(REP_INFO));
            let (item, value) = (number(&data[..2]), &data[2..]);
            match item as u16 {
                INFO_EXPORT => self.check_export(&name, value),
                INFO_NAME => assert_eq!(value, name.as_bytes()),
                INFO_BLOCK_SIZE => assert_eq!(number(&value[8..]), u64::from(MAX_PAYLOAD)),
                _ => {}
            }
            told.push(item);
        }
        for item in [INFO_EXPORT, INFO_NAME, INFO_DESCRIPTION, INFO_BLOCK_SIZE].map(u64::from) {
            let asked = item == u64::from(INFO_EXPORT) || items.contains(&item);
            let times = told.iter().filter(|&&told| told == item).count();
            assert_eq!(times, usize::from(asked), "information {item}");
        }
        (option == OPT_GO).then(|| self.enter(name))
    }

    async fn meta(&mut self, option: u32, mut data: &[u8]) -> Option<Session> {
        let is_set = option == OPT_SET_META_CONTEXT;
        let parsed = (|| {
            let name = cut_text(&mut data)?;
            let count = cut_number(&mut data, 4)? as usize;
            let queries: Option<Vec<String>> = (0..count.min(MAX_QUERIES + 1)).map(|_| cut_text(&mut data)).collect();
            (count <= MAX_QUERIES && data.is_empty()).then_some((name, queries?))
        })();
        let Some((name, queries)) = parsed else {
            self.replies(option, Outcome::Refused(&[INVALID, TOO_BIG])).await;
            return None;
        };
        if is_set {
            self.contexts = None;
        }
        if self.style == ReplyStyle::Simple {
            self.replies(option, Outcome::Refused(&[INVALID])).await;
            return None;
        }
        if !is_export(&name) {
            self.replies(option, Outcome::Refused(&[UNKNOWN])).await;
            return None;
        }
        let replies = self.replies(option, Outcome::Success).await;
        let mut came = Vec::new();
        for (kind, data) in replies {
            assert_eq!(kind, u64::from(REP_META_CONTEXT));
            came.push((number(&data[..4]) as u32, text(&data[4..]).expect("a name is text")));
        }
        let is_asked = |context: &&str| {
            let begins = |q: &String| !is_set && q.ends_with(':') && context.starts_with(q.as_str());
            !is_set && queries.is_empty() || queries.iter().any(|q| q == context || begins(q))
        };
        let due: Vec<&str> = CONTEXTS.into_iter().filter(is_asked).collect();
        let mut names: Vec<&str> = came.iter().map(|(_, name)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, due, "contexts for {queries:?}");
        if is_set {
            came.sort_unstable();
            assert!(came.windows(2).all(|pair| pair[0].0 < pair[1].0), "numbers of contexts: {came:?}");
            self.contexts = Some((name, came));
        }
        None
    }

    async fn enter_old(mut self, name: String) -> Session {
        let value = self.wire.take(10).await;
        self.check_export(&name, &value);
        if !self.no_zeroes {
            assert_eq!(self.wire.take(124).await, [0; 124]);
        }
        self.enter(name)
    }

    /// Size and transmission flags.
    fn check_export(&self, name: &str, value: &[u8]) {
        let flags = number(&value[8..]) as u16;
        let has = |flag| flags & flag != 0;
        let is_writable = name == disk::WRITABLE;
        assert_eq!(number(&value[..8]), disk::SIZE);
        assert!(has(FLAG_HAS_FLAGS) && has(FLAG_SEND_FLUSH) && has(FLAG_CAN_MULTI_CONN));
        assert_eq!(has(FLAG_READ_ONLY), !is_writable);
        assert_eq!([has(FLAG_SEND_TRIM), has(FLAG_SEND_WRITE_ZEROES)], [is_writable; 2]);
        assert_eq!(has(FLAG_SEND_DF), self.style != ReplyStyle::Simple);
    }

    fn enter(&mut self, name: String) -> Session {
        let contexts = self.contexts.take().filter(|(of, _)| *of == name);
        Session {
            style: self.style,
            is_writable: name == disk::WRITABLE,
            size: disk::SIZE,
            bad: None,
            contexts: contexts.map_or_else(Vec::new, |(_, list)| list),
            contents: Contents::zeroes(disk::SIZE as usize),
        }
    }
}

fn server_name(kind: u64, mut data: &[u8]) -> String {
    assert_eq!(kind, u64::from(REP_SERVER));
    cut_text(&mut data).expect("the name of an export")
}
