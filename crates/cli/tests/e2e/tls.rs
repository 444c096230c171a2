//! TCP and TLS with independent clients and certificates made for the test.

use std::fs;
use std::path::Path;

use crate::certificates::Authority;
use crate::harness::{LIMIT, Lab, Limited, POOL, Run, Server, client, noise, succeed};

/// Creates a pool with the volumes `a` and `vm/b`, and a certificate authority.
fn lab() -> (Lab, Authority) {
    let lab = Lab::with_pool("128M");
    lab.ok(&["create", "pool.img/a", "pool.img/vm/b", "--size", "8M"]);
    let authority = Authority::make(&lab.path("pki"));
    (lab, authority)
}

/// Serves over TCP with TLS on a free port.
fn serve(lab: &Lab, options: &[&str]) -> Server {
    let certificates = ["--tls-cert", "pki/server-cert.pem", "--tls-key", "pki/server-key.pem"];
    Server::start_with(lab, POOL, &[&["--tcp", "127.0.0.1:0"], &certificates[..], options].concat())
}

/// Returns the prefix of the URIs over TCP; the name of an export follows it.
fn tcp(server: &Server) -> String {
    server.announced()["tcp"][0].as_str().expect("a TCP address").to_owned()
}

fn port(server: &Server) -> String {
    tcp(server).trim_end_matches('/').rsplit_once(':').expect("a port").1.to_owned()
}

/// Returns an `nbds` URI for libnbd, with the folder of a client's certificates.
fn nbds(server: &Server, export: &str, certificates: &Path) -> String {
    format!("nbds://localhost:{}/{export}?tls-certificates={}", port(server), certificates.display())
}

#[test]
fn tcp_on_this_machine_is_served_in_the_clear() {
    let (lab, _) = lab();
    let server = Server::start_with(&lab, POOL, &["--tcp", "127.0.0.1:0", "--tcp", "[::1]:0"]);
    for uri in server.announced()["tcp"].as_array().expect("addresses") {
        let uri = uri.as_str().expect("a URI");
        assert!(uri.starts_with("nbd://"), "{uri}");
        let Some(mut nbdinfo) = client("nbdinfo", "libnbd-bin") else { return };
        assert_eq!(succeed(nbdinfo.args(["--size", &format!("{uri}vm/b")])).trim(), "8388608");
    }
    server.stop();
}

#[test]
fn beyond_this_machine_tls_or_insecure_is_demanded() {
    let (lab, _) = lab();
    let said = lab.run(&["serve", POOL, "--tcp", "0.0.0.0:0"]).refused();
    assert!(said.contains("--tls-cert") && said.contains("--insecure"), "{said}");
    let certificates = ["--tls-cert", "pki/server-cert.pem", "--tls-key", "pki/server-key.pem"];
    let offered = [&["serve", POOL, "--tcp", "[::]:0", "--tls", "allowed"], &certificates[..]].concat();
    assert!(lab.run(&offered).refused().contains("--insecure"));
    let said = lab.run(&["serve", POOL, "--tcp", "--tls-cert", "gone.pem", "--tls-key", "gone.pem"]).refused();
    assert!(said.contains("gone.pem"), "{said}");
}

#[test]
fn libnbd_copies_over_nbds_in_both_directions() {
    let (lab, authority) = lab();
    let server = serve(&lab, &["--tls-client-ca", "pki/ca-cert.pem"]);
    assert!(tcp(&server).starts_with("nbds://"));
    let uri = nbds(&server, "a", &authority.client("someone"));
    let Some(mut nbdinfo) = client("nbdinfo", "libnbd-bin") else { return };
    let info = succeed(nbdinfo.arg(&uri));
    assert!(info.contains("with TLS"), "{info}");
    let image = lab.write_file("image", &noise(7, 8 << 20));
    let Some(mut nbdcopy) = client("nbdcopy", "libnbd-bin") else { return };
    succeed(nbdcopy.args(["--connections=4", "--flush"]).arg(&image).arg(&uri));
    let back = lab.path("back");
    succeed(client("nbdcopy", "libnbd-bin").expect("found above").arg(&uri).arg(&back));
    assert!(fs::read(&back).expect("copied") == noise(7, 8 << 20), "what came back differs");
    server.stop();
    assert!(lab.contents("a") == noise(7, 8 << 20), "what is in the volume differs");
}

#[test]
fn qemu_writes_and_compares_over_tls() {
    let (lab, authority) = lab();
    let server = serve(&lab, &["--tls-client-ca", "pki/ca-cert.pem"]);
    let credentials =
        format!("tls-creds-x509,id=tls,endpoint=client,dir={},verify-peer=yes", authority.client("someone").display());
    let disk = format!(
        "driver=nbd,server.type=inet,server.host=localhost,server.port={},export=vm/b,tls-creds=tls",
        port(&server)
    );
    let Some(mut qemu_io) = client("qemu-io", "qemu-utils") else { return };
    qemu_io.args(["--object", &credentials, "--image-opts", &disk]);
    let said = succeed(qemu_io.args(["-c", "write -P 0x5a 4k 3M", "-c", "flush", "-c", "read -P 0x5a 4k 3M"]));
    assert!(said.contains("wrote") && !said.contains("failed"), "{said}");
    let mut expected = vec![0; 8 << 20];
    expected[4096..4096 + (3 << 20)].fill(0x5a);
    let image = lab.write_file("image", &expected);
    let Some(mut qemu_img) = client("qemu-img", "qemu-utils") else { return };
    qemu_img.args(["compare", "--object", &credentials, "--image-opts", &disk]);
    let file = format!("driver=raw,file.filename={}", image.display());
    assert!(succeed(qemu_img.arg(file)).contains("identical"));
    server.stop();
}

