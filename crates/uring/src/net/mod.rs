//! Stream sockets on the ring: unix and TCP listeners, and one kind of connection for both.
//!
//! Buffers are owned by the operation while the kernel may use them. A dropped receive is
//! cancelled; bytes it had already taken are lost with it, so whoever gives up on a receive gives
//! up on the connection.

mod byte_stream;
mod message;
mod stream;
mod tcp;
mod unix;

pub use byte_stream::{Accept, ByteStream};
pub(crate) use message::Message;
pub use message::Piece;
pub use stream::Stream;
pub use tcp::TcpListener;
pub use unix::{SocketAccess, UnixListener};
