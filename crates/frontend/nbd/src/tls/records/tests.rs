//! The records against the library as the client, and against a peer with the same keys that sends what it likes.

use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, SupportedCipherSuite};

use super::super::handshake::{TrafficSecrets, records};
use super::super::keys::{Cipher, Secret};
use super::*;

/// Suites for certificates with elliptic curves, of both versions.
fn suites() -> Vec<SupportedCipherSuite> {
    let all = rustls::crypto::ring::ALL_CIPHER_SUITES.iter().copied();
    all.filter(|suite| !format!("{:?}", suite.suite()).contains("ECDHE_RSA")).collect()
}

/// A client of the library and the records of its server.
struct Pair {
    client: ClientConnection,
    server: Records,
}

impl Pair {
    fn new(suite: SupportedCipherSuite) -> Pair {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate: CertificateDer<'static> = params.self_signed(&key).unwrap().der().clone();
        let provider =
            Arc::new(CryptoProvider { cipher_suites: vec![suite], ..rustls::crypto::ring::default_provider() });
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let config = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        let config = config.unwrap().with_root_certificates(roots).with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        client.set_buffer_limit(None);
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.unwrap().with_no_client_auth();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let mut config = config.with_single_cert(vec![certificate], key).unwrap();
        let log = Arc::new(TrafficSecrets::default());
        (config.key_log, config.enable_secret_extraction, config.send_tls13_tickets) = (log.clone(), true, 0);
        let mut server = ServerConnection::new(Arc::new(config)).unwrap();
        while client.is_handshaking() || server.is_handshaking() || client.wants_write() || server.wants_write() {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                server.read_tls(&mut rest).unwrap();
                server.process_new_packets().unwrap();
            }
            bytes.clear();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            let mut pair = Pair { client, server: peer() };
            pair.deliver(&bytes).unwrap();
            client = pair.client;
        }
        Pair { client, server: records(server, &log).unwrap() }
    }

    /// Gives bytes to the client; returns the data that it has got.
    fn deliver(&mut self, mut bytes: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        let mut data = Vec::new();
        while !bytes.is_empty() {
            self.client.read_tls(&mut bytes).unwrap();
            let state = self.client.process_new_packets()?;
            let mut part = vec![0; state.plaintext_bytes_to_read()];
            std::io::Read::read_exact(&mut self.client.reader(), &mut part).unwrap();
            data.extend(part);
        }
        Ok(data)
    }

    /// Lets the server send; returns what the client has got.
    fn reply(&mut self, data: &[u8]) -> Vec<u8> {
        let out = seal(&mut self.server, data).unwrap();
        self.deliver(&out).unwrap()
    }

    /// Returns what the client sends with `data`.
    fn sent(&mut self, data: &[u8]) -> Vec<u8> {
        std::io::Write::write_all(&mut self.client.writer(), data).unwrap();
        let mut bytes = Vec::new();
        while self.client.wants_write() {
            self.client.write_tls(&mut bytes).unwrap();
        }
        bytes
    }

    /// Lets the client send; returns what the server has got.
    fn request(&mut self, data: &[u8]) -> Vec<u8> {
        let bytes = self.sent(data);
        open(&mut self.server, &bytes).unwrap()
    }

    /// Continues with the state as another process gets it.
    fn pass_on(&mut self) {
        let text = serde_json::to_string(&self.server.pass_on()).unwrap();
        self.server = Records::new(serde_json::from_str(&text).unwrap()).unwrap();
    }
}

fn seal(records: &mut Records, data: &[u8]) -> Result<Vec<u8>, KeysExhausted> {
    let mut out = Vec::new();
    for part in data.chunks(DATA_BYTES) {
        let begun = records.begin(&mut out)?;
        out.extend_from_slice(part);
        records.end(begun, &mut out);
    }
    Ok(out)
}

/// Opens whole records; returns their data.
fn open(records: &mut Records, bytes: &[u8]) -> Result<Vec<u8>, Violation> {
    let (mut bytes, mut data) = (bytes.to_vec(), Vec::new());
    let mut rest = &mut bytes[..];
    while let Some(len) = record_len(rest)? {
        let (record, more) = rest.split_at_mut(len);
        match records.open(record)? {
            Received::Data(place) => data.extend_from_slice(&record[place]),
            Received::Nothing => {}
            Received::Closed => assert!(more.is_empty()),
        }
        rest = more;
    }
    assert!(rest.is_empty(), "a part of a record");
    Ok(data)
}

