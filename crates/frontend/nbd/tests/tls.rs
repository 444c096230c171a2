//! STARTTLS: when it is required, what it protects, and access to exports under it.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forkdisk::{CreateOptions, Device, FormatOptions, OpenOptions, Pool};
use forkdisk_nbd::codec::*;
use forkdisk_nbd::memory::MemoryExports;
use forkdisk_nbd::tls::{AccessEntry, AccessTable, Tls};
use forkdisk_nbd::{Security, ServerOptions};
use forkdisk_uring::{DeviceOptions, Rt, UringDevice};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use support::tls::Authority;
use support::{Client, TestServer};

const ERR_POLICY: u32 = REP_ERROR + 2;
const ERR_INVALID: u32 = REP_ERROR + 3;
const ERR_TLS_REQD: u32 = REP_ERROR + 5;
const ERR_UNKNOWN: u32 = REP_ERROR + 6;
const EPERM: u32 = 1;
const SIZE: usize = 40 << 20;

/// An authority and a server with a certificate from it.
struct Lab {
    authority: Authority,
    server: TestServer,
    _dir: tempfile::TempDir,
}

#[derive(Clone, Copy, PartialEq)]
enum Clients {
    Any,
    Certified,
}

impl Lab {
    fn start(secure: fn(Tls) -> Security, clients: Clients, table: AccessTable) -> Lab {
        Lab::start_with(secure, clients, table, ServerOptions::default())
    }

    fn start_with(secure: fn(Tls) -> Security, clients: Clients, table: AccessTable, options: ServerOptions) -> Lab {
        let dir = tempfile::tempdir().expect("a folder");
        let authority = Authority::make(&dir.path().join("pki"));
        let tls = Tls::load(&authority.server(clients == Clients::Certified), table).expect("sound certificates");
        let server = TestServer::start_as(options, secure(tls), |_| async {
            let disks = MemoryExports::new().with("vm/a", SIZE, false).with("vm/b", SIZE, false);
            disks.with("vm/b@monday", SIZE, true).with("other", SIZE, false)
        });
        Lab { authority, server, _dir: dir }
    }

    /// Creates a client's session, with the certificate of the client `name` if it has one.
    fn session(&self, name: Option<&str>) -> ClientConnection {
        let files = self.authority.client(name.unwrap_or("nobody"));
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(files.join("ca-cert.pem")).expect("a certificate")).expect("sound");
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().expect("versions").with_root_certificates(roots);
        let config = match name {
            None => builder.with_no_client_auth(),
            Some(_) => {
                let chain = vec![CertificateDer::from_pem_file(files.join("client-cert.pem")).expect("a certificate")];
                let key = PrivateKeyDer::from_pem_file(files.join("client-key.pem")).expect("a key");
                builder.with_client_auth_cert(chain, key).expect("they fit")
            }
        };
        let host = ServerName::try_from("localhost").expect("a name");
        ClientConnection::new(Arc::new(config), host).expect("a session")
    }

    /// Returns a client under TLS, before its options.
    fn encrypted(&self, name: Option<&str>) -> Client {
        let mut client = self.server.raw();
        client.option(OPT_STARTTLS, &[]);
        assert_eq!(client.option_reply(OPT_STARTTLS), (REP_ACK, vec![]));
        client.encrypt(self.session(name)).expect("TLS")
    }
}

/// Returns the names that LIST reports.
fn list(client: &mut Client) -> Vec<String> {
    client.option(OPT_LIST, &[]);
    let mut names = Vec::new();
    loop {
        let (kind, data) = client.option_reply(OPT_LIST);
        if kind == REP_ACK {
            return names;
        }
        let len = u32::from_be_bytes(data[..4].try_into().expect("4 bytes")) as usize;
        names.push(String::from_utf8(data[4..4 + len].to_vec()).expect("text"));
    }
}

