//! The handshake of one connection: answers options until the client has chosen an export.
//!
//! It starts unencrypted. STARTTLS ends that part: what the client has sent after it is
//! dropped, everything negotiated before is void, and options are answered anew under TLS.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkdisk::{Error, ErrorKind};
use forkdisk_uring::{ByteStream, Rt, is_interrupted};

use super::contexts::CHANGED;
use super::export::{Export, Exports};
use super::fair::Fair;
use super::inbox::Inbox;
use super::pacing::Pacing;
use super::passed::Agreed;
use crate::codec::{
    ExportInfo, GREETING, Handshake, InfoRequests, MAX_CONTEXTS, Message, OPT_ABORT, OPT_EXTENDED_HEADERS, OPT_GO,
    OPT_INFO, OPT_LIST, OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY, OptionReplies,
    Refusal, ReplyStyle, Violation, encode_export_name_reply,
};
use crate::tls::{Grants, Permission, Tls, TlsStream};

/// Approximate size of the parts in which replies to a list are sent.
const LIST_PART_BYTES: usize = 64 << 10;
/// Names of a list that are processed before other tasks run.
const LIST_PIECE_COUNT: usize = 128;

/// Why a negotiation ended without an export.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("the client disconnected during the negotiation")]
    Left,
    #[error("the client requested the export {0:?}: {1}")]
    Refused(String, forkdisk::Error),
    #[error("the client chose an export without TLS, which is required here")]
    NotEncrypted,
    #[error("TLS could not be agreed upon: {0}")]
    Tls(io::Error),
    #[error(transparent)]
    Violation(#[from] Violation),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Ended {
    /// Returns whether the client disconnected normally. Many clients do so without waiting for the
    /// answer to their last option.
    pub(super) fn is_a_farewell(&self) -> bool {
        match self {
            Ended::Left => true,
            Ended::Io(e) => matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset),
            Ended::Refused(..) | Ended::Violation(_) | Ended::NotEncrypted | Ended::Tls(_) => false,
        }
    }
}

/// An export that a client has chosen, with the properties reported to it.
pub(super) struct Chosen<E: Export> {
    pub(super) export: E,
    pub(super) info: ExportInfo,
    pub(super) style: ReplyStyle,
    /// Chosen contexts; their numbers are their positions, from 1 on.
    pub(super) contexts: Vec<E::Context>,
    pub(super) context_names: Vec<String>,
}

/// Protection of a listener's clients.
#[derive(Clone, Default)]
pub enum Security {
    /// No encryption; every client may open every export.
    #[default]
    Clear,
    /// Clients may start TLS. Those that do not may open every export.
    Offered(Tls),
    /// No export is listed or opened before TLS has been started.
    Required(Tls),
    /// No encryption; every client may open this one export, which is also the default export. The
    /// others appear not to exist.
    Only(Arc<str>),
}

impl Security {
    /// Returns the only export that a client may open.
    pub(super) fn only(&self) -> Option<String> {
        match self {
            Security::Only(name) => Some(name.to_string()),
            _ => None,
        }
    }

    /// Returns the configuration of TLS, if clients can start it.
    pub(super) fn tls(&self) -> Option<&Tls> {
        match self {
            Security::Offered(tls) | Security::Required(tls) => Some(tls),
            Security::Clear | Security::Only(_) => None,
        }
    }
}

/// Limits of a negotiation, and the properties it reports.
#[derive(Clone, Copy)]
pub(super) struct Terms<'a> {
    pub(super) rt: &'a Rt,
    /// How long a client may take for its next option, and to accept a part of an answer.
    pub(super) patience: Duration,
    /// Whether a client may open several connections to an export.
    pub(super) multi_conn: bool,
    /// Called once, with the name of the export that the client is about to open.
    pub(super) admits: &'a dyn Fn(&str) -> bool,
    /// Whether the connection goes to another process.
    pub(super) is_leaving: &'a dyn Fn() -> bool,
    /// Limits the CPU time of all handshakes.
    pub(super) pacing: &'a Pacing,
    /// Counts requests of clients that have chosen an export.
    pub(super) fair: &'a Fair,
}

