//! A real pool behind the server: volumes and snapshots as exports.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::rc::Rc;

use forkdisk::{CreateOptions, Device, FormatOptions, OpenOptions, Pool};
use forkdisk_nbd::ServerOptions;
use forkdisk_nbd::codec::*;
use forkdisk_uring::{DeviceOptions, Rt, UringDevice};
use support::TestServer;

const SIZE: u64 = 10 << 20;

/// Creates a pool in an unlinked file, with volumes of these names.
async fn pool(rt: &Rt, volumes: &[&str]) -> Pool<UringDevice> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("pool");
    let device = UringDevice::create(rt, &path, 64 << 20, false, &DeviceOptions::default()).expect("a file");
    let options = FormatOptions::new(device.len(), [7; 16], 0);
    Pool::format(&device, &options).await.expect("a pool");
    let pool = Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await.expect("it opens");
    for name in volumes {
        pool.create(name, &CreateOptions::new(SIZE, 0)).await.expect("a volume");
    }
    pool
}

/// Starts a server of a pool with `vms/web`, its snapshot `vms/web@old` that holds `before` at
/// 4096, and the volumes `others`.
fn start(others: &'static [&'static str]) -> TestServer {
    TestServer::start_with(ServerOptions::default(), move |rt| async move {
        let pool = pool(&rt, &["vms/web"]).await;
        for name in others {
            pool.create(name, &CreateOptions::new(SIZE, 0)).await.expect("a volume");
        }
        let volume = pool.volume("vms/web").expect("the volume");
        let mut buf = pool.buffer(6);
        buf.copy_from_slice(b"before");
        volume.write(4096, buf, false).await.0.expect("a write");
        pool.snapshot(&[("vms/web", "old")], 0).await.expect("a snapshot");
        pool
    })
}

#[test]
fn volumes_and_snapshots_are_listed() {
    let server = start(&["other"]);
    let mut c = server.raw();
    c.option(OPT_LIST, &[]);
    let mut names = Vec::new();
    while let (REP_SERVER, data) = c.option_reply(OPT_LIST) {
        let len = u32::from_be_bytes(data[..4].try_into().expect("4 bytes")) as usize;
        names.push(String::from_utf8(data[4..4 + len].to_vec()).expect("text"));
    }
    names.sort();
    assert_eq!(names, ["other", "vms/web", "vms/web@old"]);
}

#[test]
fn a_snapshot_is_read_only_and_keeps_what_it_held() {
    let server = start(&[]);
    let mut volume = server.client("vms/web");
    assert_eq!(volume.write(CMD_FLAG_FUA, 4096, b"after!"), 0);
    let mut snapshot = server.raw();
    let (size, flags) = snapshot.go("vms/web@old");
    assert_eq!(size, SIZE);
    assert_ne!(flags & FLAG_READ_ONLY, 0);
    assert_eq!(snapshot.read(4096, 6), Ok(b"before".to_vec()));
    assert_eq!(snapshot.write(0, 0, b"x"), 1);
    assert_eq!(volume.read(4096, 6), Ok(b"after!".to_vec()));
}

#[test]
fn the_default_export_is_the_only_volume_whatever_its_snapshots() {
    let one = start(&[]);
    let mut c = one.raw();
    assert_eq!(c.go("").0, SIZE);
    assert_eq!(c.read(4096, 6), Ok(b"before".to_vec()));
    let several = start(&["other"]);
    let mut refused = several.raw();
    refused.ask(OPT_GO, "", &[]);
    assert_eq!(refused.option_reply(OPT_GO).0, REP_ERROR + 6);
}

#[test]
fn trim_zeroes_and_flush_reach_the_volume() {
    let server = start(&[]);
    let mut c = server.client("vms/web");
    assert_eq!(c.write(0, 0, &[5; 65536]), 0);
    assert_eq!(c.call(CMD_WRITE_ZEROES, CMD_FLAG_NO_HOLE, 1000, 10_000), 0);
    assert_eq!(c.call(CMD_TRIM, CMD_FLAG_FUA, 16_384, 16_384), 0);
    assert_eq!(c.flush(), 0);
    let expected = [&[5; 1000][..], &[0; 10_000], &[5; 5384], &[0; 16_384], &[5; 32_768]].concat();
    assert!(c.read(0, 65_536) == Ok(expected));
}

#[test]
fn names_that_no_pool_has_are_unknown() {
    let server = start(&[]);
    let mut c = server.raw();
    for name in ["vms", "vms/web@", "@old", "vms/web@new", "../vms/web", "vms//web", "vms/web\n"] {
        c.ask(OPT_GO, name, &[]);
        assert_eq!(c.option_reply(OPT_GO).0, REP_ERROR + 6, "{name:?}");
    }
    c.go("vms/web");
}