#[test]
fn bytes_pipelined_behind_starttls_are_thrown_away() {
    let lab = Lab::start(Security::Required, Clients::Any, AccessTable::open());
    let mut client = lab.server.raw();
    // One send: as if an attacker injected bytes before the client's own TLS.
    let mut bytes = Vec::new();
    for (option, data) in [(OPT_STARTTLS, &b""[..]), (OPT_LIST, b""), (OPT_EXPORT_NAME, b"vm/a"), (OPT_LIST, b"")] {
        bytes.extend_from_slice(&IHAVEOPT.to_be_bytes());
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
    }
    client.send(&bytes);
    assert_eq!(client.option_reply(OPT_STARTTLS), (REP_ACK, vec![]));
    let mut client = client.encrypt(lab.session(None)).expect("the session begins with what comes now");
    let (size, _) = client.go("vm/b");
    assert_eq!(size, SIZE as u64, "the first answer under TLS is to the first question under TLS");
    assert_eq!(client.write(0, 7, b"mine"), 0);
}

#[test]
fn nothing_is_told_before_tls_where_it_is_required() {
    let lab = Lab::start(Security::Required, Clients::Any, AccessTable::open());
    let mut client = lab.server.raw();
    client.option(OPT_LIST, &[]);
    assert_eq!(client.option_reply(OPT_LIST).0, ERR_TLS_REQD);
    for option in [OPT_INFO, OPT_GO] {
        client.ask(option, "vm/a", &[]);
        assert_eq!(client.option_reply(option).0, ERR_TLS_REQD);
    }
    client.option(OPT_ABORT, &[]);
    assert_eq!(client.option_reply(OPT_ABORT).0, REP_ACK);
    let mut old = lab.server.raw();
    old.option(OPT_EXPORT_NAME, b"vm/a");
    old.expect_end();
    assert_eq!(list(&mut lab.encrypted(None)), ["other", "vm/a", "vm/b", "vm/b@monday"]);
}

#[test]
fn where_tls_is_offered_both_kinds_of_client_are_served() {
    let lab = Lab::start(Security::Offered, Clients::Any, AccessTable::open());
    let mut clear = lab.server.client("vm/a");
    assert_eq!(clear.write(0, 100, b"in the clear"), 0);
    let mut encrypted = lab.encrypted(None);
    encrypted.go("vm/a");
    assert_eq!(encrypted.read(100, 12), Ok(b"in the clear".to_vec()));
}

#[test]
fn without_certificates_starttls_is_refused_and_the_session_goes_on() {
    let server = TestServer::start(ServerOptions::default(), |_| MemoryExports::new().with("a", SIZE, false));
    let mut client = server.raw();
    client.option(OPT_STARTTLS, &[]);
    assert_eq!(client.option_reply(OPT_STARTTLS).0, ERR_POLICY);
    client.go("a");
    assert_eq!(client.write(0, 0, b"x"), 0);
}

#[test]
fn starttls_takes_no_data_and_comes_once() {
    let lab = Lab::start(Security::Required, Clients::Any, AccessTable::open());
    let mut client = lab.server.raw();
    client.option(OPT_STARTTLS, b"data");
    assert_eq!(client.option_reply(OPT_STARTTLS).0, ERR_INVALID);
    let mut client = lab.encrypted(None);
    client.option(OPT_STARTTLS, &[]);
    assert_eq!(client.option_reply(OPT_STARTTLS).0, ERR_INVALID);
    client.go("vm/a");
}

#[test]
fn clients_without_a_certificate_of_the_authority_are_not_let_in() {
    let lab = Lab::start(Security::Required, Clients::Certified, AccessTable::open());
    let stranger = Authority::make(&lab.server.path().join("stranger"));
    let foreign = Lab { authority: stranger, ..Lab::start(Security::Required, Clients::Any, AccessTable::open()) };
    for session in [lab.session(None), foreign.session(Some("vm"))] {
        let mut client = lab.server.raw();
        client.option(OPT_STARTTLS, &[]);
        assert_eq!(client.option_reply(OPT_STARTTLS).0, REP_ACK);
        // In TLS 1.3 the client's handshake ends before the server has seen its certificate.
        if let Ok(mut client) = client.encrypt(session) {
            client.try_send(&IHAVEOPT.to_be_bytes());
            assert!(client.is_turned_away(), "it got an answer");
        }
    }
    lab.encrypted(Some("vm")).go("vm/a");
}

