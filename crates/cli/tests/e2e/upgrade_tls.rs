//! Upgrades under clients with TLS: their sessions go on in the new program.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustls::SupportedProtocolVersion;
use rustls::version::{TLS12, TLS13};

use crate::certificates::Authority;
use crate::harness::{Lab, POOL, Server, client, noise, succeed};
use crate::nbd::{Client, READ};
use crate::upgrade::{script, upgrade, work};

const PAGE: usize = 4096;
const VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];

/// A server that requires TLS by TCP, and a client's certificates.
struct Encrypted {
    lab: Lab,
    server: Server,
    files: PathBuf,
}

impl Encrypted {
    fn start(volumes: &[String], size: &str) -> Encrypted {
        let lab = Lab::with_pool("256M");
        let names: Vec<String> = volumes.iter().map(|name| format!("pool.img/{name}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        lab.ok(&[&["create"], &names[..], &["--size", size]].concat());
        let files = Authority::make(&lab.path("pki")).client("one");
        let certificates = ["--tls-cert", "pki/server-cert.pem", "--tls-key", "pki/server-key.pem"];
        let clients = ["--tls-client-ca", "pki/ca-cert.pem", "--tls-clients", "clients.toml"];
        lab.write_file("clients.toml", b"[[client]]\nname = \"one\"\nexports = [\"*\"]\n");
        let options = [&["--tcp", "127.0.0.1:0"], &certificates[..], &clients].concat();
        let server = Server::start_with(&lab, POOL, &options);
        Encrypted { lab, server, files }
    }

    fn port(&self) -> u16 {
        let uri = self.server.announced()["tcp"][0].as_str().unwrap();
        uri.trim_end_matches('/').rsplit_once(':').unwrap().1.parse().unwrap()
    }

    fn client(&self, version: &'static SupportedProtocolVersion, export: &str) -> Client {
        Client::connect_encrypted(self.port(), (version, &self.files), export).unwrap()
    }

    /// Returns a URI for libnbd.
    fn uri(&self, export: &str) -> String {
        format!("nbds://localhost:{}/{export}?tls-certificates={}", self.port(), self.files.display())
    }
}

#[test]
fn encrypted_clients_go_on_over_twenty_upgrades() {
    let names: Vec<String> = (0..4).map(|n| format!("v{n}")).collect();
    let lab = Encrypted::start(&names, "1M");
    let ends = Arc::new(AtomicBool::new(false));
    let clients = names.iter().zip(0u64..).map(|(name, n)| {
        let (client, ends) = (lab.client(VERSIONS[n as usize % 2], name), ends.clone());
        thread::spawn(move || work(client, &ends, n * 1_000_000))
    });
    let clients: Vec<_> = clients.collect();
    for _ in 0..20 {
        let upgraded = upgrade(&lab.lab);
        assert_eq!((&upgraded["connections"], &upgraded["disconnected"]), (&5.into(), &0.into()), "{upgraded}");
        // New clients find the same port and certificates.
        drop(lab.client(&TLS13, "v0"));
    }
    ends.store(true, Ordering::Relaxed);
    let rounds: Vec<u64> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert!(rounds.iter().all(|&count| count > 20), "{rounds:?}");
    lab.server.stop();
    lab.lab.assert_clean();
}

#[test]
fn libnbd_and_qemu_go_on_with_tls_over_upgrades() {
    let lab = Encrypted::start(&["a".into(), "b".into(), "c".into()], "32M");
    if client("nbdcopy", "libnbd-bin").is_none() || client("qemu-img", "qemu-utils").is_none() {
        return;
    }
    let image = lab.lab.write_file("image", &noise(5, 32 << 20));
    let ends = Arc::new(AtomicBool::new(false));
    let (uri, back, source, stop) = (lab.uri("a"), lab.lab.path("back"), image.clone(), ends.clone());
    let copies = thread::spawn(move || {
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            let nbdcopy = || client("nbdcopy", "libnbd-bin").unwrap();
            succeed(nbdcopy().args(["--connections=2", "--requests=16", "--flush"]).arg(&source).arg(&uri));
            succeed(nbdcopy().arg(&uri).arg(&back));
            assert!(std::fs::read(&back).unwrap() == noise(5, 32 << 20), "copy {count} differs");
            count += 1;
        }
        count
    });
    // TLS 1.2 and 1.3, with different ciphers.
    let priorities =
        [("b", "NORMAL:-VERS-TLS1.3:-CIPHER-ALL:+AES-128-GCM"), ("c", "NORMAL:-CIPHER-ALL:+CHACHA20-POLY1305")];
    let converts = priorities.map(|(export, priority)| {
        let credentials = format!(
            "tls-creds-x509,id=tls,endpoint=client,dir={},verify-peer=yes,priority={priority}",
            lab.files.display()
        );
        let disk = format!(
            "driver=nbd,server.type=inet,server.host=localhost,server.port={},export={export},tls-creds=tls",
            lab.port()
        );
        let (image, stop) = (image.clone(), ends.clone());
        thread::spawn(move || {
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                let mut qemu_img = client("qemu-img", "qemu-utils").unwrap();
                qemu_img.args(["convert", "--object", &credentials, "-n", "-W", "-m", "8", "-f", "raw"]);
                succeed(qemu_img.arg("--target-image-opts").arg(&image).arg(&disk));
                let mut qemu_img = client("qemu-img", "qemu-utils").unwrap();
                qemu_img.args(["compare", "--object", &credentials, "--image-opts", &disk]);
                let file = format!("driver=raw,file.filename={}", image.display());
                assert!(succeed(qemu_img.arg(file)).contains("identical"), "copy {count} differs");
                count += 1;
            }
            count
        })
    });
    for _ in 0..20 {
        assert_eq!(upgrade(&lab.lab)["disconnected"], 0);
        thread::sleep(Duration::from_millis(100));
    }
    ends.store(true, Ordering::Relaxed);
    assert!(copies.join().unwrap() > 0);
    for convert in converts {
        assert!(convert.join().unwrap() > 0);
    }
    lab.server.stop();
    lab.lab.assert_clean();
}

