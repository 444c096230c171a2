//! Features of NBD beyond reading and writing, with independent clients: metadata
//! contexts, backups of changes, misbehaving proxies, daemons in between.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::harness::{
    LIMIT, Lab, Limited, LimitedWait, Mount, Server, client, fingerprint, noise, succeed, wait_until,
};

const MIB: usize = 1 << 20;

/// Creates a pool with the volume `vm` of 64 MiB: data in 0..8 MiB and 32..33 MiB, then the
/// snapshot `one`, then 64 KiB more at 1 MiB, a hole at 4..5 MiB and 4 KiB of data at 40 MiB.
fn lab() -> Lab {
    let lab = Lab::with_pool("512M");
    let image = [noise(1, 8 * MIB), vec![0; 24 * MIB], noise(2, MIB), vec![0; 31 * MIB]].concat();
    lab.import("vm", &image);
    lab.ok(&["snapshot", "pool.img/vm@one"]);
    let server = Server::start(&lab);
    let Some(mut qemu_io) = client("qemu-io", "qemu-utils") else { return lab };
    let commands = ["-c", "write -P 7 1M 64k", "-c", "write -z -u 4M 1M", "-c", "write -P 8 40M 4k", "-c", "flush"];
    succeed(qemu_io.args(["-f", "raw", &server.uri("vm")]).args(commands));
    server.stop();
    lab
}

/// Returns offset, length and type of the extents of a context, from nbdinfo.
fn map(server: &Server, export: &str, context: &str) -> Option<Vec<(u64, u64, u64)>> {
    let mut nbdinfo = client("nbdinfo", "libnbd-bin")?;
    let text = succeed(nbdinfo.args(["--json", &format!("--map={context}"), &server.uri(export)]));
    let list: Value = serde_json::from_str(&text).unwrap();
    let number = |of: &Value, name: &str| of[name].as_u64().unwrap();
    let extents = list.as_array().unwrap().iter();
    Some(extents.map(|e| (number(e, "offset"), number(e, "length"), number(e, "type"))).collect())
}

/// Returns the ranges that a dirty bitmap marks, in KiB.
fn dirty(server: &Server, export: &str, since: &str) -> Option<Vec<(u64, u64)>> {
    let extents = map(server, export, &format!("qemu:dirty-bitmap:{since}"))?;
    Some(extents.into_iter().filter(|e| e.2 == 1).map(|e| (e.0 >> 10, e.1 >> 10)).collect())
}

/// Changes in [`lab`] since `one`, in KiB.
const CHANGED: [(u64, u64); 3] = [(1024, 64), (4096, 1024), (40 << 10, 4)];

#[test]
fn nbdinfo_maps_every_context() {
    let lab = lab();
    let server = Server::start(&lab);
    let m = MIB as u64;
    let Some(allocation) = map(&server, "vm", "base:allocation") else { return };
    let page = (40 * m, 4096, 0);
    let expected = [
        (0, 4 * m, 0),
        (4 * m, m, 3),
        (5 * m, 3 * m, 0),
        (8 * m, 24 * m, 3),
        (32 * m, m, 0),
        (33 * m, 7 * m, 3),
        page,
        (page.0 + page.1, 24 * m - page.1, 3),
    ];
    assert_eq!(allocation, expected);
    let depths = map(&server, "vm", "qemu:allocation-depth").unwrap();
    let of = |at: u64| depths.iter().find(|e| (e.0..e.0 + e.1).contains(&at)).unwrap().2;
    assert_eq!([0, m, m + 65_536, 4 * m, 32 * m, 40 * m, 40 * m + 4096].map(of), [2, 1, 2, 0, 2, 1, 0]);
    assert_eq!(dirty(&server, "vm", "one").unwrap(), CHANGED);
    let text = succeed(client("nbdinfo", "libnbd-bin").unwrap().args(["--list", "--json", &server.uri("")]));
    for context in ["base:allocation", "qemu:allocation-depth", "qemu:dirty-bitmap:one"] {
        assert!(text.contains(context), "{context} is not in {text}");
    }
}

#[test]
fn qemu_img_reads_the_map_and_the_dirty_bitmap() {
    let lab = lab();
    let server = Server::start(&lab);
    let Some(mut qemu_img) = client("qemu-img", "qemu-utils") else { return };
    let of = |text: String, wanted: &dyn Fn(&Value) -> bool| -> Vec<(u64, u64)> {
        let list: Value = serde_json::from_str(&text).unwrap();
        let found = list.as_array().unwrap().iter().filter(|e| wanted(e));
        found.map(|e| (e["start"].as_u64().unwrap() >> 10, e["length"].as_u64().unwrap() >> 10)).collect()
    };
    let text = succeed(qemu_img.args(["map", "--output=json", "-f", "raw", &server.uri("vm")]));
    let data = of(text, &|e| e["data"].as_bool().unwrap());
    assert_eq!(data, [(0, 4096), (5120, 3072), (32 << 10, 1024), (40 << 10, 4)]);
    let image = format!(
        "driver=nbd,export=vm,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:one",
        server.socket().display()
    );
    let mut qemu_img = client("qemu-img", "qemu-utils").unwrap();
    let text = succeed(qemu_img.args(["map", "--output=json", "--image-opts", &image]));
    // QEMU takes the bitmap for an allocation map: it shows dirty ranges as holes.
    let changed = of(text, &|e| !e["data"].as_bool().unwrap());
    assert_eq!(changed, CHANGED);
}