fn entry(name: &str, exports: &[&str], read_only: bool) -> AccessEntry {
    let exports = exports.iter().map(|e| (*e).to_owned()).collect();
    AccessEntry { name: Some(name.to_owned()), fingerprint: None, exports, read_only }
}

#[test]
fn a_client_sees_and_opens_what_its_certificate_may() {
    let table = AccessTable::new(vec![entry("web", &["vm/a"], false), entry("backup", &["vm/*"], true)]);
    let lab = Lab::start(Security::Required, Clients::Certified, table.expect("a sound table"));
    assert_eq!(list(&mut lab.encrypted(Some("web"))), ["vm/a"]);
    assert_eq!(list(&mut lab.encrypted(Some("backup"))), ["vm/a", "vm/b", "vm/b@monday"]);
    assert_eq!(list(&mut lab.encrypted(Some("nobody"))), Vec::<String>::new());

    let mut web = lab.encrypted(Some("web"));
    for option in [OPT_INFO, OPT_GO] {
        let answers = ["vm/b", "nowhere"].map(|name| {
            web.ask(option, name, &[]);
            let (kind, text) = web.option_reply(option);
            (kind, String::from_utf8(text).expect("text").replace(name, ""))
        });
        assert_eq!(answers[0].0, ERR_UNKNOWN);
        assert_eq!(answers[0], answers[1], "what is hidden looks like what is not there");
    }
    let (_, flags) = web.go("vm/a");
    assert_eq!(flags & FLAG_READ_ONLY, 0);
    assert_eq!(web.write(0, 0, b"data"), 0);

    let mut backup = lab.encrypted(Some("backup"));
    let (_, flags) = backup.go("vm/a");
    assert_ne!(flags & FLAG_READ_ONLY, 0);
    assert_eq!(backup.read(0, 4), Ok(b"data".to_vec()));
    assert_eq!(backup.write(0, 0, b"evil"), EPERM);
    assert_eq!(backup.read(0, 4), Ok(b"data".to_vec()), "nothing was written");

    let mut nobody = lab.encrypted(Some("nobody"));
    nobody.option(OPT_EXPORT_NAME, b"vm/a");
    nobody.expect_end();
}

/// Creates a pool in an unlinked file.
async fn pool(rt: &Rt) -> Pool<UringDevice> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("pool");
    let device = UringDevice::create(rt, &path, 64 << 20, false, &DeviceOptions::default()).expect("a file");
    let options = FormatOptions::new(device.len(), [7; 16], 0);
    Pool::format(&device, &options).await.expect("a pool");
    Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await.expect("it opens")
}

/// Returns the contexts of `export` that SET or LIST reports when all of `names` are requested.
fn contexts(client: &mut Client, option: u32, export: &str, names: &[&str]) -> Vec<String> {
    let text = |s: &str| [&(s.len() as u32).to_be_bytes()[..], s.as_bytes()].concat();
    let mut data = [text(export), (names.len() as u32).to_be_bytes().to_vec()].concat();
    names.iter().for_each(|name| data.extend(text(name)));
    client.option(option, &data);
    let mut told = Vec::new();
    loop {
        let (kind, data) = client.option_reply(option);
        if kind == REP_ACK {
            return told;
        }
        told.push(String::from_utf8(data[4..].to_vec()).expect("text"));
    }
}

#[test]
fn what_changed_since_a_snapshot_is_told_to_those_who_may_open_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let authority = Authority::make(&dir.path().join("pki"));
    let table = vec![entry("web", &["vm", "vm@mine"], false), entry("all", &["*"], false)];
    let table = AccessTable::new(table).expect("a sound table");
    let tls = Tls::load(&authority.server(true), table).expect("sound certificates");
    let server = TestServer::start_as(ServerOptions::default(), Security::Required(tls), |rt| async move {
        let pool = pool(&rt).await;
        pool.create("vm", &CreateOptions::new(1 << 20, 1)).await.expect("created");
        pool.snapshot(&[("vm", "mine")], 1).await.expect("taken");
        pool.snapshot(&[("vm", "secret")], 1).await.expect("taken");
        pool
    });
    let lab = Lab { authority, server, _dir: dir };
    let bitmap = |name: &str| format!("qemu:dirty-bitmap:{name}");
    let asked = [bitmap("mine"), bitmap("secret"), bitmap("vm@secret")];
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    let told = |name: &str| {
        let mut client = lab.encrypted(Some(name));
        client.option(OPT_STRUCTURED_REPLY, &[]);
        assert_eq!(client.option_reply(OPT_STRUCTURED_REPLY).0, REP_ACK);
        let chosen = contexts(&mut client, OPT_SET_META_CONTEXT, "vm", &asked);
        (chosen, contexts(&mut client, OPT_LIST_META_CONTEXT, "vm", &["qemu:dirty-bitmap:"]))
    };
    assert_eq!(told("web"), (vec![bitmap("mine")], vec![bitmap("mine")]));
    assert_eq!(told("all").0.len(), 3);
}