impl Terms<'_> {
    /// Records the time since `began` for an option, or for a part of a long reply.
    fn answered(&self, began: Instant) {
        self.pacing.answered(Instant::now(), began.elapsed(), self.fair.begun());
    }
}

/// A client that has chosen an export, with its stream.
pub(super) enum Entered<S, E: Export> {
    Clear(Inbox<S>, Chosen<E>),
    Encrypted(Inbox<TlsStream<S>>, Chosen<E>),
    /// It leaves: the bytes that were received and not used, and what was agreed upon.
    Leaving(Vec<u8>, Agreed),
    /// The same under TLS.
    LeavingEncrypted(TlsStream<S>, Vec<u8>, Agreed),
}

/// Greets a client and negotiates until its next byte belongs to a request. Fails with `TimedOut`
/// if the client takes too long. `agreed`: it was greeted by another process.
pub(super) async fn enter<X: Exports, S: ByteStream>(
    exports: &X,
    mut inbox: Inbox<S>,
    security: &Security,
    agreed: Option<Agreed>,
    terms: Terms<'_>,
) -> Result<Entered<S, X::Export>, Ended> {
    let stream = inbox.stream().clone();
    let mut handshake = agreed.as_ref().map_or_else(Handshake::new, |agreed| agreed.handshake.clone());
    let mut clear = Negotiation::new(exports, &stream, Policy::Clear(security), terms);
    match agreed {
        Some(agreed) => clear.resume(agreed)?,
        None => clear.out.extend_from_slice(&GREETING),
    }
    clear.send().await?;
    let tls = match clear.run(&mut handshake, &mut inbox).await? {
        Next::Transmission(chosen) => return Ok(Entered::Clear(inbox, chosen)),
        Next::StartTls(tls) => tls,
        Next::Leaving(agreed) => return Ok(Entered::Leaving(inbox.take_rest(), agreed)),
    };
    // Drops the inbox with everything received after STARTTLS, and all that was negotiated.
    drop((clear, inbox));
    let accepted = terms.rt.timeout(terms.patience, TlsStream::accept(stream, tls.config())).await;
    let stream = accepted.map_err(|_| late())?.map_err(Ended::Tls)?;
    if let Some(identity) = stream.identity() {
        tracing::debug!(client = %identity, "a client presented its certificate");
    }
    let agreed = Agreed { handshake, ..Agreed::default() };
    enter_encrypted(exports, Inbox::after(stream, &[]), &tls, agreed, terms).await
}

/// Negotiates under TLS until the client's next byte belongs to a request, with the rights that `tls` grants it.
pub(super) async fn enter_encrypted<X: Exports, S: ByteStream>(
    exports: &X,
    mut inbox: Inbox<TlsStream<S>>,
    tls: &Tls,
    agreed: Agreed,
    terms: Terms<'_>,
) -> Result<Entered<S, X::Export>, Ended> {
    let stream = inbox.stream().clone();
    let mut handshake = agreed.handshake.clone();
    let policy = Policy::Encrypted(tls.grants(stream.identity().as_ref()));
    let mut negotiation = Negotiation::new(exports, &stream, policy, terms);
    negotiation.resume(agreed)?;
    match negotiation.run(&mut handshake, &mut inbox).await? {
        Next::Transmission(chosen) => Ok(Entered::Encrypted(inbox, chosen)),
        Next::Leaving(agreed) => Ok(Entered::LeavingEncrypted(stream.clone(), inbox.take_rest(), agreed)),
        Next::StartTls(_) => unreachable!("STARTTLS is refused under TLS"),
    }
}

/// Returns the error for a client that takes too long.
fn late() -> io::Error {
    io::ErrorKind::TimedOut.into()
}

/// What a client may do in this part of the negotiation.
enum Policy<'a> {
    Clear(&'a Security),
    Encrypted(Grants),
}

/// How a part of the negotiation ends.
enum Next<E: Export> {
    StartTls(Tls),
    Transmission(Chosen<E>),
    Leaving(Agreed),
}

/// Contexts that a client has chosen.
struct Contexts<E: Export> {
    /// Their export.
    of: String,
    names: Vec<String>,
    open: Vec<E::Context>,
}

