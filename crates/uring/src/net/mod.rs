//! Stream sockets on the ring: unix and TCP listeners, and one type of connection for both.
//!
//! Buffers are owned by the operation while the kernel may use them. A dropped receive is
//! cancelled; bytes it had already received are lost, so the connection cannot be used for further
//! receives.

mod byte_stream;
mod listeners;
mod message;
mod stream;
mod tcp;
mod unix;

pub use byte_stream::{Accept, ByteStream};
pub(crate) use listeners::Listeners;
pub use listeners::PassedListener;
pub(crate) use message::Message;
pub use message::Piece;
pub use stream::{Stream, is_interrupted};
pub use tcp::TcpListener;
pub use unix::{SocketAccess, UnixListener};
