//! The fixed newstyle handshake from the server's side, as a state machine over bytes.
//!
//! The driver sends [`GREETING`], then calls [`advance`](Handshake::advance) with the received
//! bytes, answers the message if there is one, and calls it again with the rest. Option data that
//! is too long is skipped as it arrives and then refused.

use serde::{Deserialize, Serialize};

use super::options::{InfoRequests, Refusal, decode_info, decode_meta_context, decode_name};
use super::values::*;

/// The first bytes of every session, from the server: magic numbers and handshake flags.
pub const GREETING: [u8; 18] = {
    let (a, b) = (NBDMAGIC.to_be_bytes(), IHAVEOPT.to_be_bytes());
    let flags = (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes();
    let mut bytes = [0; 18];
    let mut i = 0;
    while i < 8 {
        bytes[i] = a[i];
        bytes[8 + i] = b[i];
        i += 1;
    }
    bytes[16] = flags[0];
    bytes[17] = flags[1];
    bytes
};

/// A message of the client during the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// EXPORT_NAME: enter transmission, or be disconnected.
    ExportName(String),
    /// LIST: name all exports.
    List,
    /// INFO, or GO if `go`.
    Info {
        /// Enter transmission when the answer is a success.
        go: bool,
        /// The export's name; empty for the default export.
        name: String,
        /// What the client requests besides NBD_INFO_EXPORT.
        requests: InfoRequests,
    },
    /// STARTTLS: continue under TLS, if the answer is a success.
    StartTls,
    /// STRUCTURED_REPLY: answer reads in chunks.
    StructuredReply,
    /// EXTENDED_HEADERS: 64-bit lengths in requests and replies.
    ExtendedHeaders,
    /// LIST_META_CONTEXT, or SET_META_CONTEXT if `set`.
    MetaContext {
        /// Choose the contexts for BLOCK_STATUS, replacing those chosen before.
        set: bool,
        /// Their export; empty for the default export.
        export: String,
        /// Names of the contexts; at most [`MAX_QUERIES`].
        queries: Vec<String>,
    },
    /// ABORT: acknowledge and disconnect.
    Abort,
    /// An option that is answered with an error; the handshake continues.
    Refused {
        /// The option's number.
        option: u32,
        /// The error to answer.
        why: Refusal,
    },
}

/// A protocol violation after which the client is disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Client flags that the server did not offer.
    #[error("unknown client flags {0:#x}")]
    ClientFlags(u32),
    /// Wrong magic number where an option must begin.
    #[error("an option begins with {0:#x}, not with IHAVEOPT")]
    OptionMagic(u64),
    /// EXPORT_NAME with a bad name; this option has no error reply.
    #[error("EXPORT_NAME with a name that is too long or is not text")]
    ExportName,
}

/// Result of [`Handshake::advance`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bytes of the input that were processed.
    pub consumed: usize,
    /// The next message; `None` if more input is needed.
    pub message: Option<Message>,
}

/// The state of one handshake. Another process that gets it, and the bytes that were not consumed, can continue.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Handshake {
    state: State,
    no_zeroes: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
enum State {
    #[default]
    ClientFlags,
    Option,
    Skip {
        left: u64,
        then: Message,
    },
}

impl Handshake {
    /// Creates the state after the greeting was sent.
    pub fn new() -> Handshake {
        Handshake::default()
    }

    /// Returns whether the client omits the zeroes after the answer to EXPORT_NAME.
    pub fn no_zeroes(&self) -> bool {
        self.no_zeroes
    }

