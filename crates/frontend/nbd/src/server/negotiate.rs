//! The handshake of one connection: answers options until the client has chosen an export.

use std::io;

use forkdisk::ErrorKind;
use forkdisk_uring::ByteStream;

use super::export::{Export, Exports};
use super::inbox::Inbox;
use crate::codec::{
    ExportInfo, GREETING, Handshake, InfoRequests, MAX_CONTEXTS, Message, OPT_ABORT, OPT_EXTENDED_HEADERS, OPT_GO,
    OPT_INFO, OPT_LIST, OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_STRUCTURED_REPLY, OptionReplies, Refusal,
    ReplyStyle, Violation, encode_export_name_reply,
};

/// Replies to a list are sent off in parts of about this size.
const LIST_PART: usize = 64 << 10;

/// Why a negotiation ended without an export.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("the client left during the negotiation")]
    Left,
    #[error("the client asked for the export {0:?}: {1}")]
    Refused(String, forkdisk::Error),
    #[error(transparent)]
    Violation(#[from] Violation),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Ended {
    /// Whether the client just went away. Many do so without waiting for the answer to their last
    /// option.
    pub(super) fn is_a_farewell(&self) -> bool {
        match self {
            Ended::Left => true,
            Ended::Io(e) => matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset),
            Ended::Refused(..) | Ended::Violation(_) => false,
        }
    }
}

/// An export that a client has chosen, with what it was told about it.
pub(super) struct Chosen<E: Export> {
    pub(super) export: E,
    pub(super) info: ExportInfo,
    pub(super) style: ReplyStyle,
    /// Their numbers are their places, from 1 on.
    pub(super) contexts: Vec<E::Context>,
}

/// Negotiates to the point where the next byte from the client belongs to a request.
pub(super) async fn negotiate<X: Exports, S: ByteStream>(
    exports: &X,
    stream: &S,
    inbox: &mut Inbox<S>,
) -> Result<Chosen<X::Export>, Ended> {
    let style = ReplyStyle::Simple;
    let mut session = Negotiation { exports, stream, out: GREETING.to_vec(), style, contexts: None };
    session.send().await?;
    let mut handshake = Handshake::new();
    loop {
        let step = handshake.advance(inbox.bytes())?;
        inbox.consume(step.consumed);
        let Some(message) = step.message else {
            if !inbox.fill().await? {
                return Err(Ended::Left);
            }
            continue;
        };
        let chosen = session.answer(message, handshake.no_zeroes()).await;
        session.send().await?;
        if let Some(chosen) = chosen? {
            return Ok(chosen);
        }
    }
}

struct Negotiation<'a, X: Exports, S> {
    exports: &'a X,
    stream: &'a S,
    out: Vec<u8>,
    style: ReplyStyle,
    /// Chosen contexts, and the name of the export they belong to.
    contexts: Option<(String, Vec<<X::Export as Export>::Context>)>,
}

