//! Connections on their way to another process of the server, which continues them between two requests.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::codec::{Handshake, ReplyStyle};
use crate::tls::PassedTls;

/// A connection, with everything that was agreed upon. `F` stands for the socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedClient<F = OwnedFd> {
    /// The socket.
    pub socket: F,
    /// Received bytes that belong to no request that was started.
    #[serde(with = "crate::hex")]
    pub received: Vec<u8>,
    /// Bytes of replies that the client has not fetched. Under TLS the first of them are encrypted already.
    #[serde(with = "crate::hex")]
    pub unsent: Vec<u8>,
    /// The session of an encrypted connection.
    #[serde(default)]
    pub tls: Option<PassedTls>,
    /// How far it was.
    pub stage: Stage,
}

/// How far a connection was.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Stage {
    /// The greeting was sent.
    Negotiation {
        /// The only export that it may open.
        only: Option<String>,
        /// TLS can or must be started, or has been.
        with_tls: bool,
        /// What was agreed upon.
        agreed: Agreed,
    },
    /// An export was chosen.
    Transmission {
        /// The export's name.
        export: String,
        /// Whether it was opened without the permission to write.
        read_only: bool,
        /// Format of requests and replies.
        style: ReplyStyle,
        /// Names of the chosen contexts, in the order of their numbers.
        contexts: Vec<String>,
    },
}

/// State of a negotiation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Agreed {
    /// State of the messages.
    pub handshake: Handshake,
    /// Format of requests and replies.
    pub style: ReplyStyle,
    /// Chosen contexts, and the name of their export.
    pub contexts: Option<(String, Vec<String>)>,
}

impl<F> PassedClient<F> {
    /// Converts the socket.
    pub fn map<G>(self, convert: impl FnOnce(F) -> G) -> PassedClient<G> {
        let PassedClient { socket, received, unsent, tls, stage } = self;
        PassedClient { socket: convert(socket), received, unsent, tls, stage }
    }
}
