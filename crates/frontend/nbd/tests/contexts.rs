//! Metadata contexts of volumes and snapshots of a real pool.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::rc::Rc;

use forkdisk::{CreateOptions, Device, FormatOptions, OpenOptions, Pool};
use forkdisk_nbd::ServerOptions;
use forkdisk_nbd::codec::*;
use forkdisk_uring::{DeviceOptions, Rt, UringDevice};
use support::TestServer;

const SIZE: u64 = 10 << 20;
const PAGE: u64 = 4096;

async fn pool(rt: &Rt) -> Pool<UringDevice> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("pool");
    let device = UringDevice::create(rt, &path, 64 << 20, false, &DeviceOptions::default()).expect("a file");
    let options = FormatOptions::new(device.len(), [7; 16], 0);
    Pool::format(&device, &options).await.expect("a pool");
    Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await.expect("it opens")
}

async fn write(pool: &Pool<UringDevice>, volume: &str, page: u64, pages: u64) {
    let mut buf = pool.buffer((pages * PAGE) as usize);
    buf.fill(1);
    pool.volume(volume).expect("a volume").write(page * PAGE, buf, false).await.0.expect("a write");
}

/// Creates `base` with its snapshots `one` and `two`, its clone `vm` (of `two`) with a snapshot
/// `three`, and `other`, which is unrelated, with a snapshot `far`. Pages written:
///
/// | | base | vm |
/// |---|---|---|
/// | before `one` | 0..512 | |
/// | before `two` | 10, 600..602 | |
/// | before `three` | | 20, 600 |
/// | last | 30 | 40 |
fn start() -> TestServer {
    TestServer::start_with(ServerOptions::default(), |rt| async move {
        let pool = pool(&rt).await;
        for name in ["base", "other"] {
            pool.create(name, &CreateOptions::new(SIZE, 0)).await.expect("a volume");
        }
        write(&pool, "base", 0, 512).await;
        pool.snapshot(&[("base", "one"), ("other", "far")], 0).await.expect("a snapshot");
        write(&pool, "base", 10, 1).await;
        write(&pool, "base", 600, 2).await;
        pool.snapshot(&[("base", "two")], 0).await.expect("a snapshot");
        pool.clone_volume("base@two", "vm", 0).await.expect("a clone");
        write(&pool, "vm", 20, 1).await;
        write(&pool, "vm", 600, 1).await;
        pool.snapshot(&[("vm", "three")], 0).await.expect("a snapshot");
        write(&pool, "base", 30, 1).await;
        write(&pool, "vm", 40, 1).await;
        pool
    })
}

/// Returns length and flags of the extents, in pages; repeats the request where a reply ended.
fn map(server: &TestServer, export: &str, context: &str) -> Vec<(u64, u64)> {
    let mut c = server.styled(ReplyStyle::Structured, export, &[context]);
    let mut extents: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    while at < SIZE {
        let list = c.status(0, at, (SIZE - at) as u32).expect("a status").remove(0).1;
        for (len, flags) in list {
            at += len;
            match extents.last_mut() {
                Some(last) if last.1 == flags => last.0 += len / PAGE,
                _ => extents.push((len / PAGE, flags)),
            }
        }
    }
    extents
}

/// Returns the pages whose flags are not 0.
fn pages(server: &TestServer, export: &str, context: &str) -> Vec<u64> {
    let mut at = 0;
    let mut pages = Vec::new();
    for (len, flags) in map(server, export, context) {
        pages.extend((at..at + len).filter(|_| flags != 0));
        at += len;
    }
    pages
}

#[test]
fn base_allocation_tells_data_from_holes() {
    let server = start();
    let expected = [(512, 0), (600 - 512, 3), (2, 0), (SIZE / PAGE - 602, 3)];
    assert_eq!(map(&server, "base", "base:allocation"), expected);
    assert_eq!(map(&server, "vm", "base:allocation"), expected);
    assert_eq!(map(&server, "base@one", "base:allocation"), [(512, 0), (SIZE / PAGE - 512, 3)]);
    assert_eq!(map(&server, "other", "base:allocation"), [(SIZE / PAGE, 3)]);
}

#[test]
fn allocation_depth_tells_own_from_shared_to_the_page() {
    let server = start();
    let rest = (SIZE / PAGE - 602, 0);
    let depth = "qemu:allocation-depth";
    assert_eq!(map(&server, "base", depth), [(30, 2), (1, 1), (481, 2), (88, 0), (2, 2), rest]);
    assert_eq!(map(&server, "vm", depth), [(40, 2), (1, 1), (471, 2), (88, 0), (2, 2), rest]);
    // Page 10 of `one` was overwritten before `two`.
    let rest = (SIZE / PAGE - 512, 0);
    assert_eq!(map(&server, "base@one", depth), [(10, 2), (1, 1), (501, 2), rest]);
}