impl<X: Exports, S: ByteStream> Negotiation<'_, X, S> {
    async fn send(&mut self) -> io::Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        self.stream.send_vectored(vec![std::mem::take(&mut self.out).into()]).await.0
    }

    async fn send_part(&mut self) -> io::Result<()> {
        if self.out.len() >= LIST_PART { self.send().await } else { Ok(()) }
    }

    fn replies(&mut self, option: u32) -> OptionReplies<'_> {
        OptionReplies::new(option, &mut self.out)
    }

    fn refuse(&mut self, option: u32, why: Refusal) {
        self.replies(option).refuse(why, refusal_text(why));
    }

    /// Answers a message; the export when that was the end of the negotiation.
    async fn answer(&mut self, message: Message, no_zeroes: bool) -> Result<Option<Chosen<X::Export>>, Ended> {
        match message {
            Message::List => self.list().await?,
            Message::Abort => {
                self.replies(OPT_ABORT).ack();
                return Err(Ended::Left);
            }
            Message::Refused { option, why } => self.refuse(option, why),
            Message::StructuredReply => match self.style {
                ReplyStyle::Simple => {
                    self.style = ReplyStyle::Structured;
                    self.replies(OPT_STRUCTURED_REPLY).ack();
                }
                ReplyStyle::Structured => self.refuse(OPT_STRUCTURED_REPLY, Refusal::Invalid),
                ReplyStyle::Extended => self.refuse(OPT_STRUCTURED_REPLY, Refusal::Extended),
            },
            Message::ExtendedHeaders if self.style == ReplyStyle::Extended => {
                self.refuse(OPT_EXTENDED_HEADERS, Refusal::Invalid);
            }
            Message::ExtendedHeaders => {
                self.style = ReplyStyle::Extended;
                self.replies(OPT_EXTENDED_HEADERS).ack();
            }
            Message::MetaContext { set, export, queries } => self.meta_context(set, &export, queries).await?,
            Message::ExportName(name) => {
                let (export, info) = self.open(&name).map_err(|e| Ended::Refused(name, e))?;
                encode_export_name_reply(&info, self.style, no_zeroes, &mut self.out);
                return Ok(Some(self.enter(export, info)));
            }
            Message::Info { go, name, requests } => return Ok(self.describe(go, &name, requests)),
        }
        Ok(None)
    }

    async fn list(&mut self) -> io::Result<()> {
        for (name, description) in self.exports.list() {
            self.replies(OPT_LIST).server(&name, &description);
            self.send_part().await?;
        }
        self.replies(OPT_LIST).ack();
        Ok(())
    }

    /// Answers INFO or GO; the export when it was GO and there is one.
    fn describe(&mut self, go: bool, name: &str, requests: InfoRequests) -> Option<Chosen<X::Export>> {
        let (option, style) = (if go { OPT_GO } else { OPT_INFO }, self.style);
        let (export, info) = self.open_for(option, name)?;
        let mut replies = self.replies(option);
        replies.info(&info, style, requests);
        replies.ack();
        go.then(|| self.enter(export, info))
    }

    fn open(&self, name: &str) -> forkdisk::Result<(X::Export, ExportInfo)> {
        let export = self.exports.open(name)?;
        let info = export.info();
        Ok((export, info))
    }

    /// Opens an export, or refuses the option.
    fn open_for(&mut self, option: u32, name: &str) -> Option<(X::Export, ExportInfo)> {
        let error = match self.open(name) {
            Ok(opened) => return Some(opened),
            Err(error) => error,
        };
        let why = match error.kind() {
            ErrorKind::NotFound | ErrorKind::Invalid => Refusal::Unknown,
            _ => Refusal::Policy,
        };
        self.replies(option).refuse(why, &error.to_string());
        None
    }

    /// Contexts that were chosen for another export do not count.
    fn enter(&mut self, export: X::Export, info: ExportInfo) -> Chosen<X::Export> {
        let contexts = self.contexts.take().filter(|(name, _)| *name == info.name);
        Chosen { export, info, style: self.style, contexts: contexts.map_or_else(Vec::new, |(_, list)| list) }
    }

    /// Answers LIST_META_CONTEXT or SET_META_CONTEXT. Names that end with a colon stand for all
    /// that begin so, but for listing only.
    async fn meta_context(&mut self, set: bool, export: &str, queries: Vec<String>) -> io::Result<()> {
        let option = if set { OPT_SET_META_CONTEXT } else { OPT_LIST_META_CONTEXT };
        if set {
            self.contexts = None;
        }
        if !self.style.has_chunks() {
            self.refuse(option, Refusal::Invalid);
            return Ok(());
        }
        let Some((export, info)) = self.open_for(option, export) else {
            return Ok(());
        };
        if set {
            self.choose(&export, info.name, queries)
        } else {
            self.list_contexts(&export, &queries).await?
        }
        Ok(())
    }

    fn choose(&mut self, export: &X::Export, name: String, mut queries: Vec<String>) {
        queries.sort();
        queries.dedup();
        let found = queries.into_iter().filter_map(|query| export.context(&query).map(|context| (query, context)));
        let (names, contexts): (Vec<String>, Vec<_>) = found.take(MAX_CONTEXTS + 1).unzip();
        if contexts.len() > MAX_CONTEXTS {
            return self.refuse(OPT_SET_META_CONTEXT, Refusal::TooBig);
        }
        let mut replies = self.replies(OPT_SET_META_CONTEXT);
        names.iter().zip(1..).for_each(|(name, id)| replies.context(id, name));
        replies.ack();
        self.contexts = Some((name, contexts));
    }

    async fn list_contexts(&mut self, export: &X::Export, queries: &[String]) -> io::Result<()> {
        let asked = |name: &str| {
            let matches = |q: &String| if q.ends_with(':') { name.starts_with(q.as_str()) } else { name == q };
            queries.is_empty() || queries.iter().any(matches)
        };
        for name in export.contexts().iter().filter(|name| asked(name)) {
            self.replies(OPT_LIST_META_CONTEXT).context(0, name);
            self.send_part().await?;
        }
        self.replies(OPT_LIST_META_CONTEXT).ack();
        Ok(())
    }
}

fn refusal_text(why: Refusal) -> &'static str {
    match why {
        Refusal::Unsupported => "this server does not know the option",
        Refusal::TooBig => "too much for the option: a name has at most 4096 bytes, a session 32 contexts",
        Refusal::Extended => "extended headers were chosen already",
        _ => "the option is malformed, or not allowed in this session",
    }
}
