//! Images of other formats: imported as what they are, or refused with the format's name and advice.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;

use crate::harness::{LIMIT, Lab, Limited, LimitedWait, POOL, Run, Server, client, noise, succeed, wait_until};

const MIB: usize = 1 << 20;

fn at(name: &str) -> String {
    format!("{POOL}/{name}")
}

/// Returns a disk with data at both ends and in between, and holes.
fn disk() -> Vec<u8> {
    let mut disk = vec![0; 24 * MIB];
    disk[..MIB].copy_from_slice(&noise(1, MIB));
    disk[10 * MIB + 4096..11 * MIB].copy_from_slice(&noise(2, MIB - 4096));
    disk[24 * MIB - 8192..].copy_from_slice(&noise(3, 8192));
    disk
}

/// Most bytes that the disk may take in a pool.
const TAKEN: u64 = 2 * MIB as u64 + 64 * 1024;

fn referenced(lab: &Lab, name: &str) -> u64 {
    lab.json(&["list", &at(name)])[0]["referenced"].as_u64().unwrap()
}

fn convert(lab: &Lab, options: &[&str], to: &str) -> Option<()> {
    let mut command = client("qemu-img", "qemu-utils")?;
    succeed(command.args(["convert", "-f", "raw"]).args(options).arg(lab.path("disk.raw")).arg(lab.path(to)));
    Some(())
}