    /// Decodes from the front of `input`. If the result has no message, call again with the rest
    /// and more; [`MAX_HANDSHAKE_MESSAGE`] bytes always suffice to make progress.
    ///
    /// # Errors
    /// The input breaks the protocol in a way after which nothing can be decoded: the connection must be
    /// closed.
    pub fn advance(&mut self, input: &[u8]) -> Result<Step, Violation> {
        let mut consumed = 0;
        loop {
            let rest = &input[consumed..];
            let taken = match &mut self.state {
                State::ClientFlags => self.client_flags(rest)?,
                State::Skip { left, then } => {
                    let n = usize::try_from(*left).map_or(rest.len(), |left| left.min(rest.len()));
                    *left -= n as u64;
                    if *left > 0 {
                        return Ok(Step { consumed: consumed + n, message: None });
                    }
                    let message = Some(then.clone());
                    self.state = State::Option;
                    return Ok(Step { consumed: consumed + n, message });
                }
                State::Option => match self.option(rest)? {
                    Some((n, Some(message))) => {
                        return Ok(Step { consumed: consumed + n, message: Some(message) });
                    }
                    Some((n, None)) => Some(n),
                    None => None,
                },
            };
            match taken {
                Some(n) => consumed += n,
                None => {
                    return Ok(Step { consumed, message: None });
                }
            }
        }
    }

    fn client_flags(&mut self, input: &[u8]) -> Result<Option<usize>, Violation> {
        let Some((bytes, _)) = input.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let flags = u32::from_be_bytes(*bytes);
        if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
            return Err(Violation::ClientFlags(flags));
        }
        self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
        self.state = State::Option;
        Ok(Some(4))
    }

    /// Decodes one option, or the beginning of one that must be skipped; the latter gives no message.
    fn option(&mut self, input: &[u8]) -> Result<Option<(usize, Option<Message>)>, Violation> {
        let Some((magic, rest)) = input.split_first_chunk::<8>() else {
            return Ok(None);
        };
        let magic = u64::from_be_bytes(*magic);
        if magic != IHAVEOPT {
            return Err(Violation::OptionMagic(magic));
        }
        let Some((option, rest)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let Some((len, rest)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let (option, len) = (u32::from_be_bytes(*option), u32::from_be_bytes(*len));
        if let Some(then) = skipped(option, len)? {
            self.state = State::Skip { left: len.into(), then };
            return Ok(Some((OPTION_HEADER, None)));
        }
        let Some(data) = rest.get(..len as usize) else {
            return Ok(None);
        };
        let message = match option {
            OPT_EXPORT_NAME => Ok(Message::ExportName(decode_name(data).map_err(|_| Violation::ExportName)?)),
            OPT_INFO | OPT_GO => {
                decode_info(data).map(|(name, requests)| Message::Info { go: option == OPT_GO, name, requests })
            }
            _ => decode_meta_context(data).map(|(export, queries)| {
                let set = option == OPT_SET_META_CONTEXT;
                Message::MetaContext { set, export, queries }
            }),
        };
        let message = message.unwrap_or_else(|why| Message::Refused { option, why });
        Ok(Some((OPTION_HEADER + data.len(), Some(message))))
    }
}

/// Returns the message of an option whose data is ignored: the data is skipped, whatever its length.
fn skipped(option: u32, len: u32) -> Result<Option<Message>, Violation> {
    let refused = |why| Some(Message::Refused { option, why });
    Ok(match option {
        OPT_EXPORT_NAME if len as usize > MAX_NAME => return Err(Violation::ExportName),
        OPT_EXPORT_NAME => None,
        OPT_INFO | OPT_GO | OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => {
            if len as usize > MAX_OPTION_DATA {
                refused(Refusal::TooBig)
            } else {
                None
            }
        }
        OPT_ABORT => Some(Message::Abort),
        OPT_LIST | OPT_STARTTLS | OPT_STRUCTURED_REPLY | OPT_EXTENDED_HEADERS if len > 0 => refused(Refusal::Invalid),
        OPT_STARTTLS => Some(Message::StartTls),
        OPT_LIST => Some(Message::List),
        OPT_STRUCTURED_REPLY => Some(Message::StructuredReply),
        OPT_EXTENDED_HEADERS => Some(Message::ExtendedHeaders),
        _ => refused(Refusal::Unsupported),
    })
}
