//! The handshake of a session, by the library, and the keys that it ends with.
//!
//! The library receives one record at a time, so that it has no byte of what follows the handshake. [`Records`]
//! decrypts that, and another process can continue it. The traffic secrets of TLS 1.3, from which further keys are
//! made, come from the library's key log, which is a new one for each session.

use std::fmt;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use forkdisk::Buf;
use forkdisk_uring::{ByteStream, is_interrupted};
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets, KeyLog, ProtocolVersion, ServerConfig, ServerConnection};

use super::identity::Identity;
use super::keys::{Cipher, PassedHalf, Secret, Suite, Version};
use super::records::{PassedRecords, Records, record_len};

/// How often a handshake continues when its receives are interrupted. It cannot go to another process.
const INTERRUPTS_COUNT: usize = 100;

/// A session after its handshake.
pub(super) struct Agreed {
    pub(super) records: Records,
    /// The client's identity, if it presented a certificate.
    pub(super) identity: Option<Identity>,
    /// Received bytes that follow the handshake.
    pub(super) arrived: (Buf, Range<usize>),
}

/// Performs the server's side of the handshake on `stream`, with `buf` for what is received. After a failure an alert
/// was sent.
pub(super) async fn agree<S: ByteStream>(stream: &S, config: &ServerConfig, buf: Buf) -> io::Result<Agreed> {
    let log = Arc::new(TrafficSecrets::default());
    let mut config = config.clone();
    config.key_log = log.clone();
    config.enable_secret_extraction = true;
    let session = ServerConnection::new(Arc::new(config)).map_err(io::Error::other)?;
    let mut handshake = Handshake { stream, session, arrived: (buf, 0..0) };
    let agreed = handshake.run().await;
    // The end of the handshake, or the alert.
    let sent = handshake.send_pending().await;
    agreed.and(sent)?;
    let Handshake { session, arrived, .. } = handshake;
    let identity = session.peer_certificates().and_then(|chain| chain.first()).map(Identity::of);
    Ok(Agreed { records: records(session, &log)?, identity, arrived })
}

struct Handshake<'a, S> {
    stream: &'a S,
    session: ServerConnection,
    /// Received bytes that the session does not have yet.
    arrived: (Buf, Range<usize>),
}

impl<S: ByteStream> Handshake<'_, S> {
    async fn run(&mut self) -> io::Result<()> {
        let mut interrupts = 0;
        while self.session.is_handshaking() {
            self.send_pending().await?;
            if self.feed()? {
                continue;
            }
            match self.receive().await {
                Ok(true) => {}
                Ok(false) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(error) if is_interrupted(&error) && interrupts < INTERRUPTS_COUNT => interrupts += 1,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Passes one whole record to the session, or everything if it is none; returns `false` if more must arrive.
    fn feed(&mut self) -> io::Result<bool> {
        let (buf, range) = &mut self.arrived;
        let bytes = &buf[range.clone()];
        let mut record = match record_len(bytes) {
            Ok(len) => match len.and_then(|len| bytes.get(..len)) {
                Some(record) => record,
                None => return Ok(false),
            },
            Err(_) => bytes,
        };
        range.start += record.len();
        while !record.is_empty() {
            self.session.read_tls(&mut record)?;
            self.session.process_new_packets().map_err(|e| io::Error::new(ErrorKind::InvalidData, e))?;
        }
        Ok(true)
    }

    /// Receives more; returns `false` when the client has closed its side.
    async fn receive(&mut self) -> io::Result<bool> {
        let (mut buf, range) = std::mem::replace(&mut self.arrived, (Buf::zeroed(0), 0..0));
        let len = range.len();
        buf.copy_within(range, 0);
        let room = buf.len() - len;
        let (result, buf) = self.stream.recv(buf, len, room).await;
        self.arrived = (buf, 0..len + result.as_ref().unwrap_or(&0));
        result.map(|n| n > 0)
    }

    /// Sends the pending output of the session.
    async fn send_pending(&mut self) -> io::Result<()> {
        let mut out = Vec::new();
        while self.session.wants_write() {
            self.session.write_tls(&mut out)?;
        }
        if out.is_empty() { Ok(()) } else { self.stream.send_vectored(vec![out.into()]).await.0 }
    }
}

/// Takes the keys of a session after its handshake.
pub(super) fn records(session: ServerConnection, log: &TrafficSecrets) -> io::Result<Records> {
    let version = match session.protocol_version() {
        Some(ProtocolVersion::TLSv1_3) => Version::Tls13,
        Some(ProtocolVersion::TLSv1_2) => Version::Tls12,
        other => return Err(io::Error::other(format!("{other:?} is not supported"))),
    };
    let ExtractedSecrets { tx, rx } = session.dangerous_extract_secrets().map_err(io::Error::other)?;
    let half = |(sequence, keys): (u64, ConnectionTrafficSecrets), logged: &OnceLock<Secret>| {
        let (cipher, key, iv) = match &keys {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (Cipher::Aes128Gcm, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (Cipher::Aes256Gcm, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (Cipher::Chacha20Poly1305, key, iv),
            _ => return Err(io::Error::other("the cipher is not supported")),
        };
        let suite = Suite { version, cipher };
        let secret = match version {
            Version::Tls12 => Secret::of([key.as_ref(), iv.as_ref()]),
            Version::Tls13 => logged.get().cloned().ok_or_else(|| io::Error::other("a traffic secret is missing"))?,
        };
        let made = suite.material(&secret).map_err(io::Error::other)?;
        if made.0.bytes() != key.as_ref() || made.1 != iv.as_ref() {
            return Err(io::Error::other("the keys do not belong to the traffic secrets"));
        }
        Ok((suite, PassedHalf { secret, sequence }))
    };
    let ((suite, sends), (_, receives)) = (half(tx, &log.server)?, half(rx, &log.client)?);
    Records::new(PassedRecords::new(suite, sends, receives)).map_err(io::Error::other)
}

/// The traffic secrets of one session of TLS 1.3.
#[derive(Default)]
pub(super) struct TrafficSecrets {
    client: OnceLock<Secret>,
    server: OnceLock<Secret>,
}

impl TrafficSecrets {
    fn place(&self, label: &str) -> Option<&OnceLock<Secret>> {
        match label {
            "CLIENT_TRAFFIC_SECRET_0" => Some(&self.client),
            "SERVER_TRAFFIC_SECRET_0" => Some(&self.server),
            _ => None,
        }
    }
}

impl fmt::Debug for TrafficSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TrafficSecrets")
    }
}

impl KeyLog for TrafficSecrets {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        if let Some(place) = self.place(label) {
            // A session has one of each.
            let _ = place.set(Secret::of([secret, &[]]));
        }
    }

    fn will_log(&self, label: &str) -> bool {
        self.place(label).is_some()
    }
}