#[test]
fn disks_of_virtual_machines_are_read_through_qemu() {
    let lab = Lab::with_pool("512M");
    let disk = disk();
    lab.write_file("disk.raw", &disk);
    for (i, (options, file)) in [
        (&["-O", "qcow2"] as &[&str], "a.qcow2"),
        (&["-O", "qcow2", "-c"], "a,compressed.img"),
        (&["-O", "vmdk"], "a.vmdk"),
        (&["-O", "vmdk", "-o", "subformat=monolithicFlat"], "b.vmdk"),
        (&["-O", "vhdx"], "a.vhdx"),
        (&["-O", "vdi"], "a.vdi"),
        (&["-O", "vpc", "-o", "force_size=on"], "a.vhd"),
        (&["-O", "vpc", "-o", "force_size=on,subformat=fixed"], "b.vhd"),
    ]
    .into_iter()
    .enumerate()
    {
        let Some(()) = convert(&lab, options, file) else { return };
        let name = format!("v{i}");
        lab.ok(&["import", file, &at(&name)]);
        assert!(lab.contents(&name) == disk, "{file}");
        assert!(referenced(&lab, &name) <= TAKEN, "{file}: {}", referenced(&lab, &name));
    }
    let server = Server::start(&lab);
    lab.ok(&["import", "a.qcow2", &at("served")]);
    assert!(lab.contents("served") == disk);
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_large_qcow2_with_little_in_it_keeps_its_size_and_its_holes() {
    let lab = Lab::with_pool("64M");
    let Some(mut command) = client("qemu-img", "qemu-utils") else { return };
    succeed(command.args(["create", "-f", "qcow2"]).arg(lab.path("i.qcow2")).arg("20G"));
    lab.ok(&["import", "i.qcow2", &at("base")]);
    let list = lab.json(&["list", &at("base")]);
    assert_eq!((&list[0]["size"], &list[0]["referenced"]), (&(20_u64 << 30).into(), &0.into()));
}

#[test]
fn a_backing_file_shows_through_and_a_missing_one_is_named() {
    let lab = Lab::with_pool("256M");
    let mut disk = disk();
    lab.write_file("disk.raw", &disk);
    let Some(()) = convert(&lab, &["-O", "qcow2"], "base.qcow2") else { return };
    let mut create = client("qemu-img", "qemu-utils").unwrap();
    create.current_dir(lab.path("")).args(["create", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", "top.qcow2"]);
    succeed(&mut create);
    let mut write = client("qemu-io", "qemu-utils").unwrap();
    succeed(write.args(["-f", "qcow2", "-c", "write -P 7 5M 64k"]).arg(lab.path("top.qcow2")));
    disk[5 * MIB..5 * MIB + 65536].fill(7);
    lab.ok(&["import", "top.qcow2", &at("a")]);
    assert!(lab.contents("a") == disk);
    fs::remove_file(lab.path("base.qcow2")).unwrap();
    let message = lab.run(&["import", "top.qcow2", &at("b")]).refused();
    assert!(message.contains("base.qcow2") && message.contains("top.qcow2 (qcow2)"), "{message}");
    assert_eq!(lab.names(), ["a"]);
    lab.assert_clean();
}

#[test]
fn without_qemu_a_disk_is_refused_by_name_with_a_way_out() {
    let lab = Lab::with_pool("64M");
    lab.write_file("i.img", &[b"QFI\xfb\0\0\0\x03" as &[u8], &[0; 4096]].concat());
    let message = {
        // No converter is installed.
        let mut command = lab.command(&["import", "i.img", &at("a")]);
        let shadow = lab.path("usr");
        fs::create_dir(&shadow).unwrap();
        command.env("PATH", &shadow);
        Run::from(command.stdin(Stdio::null()).output_within(LIMIT).unwrap()).refused()
    };
    assert!(message.contains("qcow2") && message.contains("qemu-img convert"), "{message}");
    let message = lab.run_with_input(&["import", "-", &at("a")], &fs::read(lab.path("i.img")).unwrap()).refused();
    assert!(message.contains("qcow2") && message.contains("qemu-img convert"), "{message}");
    lab.ok(&["import", "i.img", &at("raw"), "--format", "raw"]);
    assert_eq!(lab.contents("raw"), fs::read(lab.path("i.img")).unwrap());
}

#[test]
fn compressed_images_are_decompressed_from_files_and_pipes() {
    let lab = Lab::with_pool("512M");
    let disk = disk();
    lab.write_file("disk.raw", &disk);
    for (i, (program, package)) in
        [("gzip", "gzip"), ("xz", "xz-utils"), ("zstd", "zstd"), ("bzip2", "bzip2")].into_iter().enumerate()
    {
        let Some(mut command) = client(program, package) else { return };
        let packed = command.args(["-1", "-c"]).arg(lab.path("disk.raw")).output_within(LIMIT).unwrap();
        assert!(packed.status.success());
        let packed = packed.stdout;
        lab.write_file("packed", &packed);
        let name = format!("v{i}");
        lab.ok(&["import", "packed", &at(&name)]);
        assert!(lab.contents(&name) == disk, "{program}");
        assert!(referenced(&lab, &name) <= TAKEN, "{program}");
        lab.import(&format!("{name}-pipe"), &packed);
        assert!(lab.contents(&format!("{name}-pipe")) == disk, "{program} from a pipe");
        // Two members are one image.
        lab.import(&format!("{name}-twice"), &[&packed[..], &packed[..]].concat());
        assert!(lab.contents(&format!("{name}-twice")) == [&disk[..], &disk[..]].concat(), "{program} twice");
        lab.ok(&["delete", &at(&format!("{name}-twice"))]);
        let message = lab.run_with_input(&["import", "-", &at("cut")], &packed[..packed.len() - 20]).refused();
        assert!(message.contains(program), "{message}");
        lab.write_file("packed", &packed[..packed.len() / 2]);
        let message = lab.run(&["import", "packed", &at("cut")]).refused();
        assert!(message.contains(program) && message.contains("cut off"), "{message}");
        assert!(!lab.names().contains(&"cut".to_string()));
    }
    lab.assert_clean();
}

#[test]
fn a_compressed_qcow2_is_refused_with_the_way_out() {
    let lab = Lab::with_pool("64M");
    let inner = [b"QFI\xfb\0\0\0\x03" as &[u8], &[1; 65536]].concat();
    lab.write_file("i.qcow2", &inner);
    let Some(mut gzip) = client("gzip", "gzip") else { return };
    succeed(gzip.arg(lab.path("i.qcow2")));
    let message = lab.run(&["import", "i.qcow2.gz", &at("a")]).refused();
    assert!(message.contains("qcow2") && message.contains("gzip -dc"), "{message}");
    assert!(lab.names().is_empty());
}

#[test]
fn what_is_no_image_is_refused() {
    let lab = Lab::with_pool("64M");
    lab.write_file("empty", b"");
    for (args, text) in [
        (&["import", "empty", "pool.img/a"] as &[&str], "empty (0 bytes)"),
        (&["import", "/dev/zero", "pool.img/a"], "character device"),
        (&["import", "-", "pool.img/a"], "character device"),
        (&["import", ".", "pool.img/a"], "directory"),
        (&["import", "empty", "pool.img/a", "--size", "1M"], "empty (0 bytes)"),
    ] {
        let message = lab.run(args).refused();
        assert!(message.contains(text), "{message}");
    }
    let message = lab.run_with_input(&["import", "-", "pool.img/a"], b"").refused();
    assert!(message.contains("empty (0 bytes)"), "{message}");
    assert_eq!(lab.run(&["import", "empty", "pool.img/a", "--format", "tar"]).status.code(), Some(2));
    assert!(lab.names().is_empty());
}

#[test]
fn the_size_of_an_import_is_what_was_asked_for() {
    let lab = Lab::with_pool("64M");
    let image = noise(4, MIB + 5);
    lab.write_file("image.raw", &image);
    let whole = [&image[..], &vec![0; MIB - 5]].concat();
    lab.ok(&["import", "image.raw", &at("a"), "--size", "2M"]);
    assert!(lab.contents("a") == whole);
    lab.run_with_input(&["import", "-", &at("b"), "--size", "2M"], &image).ok();
    assert!(lab.contents("b") == whole);
    lab.run_with_input(&["import", "-", &at("c"), "--size", &image.len().to_string()], &image).ok();
    assert!(lab.contents("c") == image);
    let message = lab.run(&["import", "image.raw", &at("d"), "--size", "1M"]).refused();
    assert!(message.contains("longer than the requested size"), "{message}");
    for input in [&image[..], &vec![0; 2 * MIB]] {
        let message = lab.run_with_input(&["import", "-", &at("d"), "--size", "1M"], input).refused();
        assert!(message.contains("longer than the requested size"), "{message}");
    }
    assert_eq!(lab.names(), ["a", "b", "c"]);
    lab.assert_clean();
}

/// QEMU with the image open; killed when dropped.
struct Qemu(std::process::Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.0.put_down();
    }
}

/// Waits for QEMU. Its socket exists before it has opened the image; a client gets an answer only afterwards.
fn wait_until_served(socket: &Path) {
    wait_until("QEMU serves the image", || {
        crate::nbd::Client::connect(socket, "").is_ok_and(|client| client.leave().is_ok())
    });
}

impl Qemu {
    fn on(lab: &Lab, file: &Path, options: &[&str]) -> Option<Qemu> {
        let mut command = client("qemu-nbd", "qemu-utils")?;
        let socket = lab.path("qemu.sock");
        command.args(["-f", "raw", "-t", "-k"]).arg(&socket).args(options).arg(file);
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let qemu = Qemu(child);
        wait_until_served(&socket);
        Some(qemu)
    }
}

#[test]
fn an_image_that_qemu_writes_is_refused_and_one_that_it_reads_is_not() {
    let lab = Lab::with_pool("64M");
    let path = lab.write_file("vm.raw", &noise(5, MIB));
    {
        let Some(_reader) = Qemu::on(&lab, &path, &["-r"]) else { return };
        lab.ok(&["import", "vm.raw", &at("read")]);
    }
    fs::remove_file(lab.path("qemu.sock")).unwrap_or_default();
    let writer = Qemu::on(&lab, &path, &[]).unwrap();
    let message = lab.run(&["import", "vm.raw", &at("a")]).refused();
    assert!(message.contains(&format!("in use by qemu-nbd (pid {})", writer.0.id())), "{message}");
    assert!(message.contains("--force"), "{message}");
    let server = Server::start(&lab);
    let message = lab.run(&["import", "vm.raw", &at("a")]).refused();
    assert!(message.contains("in use by qemu-nbd"), "{message}");
    server.stop();
    assert_eq!(lab.names(), ["read"]);
    lab.ok(&["import", "vm.raw", &at("forced"), "--force"]);
    drop(writer);
    lab.ok(&["import", "vm.raw", &at("a")]);
}

#[test]
fn a_qcow2_that_qemu_writes_is_refused_unless_forced() {
    let lab = Lab::with_pool("128M");
    let disk = disk();
    lab.write_file("disk.raw", &disk);
    let Some(()) = convert(&lab, &["-O", "qcow2"], "i.qcow2") else { return };
    let mut command = client("qemu-nbd", "qemu-utils").unwrap();
    let socket = lab.path("qemu.sock");
    let child = command.args(["-f", "qcow2", "-t", "-k"]).arg(&socket).arg(lab.path("i.qcow2")).spawn().unwrap();
    let writer = Qemu(child);
    wait_until_served(&socket);
    let message = lab.run(&["import", "i.qcow2", &at("a")]).refused();
    assert!(message.contains("in use by qemu-nbd"), "{message}");
    lab.ok(&["import", "i.qcow2", &at("forced"), "--force"]);
    assert!(lab.contents("forced") == disk);
    drop(writer);
    lab.ok(&["import", "i.qcow2", &at("a")]);
}

#[test]
fn the_file_of_another_pool_in_use_is_not_imported() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["init", "other.img", "--size", "64M"]);
    let server = Server::start_on(&lab, "other.img");
    let message = lab.run(&["import", "other.img", &at("a")]).refused();
    assert!(message.contains("in use by forkdisk (pid"), "{message}");
    server.stop();
    lab.ok(&["import", "other.img", &at("a")]);
    // A pool cannot be imported into itself, idle or served.
    let message = lab.run(&["import", POOL, &at("b")]).refused();
    assert!(message.contains("is the pool itself"), "{message}");
    let server = Server::start(&lab);
    let message = lab.run(&["import", POOL, &at("b")]).refused();
    assert!(message.contains(&format!("in use by forkdisk (pid {})", server.pid())), "{message}");
    server.stop();
}