#[test]
fn what_a_clone_was_cloned_from_is_followed_over_renames_and_deletions() {
    let lab = Lab::with_pool("256M");
    lab.import("web", &noise(1, MIB));
    lab.ok(&["snapshot", "pool.img/web@monday"]);
    lab.ok(&["clone", "pool.img/web@monday", "pool.img/c1"]);
    lab.ok(&["clone", "pool.img/c1", "pool.img/c2"]);
    let origin = |name: &str| {
        let record = lab.json(&["list", &format!("pool.img/{name}")])[0].clone();
        (record["origin"].clone(), record["origin_id"].clone())
    };
    let monday = lab.json(&["list", "pool.img/web@monday"])[0]["id"].clone();
    assert!(monday.as_u64().is_some_and(|id| id > 0), "{monday}");
    let server = Server::start(&lab);
    lab.ok(&["rename", "pool.img/web", "pool.img/golden"]);
    assert_eq!(origin("c1"), ("golden@monday".into(), monday.clone()));
    // A new volume with the old name is another one.
    lab.ok(&["create", "pool.img/web", "--size", "1M"]);
    lab.ok(&["snapshot", "pool.img/web@monday"]);
    assert_eq!(origin("c1"), ("golden@monday".into(), monday.clone()));
    assert_eq!(origin("c2").0, "c1");
    lab.ok(&["delete", "pool.img/c1"]);
    assert_eq!(origin("c2"), (Value::Null, Value::Null));
    lab.ok(&["create", "pool.img/c1", "--size", "1M"]);
    assert_eq!(origin("c2").0, Value::Null);
    let mut written = crate::nbd::Client::connect(server.socket(), "c2").unwrap();
    written.write(65536, &noise(2, 4096), true).unwrap();
    drop(written);
    let look = |server: &Server| {
        let Some(mut info) = client("nbdinfo", "libnbd-bin") else { return };
        let text = succeed(info.args(["--list", "--json", &server.uri("c2")]));
        assert!(text.contains("qemu:dirty-bitmap:golden@monday"), "{text}");
        assert_eq!(dirty(server, "c2", "golden@monday").unwrap(), [(64, 4)]);
        assert!(dirty_is_refused(server, "c2", "web@monday"));
    };
    look(&server);
    // After replaying the journal, and from the directory.
    server.kill();
    let server = Server::start(&lab);
    look(&server);
    server.stop();
    let server = Server::start(&lab);
    look(&server);
    // Its snapshot is deleted as well: others of that volume can still be compared.
    lab.ok(&["snapshot", "pool.img/golden@tuesday"]);
    lab.ok(&["delete", "pool.img/golden@monday"]);
    assert!(dirty(&server, "c2", "golden@tuesday").is_none_or(|dirty| !dirty.is_empty()));
    server.stop();
    lab.assert_clean();
}

/// Returns whether an export has no context of that name.
fn dirty_is_refused(server: &Server, export: &str, since: &str) -> bool {
    let mut nbdinfo = client("nbdinfo", "libnbd-bin").unwrap();
    let context = format!("--map=qemu:dirty-bitmap:{since}");
    !nbdinfo.args(["--json", &context, &server.uri(export)]).output_within(LIMIT).unwrap().status.success()
}

#[test]
fn the_dirty_bitmap_is_the_same_after_kill_9() {
    let lab = lab();
    let server = Server::start(&lab);
    let Some(mut qemu_io) = client("qemu-io", "qemu-utils") else { return };
    succeed(qemu_io.args(["-f", "raw", &server.uri("vm"), "-c", "write -P 9 50M 12k", "-c", "flush"]));
    let expected: Vec<(u64, u64)> = CHANGED.into_iter().chain([(50 << 10, 12)]).collect();
    assert_eq!(dirty(&server, "vm", "one").unwrap(), expected);
    server.kill();
    let server = Server::start(&lab);
    assert_eq!(dirty(&server, "vm", "one").unwrap(), expected);
    server.stop();
    lab.assert_clean();
}