#[test]
fn who_shows_no_certificate_or_speaks_in_the_clear_is_turned_away() {
    let (lab, authority) = lab();
    let server = serve(&lab, &["--tls-client-ca", "pki/ca-cert.pem"]);
    let certificates = authority.client("someone");
    let anonymous = lab.path("anonymous");
    fs::create_dir(&anonymous).expect("a folder");
    fs::copy(certificates.join("ca-cert.pem"), anonymous.join("ca-cert.pem")).expect("copied");
    let clear = format!("nbd://localhost:{}/a", port(&server));
    for uri in [nbds(&server, "a", &anonymous), clear] {
        let Some(mut nbdinfo) = client("nbdinfo", "libnbd-bin") else { return };
        let run = Run::from(nbdinfo.arg(&uri).output_within(LIMIT).expect("nbdinfo"));
        assert!(!run.status.success(), "{uri} was let in: {}", run.stdout);
    }
    let mut nbdinfo = client("nbdinfo", "libnbd-bin").expect("found above");
    succeed(nbdinfo.arg(nbds(&server, "a", &certificates)));
    server.stop();
}

#[test]
fn the_table_of_clients_says_who_may_open_what() {
    let (lab, authority) = lab();
    let table = r#"
        [[client]]
        name = "web"
        exports = ["vm/*"]

        [[client]]
        name = "backup"
        exports = ["*"]
        read_only = true
    "#;
    lab.write_file("clients.toml", table.as_bytes());
    let server = serve(&lab, &["--tls-client-ca", "pki/ca-cert.pem", "--tls-clients", "clients.toml"]);
    let list = |name: &str| -> Option<String> {
        let mut nbdinfo = client("nbdinfo", "libnbd-bin")?;
        Some(succeed(nbdinfo.args(["--list", "--json", &nbds(&server, "", &authority.client(name))])))
    };
    let Some(web) = list("web") else { return };
    assert!(web.contains("\"vm/b\"") && !web.contains("\"a\""), "{web}");
    let backup = list("backup").expect("found above");
    assert!(backup.contains("\"vm/b\"") && backup.contains("\"a\""), "{backup}");
    let info = |name: &str, export: &str| {
        let mut nbdinfo = client("nbdinfo", "libnbd-bin").expect("found above");
        Run::from(nbdinfo.arg(nbds(&server, export, &authority.client(name))).output_within(LIMIT).expect("nbdinfo"))
    };
    assert!(!info("web", "a").status.success());
    assert!(info("web", "vm/b").ok().contains("is_read_only: false"));
    assert!(info("backup", "vm/b").ok().contains("is_read_only: true"));
    server.stop();
}

#[test]
fn a_table_that_makes_no_sense_is_refused_with_its_place() {
    let (lab, _) = lab();
    let tls = ["--tls-cert", "pki/server-cert.pem", "--tls-key", "pki/server-key.pem"];
    let refused = |text: &str| {
        lab.write_file("clients.toml", text.as_bytes());
        let ca = ["serve", POOL, "--tcp", "--tls-client-ca", "pki/ca-cert.pem", "--tls-clients", "clients.toml"];
        lab.run(&[&ca[..], &tls].concat()).refused()
    };
    assert!(refused("[[client]]\nexports = [\"*\"]\n").contains("client 1"));
    assert!(refused("[[client]]\nname = \"a\"\nexport = [\"*\"]\n").contains("clients.toml"));
    assert!(refused("not TOML").contains("clients.toml"));
}

#[test]
fn certificates_made_as_the_document_says_work() {
    let (lab, _) = lab();
    let Some(mut openssl) = client("openssl", "openssl") else { return };
    let version = succeed(openssl.arg("version"));
    if !version.starts_with("OpenSSL 3") {
        return crate::harness::missing(&format!("{version} is older than the document demands"));
    }
    let document = include_str!("../../../../docs/tls.md");
    let commands = document.split("```sh\n").nth(1).expect("commands").split("```").next().expect("their end");
    let folder = lab.path("made");
    fs::create_dir(&folder).expect("a folder");
    succeed(client("sh", "dash").expect("a shell").args(["-e", "-c", commands]).current_dir(&folder));
    let table = "[[client]]\nname = \"backup\"\nexports = [\"vm/*\"]\n";
    lab.write_file("clients.toml", table.as_bytes());
    let made = ["--tls-cert", "made/server-cert.pem", "--tls-key", "made/server-key.pem"];
    let clients = ["--tls-client-ca", "made/ca-cert.pem", "--tls-clients", "clients.toml", "--tcp", "127.0.0.1:0"];
    let server = Server::start_with(&lab, POOL, &[&made[..], &clients].concat());
    let Some(mut nbdinfo) = client("nbdinfo", "libnbd-bin") else { return };
    assert!(succeed(nbdinfo.arg(nbds(&server, "vm/b", &folder))).contains("with TLS"));
    server.stop();
}
