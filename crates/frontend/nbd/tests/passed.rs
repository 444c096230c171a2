//! Connections that go to another server, as to another process: at every byte of a conversation its replies stay the
//! same.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/tls.rs"]
mod certificates;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use certificates::Authority;
use forkdisk::Buf;
use forkdisk_nbd::codec::*;
use forkdisk_nbd::memory::MemoryExports;
use forkdisk_nbd::tls::{AccessEntry, AccessTable, Tls};
use forkdisk_nbd::{PassedClient, Security, Server, ServerOptions};
use forkdisk_uring::{Config, Rt, Stream, block_on};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, SupportedProtocolVersion};

const DISK_BYTES: usize = 1 << 20;
const TURN: Duration = Duration::from_millis(1);

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [&IHAVEOPT.to_be_bytes()[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), rest].concat()
}

fn request(style: ReplyStyle, command: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
    let has_payload = style == ReplyStyle::Extended && command == CMD_WRITE;
    let flags = if has_payload { CMD_FLAG_PAYLOAD_LEN } else { 0 };
    Request { style, flags, command, cookie, offset, length }.encode()
}

/// Everything that a client sends: options, then requests with and without data. It waits for the replies behind each.
fn script(style: ReplyStyle) -> Vec<Vec<u8>> {
    let context = b"base:allocation";
    let queries = [&1u32.to_be_bytes()[..], &(context.len() as u32).to_be_bytes(), context].concat();
    let mut all = vec![3u32.to_be_bytes().to_vec()];
    match style {
        ReplyStyle::Simple => all.push(option(OPT_LIST, b"not allowed here")),
        ReplyStyle::Structured => all.push(option(OPT_STRUCTURED_REPLY, &[])),
        ReplyStyle::Extended => all.push(option(OPT_EXTENDED_HEADERS, &[])),
    }
    if style.has_chunks() {
        all.push(option(OPT_SET_META_CONTEXT, &named("a", &queries)));
    }
    all.push(option(OPT_GO, &named("a", &0u16.to_be_bytes())));
    let data: Vec<u8> = (0..40_000usize).map(|n| (n % 249) as u8 + 1).collect();
    all.push([request(style, CMD_WRITE, 1, 8192, data.len() as u64), data].concat());
    all.push([request(style, CMD_WRITE, 2, 512, 700), vec![7; 700]].concat());
    // Refused, with data that is dropped.
    all.push([request(style, CMD_WRITE, 3, DISK_BYTES as u64, 600), vec![8; 600]].concat());
    all.push(request(style, CMD_READ, 4, 0, 60_000));
    if style.has_chunks() {
        all.push(request(style, CMD_BLOCK_STATUS, 5, 0, 100_000));
    }
    all.push(request(style, CMD_FLUSH, 6, 0, 0));
    all.push(request(style, CMD_DISC, 7, 0, 0));
    all
}

/// Passes a client on as text and descriptor, which is how another process gets it.
fn over_text(passed: PassedClient) -> PassedClient {
    let mut sockets = Vec::new();
    let text = serde_json::to_string(&passed.map(|socket| sockets.push(socket))).unwrap();
    let passed: PassedClient<()> = serde_json::from_str(&text).unwrap();
    passed.map(|()| sockets.pop().unwrap())
}

/// Plays a script to a server that is replaced after `cuts` bytes; returns the replies. Fetches none before the end.
async fn play(rt: &Rt, script: &[Vec<u8>], cuts: &[usize]) -> Vec<u8> {
    let exports = MemoryExports::new().with("a", DISK_BYTES, false);
    let server = || Server::new(rt, exports.clone(), ServerOptions::default());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let client = Stream::from_fd(rt, OwnedFd::from(theirs));
    let serving = server();
    serving.welcome(Stream::from_fd(rt, OwnedFd::from(ours)));
    converse(rt, (serving, &server, &Security::Clear), &client, script, cuts).await
}

