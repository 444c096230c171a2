//! Connections on their way to another process of the server, which continues them between two requests.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::codec::{Handshake, ReplyStyle};

/// A connection, with everything that was agreed upon. `F` stands for the socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedClient<F = OwnedFd> {
    /// The socket.
    pub socket: F,
    /// Received bytes that belong to no request that was started.
    #[serde(with = "hex")]
    pub received: Vec<u8>,
    /// Bytes of replies that the client has not fetched.
    #[serde(with = "hex")]
    pub unsent: Vec<u8>,
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
        /// TLS can or must be started.
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
        let PassedClient { socket, received, unsent, stage } = self;
        PassedClient { socket: convert(socket), received, unsent, stage }
    }
}

/// Bytes as hexadecimal digits.
mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        to.serialize_str(&digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect::<String>())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        let digit = |digit: u8| char::from(digit).to_digit(16).ok_or_else(|| D::Error::custom("no hexadecimal digit"));
        let pair = |pair: &[u8]| match pair {
            [high, low] => Ok((digit(*high)? << 4 | digit(*low)?) as u8),
            _ => Err(D::Error::custom("half of a byte")),
        };
        text.as_bytes().chunks(2).map(pair).collect()
    }
}