#[test]
fn the_reader_of_an_import_that_is_killed_ends_with_it() {
    let lab = Lab::with_pool("512M");
    let file = File::create(lab.path("disk.raw")).unwrap();
    file.set_len(300 << 20).unwrap();
    for i in 0..300 {
        file.write_all_at(&noise(i, MIB), i << 20).unwrap();
    }
    drop(file);
    let Some(()) = convert(&lab, &["-O", "qcow2"], "i.qcow2") else { return };
    let mut import = lab.command(&["import", "i.qcow2", &at("a")]).spawn().unwrap();
    let reads = || {
        let all = fs::read_dir("/proc").unwrap().flatten();
        let lines = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
        let path = lab.path("i.qcow2").into_os_string().into_encoded_bytes();
        lines.filter(|line| line.windows(path.len()).any(|part| part == path)).count()
    };
    wait_until("qemu-nbd reads the image", || reads() > 0);
    import.put_down().unwrap();
    wait_until("qemu-nbd has ended", || reads() == 0);
    assert!(lab.names().is_empty());
    lab.assert_clean();
}

/// QEMU reads zeroes past the end of a file: a truncated download would be a disk with holes.
#[test]
fn a_disk_that_was_cut_off_is_refused_and_leaves_nothing() {
    let lab = Lab::with_pool("512M");
    lab.write_file("disk.raw", &noise(7, 24 * MIB));
    let cut = |file: &str| {
        let file = File::options().write(true).open(lab.path(file)).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    };
    for format in ["qcow2", "vmdk", "vdi", "vhdx", "vpc"] {
        let file = format!("a.{format}");
        let Some(()) = convert(&lab, &["-O", format], &file) else { return };
        cut(&file);
        let error = lab.run(&["import", &file, &at("a")]).refused();
        assert!(error.contains(&file), "{format}: {error}");
        assert!(lab.names().is_empty(), "{format}");
    }
    let Some(()) = convert(&lab, &["-O", "qcow2"], "base.qcow2") else { return };
    let Some(mut create) = client("qemu-img", "qemu-utils") else { return };
    succeed(
        create
            .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
            .args([lab.path("base.qcow2"), lab.path("top.qcow2")]),
    );
    lab.ok(&["import", "top.qcow2", &at("whole")]);
    cut("base.qcow2");
    let error = lab.run(&["import", "top.qcow2", &at("a")]).refused();
    assert!(error.contains("base.qcow2") && error.contains("cut off"), "{error}");
    lab.ok(&["import", "top.qcow2", &at("forced"), "--force"]);
    assert_eq!(lab.names(), ["forced", "whole"]);
}