/// Sends a script to a server that is replaced by another after `cuts` bytes; returns what comes until the end.
async fn converse(
    rt: &Rt,
    (mut serving, server, security): (Server<MemoryExports>, &dyn Fn() -> Server<MemoryExports>, &Security),
    client: &Stream,
    script: &[Vec<u8>],
    cuts: &[usize],
) -> Vec<u8> {
    let ends = script.iter().scan(0, |end, part| {
        *end += part.len();
        Some((*end, false))
    });
    let mut places: Vec<(usize, bool)> = cuts.iter().map(|&cut| (cut, true)).chain(ends).collect();
    places.sort_unstable();
    let (all, mut at) = (script.concat(), 0);
    for (place, is_cut) in places {
        client.send_vectored(vec![all[at..place].to_vec().into()]).await.0.unwrap();
        at = place;
        rt.sleep_for(TURN).await;
        if !is_cut {
            continue;
        }
        let mut passed = serving.pass_on(true).await;
        assert_eq!((passed.len(), serving.handle().connections()), (1, 0), "after {place} bytes");
        serving = server();
        serving.resume(over_text(passed.pop().unwrap()), security.clone());
    }
    let (mut replies, mut buf) = (Vec::new(), Buf::zeroed(64 << 10));
    loop {
        let (result, back) = client.recv(buf, 0, 64 << 10).await;
        buf = back;
        match result.unwrap() {
            0 => return replies,
            count => replies.extend_from_slice(&buf[..count]),
        }
    }
}

fn in_runtime<T>(work: impl AsyncFnOnce(Rt) -> T) -> T {
    block_on(Config::default(), |rt| async move { work(rt).await }).unwrap()
}

#[test]
fn a_conversation_is_the_same_wherever_it_is_passed_on() {
    for style in [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended] {
        let script = script(style);
        in_runtime(async |rt| {
            let wanted = play(&rt, &script, &[]).await;
            assert!(wanted.len() > 40_000, "{style:?}: {} bytes", wanted.len());
            // Every byte of the options and of the first request, some of the data and of the last requests.
            let len = script.concat().len();
            let places = (0..180).chain((180..len).step_by(2999)).chain((len - 170..len).step_by(3));
            for cut in places {
                let found = play(&rt, &script, &[cut]).await;
                assert!(found == wanted, "{style:?}, after {cut} bytes: {} of {}", found.len(), wanted.len());
            }
            let often: Vec<usize> = (1..30).map(|n| n * len / 31).collect();
            assert!(play(&rt, &script, &often).await == wanted, "{style:?}, often");
        });
    }
}

#[test]
fn replies_that_a_client_does_not_fetch_go_with_it() {
    in_runtime(async |rt| {
        let style = ReplyStyle::Simple;
        let mut parts = vec![3u32.to_be_bytes().to_vec(), option(OPT_GO, &named("a", &0u16.to_be_bytes()))];
        parts.extend((0..24).map(|n| request(style, CMD_READ, n, 0, DISK_BYTES as u64)));
        parts.push(request(style, CMD_DISC, 99, 0, 0));
        let (script, len) = ([parts.concat()], parts.concat().len());
        let wanted = play(&rt, &script, &[]).await;
        assert!(wanted.len() > 24 * DISK_BYTES);
        for cuts in [&[len - 28][..], &[len - 28 * 10, len - 28 * 5, len - 28], &[len - 20]] {
            assert!(play(&rt, &script, cuts).await == wanted, "{cuts:?}");
        }
    });
}

/// Certificates, and a server that requires them.
struct Encryption {
    authority: Authority,
    tls: Tls,
    _dir: tempfile::TempDir,
}

impl Encryption {
    fn new() -> Encryption {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::make(&dir.path().join("pki"));
        let (name, exports) = (Some("one".into()), vec!["a".into()]);
        let entry = AccessEntry { name, fingerprint: None, exports, read_only: false };
        let tls = Tls::load(&authority.server(true), AccessTable::new(vec![entry]).unwrap()).unwrap();
        Encryption { authority, tls, _dir: dir }
    }

    fn client(&self, version: &'static SupportedProtocolVersion) -> ClientConnection {
        let files = self.authority.client("one");
        let certificate = |name: &str| CertificateDer::from_pem_file(files.join(name)).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate("ca-cert.pem")).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let config = config.with_protocol_versions(&[version]).unwrap().with_root_certificates(roots);
        let key = PrivateKeyDer::from_pem_file(files.join("client-key.pem")).unwrap();
        let config = config.with_client_auth_cert(vec![certificate("client-cert.pem")], key).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap()).unwrap();
        client.set_buffer_limit(None);
        client
    }
}