#[test]
fn a_dirty_bitmap_tells_what_changed_since_any_ancestor() {
    let server = start();
    let changed = |export, since: &str| pages(&server, export, &format!("qemu:dirty-bitmap:{since}"));
    assert_eq!(changed("base", "two"), [30]);
    assert_eq!(changed("base", "one"), [10, 30, 600, 601]);
    assert_eq!(changed("base@two", "one"), [10, 600, 601]);
    assert_eq!(changed("vm", "three"), [40]);
    assert_eq!(changed("vm", "vm@three"), [40]);
    assert_eq!(changed("vm", "base@two"), [20, 40, 600]);
    assert_eq!(changed("vm", "base@one"), [10, 20, 40, 600, 601]);
    assert_eq!(changed("vm@three", "base@two"), [20, 600]);
    assert_eq!(changed("other", "far"), [0; 0]);
}

#[test]
fn several_contexts_answer_one_request() {
    let server = start();
    let names = ["base:allocation", "qemu:allocation-depth", "qemu:dirty-bitmap:base@two", "qemu:dirty-bitmap:three"];
    for style in [ReplyStyle::Structured, ReplyStyle::Extended] {
        let mut c = server.raw();
        c.negotiate(style);
        let ids = c.contexts(OPT_SET_META_CONTEXT, "vm", &names).expect("contexts");
        assert_eq!(ids.len(), names.len());
        c.go("vm");
        let status = c.status(0, 19 * PAGE, 3 * 4096).expect("a status");
        for (id, name) in ids {
            let extents = &status.iter().find(|(of, _)| *of == id).expect("every context answers").1;
            let expected = match name.as_str() {
                "base:allocation" | "qemu:dirty-bitmap:three" => vec![(3 * PAGE, 0)],
                "qemu:allocation-depth" => vec![(3 * PAGE, 2)],
                _ => vec![(PAGE, 0), (PAGE, 1), (PAGE, 0)],
            };
            assert_eq!(extents, &expected, "{name}");
        }
    }
}

#[test]
fn wildcards_list_the_snapshots_of_the_whole_line() {
    let server = start();
    let mut c = server.raw();
    c.negotiate(ReplyStyle::Structured);
    let mut list = |export: &str, queries: &[&str]| -> Vec<String> {
        let found = c.contexts(OPT_LIST_META_CONTEXT, export, queries).expect("a list");
        let mut names: Vec<_> = found.into_iter().map(|(_, name)| name).collect();
        names.sort();
        names
    };
    let bitmaps = |names: &[&str]| -> Vec<String> { names.iter().map(|n| format!("qemu:dirty-bitmap:{n}")).collect() };
    assert_eq!(list("vm", &["qemu:dirty-bitmap:"]), bitmaps(&["base@one", "base@two", "three"]));
    assert_eq!(list("base@two", &["qemu:dirty-bitmap:"]), bitmaps(&["one"]));
    assert_eq!(list("vm", &["base:"]), ["base:allocation"]);
    assert_eq!(list("vm", &["qemu:"]).len(), 4);
    assert_eq!(list("vm", &[]).len(), 5);
    assert_eq!(list("vm", &["qemu:dirty-bitmap:three", "qemu:dirty-bitmap:far"]), bitmaps(&["three"]));
}

#[test]
fn snapshots_outside_the_line_are_no_context() {
    let server = start();
    let mut c = server.raw();
    c.negotiate(ReplyStyle::Structured);
    let wrong = ["other@far", "far", "", "@", "vm@", "base@", "base@new", "../base@one", "base@one@two", "base"];
    for name in wrong.map(|name| format!("qemu:dirty-bitmap:{name}")) {
        assert_eq!(c.contexts(OPT_SET_META_CONTEXT, "vm", &[&name]), Ok(vec![]), "{name}");
    }
}

#[test]
fn a_read_of_a_volume_tells_of_its_holes() {
    let server = start();
    let mut c = server.styled(ReplyStyle::Structured, "base", &[]);
    c.request(CMD_READ, 0, 5, 599 * PAGE, 4 * 4096);
    let kinds: Vec<(u16, usize)> = c.chunks().into_iter().map(|chunk| (chunk.kind, chunk.data.len())).collect();
    assert_eq!(kinds, [(CHUNK_OFFSET_HOLE, 12), (CHUNK_OFFSET_DATA, 8 + 2 * 4096), (CHUNK_OFFSET_HOLE, 12)]);
    c.request(CMD_READ, CMD_FLAG_DF, 5, 599 * PAGE, 4 * 4096);
    let whole = c.chunks();
    assert!(whole.len() == 1 && whole[0].kind == CHUNK_OFFSET_DATA && whole[0].data[8..4096 + 8] == [0; 4096]);
}

#[test]
fn fast_zeroes_are_whole_pages_or_many() {
    let server = start();
    let mut c = server.client("base");
    let fast = |c: &mut support::Client, offset, len| c.call(CMD_WRITE_ZEROES, CMD_FLAG_FAST_ZERO, offset, len);
    assert_eq!(fast(&mut c, 4096, 8192), 0);
    assert_eq!(fast(&mut c, 4096, 8191), 95);
    assert_eq!(c.read(12287, 1), Ok(vec![0]), "what was zeroed before");
    assert_eq!(fast(&mut c, 4095, 4097), 95);
    assert_eq!(c.read(4095, 1), Ok(vec![1]), "nothing was done");
    assert_eq!(fast(&mut c, 4095, 65_537), 0);
    assert_eq!(c.call(CMD_CACHE, 0, 0, SIZE as u32), 0);
}
