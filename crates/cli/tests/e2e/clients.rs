//! Common tools of other projects on a served pool.

use std::fs;

use crate::harness::{Lab, Mount, Server, client, noise, succeed};

const MIB: usize = 1 << 20;

fn served(size: &str) -> (Lab, Server) {
    let lab = Lab::with_pool("512M");
    lab.ok(&["create", "pool.img/a", "--size", size]);
    let server = Server::start(&lab);
    (lab, server)
}

#[test]
fn qemu_io_reads_what_it_wrote_after_a_restart() {
    let Some(mut qemu_io) = client("qemu-io", "qemu-utils") else { return };
    let (lab, server) = served("64M");
    let writes = ["-c", "write -P 0xaa 0 1M", "-c", "write -P 0xbb 300k 3k", "-c", "write -z 512k 64k", "-c", "flush"];
    succeed(qemu_io.args(["-f", "raw", &server.uri("a")]).args(writes));
    server.stop();
    let server = Server::start(&lab);
    let reads = [
        "-c",
        "read -P 0xaa 0 300k",
        "-c",
        "read -P 0xbb 300k 3k",
        "-c",
        "read -P 0xaa 303k 209k",
        "-c",
        "read -P 0 512k 64k",
        "-c",
        "read -P 0xaa 576k 448k",
        "-c",
        "read -P 0 1M 63M",
    ];
    let mut qemu_io = client("qemu-io", "qemu-utils").unwrap();
    let text = succeed(qemu_io.args(["-r", "-f", "raw", &server.uri("a")]).args(reads));
    assert!(!text.contains("Pattern verification failed"), "{text}");
}

#[test]
fn qemu_io_discards_give_space_back() {
    let Some(mut qemu_io) = client("qemu-io", "qemu-utils") else { return };
    let (lab, server) = served("64M");
    let commands = ["-c", "write -P 1 0 16M", "-c", "discard 4M 8M", "-c", "flush"];
    succeed(qemu_io.args(["-d", "unmap", "-f", "raw", &server.uri("a")]).args(commands));
    server.stop();
    assert_eq!(lab.json(&["list", "pool.img/a"])[0]["referenced"], 8 << 20);
    lab.assert_clean();
}

#[test]
fn qemu_img_converts_in_and_out() {
    let Some(mut convert_in) = client("qemu-img", "qemu-utils") else { return };
    let (lab, server) = served("16M");
    let image = lab.write_file("image.raw", &[noise(1, 3 * MIB), vec![0; 12 * MIB], noise(2, MIB)].concat());
    let (uri, image) = (server.uri("a"), image.to_str().unwrap());
    succeed(convert_in.args(["convert", "-n", "-f", "raw", "-O", "raw", image, &uri]));
    let out = lab.path("out.qcow2");
    let qemu_img = || client("qemu-img", "qemu-utils").unwrap();
    succeed(qemu_img().args(["convert", "-f", "raw", "-O", "qcow2", &uri]).arg(&out));
    succeed(qemu_img().args(["compare", "-f", "raw", "-F", "qcow2", image]).arg(&out));
    succeed(qemu_img().args(["compare", "-f", "raw", "-F", "raw", image, &uri]));
}

#[test]
fn qemu_img_info_tells_the_size() {
    let Some(mut qemu_img) = client("qemu-img", "qemu-utils") else { return };
    let (_lab, server) = served("48M");
    let text = succeed(qemu_img.args(["info", "--output=json", "-f", "raw", &server.uri("a")]));
    let info: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(info["virtual-size"], 48 << 20);
}

#[test]
fn nbdsh_finds_what_is_offered_and_uses_all_of_it() {
    let Some(mut nbdsh) = client("nbdsh", "python3-libnbd") else { return };
    let (_lab, server) = served("16M");
    let script = "
assert h.get_size() == 16 << 20
assert h.can_flush() and h.can_fua() and h.can_trim() and h.can_zero()
assert not h.is_read_only()
h.pwrite(b'x' * 8192, 4096, nbd.CMD_FLAG_FUA)
h.pwrite(b'y' * 100, 5000)
h.flush()
assert h.pread(8192, 4096) == b'x' * 904 + b'y' * 100 + b'x' * 7188
h.zero(4096, 4096)
assert h.pread(4096, 4096) == bytes(4096)
h.trim(4096, 8192)
assert h.pread(4096, 8192) == bytes(4096)
for bad in (lambda: h.pread(4096, (16 << 20) - 512), lambda: h.pwrite(b'z' * 512, 16 << 20)):
    try:
        bad()
    except nbd.Error:
        continue
    raise AssertionError('beyond the end')
";
    succeed(nbdsh.args(["-u", &server.uri("a"), "-c", "h.set_strict_mode(0)", "-c", script]));
}