/// Receives at least `len` bytes; fewer at the end.
async fn received(client: &Stream, len: usize) -> Vec<u8> {
    let (mut all, mut buf) = (Vec::new(), Buf::zeroed(64 << 10));
    while all.len() < len {
        let (result, back) = client.recv(buf, 0, 64 << 10).await;
        buf = back;
        match result.unwrap() {
            0 => break,
            count => all.extend_from_slice(&buf[..count]),
        }
    }
    all
}

fn to_send(session: &mut ClientConnection) -> Vec<u8> {
    let mut bytes = Vec::new();
    while session.wants_write() {
        session.write_tls(&mut bytes).unwrap();
    }
    bytes
}

/// Gives bytes to the session; returns the data in them.
fn decrypted(session: &mut ClientConnection, mut bytes: &[u8]) -> Vec<u8> {
    let mut data = Vec::new();
    while !bytes.is_empty() {
        session.read_tls(&mut bytes).unwrap();
        let mut part = vec![0; session.process_new_packets().unwrap().plaintext_bytes_to_read()];
        session.reader().read_exact(&mut part).unwrap();
        data.extend(part);
    }
    data
}

/// Connects a client that has done its part of the handshake, except for sending the last of it.
async fn begin_encrypted(
    rt: &Rt,
    server: &Server<MemoryExports>,
    encryption: &Encryption,
    version: &'static SupportedProtocolVersion,
) -> (Stream, ClientConnection) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let client = Stream::from_fd(rt, OwnedFd::from(theirs));
    server.welcome_as(Stream::from_fd(rt, OwnedFd::from(ours)), Security::Required(encryption.tls.clone()));
    let begin = [&3u32.to_be_bytes()[..], &option(OPT_STARTTLS, &[])].concat();
    client.send_vectored(vec![begin.into()]).await.0.unwrap();
    assert_eq!(received(&client, 18 + 20).await.len(), 18 + 20);
    let mut session = encryption.client(version);
    while session.is_handshaking() {
        let out = to_send(&mut session);
        client.send_vectored(vec![out.into()]).await.0.unwrap();
        let bytes = received(&client, 1).await;
        assert_eq!(decrypted(&mut session, &bytes), b"");
    }
    (client, session)
}

/// As [`play`], under TLS. The cuts are fractions of what is sent behind the handshake. `keys`: the client changes its
/// keys before each part.
async fn play_encrypted(
    rt: &Rt,
    (encryption, version, keys): (&Encryption, &'static SupportedProtocolVersion, bool),
    script: &[Vec<u8>],
    cuts: &[f64],
) -> Vec<u8> {
    let exports = MemoryExports::new().with("a", DISK_BYTES, false);
    let security = Security::Required(encryption.tls.clone());
    let server = || Server::new(rt, exports.clone(), ServerOptions::default());
    let serving = server();
    let (client, mut session) = begin_encrypted(rt, &serving, encryption, version).await;
    client.send_vectored(vec![to_send(&mut session).into()]).await.0.unwrap();
    let mut encrypt = |part: &Vec<u8>| {
        if keys {
            session.refresh_traffic_keys().unwrap();
        }
        session.writer().write_all(part).unwrap();
        to_send(&mut session)
    };
    let sent: Vec<Vec<u8>> = script[1..].iter().map(&mut encrypt).collect();
    let len = sent.concat().len();
    let cuts: Vec<usize> = cuts.iter().map(|cut| (cut * len as f64) as usize).collect();
    let replies = converse(rt, (serving, &server, &security), &client, &sent, &cuts).await;
    decrypted(&mut session, &replies)
}

#[test]
fn an_encrypted_conversation_is_the_same_wherever_it_is_passed_on() {
    let encryption = Encryption::new();
    let cases = [
        (&rustls::version::TLS13, ReplyStyle::Structured, false, 120),
        (&rustls::version::TLS13, ReplyStyle::Simple, true, 30),
        (&rustls::version::TLS12, ReplyStyle::Extended, false, 60),
    ];
    for (version, style, keys, count) in cases {
        let script = script(style);
        let how = (&encryption, version, keys);
        in_runtime(async |rt| {
            let wanted = play_encrypted(&rt, how, &script, &[]).await;
            assert!(wanted.len() > 40_000, "{version:?}: {} bytes", wanted.len());
            // Most of them in the options and the small requests at the end, the others in the data.
            let near = (0..count).map(|n| n as f64 / count as f64 * 0.02);
            for cut in near.clone().chain(near.map(|near| 0.98 + near)).chain((0..30).map(|n| n as f64 / 30.0)) {
                let found = play_encrypted(&rt, how, &script, &[cut]).await;
                assert!(found == wanted, "{version:?}, at {cut}: {} of {}", found.len(), wanted.len());
            }
            let often: Vec<f64> = (0..40).map(|n| n as f64 / 40.0).collect();
            assert!(play_encrypted(&rt, how, &script, &often).await == wanted, "{version:?}, often");
        });
    }
}

#[test]
fn encrypted_replies_that_a_client_does_not_fetch_go_with_it() {
    let encryption = Encryption::new();
    in_runtime(async |rt| {
        let style = ReplyStyle::Simple;
        let mut parts = vec![3u32.to_be_bytes().to_vec(), option(OPT_GO, &named("a", &0u16.to_be_bytes()))];
        parts.extend((0..24).map(|n| request(style, CMD_READ, n, 0, DISK_BYTES as u64)));
        parts.push(request(style, CMD_DISC, 99, 0, 0));
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            for keys in [false, version.version == rustls::ProtocolVersion::TLSv1_3] {
                let how = (&encryption, version, keys);
                let wanted = play_encrypted(&rt, how, &parts, &[]).await;
                assert!(wanted.len() > 24 * DISK_BYTES);
                for cuts in [&[0.5][..], &[0.3, 0.6, 0.98], &[0.99]] {
                    assert!(play_encrypted(&rt, how, &parts, cuts).await == wanted, "{version:?}: {cuts:?}");
                }
            }
        }
    });
}