struct Negotiation<'a, X: Exports, S> {
    exports: &'a X,
    stream: &'a S,
    policy: Policy<'a>,
    terms: Terms<'a>,
    out: Vec<u8>,
    style: ReplyStyle,
    contexts: Option<Contexts<X::Export>>,
}

impl<'a, X: Exports, S: ByteStream> Negotiation<'a, X, S> {
    fn new(exports: &'a X, stream: &'a S, policy: Policy<'a>, terms: Terms<'a>) -> Self {
        let (out, style) = (Vec::new(), ReplyStyle::Simple);
        Negotiation { exports, stream, policy, terms, out, style, contexts: None }
    }

    /// Continues with what another process had agreed upon.
    fn resume(&mut self, agreed: Agreed) -> Result<(), Ended> {
        self.style = agreed.style;
        if let Some((of, names)) = agreed.contexts {
            let export = self.exports.open(&of).map_err(|error| Ended::Refused(of.clone(), error))?;
            let open = names.iter().filter_map(|name| export.context(name)).collect();
            self.contexts = Some(Contexts { of, names, open });
        }
        Ok(())
    }

    /// Returns what was agreed upon so far.
    fn agreed(&self, handshake: &Handshake) -> Agreed {
        let contexts = self.contexts.as_ref().map(|contexts| (contexts.of.clone(), contexts.names.clone()));
        Agreed { handshake: handshake.clone(), style: self.style, contexts }
    }

    /// Answers options until an export is chosen or TLS is to be started. The timeout counts from
    /// the last answer: a long list of exports takes many options.
    async fn run(&mut self, handshake: &mut Handshake, inbox: &mut Inbox<S>) -> Result<Next<X::Export>, Ended> {
        let Terms { rt, patience, .. } = self.terms;
        let mut since = Instant::now();
        loop {
            let step = handshake.advance(inbox.bytes())?;
            inbox.consume(step.consumed);
            let Some(message) = step.message else {
                if (self.terms.is_leaving)() {
                    return Ok(Next::Leaving(self.agreed(handshake)));
                }
                let left = patience.saturating_sub(since.elapsed());
                match rt.timeout(left, inbox.fill()).await.map_err(|_| late())? {
                    Ok(true) => {}
                    Ok(false) => return Err(Ended::Left),
                    Err(error) if is_interrupted(&error) => {}
                    Err(error) => return Err(error.into()),
                }
                continue;
            };
            self.terms.pacing.wait(rt).await;
            let began = Instant::now();
            let next = self.answer(message, handshake.no_zeroes()).await;
            self.terms.answered(began);
            self.send().await?;
            if let Some(next) = next? {
                return Ok(next);
            }
            since = Instant::now();
        }
    }

