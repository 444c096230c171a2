//! Bytes of the NBD protocol: decoding what a client sends, encoding the server's replies.
//!
//! Pure: no I/O, no clock, no tasks. It accepts any bytes without panicking, reads no more than it
//! was given, and allocates only for names, which are capped at [`MAX_NAME`] bytes *before* the
//! allocation. It implements the fixed newstyle handshake, simple and structured replies, metadata
//! contexts and extended headers, as the NBD protocol document describes them.
//!
//! Every reply is built by one [`ReplyEncoder`], whose methods take all that any style needs. The
//! handshake is a state machine over bytes, independent of the transport.

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
