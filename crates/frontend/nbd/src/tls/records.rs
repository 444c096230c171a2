//! Records of TLS after the handshake, without I/O.
//!
//! The library's own record layer cannot be moved to another process; this one can. It uses the same ciphers, keys and
//! numbers of records. It answers a client that changes its keys, and changes the server's keys before they have
//! encrypted too much. Everything else that is no data, an alert or a change of keys ends the session with an error.

use std::ops::Range;

use ring::aead::{Aad, Nonce};
use serde::{Deserialize, Serialize};

use super::keys::{Half, NONCE_BYTES, PassedHalf, Suite, Unfit, Version};

/// Length of a record's header.
const HEADER_BYTES: usize = 5;
/// Most bytes of data in a record.
pub(super) const DATA_BYTES: usize = 1 << 14;
/// Most bytes of a record after its header, in TLS 1.2 and 1.3.
const BODY_TLS12_BYTES: usize = DATA_BYTES + 2048;
const BODY_TLS13_BYTES: usize = DATA_BYTES + 256;
/// Length of a record's authentication tag.
const TAG_BYTES: usize = 16;
/// Length of the part of a nonce that records of TLS 1.2 with AES-GCM contain.
const EXPLICIT_BYTES: usize = 8;
/// Length of a record's number.
const NUMBER_BYTES: usize = 8;
/// Most bytes that a record is longer than its data.
const EXTRA_BYTES: usize = HEADER_BYTES + EXPLICIT_BYTES + 1 + TAG_BYTES;
/// Records without data that may follow one another.
const FRUITLESS_COUNT: u8 = 32;

/// Types of records.
const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

/// Levels and numbers of alerts.
const WARNING: u8 = 1;
const FATAL: u8 = 2;
pub(super) const CLOSE_NOTIFY: u8 = 0;
const UNEXPECTED_MESSAGE: u8 = 10;
const BAD_RECORD_MAC: u8 = 20;
const RECORD_OVERFLOW: u8 = 22;
const DECODE_ERROR: u8 = 50;
const USER_CANCELED: u8 = 90;
const NO_RENEGOTIATION: u8 = 100;

/// First byte of a handshake message.
const HELLO_REQUEST: u8 = 0;
const CLIENT_HELLO: u8 = 1;
const KEY_UPDATE: u8 = 24;

/// A change of keys, without and with the request to change the other side's.
const UPDATE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];
const UPDATE_REQUESTED: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 1];

/// Why the records of a client end the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("the client sent a record of the type {0}, which is not allowed here")]
    Type(u8),
    #[error("the client sent a record that is longer than TLS allows")]
    TooLong,
    #[error("a record of the client cannot be decrypted")]
    Undecryptable,
    #[error("the client sent a malformed record")]
    Malformed,
    #[error("the client sent a handshake message of the type {0}, which is not allowed here")]
    Message(u8),
    #[error("the client requested a renegotiation, which this server does not support")]
    Renegotiation,
    #[error("the client sent more than {FRUITLESS_COUNT} records without data")]
    Fruitless,
    #[error("the client ended TLS with the alert {0}")]
    Alert(u8),
    #[error("the client has sent as many records as a session can have")]
    Exhausted,
}

impl Violation {
    /// Returns the alert that says so to the client.
    pub(super) fn alert(self) -> u8 {
        match self {
            Violation::Type(_) | Violation::Message(_) | Violation::Fruitless => UNEXPECTED_MESSAGE,
            Violation::Undecryptable => BAD_RECORD_MAC,
            Violation::TooLong => RECORD_OVERFLOW,
            Violation::Malformed => DECODE_ERROR,
            Violation::Renegotiation => NO_RENEGOTIATION,
            Violation::Alert(_) | Violation::Exhausted => CLOSE_NOTIFY,
        }
    }
}

/// The keys have encrypted as much as they may, and TLS 1.2 cannot replace them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the keys of a TLS 1.2 session have encrypted as many records as is safe: the client has to connect again")]
pub(super) struct KeysExhausted;

/// Where a record begins that is being made.
pub(super) struct Begun(usize);

/// What a record contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Data, at this place of the record.
    Data(Range<usize>),
    /// Nothing for the protocol above.
    Nothing,
    /// The client sends nothing more.
    Closed,
}

/// The state of both directions, for another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PassedRecords {
    suite: Suite,
    sends: PassedHalf,
    receives: PassedHalf,
    /// The client requested new keys of the server.
    #[serde(default)]
    owes_update: bool,
    #[serde(default)]
    fruitless: u8,
}

/// Both directions of a session.
pub(super) struct Records {
    suite: Suite,
    sends: Half,
    receives: Half,
    owes_update: bool,
    /// How many records without data have followed one another.
    fruitless: u8,
}