/// Returns a state with made up keys.
fn peer() -> Records {
    sides(Suite { version: Version::Tls13, cipher: Cipher::Aes128Gcm }, 0).0
}

/// Returns both sides of a session with made up keys, from this record on.
fn sides(suite: Suite, sequence: u64) -> (Records, Records) {
    let len = match (suite.version, suite.cipher) {
        (Version::Tls12, Cipher::Aes128Gcm) => 28,
        (Version::Tls12, _) => 44,
        (Version::Tls13, Cipher::Aes256Gcm) => 48,
        (Version::Tls13, _) => 32,
    };
    let half = |byte: u8| PassedHalf { secret: Secret::from(&vec![byte; len][..]), sequence };
    let side = |sends, receives| Records::new(PassedRecords::new(suite, half(sends), half(receives))).unwrap();
    (side(1, 2), side(2, 1))
}

fn all_suites() -> impl Iterator<Item = Suite> {
    let ciphers = [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::Chacha20Poly1305];
    let versions = [Version::Tls12, Version::Tls13];
    versions.into_iter().flat_map(move |version| ciphers.map(|cipher| Suite { version, cipher }))
}

/// Returns a record with any type and content.
fn record(records: &mut Records, kind: u8, content: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    records.sends.seal(kind, content, &mut out);
    out
}

fn noise(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 31 % 251) as u8).collect()
}

#[test]
fn data_goes_in_both_directions_with_each_cipher_suite() {
    assert_eq!(suites().len(), 6);
    for suite in suites() {
        let mut pair = Pair::new(suite);
        for len in [1, 2, 1000, DATA_BYTES, DATA_BYTES + 1, 300_000] {
            let data = noise(len);
            assert!(pair.request(&data) == data && pair.reply(&data) == data, "{suite:?}: {len} bytes");
        }
    }
}

#[test]
fn a_session_goes_on_after_it_was_passed_on_often() {
    for suite in suites() {
        let mut pair = Pair::new(suite);
        for round in 0..25 {
            pair.pass_on();
            let data = noise(1 + round * 3001);
            assert!(pair.request(&data) == data, "{suite:?}: round {round}");
            pair.pass_on();
            assert!(pair.reply(&data) == data, "{suite:?}: round {round}");
        }
    }
}

#[test]
fn a_client_that_changes_its_keys_is_followed() {
    for suite in suites().into_iter().filter(|suite| suite.tls13().is_some()) {
        let mut pair = Pair::new(suite);
        for round in 0..5 {
            pair.client.refresh_traffic_keys().unwrap();
            let changed = pair.sent(b"");
            assert_eq!(open(&mut pair.server, &changed), Ok(Vec::new()));
            assert!(pair.server.owes_update, "the client requests new keys of the server as well");
            pair.pass_on();
            assert_eq!(pair.request(b"with the new key"), b"with the new key", "{suite:?}: round {round}");
            let out = seal(&mut pair.server, b"as well").unwrap();
            assert!(!pair.server.owes_update);
            assert_eq!((pair.server.sends.passed.sequence, pair.deliver(&out).unwrap()), (1, b"as well".to_vec()));
            pair.pass_on();
        }
    }
}

#[test]
fn the_end_that_a_client_announces_is_an_end() {
    for suite in suites() {
        let mut pair = Pair::new(suite);
        pair.client.send_close_notify();
        let mut bytes = pair.sent(b"");
        assert_eq!(record_len(&bytes), Ok(Some(bytes.len())));
        assert_eq!(pair.server.open(&mut bytes), Ok(Received::Closed));
        let mut out = Vec::new();
        pair.server.seal_alert(CLOSE_NOTIFY, &mut out);
        pair.client.read_tls(&mut &out[..]).unwrap();
        assert!(pair.client.process_new_packets().unwrap().peer_has_closed());
    }
}