    async fn send(&mut self) -> io::Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        let sent = self.stream.send_vectored(vec![std::mem::take(&mut self.out).into()]);
        self.terms.rt.timeout(self.terms.patience, sent).await.map_err(|_| late())?.0
    }

    async fn send_part(&mut self) -> io::Result<()> {
        if self.out.len() >= LIST_PART_BYTES { self.send().await } else { Ok(()) }
    }

    fn replies(&mut self, option: u32) -> OptionReplies<'_> {
        OptionReplies::new(option, &mut self.out)
    }

    fn refuse(&mut self, option: u32, why: Refusal) {
        self.replies(option).refuse(why, refusal_text(why));
    }

    /// Answers a message; returns what follows if that ended this part.
    async fn answer(&mut self, message: Message, no_zeroes: bool) -> Result<Option<Next<X::Export>>, Ended> {
        if let Policy::Clear(Security::Required(_)) = self.policy
            && let Some(option) = tells_something(&message)?
        {
            self.refuse(option, Refusal::TlsRequired);
            return Ok(None);
        }
        match message {
            Message::StartTls => return Ok(self.start_tls().map(Next::StartTls)),
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
                let opened = self.open(&name).and_then(|opened| self.admit(opened));
                let (export, info) = opened.map_err(|e| Ended::Refused(name, e))?;
                encode_export_name_reply(&info, self.style, no_zeroes, &mut self.out);
                return Ok(Some(Next::Transmission(self.enter(export, info))));
            }
            Message::Info { go, name, requests } => {
                return Ok(self.describe(go, &name, requests).map(Next::Transmission));
            }
        }
        Ok(None)
    }

    async fn list(&mut self) -> io::Result<()> {
        if let Policy::Clear(Security::Only(only)) = self.policy {
            if let Ok((_, info)) = self.open(only) {
                self.replies(OPT_LIST).server(&info.name, &info.description);
            }
            self.replies(OPT_LIST).ack();
            return Ok(());
        }
        let mut after = String::new();
        loop {
            self.terms.pacing.wait(self.terms.rt).await;
            let began = Instant::now();
            let piece = self.exports.list(&after, LIST_PIECE_COUNT);
            let Some((last, _)) = piece.last() else { break };
            after.clone_from(last);
            for (name, description) in piece {
                if self.permission(&name) != Permission::None {
                    self.replies(OPT_LIST).server(&name, &description);
                }
            }
            self.terms.answered(began);
            self.send_part().await?;
            self.terms.rt.yield_now().await;
        }
        self.replies(OPT_LIST).ack();
        Ok(())
    }

    /// Answers INFO or GO; returns the export for GO if there is one.
    fn describe(&mut self, go: bool, name: &str, requests: InfoRequests) -> Option<Chosen<X::Export>> {
        let (option, style) = (if go { OPT_GO } else { OPT_INFO }, self.style);
        let opened = self.open_for(option, name)?;
        let (export, info) = match go {
            false => opened,
            true => {
                self.admit(opened).map_err(|e| self.replies(option).refuse(Refusal::Policy, &e.to_string())).ok()?
            }
        };
        let mut replies = self.replies(option);
        replies.info(&info, style, requests);
        replies.ack();
        go.then(|| self.enter(export, info))
    }

    /// Opens an export with the client's permissions. An export that it may not open appears not to exist.
    fn open(&self, name: &str) -> forkdisk::Result<(X::Export, ExportInfo)> {
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no export {name:?} for this client"));
        let name = match self.policy {
            Policy::Clear(Security::Only(only)) if name.is_empty() => only,
            _ => name,
        };
        let export = match self.exports.open(name) {
            Err(error) if self.is_restricted() => {
                tracing::debug!(%error, "an export that could not be opened");
                return Err(missing());
            }
            opened => opened?,
        };
        let mut info = export.info();
        info.multi_conn &= self.terms.multi_conn;
        match self.permission(&info.name) {
            Permission::None => return Err(missing()),
            Permission::ReadOnly => info.read_only = true,
            Permission::Full => {}
        }
        Ok((export, info))
    }

    /// Refuses an export that has its maximum of clients.
    fn admit(&self, opened: (X::Export, ExportInfo)) -> forkdisk::Result<(X::Export, ExportInfo)> {
        match (self.terms.admits)(&opened.1.name) {
            true => Ok(opened),
            false => {
                let text = format!("the export {:?} has as many connections as it may have", opened.1.name);
                Err(Error::new(ErrorKind::Busy, text))
            }
        }
    }

    fn permission(&self, export: &str) -> Permission {
        match &self.policy {
            Policy::Clear(Security::Only(only)) if **only != *export => Permission::None,
            Policy::Clear(_) => Permission::Full,
            Policy::Encrypted(grants) => grants.on(export),
        }
    }

    fn is_restricted(&self) -> bool {
        match &self.policy {
            Policy::Clear(security) => matches!(security, Security::Only(_)),
            Policy::Encrypted(grants) => grants.is_restricted(),
        }
    }

    /// Returns whether the client may query this context of `export`: changes since a snapshot
    /// that it may not open are hidden.
    fn may_ask(&self, export: &str, context: &str) -> bool {
        let Some(snapshot) = context.strip_prefix(CHANGED) else {
            return true;
        };
        let volume = export.split_once('@').map_or(export, |(volume, _)| volume);
        let is_full = snapshot.contains('@');
        if let Policy::Clear(Security::Only(only)) = self.policy {
            return !is_full && **only == *export;
        }
        let full = if is_full { snapshot.to_owned() } else { format!("{volume}@{snapshot}") };
        self.permission(&full) != Permission::None
    }

    fn start_tls(&mut self) -> Option<Tls> {
        let why = match self.policy {
            Policy::Clear(Security::Offered(tls) | Security::Required(tls)) => {
                self.replies(OPT_STARTTLS).ack();
                return Some(tls.clone());
            }
            Policy::Clear(Security::Clear | Security::Only(_)) => Refusal::Policy,
            Policy::Encrypted(_) => Refusal::Invalid,
        };
        self.refuse(OPT_STARTTLS, why);
        None
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

    /// Enters an export; drops contexts that were chosen for another export.
    fn enter(&mut self, export: X::Export, info: ExportInfo) -> Chosen<X::Export> {
        let contexts = self.contexts.take().filter(|contexts| contexts.of == info.name);
        let (context_names, contexts) = contexts.map(|contexts| (contexts.names, contexts.open)).unwrap_or_default();
        Chosen { export, info, style: self.style, contexts, context_names }
    }

    /// Answers LIST_META_CONTEXT or SET_META_CONTEXT. For listing, a name that ends with a colon
    /// matches all names that begin with it.
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
            self.list_contexts(&export, &info.name, &queries).await?
        }
        Ok(())
    }

    fn choose(&mut self, export: &X::Export, name: String, mut queries: Vec<String>) {
        queries.sort();
        queries.dedup();
        let found = queries
            .into_iter()
            .filter(|query| self.may_ask(&name, query))
            .filter_map(|query| export.context(&query).map(|context| (query, context)));
        let (names, contexts): (Vec<String>, Vec<_>) = found.take(MAX_CONTEXTS + 1).unzip();
        if contexts.len() > MAX_CONTEXTS {
            return self.refuse(OPT_SET_META_CONTEXT, Refusal::TooBig);
        }
        let mut replies = self.replies(OPT_SET_META_CONTEXT);
        names.iter().zip(1..).for_each(|(name, id)| replies.context(id, name));
        replies.ack();
        self.contexts = Some(Contexts { of: name, names, open: contexts });
    }

    async fn list_contexts(&mut self, export: &X::Export, of: &str, queries: &[String]) -> io::Result<()> {
        let asked = |name: &String| {
            let matches = |q: &String| if q.ends_with(':') { name.starts_with(q.as_str()) } else { name == q };
            queries.is_empty() || queries.iter().any(matches)
        };
        let mut found = export.contexts();
        found.retain(asked);
        // A list may be incomplete; contexts queried by name are looked up.
        for name in queries {
            if !name.ends_with(':') && !found.contains(name) && export.context(name).is_some() {
                found.push(name.clone());
            }
        }
        for piece in found.chunks(LIST_PIECE_COUNT) {
            for name in piece {
                if self.may_ask(of, name) {
                    self.replies(OPT_LIST_META_CONTEXT).context(0, name);
                }
            }
            self.send_part().await?;
            if piece.len() == LIST_PIECE_COUNT {
                self.terms.rt.yield_now().await;
            }
        }
        self.replies(OPT_LIST_META_CONTEXT).ack();
        Ok(())
    }
}