#[test]
fn a_table_without_an_authority_for_clients_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let authority = Authority::make(dir.path());
    let table = AccessTable::new(vec![entry("web", &["*"], false)]).expect("sound");
    let refused = Tls::load(&authority.server(false), table).err().expect("refused").to_string();
    assert!(refused.contains("client CA"), "{refused}");
}

#[test]
fn certificates_that_cannot_be_used_are_refused_with_their_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let authority = Authority::make(&dir.path().join("one"));
    let other = Authority::make(&dir.path().join("two"));
    let good = authority.server(true);
    let cases = [
        forkdisk_nbd::tls::TlsFiles { certificate: dir.path().join("gone.pem"), ..good.clone() },
        forkdisk_nbd::tls::TlsFiles { certificate: good.key.clone(), ..good.clone() },
        forkdisk_nbd::tls::TlsFiles { key: good.certificate.clone(), ..good.clone() },
        forkdisk_nbd::tls::TlsFiles { key: other.server(true).key, ..good.clone() },
        forkdisk_nbd::tls::TlsFiles { client_ca: Some(good.key.clone()), ..good.clone() },
    ];
    for files in cases {
        let error = Tls::load(&files, AccessTable::open()).err().expect("refused").to_string();
        assert!(error.contains(".pem"), "{error}");
    }
}

#[test]
fn the_largest_requests_pass_unchanged_in_both_directions() {
    let lab = Lab::start(Security::Required, Clients::Any, AccessTable::open());
    let mut client = lab.encrypted(None);
    client.go("vm/a");
    let data: Vec<u8> = (0..MAX_PAYLOAD).map(|i| (i / 7 % 251) as u8).collect();
    assert_eq!(client.write(0, 3, &data), 0);
    assert_eq!(client.read(3, MAX_PAYLOAD), Ok(data));
    for i in 0..100u32 {
        client.request(CMD_READ, 0, i.into(), u64::from(i) * 4096, 4096);
    }
    for _ in 0..100 {
        let reply = client.reply();
        assert_eq!(reply.error, 0);
        client.bytes(4096);
    }
}

#[test]
fn noise_instead_of_tls_ends_the_connection_and_no_other() {
    let lab = Lab::start(Security::Required, Clients::Any, AccessTable::open());
    let mut alive = lab.encrypted(None);
    alive.go("vm/a");
    let noises = [vec![0x16; 100_000], vec![0; 5], vec![0xff; 70_000], b"GET / HTTP/1.1\r\n\r\n".to_vec()];
    for noise in noises {
        let mut client = lab.server.raw();
        client.option(OPT_STARTTLS, &[]);
        assert_eq!(client.option_reply(OPT_STARTTLS).0, REP_ACK);
        client.try_send(&noise);
        client.finish();
        client.drain();
    }
    assert_eq!(alive.write(0, 0, b"alive"), 0);
}

#[test]
fn a_tls_handshake_that_does_not_go_on_is_ended() {
    let options = ServerOptions::default().with_handshake_timeout(Duration::from_millis(200));
    let lab = Lab::start_with(Security::Required, Clients::Any, AccessTable::open(), options);
    let mut client = lab.server.raw();
    client.option(OPT_STARTTLS, &[]);
    assert_eq!(client.option_reply(OPT_STARTTLS).0, REP_ACK);
    client.send(&[0x16, 3, 1]);
    client.expect_end();
}