/// Checks that an export has the contents of a file.
pub fn assert_same(server: &Server, export: &str, image: &Path) {
    let mut qemu_img = client("qemu-img", "qemu-utils").unwrap();
    let uri = server.uri(export);
    succeed(qemu_img.args(["compare", "-f", "raw", "-F", "raw", &uri, image.to_str().unwrap()]));
}

#[test]
fn nbdcopy_copies_both_ways_over_many_connections() {
    let Some(mut copy_in) = client("nbdcopy", "libnbd-bin") else { return };
    let lab = Lab::with_pool("512M");
    lab.ok(&["create", "pool.img/a", "--size", "96M"]);
    let image = lab.write_file("in.img", &[noise(3, 40 * MIB), vec![0; 16 * MIB], noise(4, 40 * MIB)].concat());
    let server = Server::start(&lab);
    let many = ["--connections=16", "--requests=64", "--threads=4"];
    succeed(copy_in.args(many).args(["--flush", "--allocated"]).arg(&image).arg(server.uri("a")));
    let out = lab.path("out.img");
    succeed(client("nbdcopy", "libnbd-bin").unwrap().args(many).arg(server.uri("a")).arg(&out));
    assert_eq!(fingerprint(&image), fingerprint(&out));
    assert_same(&server, "a", &image);
}

#[test]
fn qemu_img_bench_reads_and_writes_at_depth_with_flushes() {
    let Some(mut reads) = client("qemu-img", "qemu-utils") else { return };
    let lab = lab();
    let server = Server::start(&lab);
    let uri = server.uri("vm");
    succeed(reads.args(["bench", "-f", "raw", "-c", "5000", "-d", "64", "-s", "4096", "-S", "20480", &uri]));
    let mut writes = client("qemu-img", "qemu-utils").unwrap();
    writes.args(["bench", "-w", "--flush-interval=100", "--pattern=65", "-f", "raw", "-t", "none"]);
    succeed(writes.args(["-c", "4000", "-d", "32", "-s", "8192", "-S", "8192", &uri]));
    let mut qemu_io = client("qemu-io", "qemu-utils").unwrap();
    let text = succeed(qemu_io.args(["-r", "-f", "raw", &uri, "-c", "read -P 65 0 32000k"]));
    assert!(!text.contains("Pattern verification failed"), "{text}");
}