#[test]
fn a_violation_reaches_the_client_as_an_alert() {
    for suite in suites() {
        let mut pair = Pair::new(suite);
        let mut out = Vec::new();
        pair.server.seal_alert(Violation::Undecryptable.alert(), &mut out);
        let received = pair.deliver(&out).unwrap_err();
        assert_eq!(received, rustls::Error::AlertReceived(rustls::AlertDescription::BadRecordMac));
    }
}

#[test]
fn a_record_with_a_changed_byte_is_refused() {
    for suite in suites() {
        let mut pair = Pair::new(suite);
        let bytes = pair.sent(b"0123456789");
        for at in 0..bytes.len() {
            let (mut changed, mut server) = (bytes.clone(), Records::new(pair.server.pass_on()).unwrap());
            changed[at] ^= 0x40;
            // A changed length makes it another record.
            let opened = open_whole(&mut server, &mut changed);
            assert!(opened.is_err(), "{suite:?}: byte {at} of {}", bytes.len());
        }
        assert_eq!(open(&mut pair.server, &bytes).unwrap(), b"0123456789");
        assert_eq!(open(&mut pair.server, &bytes), Err(Violation::Undecryptable), "a record that was repeated");
    }
}

fn open_whole(server: &mut Records, record: &mut [u8]) -> Result<Received, Violation> {
    match record_len(record)? {
        Some(len) if len == record.len() => server.open(record),
        _ => Err(Violation::Malformed),
    }
}

#[test]
fn a_part_of_a_record_is_waited_for() {
    let bytes = Pair::new(suites()[0]).sent(&noise(500));
    for len in 0..5 {
        assert_eq!(record_len(&bytes[..len]), Ok(None));
    }
    for len in 5..bytes.len() {
        assert_eq!(record_len(&bytes[..len]), Ok(Some(bytes.len())));
    }
}

#[test]
fn a_record_that_is_too_long_is_refused() {
    assert_eq!(record_len(&[23, 3, 3, 0x48, 0]), Ok(Some(HEADER_BYTES + BODY_TLS12_BYTES)));
    assert_eq!(record_len(&[23, 3, 3, 0x48, 1]), Err(Violation::TooLong));
    assert_eq!(record_len(&[23, 3, 3, 0xff, 0xff]), Err(Violation::TooLong));
    assert_eq!(record_len(b"GET "), Err(Violation::Type(b'G')));
    assert_eq!(record_len(&[24]), Err(Violation::Type(24)));
    for suite in all_suites() {
        let (mut client, mut server) = sides(suite, 0);
        let longest = record(&mut client, APPLICATION_DATA, &noise(DATA_BYTES));
        assert!(open(&mut server, &longest).unwrap() == noise(DATA_BYTES), "{suite:?}");
        let longer = record(&mut client, APPLICATION_DATA, &noise(DATA_BYTES + 1));
        assert_eq!(open(&mut server, &longer), Err(Violation::TooLong), "{suite:?}");
        if suite.version == Version::Tls13 {
            let (mut client, mut server) = sides(suite, 0);
            let padded = record(&mut client, 0, &[&[1, 23][..], &[0; DATA_BYTES - 2]].concat());
            assert_eq!(open(&mut server, &padded).unwrap(), [1], "{suite:?}: padding up to the limit");
            let padded = record(&mut client, 0, &[&[1, 23][..], &[0; DATA_BYTES - 1]].concat());
            assert_eq!(open(&mut server, &padded), Err(Violation::TooLong), "{suite:?}: padding beyond the limit");
            let nothing = record(&mut sides(suite, 0).0, 0, &[0; 100]);
            assert_eq!(open(&mut sides(suite, 0).1, &nothing), Err(Violation::Malformed), "{suite:?}");
        }
    }
}

#[test]
fn a_record_without_room_for_its_tag_is_refused() {
    for suite in all_suites() {
        for len in 0..24 {
            let mut record = [&[23, 3, 3, 0, len as u8][..], &vec![7; len]].concat();
            let refused = sides(suite, 0).1.open(&mut record);
            assert_eq!(refused, Err(Violation::Undecryptable), "{suite:?}: {len} bytes");
        }
        assert_eq!(sides(suite, 0).1.open(&mut [23, 3]), Err(Violation::Malformed));
    }
}