#[test]
fn encrypted_clients_are_disconnected_where_nothing_can_continue_them() {
    let encryption = Encryption::new();
    in_runtime(async |rt| {
        let exports = MemoryExports::new().with("a", DISK_BYTES, false);
        let server = Server::new(&rt, exports, ServerOptions::default());
        let (client, mut session) = begin_encrypted(&rt, &server, &encryption, &rustls::version::TLS13).await;
        let mut replies = Vec::new();
        session.writer().write_all(&option(OPT_GO, &named("a", &0u16.to_be_bytes()))).unwrap();
        while replies.len() < 20 {
            let out = to_send(&mut session);
            client.send_vectored(vec![out.into()]).await.0.unwrap();
            let bytes = received(&client, 1).await;
            replies.extend(decrypted(&mut session, &bytes));
        }
        assert!(server.pass_on(false).await.is_empty());
        let end = received(&client, usize::MAX).await;
        session.read_tls(&mut &end[..]).unwrap();
        assert!(session.process_new_packets().unwrap().peer_has_closed(), "the end is announced");
    });
}

#[test]
fn a_tls_handshake_under_way_ends_before_the_client_is_passed_on() {
    let encryption = Encryption::new();
    in_runtime(async |rt| {
        let exports = MemoryExports::new().with("a", DISK_BYTES, false);
        let server = || Server::new(&rt, exports.clone(), ServerOptions::default());
        let (before, after) = (server(), server());
        let (client, mut session) = begin_encrypted(&rt, &before, &encryption, &rustls::version::TLS13).await;
        let leaving = rt.spawn(async move { before.pass_on(true).await });
        rt.sleep_for(5 * TURN).await;
        client.send_vectored(vec![to_send(&mut session).into()]).await.0.unwrap();
        let mut passed = leaving.await;
        assert_eq!(passed.len(), 1);
        after.resume(over_text(passed.pop().unwrap()), Security::Required(encryption.tls.clone()));
        let go = option(OPT_GO, &named("a", &0u16.to_be_bytes()));
        session.writer().write_all(&[go, request(ReplyStyle::Simple, CMD_DISC, 1, 0, 0)].concat()).unwrap();
        client.send_vectored(vec![to_send(&mut session).into()]).await.0.unwrap();
        let replies = received(&client, usize::MAX).await;
        assert_eq!(decrypted(&mut session, &replies)[8..16], [0, 0, 0, 7, 0, 0, 0, 3], "the export was opened");
    });
}
