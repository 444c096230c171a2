//! Bytes of the NBD protocol: decoding what a client sends, encoding what a server answers.
//!
//! Pure: no I/O, no clock, no tasks. It accepts any bytes without panicking, looks at no more than
//! it was given, and allocates only for names, which are capped at [`MAX_NAME`] bytes
//! *before* the allocation. It speaks the fixed newstyle handshake, simple and structured replies,
//! metadata contexts and extended headers, as the NBD protocol document describes them.
//!
//! Every reply goes through one [`ReplyEncoder`] that is told all that any style needs, and the
//! handshake is a state machine over bytes that does not care what carries them.

mod export;
mod handshake;
mod options;
mod reply;
mod request;
mod values;

pub use export::{BlockSizes, ExportInfo};
pub use handshake::{GREETING, Handshake, Message, Step, Violation};
pub use options::{InfoRequests, OptionReplies, Refusal, encode_export_name_reply};
pub use reply::{ErrorCode, ReplyEncoder, ReplyStyle, ReplyTo, StatusExtent};
pub use request::{Action, Request, RequestError};
pub use values::*;