impl PassedRecords {
    /// Describes a session from its first record after the handshake.
    pub(super) fn new(suite: Suite, sends: PassedHalf, receives: PassedHalf) -> PassedRecords {
        PassedRecords { suite, sends, receives, owes_update: false, fruitless: 0 }
    }
}

/// Returns the length of the record that begins with `bytes`; `None` if more of it must arrive.
pub(super) fn record_len(bytes: &[u8]) -> Result<Option<usize>, Violation> {
    if let Some(&kind) = bytes.first()
        && !(CHANGE_CIPHER_SPEC..=APPLICATION_DATA).contains(&kind)
    {
        return Err(Violation::Type(kind));
    }
    let Some(&[_, _, _, high, low]) = bytes.first_chunk() else { return Ok(None) };
    match usize::from(u16::from_be_bytes([high, low])) {
        len if len > BODY_TLS12_BYTES => Err(Violation::TooLong),
        len => Ok(Some(HEADER_BYTES + len)),
    }
}

/// Returns how many bytes the records of `len` bytes of data have at most.
pub(super) fn sealed_len(len: usize) -> usize {
    len + (len / DATA_BYTES + 2) * EXTRA_BYTES
}

impl Records {
    /// Creates the state of a session, or continues one of another process.
    pub(super) fn new(passed: PassedRecords) -> Result<Records, Unfit> {
        let PassedRecords { suite, sends, receives, owes_update, fruitless } = passed;
        let (sends, receives) = (Half::new(suite, sends)?, Half::new(suite, receives)?);
        Ok(Records { suite, sends, receives, owes_update, fruitless })
    }

    /// Returns the state for another process. This one must not encrypt anything afterwards.
    pub(super) fn pass_on(&self) -> PassedRecords {
        let (sends, receives) = (self.sends.passed.clone(), self.receives.passed.clone());
        PassedRecords { suite: self.suite, sends, receives, owes_update: self.owes_update, fruitless: self.fruitless }
    }

    /// Begins a record at the end of `out`. Up to [`DATA_BYTES`] are appended to `out` before [`end`](Self::end).
    pub(super) fn begin(&mut self, out: &mut Vec<u8>) -> Result<Begun, KeysExhausted> {
        if self.sends.passed.sequence >= self.suite.cipher.limit() || self.owes_update {
            self.change_keys(out)?;
        }
        Ok(self.sends.begin(out))
    }

    /// Ends a record with data.
    pub(super) fn end(&mut self, begun: Begun, out: &mut Vec<u8>) {
        self.sends.end(APPLICATION_DATA, begun, out);
    }

    /// Appends the record of an alert to `out`.
    pub(super) fn seal_alert(&mut self, alert: u8, out: &mut Vec<u8>) {
        let level = if alert == CLOSE_NOTIFY { WARNING } else { FATAL };
        self.sends.seal(ALERT, &[level, alert], out);
    }

    /// Tells the client that new keys follow, and uses them.
    fn change_keys(&mut self, out: &mut Vec<u8>) -> Result<(), KeysExhausted> {
        if self.suite.version == Version::Tls12 {
            return Err(KeysExhausted);
        }
        self.sends.seal(HANDSHAKE, &UPDATE, out);
        self.sends.advance().map_err(|_| KeysExhausted)?;
        self.owes_update = false;
        Ok(())
    }

    /// Decrypts a whole record in its place.
    pub(super) fn open(&mut self, record: &mut [u8]) -> Result<Received, Violation> {
        let (kind, place) = self.receives.open(record)?;
        let content = &record[place.clone()];
        match (kind, content, self.suite.version) {
            (APPLICATION_DATA, [_, ..], _) => {
                self.fruitless = 0;
                return Ok(Received::Data(place));
            }
            (APPLICATION_DATA, [], _) => {}
            (ALERT, [_, CLOSE_NOTIFY], _) => return Ok(Received::Closed),
            (ALERT, [WARNING, USER_CANCELED], _) | (ALERT, [WARNING, _], Version::Tls12) => {}
            (ALERT, &[_, alert], _) => return Err(Violation::Alert(alert)),
            (HANDSHAKE, message, Version::Tls13) if *message == UPDATE || *message == UPDATE_REQUESTED => {
                self.owes_update |= *message == UPDATE_REQUESTED;
                self.receives.advance().map_err(|_| Violation::Malformed)?;
            }
            (HANDSHAKE, [HELLO_REQUEST | CLIENT_HELLO, ..], Version::Tls12) => return Err(Violation::Renegotiation),
            (HANDSHAKE, &[message, ..], _) => return Err(Violation::Message(message)),
            (ALERT | HANDSHAKE, _, _) => return Err(Violation::Malformed),
            (kind, _, _) => return Err(Violation::Type(kind)),
        }
        self.fruitless += 1;
        if self.fruitless > FRUITLESS_COUNT { Err(Violation::Fruitless) } else { Ok(Received::Nothing) }
    }
}