#[test]
fn snapshots_are_read_only_exports() {
    let Some(mut nbdsh) = client("nbdsh", "python3-libnbd") else { return };
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(3, MIB));
    lab.ok(&["snapshot", "pool.img/a@x"]);
    let server = Server::start(&lab);
    let script = "
assert h.is_read_only()
h.set_strict_mode(0)
try:
    h.pwrite(b'x' * 512, 0)
    raise SystemExit('a snapshot was written')
except nbd.Error:
    pass
";
    succeed(nbdsh.args(["-u", &server.uri("a@x"), "-c", script]));
    assert!(fs::metadata(server.socket()).is_ok());
    server.stop();
    assert!(lab.contents("a@x") == noise(3, MIB));
}

#[test]
fn nbdcopy_copies_in_and_out() {
    let Some(mut copy_in) = client("nbdcopy", "libnbd-bin") else { return };
    let (lab, server) = served("16M");
    let image = [noise(4, 5 * MIB), vec![0; 8 * MIB], noise(5, 3 * MIB)].concat();
    let path = lab.write_file("image.raw", &image);
    succeed(copy_in.arg("--flush").arg(&path).arg(server.uri("a")));
    let mut copy_out = client("nbdcopy", "libnbd-bin").unwrap();
    succeed(copy_out.arg(server.uri("a")).arg(lab.path("out.raw")));
    assert!(fs::read(lab.path("out.raw")).unwrap() == image);
    server.stop();
    assert!(lab.contents("a") == image);
}

#[test]
fn nbdinfo_lists_every_export() {
    let Some(mut nbdinfo) = client("nbdinfo", "libnbd-bin") else { return };
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "pool.img/dir/b", "--size", "3M"]);
    lab.ok(&["snapshot", "pool.img/a@x"]);
    let server = Server::start(&lab);
    let text = succeed(nbdinfo.args(["--list", "--json", &server.uri("")]));
    let list: serde_json::Value = serde_json::from_str(&text).unwrap();
    let exports = list["exports"].as_array().unwrap();
    let mut names: Vec<&str> = exports.iter().map(|export| export["export-name"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["a", "a@x", "dir/b"]);
    assert!(exports.iter().all(|export| export["export-size"] == 3 << 20), "{text}");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let Some(mut fio) = client("fio", "fio") else { return };
    let (lab, server) = served("64M");
    let uri = format!("--uri={}", server.uri("a"));
    let job = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bsrange=512-64k",
        "--bs_unaligned=0",
        "--blockalign=512",
        "--iodepth=16",
        "--size=64m",
        "--io_size=64m",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--fsync=64",
        "--randseed=7",
        "--output-format=terse",
    ];
    succeed(fio.args(job).current_dir(lab.path(".")));
    server.stop();
    lab.assert_clean();
}

#[test]
fn fsx_finds_every_byte_where_it_wrote_it() {
    let Some(mut fsx) = client("fsx", "`cargo install fsx --version 0.3.0`: no package") else { return };
    let (lab, server) = served("8M");
    let Some(mount) = Mount::new(&lab, &server, "a") else { return };
    let config = "
blockmode = true
flen = 8388608
[opsize]
min = 1
max = 131072
align = 1
[weights]
read = 10
write = 10
punch_hole = 3
fsync = 1
fdatasync = 1
mapread = 0
mapwrite = 0
truncate = 0
";
    let config = lab.write_file("fsx.toml", config.as_bytes());
    fsx.args(["-N", "30000", "-S", "7", "-f"]).arg(config).arg("-P").arg(lab.path(".")).arg(mount.file());
    succeed(&mut fsx);
    mount.unmount();
    server.stop();
    lab.assert_clean();
}