/// Returns the option of a message that reveals or chooses an export; `EXPORT_NAME` can only
/// be refused by ending the session.
fn tells_something(message: &Message) -> Result<Option<u32>, Ended> {
    Ok(match message {
        Message::ExportName(_) => return Err(Ended::NotEncrypted),
        Message::List => Some(OPT_LIST),
        Message::Info { go: true, .. } => Some(OPT_GO),
        Message::Info { go: false, .. } => Some(OPT_INFO),
        Message::MetaContext { set: true, .. } => Some(OPT_SET_META_CONTEXT),
        Message::MetaContext { set: false, .. } => Some(OPT_LIST_META_CONTEXT),
        Message::StructuredReply => Some(OPT_STRUCTURED_REPLY),
        Message::ExtendedHeaders => Some(OPT_EXTENDED_HEADERS),
        Message::StartTls | Message::Abort | Message::Refused { .. } => None,
    })
}

fn refusal_text(why: Refusal) -> &'static str {
    match why {
        Refusal::Unsupported => "this server does not know the option",
        Refusal::TooBig => "too much for the option: a name has at most 4096 bytes, a session 32 contexts",
        Refusal::Extended => "extended headers were chosen already",
        Refusal::TlsRequired => "start TLS first: it is required here",
        Refusal::Policy => "this server has no certificate for TLS",
        _ => "the option is malformed, or not allowed in this session",
    }
}