impl Half {
    /// Length of the part of nonces that the records contain.
    fn explicit_len(&self) -> usize {
        if self.suite.version == Version::Tls12 && self.suite.cipher.is_gcm() { EXPLICIT_BYTES } else { 0 }
    }

    /// Appends a record with `content` to `out`.
    fn seal(&mut self, kind: u8, content: &[u8], out: &mut Vec<u8>) {
        let begun = self.begin(out);
        out.extend_from_slice(content);
        self.end(kind, begun, out);
    }

    fn begin(&self, out: &mut Vec<u8>) -> Begun {
        let begun = Begun(out.len());
        out.extend_from_slice(&[0; HEADER_BYTES]);
        out.extend_from_slice(&self.nonce()[NONCE_BYTES - self.explicit_len()..]);
        begun
    }

    fn end(&mut self, kind: u8, Begun(start): Begun, out: &mut Vec<u8>) {
        let is_hidden = self.suite.version == Version::Tls13;
        let at = start + HEADER_BYTES + self.explicit_len();
        let data_len = out.len() - at;
        out.extend(is_hidden.then_some(kind));
        let shown = if is_hidden { APPLICATION_DATA } else { kind };
        // Both versions send the number of TLS 1.2.
        let [high, low] = ((out.len() + TAG_BYTES - start - HEADER_BYTES) as u16).to_be_bytes();
        let header = [shown, 3, 3, high, low];
        out[start..start + HEADER_BYTES].copy_from_slice(&header);
        let bound = self.bound(header, data_len);
        let nonce = Nonce::assume_unique_for_key(self.nonce());
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(bound.bytes()), &mut out[at..]);
        out.extend_from_slice(tag.expect("a record is short enough").as_ref());
        self.passed.sequence += 1;
    }

    /// Decrypts a record; returns its type and where its content is.
    fn open(&mut self, record: &mut [u8]) -> Result<(u8, Range<usize>), Violation> {
        let Some((&mut header, body)) = record.split_first_chunk_mut::<HEADER_BYTES>() else {
            return Err(Violation::Malformed);
        };
        let (is_hidden, explicit) = (self.suite.version == Version::Tls13, self.explicit_len());
        if is_hidden && header[0] != APPLICATION_DATA {
            return Err(Violation::Type(header[0]));
        }
        if is_hidden && body.len() > BODY_TLS13_BYTES {
            return Err(Violation::TooLong);
        }
        let data_len = body.len().checked_sub(explicit + TAG_BYTES).ok_or(Violation::Undecryptable)?;
        let (shown, sealed) = body.split_at_mut(explicit);
        let mut nonce = self.nonce();
        nonce[NONCE_BYTES - explicit..].copy_from_slice(shown);
        let bound = self.bound(header, data_len);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let opened = self.key.open_in_place(nonce, Aad::from(bound.bytes()), sealed);
        let content = opened.map_err(|_| Violation::Undecryptable)?;
        self.passed.sequence = self.passed.sequence.checked_add(1).ok_or(Violation::Exhausted)?;
        let (kind, len) = if is_hidden {
            // The type is the last byte that is not padding.
            let at = content.iter().rposition(|&byte| byte != 0).ok_or(Violation::Malformed)?;
            (content[at], at)
        } else {
            (header[0], content.len())
        };
        if content.len() > DATA_BYTES + usize::from(is_hidden) || len > DATA_BYTES {
            return Err(Violation::TooLong);
        }
        let start = HEADER_BYTES + explicit;
        Ok((kind, start..start + len))
    }

    /// Returns what a record's tag authenticates besides its content: in TLS 1.3 the header as it is sent, in TLS 1.2
    /// the number and the header of the data.
    fn bound(&self, header: [u8; HEADER_BYTES], data_len: usize) -> Bound {
        match self.suite.version {
            Version::Tls13 => Bound::Tls13(header),
            Version::Tls12 => {
                let [high, low] = (data_len as u16).to_be_bytes();
                let mut bound = [0; NUMBER_BYTES + HEADER_BYTES];
                bound[..NUMBER_BYTES].copy_from_slice(&self.passed.sequence.to_be_bytes());
                bound[NUMBER_BYTES..].copy_from_slice(&[header[0], header[1], header[2], high, low]);
                Bound::Tls12(bound)
            }
        }
    }
}

enum Bound {
    Tls12([u8; NUMBER_BYTES + HEADER_BYTES]),
    Tls13([u8; HEADER_BYTES]),
}

impl Bound {
    fn bytes(&self) -> &[u8] {
        match self {
            Bound::Tls12(bytes) => bytes,
            Bound::Tls13(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests;
