//! The handshake of one connection: answers options until the client has chosen an export.
//!
//! It begins in the clear. STARTTLS ends that part: whatever the client has sent behind it is thrown
//! away, nothing that was negotiated before counts any more, and options are answered anew under TLS.

use std::io;

use forkdisk::{Error, ErrorKind};
use forkdisk_uring::ByteStream;

use super::export::{Export, Exports};
use super::inbox::Inbox;
use crate::codec::{
    ExportInfo, GREETING, Handshake, InfoRequests, Message, OPT_ABORT, OPT_GO, OPT_INFO, OPT_LIST, OPT_STARTTLS,
    OptionReplies, Refusal, Violation, encode_export_name_reply,
};
use crate::tls::{Grants, Permission, Tls, TlsStream};

/// Replies to a list are sent off in parts of about this size.
const LIST_PART: usize = 64 << 10;

/// Why a negotiation ended without an export.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("the client left during the negotiation")]
    Left,
    #[error("the client asked for the export {0:?}: {1}")]
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

/// An export that a client has chosen, with what it was told about it.
pub(super) struct Chosen<E> {
    pub(super) export: E,
    pub(super) info: ExportInfo,
}

/// How the clients of a listener are protected.
#[derive(Clone, Default)]
pub enum Security {
    /// Everything goes in the clear, and everybody may open everything.
    #[default]
    Clear,
    /// Clients may start TLS. Those that do not may open everything.
    Offered(Tls),
    /// Nothing is listed or opened before TLS has been started.
    Required(Tls),
}

/// A client that has chosen an export, and the stream it goes on with.
pub(super) enum Entered<S, E> {
    Clear(Inbox<S>, Chosen<E>),
    Encrypted(Inbox<TlsStream<S>>, Chosen<E>),
}

/// Greets a client and negotiates to the point where its next byte belongs to a request.
pub(super) async fn enter<X: Exports, S: ByteStream>(
    exports: &X,
    stream: S,
    security: &Security,
) -> Result<Entered<S, X::Export>, Ended> {
    send(&stream, &mut GREETING.to_vec()).await?;
    let mut inbox = Inbox::new(stream.clone());
    let mut negotiation = Negotiation { exports, handshake: Handshake::new(), policy: Policy::Clear(security) };
    if let Some(chosen) = negotiation.run(&stream, &mut inbox).await? {
        return Ok(Entered::Clear(inbox, chosen));
    }
    // The inbox goes, and with it whatever came behind STARTTLS.
    drop(inbox);
    let (Security::Offered(tls) | Security::Required(tls)) = security else {
        unreachable!("STARTTLS is refused without TLS");
    };
    let stream = TlsStream::accept(stream, tls.config()).await.map_err(Ended::Tls)?;
    let identity = stream.identity();
    if let Some(identity) = &identity {
        tracing::debug!(client = %identity, "a client has shown its certificate");
    }
    negotiation.policy = Policy::Encrypted(tls.grants(identity.as_ref()));
    let mut inbox = Inbox::new(stream.clone());
    match negotiation.run(&stream, &mut inbox).await? {
        Some(chosen) => Ok(Entered::Encrypted(inbox, chosen)),
        None => unreachable!("STARTTLS is refused under TLS"),
    }
}

/// What a client may do at this point.
enum Policy<'a> {
    Clear(&'a Security),
    Encrypted(Grants),
}

/// What answering one message led to.
enum Next<E> {
    Option,
    StartTls,
    Transmission(Chosen<E>),
}

struct Negotiation<'a, X> {
    exports: &'a X,
    handshake: Handshake,
    policy: Policy<'a>,
}

