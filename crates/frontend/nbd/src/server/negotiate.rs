//! The handshake of one connection: answers options until the client has chosen an export.

use std::io;

use forkdisk::ErrorKind;
use forkdisk_uring::ByteStream;

use super::export::{Export, Exports};
use super::inbox::Inbox;
use crate::codec::{
    ExportInfo, GREETING, Handshake, InfoRequests, Message, OPT_ABORT, OPT_GO, OPT_INFO, OPT_LIST, OptionReplies,
    Refusal, Violation, encode_export_name_reply,
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

/// An export that a client has chosen, with what it was told about it.
pub(super) struct Chosen<E> {
    pub(super) export: E,
    pub(super) info: ExportInfo,
}

/// What answering one message led to.
enum Next<E> {
    Option,
    Transmission(Chosen<E>),
}

/// Negotiates to the point where the next byte from the client belongs to a request.
pub(super) async fn negotiate<X: Exports, S: ByteStream>(
    exports: &X,
    stream: &S,
    inbox: &mut Inbox<S>,
) -> Result<Chosen<X::Export>, Ended> {
    let mut out = GREETING.to_vec();
    send(stream, &mut out).await?;
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
        let no_zeroes = handshake.no_zeroes();
        let next = match message {
            Message::List => {
                list(exports, stream, &mut out).await?;
                Ok(Next::Option)
            }
            message => answer(exports, message, no_zeroes, &mut out),
        };
        send(stream, &mut out).await?;
        match next? {
            Next::Option => {}
            Next::Transmission(chosen) => return Ok(chosen),
        }
    }
}

async fn send(stream: &impl ByteStream, out: &mut Vec<u8>) -> io::Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    stream.send_vectored(vec![std::mem::take(out).into()]).await.0
}

async fn list<X: Exports>(exports: &X, stream: &impl ByteStream, out: &mut Vec<u8>) -> io::Result<()> {
    for (name, description) in exports.list() {
        OptionReplies::new(OPT_LIST, out).server(&name, &description);
        if out.len() >= LIST_PART {
            send(stream, out).await?;
        }
    }
    OptionReplies::new(OPT_LIST, out).ack();
    Ok(())
}

/// Encodes the answer to any message but LIST.
fn answer<X: Exports>(
    exports: &X,
    message: Message,
    no_zeroes: bool,
    out: &mut Vec<u8>,
) -> Result<Next<X::Export>, Ended> {
    match message {
        Message::List => {}
        Message::Abort => {
            OptionReplies::new(OPT_ABORT, out).ack();
            return Err(Ended::Left);
        }
        Message::Refused { option, why } => {
            OptionReplies::new(option, out).refuse(why, refusal_text(why));
        }
        Message::ExportName(name) => {
            let chosen = open(exports, &name).map_err(|e| Ended::Refused(name, e))?;
            encode_export_name_reply(&chosen.info, no_zeroes, out);
            return Ok(Next::Transmission(chosen));
        }
        Message::Info { go, name, requests } => {
            if let Some(chosen) = describe(exports, go, &name, requests, out) {
                return Ok(Next::Transmission(chosen));
            }
        }
    }
    Ok(Next::Option)
}

/// Answers INFO or GO; the export when it was GO and there is one.
fn describe<X: Exports>(
    exports: &X,
    go: bool,
    name: &str,
    requests: InfoRequests,
    out: &mut Vec<u8>,
) -> Option<Chosen<X::Export>> {
    let mut replies = OptionReplies::new(if go { OPT_GO } else { OPT_INFO }, out);
    match open(exports, name) {
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

fn open<X: Exports>(exports: &X, name: &str) -> forkdisk::Result<Chosen<X::Export>> {
    let export = exports.open(name)?;
    let info = export.info();
    Ok(Chosen { export, info })
}

fn refusal_text(why: Refusal) -> &'static str {
    match why {
        Refusal::Unsupported => "this server does not know the option",
        Refusal::TooBig => "too much data for the option: a name has at most 4096 bytes",
        _ => "the option's data is malformed",
    }
}
