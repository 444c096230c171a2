//! Bytes of the NBD protocol: decoding what a client sends, encoding what a server answers.
//!
//! Pure: no I/O, no clock, no tasks. It accepts any bytes without panicking, looks at no more than
//! it was given, and allocates only for export names, which are capped at [`MAX_NAME`] bytes
//! *before* the allocation. What it understands is the fixed newstyle handshake and simple
//! replies, as the NBD protocol document describes them.
//!
//! Room for what comes later: a [`Request`] carries a 64-bit length (extended headers), payload
//! and command are told apart ([`Request::payload`]), every reply goes through one
//! [`ReplyEncoder`] that is told all a structured reply needs, and the handshake is a state machine
//! over bytes that does not care what carries them (TLS).

mod export;
mod handshake;
mod options;
mod reply;
mod request;
mod values;

pub use export::{BlockSizes, ExportInfo};
pub use handshake::{GREETING, Handshake, Message, Step, Violation};
pub use options::{InfoRequests, OptionReplies, Refusal, encode_export_name_reply};
pub use reply::{ErrorCode, ReplyEncoder};
pub use request::{Action, Request, RequestError};
pub use values::*;