#[test]
fn half_of_an_encrypted_write_and_replies_that_wait_are_passed_on() {
    for version in VERSIONS {
        let lab = Encrypted::start(&["a".into()], "32M");
        lab.client(version, "a").write(16 << 20, &noise(1, 8 << 20), false).unwrap();
        // One has sent a half of its data, one fetches no replies.
        let mut half = lab.client(version, "a");
        let data = noise(2, 8 << 20);
        half.start_write(0, 8 << 20, &data[..3 << 20]).unwrap();
        let mut slow = lab.client(version, "a");
        let reads: Vec<u64> = (0..8).map(|n| slow.start(READ, 0, (16 + n) << 20, 1 << 20, &[]).unwrap()).collect();
        thread::sleep(Duration::from_millis(100));
        for _ in 0..3 {
            let upgraded = upgrade(&lab.lab);
            assert_eq!((&upgraded["connections"], &upgraded["disconnected"]), (&3.into(), &0.into()), "{upgraded}");
        }
        half.start_rest(&data[3 << 20..]).unwrap();
        assert!(half.finish(|_| 0).unwrap().1.is_empty());
        for _ in &reads {
            let (cookie, read) = slow.finish(|_| 1 << 20).unwrap();
            let at = reads.iter().position(|&read| read == cookie).unwrap();
            assert!(read == noise(1, 8 << 20)[at << 20..(at + 1) << 20], "{version:?}: {at}");
        }
        assert!(slow.read(0, 8 << 20).unwrap() == data, "{version:?}");
        drop((half, slow));
        lab.server.stop();
        lab.lab.assert_clean();
    }
}

/// Returns a command that says what a program says that can take over.
fn ready(text: &str) -> String {
    format!(r#"printf '\{:03o}\000\000\000\000\000\000\000{text}' >&0"#, text.len())
}

#[test]
fn encrypted_clients_stay_if_the_new_program_fails() {
    let lab = Encrypted::start(&["a".into()], "16M");
    let mut clients = VERSIONS.map(|version| lab.client(version, "a"));
    let says_ready = ready(r#"{"Ready":{"format":1,"tls":true}}"#);
    let programs = [
        ("no-program", "exit 3".to_string()),
        ("ends-when-it-is-ready", format!("{says_ready}; sleep 0.2; exit 1")),
        ("killed-when-it-is-ready", format!("{says_ready}; sleep 0.2; kill -9 $$")),
        ("reads-and-fails", format!("{says_ready}; head -c 100 <&0 >/dev/null; exit 1")),
    ];
    let data = noise(9, 2 << 20);
    for (round, (name, text)) in programs.iter().enumerate() {
        let program = script(&lab.lab, name, text);
        // In the middle of a request.
        let at = (round as u64) << 20;
        clients.iter_mut().for_each(|client| client.start_write(at, 2 << 20, &data[..700_000]).unwrap());
        assert!(lab.lab.run(&["upgrade", POOL, "--program", &program]).refused().contains(name));
        for client in &mut clients {
            client.start_rest(&data[700_000..]).unwrap();
            client.finish(|_| 0).unwrap();
            assert!(client.read(at, 2 << 20).unwrap() == data, "{name}");
        }
    }
    let upgraded = upgrade(&lab.lab);
    assert_eq!((&upgraded["connections"], &upgraded["disconnected"]), (&3.into(), &0.into()), "{upgraded}");
    assert!(clients.iter_mut().all(|client| client.read(3 << 20, PAGE).unwrap() == data[..PAGE]));
    drop(clients);
    lab.server.stop();
}

#[test]
fn a_program_without_encrypted_clients_is_sent_no_keys() {
    let lab = Encrypted::start(&["a".into()], "1M");
    let mut encrypted = lab.client(&TLS13, "a");
    let mut clear = Client::connect(lab.server.socket(), "a").unwrap();
    clear.write(0, &noise(1, PAGE), false).unwrap();
    // As a program of an earlier version.
    let says_ready = ready(r#"{"Ready":{"format":1,"fuse_uring":true}}"#);
    let seen = lab.lab.path("seen");
    let program = script(&lab.lab, "earlier", &format!("{says_ready}; timeout 5 cat <&0 >{}; exit 1", seen.display()));
    lab.lab.run(&["upgrade", POOL, "--program", &program]).refused();
    let seen = String::from_utf8_lossy(&std::fs::read(seen).unwrap()).into_owned();
    assert!(seen.contains("\"clients\"") && !seen.contains("secret"), "{seen}");
    assert!(encrypted.read(0, PAGE).is_err(), "it was disconnected");
    assert!(clear.read(0, PAGE).unwrap() == noise(1, PAGE));
    assert!(lab.client(&TLS13, "a").read(0, PAGE).unwrap() == noise(1, PAGE));
    drop(clear);
    lab.server.stop();
}
