//! Independent clients: qemu-io, qemu-img, nbdinfo, nbdcopy, nbdsh, fio.
//!
//! A test whose client is not installed prints that and passes, unless
//! FORKDISK_TEST_REQUIRE_CLIENTS=1 is set: then it fails.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::process::{Command, Output};

use forkdisk_nbd::memory::MemoryExports;
use forkdisk_nbd::{ServerOptions, nbd_uri};
use support::TestServer;

const SIZE: usize = 16 << 20;

fn start() -> TestServer {
    TestServer::start(ServerOptions::default(), |_| {
        let disks = MemoryExports::new().with("vms/web one", SIZE, false);
        disks.with("vms/web one@monday", SIZE, true)
    })
}

fn uri(server: &TestServer) -> String {
    nbd_uri(&server.socket(), "vms/web one")
}

/// Returns whether `program` can be used; prints a reason if not.
fn installed(program: &str, probe: &[&str]) -> bool {
    let works = Command::new(program).args(probe).output().is_ok_and(|o| o.status.success());
    if !works {
        let required = std::env::var("FORKDISK_TEST_REQUIRE_CLIENTS").is_ok_and(|v| v == "1");
        assert!(!required, "{program} is not installed and FORKDISK_TEST_REQUIRE_CLIENTS=1");
        eprintln!("skipped: {program} is not installed");
    }
    works
}

/// Runs a client that must succeed; returns its standard output.
fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("the client starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let (stdout, stderr) = (text(stdout), text(stderr));
    assert!(status.success(), "{command:?}: {status}\n{stdout}{stderr}");
    stdout
}

#[test]
fn qemu_io_writes_zeroes_discards_and_reads_back() {
    if !installed("qemu-io", &["--version"]) {
        return;
    }
    let server = start();
    let script = [
        "write -P 0x11 0 1M",
        "write -f -P 0x22 1000 3000",
        "write -z 8k 8k",
        "write -z -u 64k 64k",
        "discard 128k 64k",
        "aio_write -P 0x33 2M 4M",
        "aio_flush",
        "flush",
        "read -P 0x11 0 512",
        "read -P 0x22 1000 3000",
        "read -P 0 8k 8k",
        "read -P 0 64k 64k",
        "read -P 0x33 2M 4M",
    ];
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", "-t", "none"]);
    script.iter().for_each(|line| {
        command.args(["-c", line]);
    });
    let output = run(command.arg(uri(&server)));
    assert!(!output.contains("failed"), "{output}");
    assert_eq!(output.matches("Pattern verification").count(), 0, "{output}");
}

#[test]
fn qemu_img_sees_size_and_refuses_to_write_to_a_snapshot() {
    if !installed("qemu-img", &["--version"]) || !installed("qemu-io", &["--version"]) {
        return;
    }
    let server = start();
    let snapshot = nbd_uri(&server.socket(), "vms/web one@monday");
    let info = run(Command::new("qemu-img").args(["info", "--output=json", &snapshot]));
    assert!(info.contains(&format!("\"virtual-size\": {SIZE}")), "{info}");
    let write = ["-f", "raw", "-c", "write 0 512", &snapshot];
    let output = Command::new("qemu-io").args(write).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() || text.contains("read-only"), "{text}");
}

#[test]
fn nbdinfo_lists_exports_with_their_flags() {
    if !installed("nbdinfo", &["--version"]) {
        return;
    }
    let server = start();
    let list = run(Command::new("nbdinfo").args(["--list", "--json", &uri(&server)]));
    for name in ["\"vms/web one\"", "\"vms/web one@monday\""] {
        assert!(list.contains(name), "{list}");
    }
    let info = run(Command::new("nbdinfo").args(["--json", &uri(&server)]));
    let wanted = [
        "\"can_flush\": true",
        "\"can_fua\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"can_multi_conn\": true",
        "\"is_read_only\": false",
        "\"block_size_preferred\": 4096",
        "\"block_size_maximum\": 33554432",
    ];
    for line in wanted {
        assert!(info.contains(line), "{line} is missing in {info}");
    }
}

#[test]
fn nbdcopy_copies_in_and_out_over_several_connections() {
    if !installed("nbdcopy", &["--version"]) {
        return;
    }
    let server = start();
    let (source, copy) = (server.path().join("source"), server.path().join("copy"));
    let data: Vec<u8> = (0..SIZE as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&source, &data).expect("room for a file");
    let nbdcopy = || {
        let mut command = Command::new("nbdcopy");
        command.args(["--connections=4", "--requests=32", "--request-size=65536", "--flush"]);
        command
    };
    run(nbdcopy().arg(&source).arg(uri(&server)));
    run(nbdcopy().arg(uri(&server)).arg(&copy));
    assert!(std::fs::read(&copy).expect("the copy") == data);
}

#[test]
fn libnbd_in_strict_mode_off_is_answered_to_every_oddity() {
    let python = "/usr/bin/python3";
    if !installed(python, &["-c", "import nbd"]) {
        return;
    }
    let server = start();
    let script = r#"
import errno, nbd, sys
h = nbd.NBD()
h.set_strict_mode(0)
h.connect_uri(sys.argv[1])
size = h.get_size()
def fails(code, f, *args):
    try:
        f(*args)
    except nbd.Error as e:
        assert e.errnum == code, (e.errnum, code)
    else:
        raise SystemExit("should have failed")
fails(errno.EINVAL, h.pread, 512, size)
fails(errno.ENOSPC, h.pwrite, b"x" * 512, size - 1)
fails(errno.EINVAL, h.trim, 512, size)
fails(errno.ENOSPC, h.zero, 512, size)
fails(errno.EINVAL, h.pread, 512, 0, 1 << 3)
assert h.pread(512, 0, nbd.CMD_FLAG_DF) == bytes(512)
h.pwrite(b"hello", 3, nbd.CMD_FLAG_FUA)
assert h.pread(5, 3) == b"hello"
h.zero(2, 3, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
assert h.pread(5, 3) == b"\0\0llo"
buffers = [nbd.Buffer(1 << 20) for _ in range(100)]
cookies = [h.aio_pread(b, i * 4096) for i, b in enumerate(buffers)]
while h.aio_in_flight() > 0:
    h.poll(-1)
h.flush()
h.shutdown()
"#;
    run(Command::new(python).args(["-c", script, &uri(&server)]));
}

#[test]
fn fio_verifies_what_it_wrote_at_depth() {
    if !installed("fio", &["--enghelp=nbd"]) {
        return;
    }
    let server = TestServer::start(ServerOptions::default(), |_| MemoryExports::new().with("fio", SIZE, false));
    let job = [
        "--name=verify".to_owned(),
        "--ioengine=nbd".to_owned(),
        format!("--uri={}", nbd_uri(&server.socket(), "fio")),
        "--rw=randwrite".to_owned(),
        "--bsrange=512-128k".to_owned(),
        "--bs_unaligned".to_owned(),
        "--iodepth=64".to_owned(),
        format!("--size={SIZE}"),
        "--verify=crc32c".to_owned(),
        "--verify_fatal=1".to_owned(),
        "--group_reporting".to_owned(),
    ];
    run(Command::new("fio").args(job).current_dir(server.path()));
}