#[test]
fn fio_verifies_over_several_connections_to_one_volume() {
    let Some(mut fio) = client("fio", "fio") else { return };
    let lab = Lab::with_pool("512M");
    lab.ok(&["create", "pool.img/a", "--size", "64M"]);
    let server = Server::start(&lab);
    let uri = format!("--uri={}", server.uri("a"));
    let shape = ["--numjobs=4", "--size=16M", "--offset_increment=16M", "--iodepth=32", "--bsrange=512-64k"];
    fio.current_dir(lab.path("")).args(["--name=v", "--ioengine=nbd", &uri, "--rw=randwrite"]).args(shape);
    succeed(fio.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--fsync=64", "--group_reporting"]));
}

#[test]
fn nbdfuse_shows_holes_and_keeps_what_was_synced_over_kill_9() {
    let lab = lab();
    let server = Server::start(&lab);
    let Some(mount) = Mount::new(&lab, &server, "vm") else { return };
    succeed(Command::new("fallocate").args(["--punch-hole", "-o", "2M", "-l", "1M"]).arg(mount.file()));
    let fill = lab.write_file("fill", &noise(5, 4096));
    let target = format!("of={}", mount.file().display());
    let dd = ["bs=4096", "seek=512", "conv=notrunc,fsync"];
    succeed(Command::new("dd").arg(format!("if={}", fill.display())).arg(target).args(dd));
    server.kill();
    drop(mount);
    let contents = lab.contents("vm");
    assert!(contents[2 * MIB..2 * MIB + 4096] == noise(5, 4096)[..], "synced");
    assert!(contents[2 * MIB + 4096..3 * MIB].iter().all(|&b| b == 0), "punched before that");
}

/// A server between a client and forkdisk, ended when dropped.
struct Between {
    child: Child,
    uri: String,
}

impl Between {
    fn start(command: &mut Command, socket: &Path, export: &str) -> Between {
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let between = Between { child, uri: format!("nbd+unix:///{export}?socket={}", socket.display()) };
        wait_until("the server in between listens", || socket.exists());
        between
    }

    /// Starts nbdkit's nbd plugin on the volume `vm`, with filters and their parameters.
    fn nbdkit(lab: &Lab, server: &Server, filters: &[&str], parameters: &[&str]) -> Option<Between> {
        let mut nbdkit = client("nbdkit", "nbdkit")?;
        let socket = lab.path("between.sock");
        let _ = fs::remove_file(&socket);
        nbdkit.args(["-f", "-U"]).arg(&socket).args(filters.iter().map(|filter| format!("--filter={filter}")));
        nbdkit.arg("nbd").arg(format!("uri={}", server.uri("vm"))).args(parameters);
        Some(Between::start(&mut nbdkit, &socket, ""))
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        // Fails if the test has ended it already.
        let _ = self.child.put_down();
    }
}

#[test]
fn nbdkit_passes_everything_through_its_nbd_plugin() {
    let lab = lab();
    let server = Server::start(&lab);
    let Some(proxy) = Between::nbdkit(&lab, &server, &[], &["shared=true"]) else { return };
    let image = lab.path("through.img");
    succeed(client("nbdcopy", "libnbd-bin").unwrap().args(["--connections=4"]).arg(&proxy.uri).arg(&image));
    assert_same(&server, "vm", &image);
    let text = succeed(client("nbdinfo", "libnbd-bin").unwrap().arg(&proxy.uri));
    for word in ["can_fast_zero: true", "can_cache: true", "can_multi_conn: true", "can_df: true", "can_fua: true"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
}

#[test]
fn nbdkit_delays_and_splits_what_passes() {
    let lab = lab();
    let server = Server::start(&lab);
    let parameters = [
        "delay-read=5ms",
        "delay-write=5ms",
        "blocksize-error-policy=error",
        "blocksize-minimum=512",
        "blocksize-preferred=64K",
        "blocksize-maximum=128K",
    ];
    let Some(proxy) = Between::nbdkit(&lab, &server, &["blocksize-policy", "delay"], &parameters) else { return };
    let mut qemu_io = client("qemu-io", "qemu-utils").unwrap();
    let commands = ["-c", "write -P 3 1M 2M", "-c", "flush", "-c", "read -P 3 1M 2M", "-c", "write -z 2M 64k"];
    let text = succeed(qemu_io.args(["-f", "raw", &proxy.uri]).args(commands));
    assert!(!text.contains("failed"), "{text}");
    drop(proxy);
    let text = succeed(client("qemu-io", "qemu-utils").unwrap().args([
        "-r",
        "-f",
        "raw",
        &server.uri("vm"),
        "-c",
        "read -P 3 1M 1M",
        "-c",
        "read -P 0 2M 64k",
    ]));
    assert!(!text.contains("failed"), "{text}");
}

#[test]
fn errors_that_nbdkit_throws_in_harm_neither_server_nor_volume() {
    let lab = lab();
    let server = Server::start(&lab);
    let before = lab.path("before.img");
    succeed(client("nbdcopy", "libnbd-bin").unwrap().arg(server.uri("vm")).arg(&before));
    let parameters = ["error=EIO", "error-pread-rate=30%", "error-pwrite-rate=100%"];
    let Some(proxy) = Between::nbdkit(&lab, &server, &["error"], &parameters) else { return };
    let mut failed = 0;
    for i in 0..20 {
        let (write, read) = (format!("write -P 1 {i}M 4k"), format!("read {i}M 4k"));
        let run = client("qemu-io", "qemu-utils").unwrap();
        let output = { run }.args(["-f", "raw", &proxy.uri, "-c", &write, "-c", &read]).output_within(LIMIT).unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        failed += text.matches("Input/output error").count();
    }
    assert!(failed >= 20, "every write at least: {failed}");
    drop(proxy);
    assert_same(&server, "vm", &before);
}

#[test]
fn qemu_storage_daemon_uses_a_volume_as_its_block_device() {
    let Some(mut daemon) = client("qemu-storage-daemon", "qemu-system-common") else { return };
    let lab = lab();
    let server = Server::start(&lab);
    let socket = lab.path("between.sock");
    let node = format!("driver=nbd,node-name=n,export=vm,server.type=unix,server.path={}", server.socket().display());
    daemon.args(["--blockdev", &format!("{node},discard=unmap"), "--blockdev"]);
    daemon.arg("driver=raw,node-name=r,file=n,discard=unmap");
    daemon.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
    daemon.args(["--export", "type=nbd,id=e,node-name=r,name=vm,writable=on"]);
    let between = Between::start(&mut daemon, &socket, "vm");
    let mut qemu_io = client("qemu-io", "qemu-utils").unwrap();
    let commands = ["-c", "write -P 5 10M 1M", "-c", "discard 0 1M", "-c", "flush", "-c", "read -P 5 10M 1M"];
    let text = succeed(qemu_io.args(["-d", "unmap", "-f", "raw", &between.uri]).args(commands));
    assert!(!text.contains("failed"), "{text}");
    let image = lab.path("through.img");
    succeed(client("nbdcopy", "libnbd-bin").unwrap().arg(&between.uri).arg(&image));
    drop(between);
    assert_same(&server, "vm", &image);
    assert_eq!(map(&server, "vm", "base:allocation").unwrap()[0], (0, MIB as u64, 3), "discarded");
}