impl<X: Exports> Negotiation<'_, X> {
    /// Answers options until an export is chosen, or (`None`) TLS is to be started.
    async fn run<S: ByteStream>(
        &mut self,
        stream: &S,
        inbox: &mut Inbox<S>,
    ) -> Result<Option<Chosen<X::Export>>, Ended> {
        let mut out = Vec::new();
        loop {
            let step = self.handshake.advance(inbox.bytes())?;
            inbox.consume(step.consumed);
            let Some(message) = step.message else {
                if !inbox.fill().await? {
                    return Err(Ended::Left);
                }
                continue;
            };
            let next = match self.refuse(&message, &mut out) {
                Some(next) => next,
                None if message == Message::List => {
                    self.list(stream, &mut out).await?;
                    Ok(Next::Option)
                }
                None => self.answer(message, &mut out),
            };
            send(stream, &mut out).await?;
            match next? {
                Next::Option => {}
                Next::StartTls => return Ok(None),
                Next::Transmission(chosen) => return Ok(Some(chosen)),
            }
        }
    }

    /// What is not allowed at this point; `None` if `message` is.
    fn refuse(&self, message: &Message, out: &mut Vec<u8>) -> Option<Result<Next<X::Export>, Ended>> {
        let option = match (&self.policy, message) {
            (Policy::Clear(Security::Required(_)), Message::ExportName(_)) => {
                return Some(Err(Ended::NotEncrypted));
            }
            (Policy::Clear(Security::Required(_)), Message::List) => OPT_LIST,
            (Policy::Clear(Security::Required(_)), Message::Info { go, .. }) => {
                if *go {
                    OPT_GO
                } else {
                    OPT_INFO
                }
            }
            _ => return None,
        };
        OptionReplies::new(option, out).refuse(Refusal::TlsRequired, "start TLS first: it is required here");
        Some(Ok(Next::Option))
    }

    async fn list(&self, stream: &impl ByteStream, out: &mut Vec<u8>) -> io::Result<()> {
        for (name, description) in self.exports.list() {
            if self.permission(&name) == Permission::None {
                continue;
            }
            OptionReplies::new(OPT_LIST, out).server(&name, &description);
            if out.len() >= LIST_PART {
                send(stream, out).await?;
            }
        }
        OptionReplies::new(OPT_LIST, out).ack();
        Ok(())
    }

    /// Encodes the answer to any message but LIST.
    fn answer(&self, message: Message, out: &mut Vec<u8>) -> Result<Next<X::Export>, Ended> {
        match message {
            Message::List => {}
            Message::StartTls => return Ok(self.start_tls(out)),
            Message::Abort => {
                OptionReplies::new(OPT_ABORT, out).ack();
                return Err(Ended::Left);
            }
            Message::Refused { option, why } => {
                OptionReplies::new(option, out).refuse(why, refusal_text(why));
            }
            Message::ExportName(name) => {
                let chosen = self.open(&name).map_err(|e| Ended::Refused(name, e))?;
                encode_export_name_reply(&chosen.info, self.handshake.no_zeroes(), out);
                return Ok(Next::Transmission(chosen));
            }
            Message::Info { go, name, requests } => {
                if let Some(chosen) = self.describe(go, &name, requests, out) {
                    return Ok(Next::Transmission(chosen));
                }
            }
        }
        Ok(Next::Option)
    }

    fn start_tls(&self, out: &mut Vec<u8>) -> Next<X::Export> {
        let mut replies = OptionReplies::new(OPT_STARTTLS, out);
        match &self.policy {
            Policy::Clear(Security::Clear) => replies.refuse(Refusal::Policy, "this server has no certificate for TLS"),
            Policy::Clear(_) => {
                replies.ack();
                return Next::StartTls;
            }
            Policy::Encrypted(_) => replies.refuse(Refusal::Invalid, "TLS has been started already"),
        }
        Next::Option
    }

    /// Answers INFO or GO; the export when it was GO and there is one.
    fn describe(&self, go: bool, name: &str, requests: InfoRequests, out: &mut Vec<u8>) -> Option<Chosen<X::Export>> {
        let mut replies = OptionReplies::new(if go { OPT_GO } else { OPT_INFO }, out);
        match self.open(name) {
            Ok(chosen) => {
                replies.info(&chosen.info, requests);
                replies.ack();
                go.then_some(chosen)
            }
            Err(error) => {
                let why = match error.kind() {
                    ErrorKind::NotFound | ErrorKind::Invalid => Refusal::Unknown,
                    _ => Refusal::Policy,
                };
                replies.refuse(why, &error.to_string());
                None
            }
        }
    }

    /// Opens an export, as the client may. What it may not open looks to it as if it did not exist.
    fn open(&self, name: &str) -> forkdisk::Result<Chosen<X::Export>> {
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no export {name:?} for you"));
        let export = match self.exports.open(name) {
            Err(error) if self.is_restricted() => {
                tracing::debug!(%error, "an export that could not be opened");
                return Err(missing());
            }
            opened => opened?,
        };
        let mut info = export.info();
        match self.permission(&info.name) {
            Permission::None => return Err(missing()),
            Permission::ReadOnly => info.read_only = true,
            Permission::Full => {}
        }
        Ok(Chosen { export, info })
    }

    fn permission(&self, export: &str) -> Permission {
        match &self.policy {
            Policy::Clear(_) => Permission::Full,
            Policy::Encrypted(grants) => grants.on(export),
        }
    }

    fn is_restricted(&self) -> bool {
        matches!(&self.policy, Policy::Encrypted(grants) if grants.is_restricted())
    }
}

async fn send(stream: &impl ByteStream, out: &mut Vec<u8>) -> io::Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    stream.send_vectored(vec![std::mem::take(out).into()]).await.0
}

fn refusal_text(why: Refusal) -> &'static str {
    match why {
        Refusal::Unsupported => "this server does not know the option",
        Refusal::TooBig => "too much data for the option: a name has at most 4096 bytes",
        _ => "the option's data is malformed",
    }
}