#[test]
fn records_without_data_may_be_sent_a_few_times() {
    for suite in all_suites() {
        let (mut client, mut server) = sides(suite, 0);
        for _ in 0..3 {
            for _ in 0..FRUITLESS_COUNT {
                let empty = record(&mut client, APPLICATION_DATA, b"");
                assert_eq!(open(&mut server, &empty), Ok(Vec::new()));
            }
            assert_eq!(open(&mut server, &seal(&mut client, b"x").unwrap()).unwrap(), b"x");
        }
        let many: Vec<u8> = (0..=FRUITLESS_COUNT).flat_map(|_| record(&mut client, ALERT, &[1, 90])).collect();
        assert_eq!(open(&mut server, &many), Err(Violation::Fruitless), "{suite:?}");
    }
}

#[test]
fn what_is_no_data_ends_the_session() {
    for suite in all_suites() {
        let is_tls13 = suite.version == Version::Tls13;
        let renegotiation = if is_tls13 { Violation::Message(1) } else { Violation::Renegotiation };
        let cases = [
            (HANDSHAKE, &[1, 0, 0, 0][..], renegotiation),
            (HANDSHAKE, &[24, 0, 0, 1, 2], Violation::Message(24)),
            (HANDSHAKE, &[24, 0, 0, 1, 0, 24], Violation::Message(24)),
            (HANDSHAKE, &[4, 0, 0, 0], Violation::Message(4)),
            (HANDSHAKE, &[], Violation::Malformed),
            (ALERT, &[2, 40], Violation::Alert(40)),
            (ALERT, &[2], Violation::Malformed),
            (ALERT, &[1, 0, 0], Violation::Malformed),
            (CHANGE_CIPHER_SPEC, &[1], Violation::Type(20)),
            (24, &[1], Violation::Type(24)),
        ];
        for (kind, content, violation) in cases {
            let (mut client, mut server) = sides(suite, 0);
            let mut bytes = record(&mut client, kind, content);
            assert_eq!(server.open(&mut bytes), Err(violation), "{suite:?}: {kind} {content:?}");
        }
        if is_tls13 {
            let clear = [20, 3, 3, 0, 1, 1];
            assert_eq!(open(&mut sides(suite, 0).1, &clear), Err(Violation::Type(20)), "{suite:?}");
        }
    }
}

#[test]
fn keys_are_changed_before_they_have_encrypted_too_much() {
    for suite in all_suites() {
        let limit = suite.cipher.limit();
        let (mut client, mut server) = sides(suite, limit - 1);
        let last = seal(&mut server, b"last").unwrap();
        assert_eq!((open(&mut client, &last).unwrap(), server.sends.passed.sequence), (b"last".to_vec(), limit));
        match suite.version {
            Version::Tls12 => {
                assert_eq!(seal(&mut server, b"one more"), Err(KeysExhausted), "{suite:?}");
                let mut end = Vec::new();
                server.seal_alert(CLOSE_NOTIFY, &mut end);
                assert_eq!(client.open(&mut end), Ok(Received::Closed));
            }
            Version::Tls13 => {
                let next = seal(&mut server, b"one more").unwrap();
                assert_eq!(
                    (open(&mut client, &next).unwrap(), server.sends.passed.sequence),
                    (b"one more".to_vec(), 1)
                );
            }
        }
    }
}

#[test]
fn a_state_with_impossible_keys_is_refused() {
    let (server, _) = sides(Suite { version: Version::Tls13, cipher: Cipher::Aes256Gcm }, 5);
    let mut state = serde_json::to_value(server.pass_on()).unwrap();
    let read = |state: &serde_json::Value| serde_json::from_value::<PassedRecords>(state.clone()).ok();
    assert!(read(&state).is_some_and(|state| Records::new(state).is_ok()));
    state["sends"]["sequence"] = u64::MAX.into();
    assert!(read(&state).is_some_and(|state| Records::new(state).is_err()));
    state["sends"]["sequence"] = 0.into();
    state["suite"]["cipher"] = "Aes128Gcm".into();
    assert!(read(&state).is_some_and(|state| Records::new(state).is_err()));
    state["suite"]["cipher"] = "Rot13".into();
    assert!(read(&state).is_none());
}
