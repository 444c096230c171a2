//! Incremental backups of a volume that is written while its snapshots are taken and copied.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::harness::{Lab, Server, client, noise, succeed, wait_until};
use crate::nbd::Client;
use crate::nbd_clients::assert_same;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
/// Pages at the front of the volume, which one client writes in a recorded order.
const PAGES: usize = 2048;
/// Writes that must be answered before a snapshot is taken, and during or after it.
const AHEAD: usize = 300;

/// A client that writes one page after the other, each with its number.
#[derive(Default)]
struct Diary {
    /// Page of each write, by its number; the last write may be in flight.
    begun: Mutex<Vec<usize>>,
    answered: Mutex<usize>,
    stop: AtomicBool,
}

/// Stops the writes when dropped, even if the test fails.
struct End<'a>(&'a Diary);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::SeqCst);
    }
}

fn page(number: usize) -> Vec<u8> {
    [b"written ".to_vec(), (number as u64).to_be_bytes().to_vec()].concat().repeat(PAGE / 16)
}

impl Diary {
    /// Writes until it is stopped, or the server is gone.
    fn write(&self, server: &Path) {
        let mut client = Client::connect(server, "vm").unwrap();
        let mut rng = SmallRng::seed_from_u64(self.begun().try_into().unwrap());
        while !self.stop.load(Ordering::SeqCst) {
            let (number, at) = (self.begun(), rng.random_range(0..PAGES));
            self.begun.lock().unwrap().push(at);
            if client.write((at * PAGE) as u64, &page(number), false).is_err() {
                return client.vanish();
            }
            *self.answered.lock().unwrap() = number + 1;
        }
    }

    fn begun(&self) -> usize {
        self.begun.lock().unwrap().len()
    }

    fn answered(&self) -> usize {
        *self.answered.lock().unwrap()
    }

    fn wait_for_more(&self) {
        let enough = self.answered() + AHEAD;
        wait_until("more has been written", || self.answered() >= enough);
    }

    /// Returns the contents of the pages after the first `count` writes.
    fn contents(&self, base: &[u8], count: usize) -> Vec<u8> {
        let mut contents = base.to_vec();
        for (number, at) in self.begun.lock().unwrap()[..count].iter().enumerate() {
            contents[at * PAGE..][..PAGE].copy_from_slice(&page(number));
        }
        contents
    }

    /// Checks that `found` is the state of the pages at one moment, after at least `least` and
    /// at most `most` writes.
    fn assert_one_moment(&self, base: &[u8], found: &[u8], least: usize, most: usize) {
        let number = |page: &[u8]| match page.strip_prefix(b"written ") {
            Some(rest) => u64::from_be_bytes(rest[..8].try_into().unwrap()) as usize + 1,
            None => 0,
        };
        let newest = found.chunks_exact(PAGE).map(number).max().unwrap();
        let count = newest.max(least);
        assert!(count <= most, "it holds write {newest}, and {most} had begun when the snapshot was there");
        let due = self.contents(base, count);
        let differs = found.chunks_exact(PAGE).zip(due.chunks_exact(PAGE)).position(|(a, b)| a != b);
        assert_eq!(differs, None, "a page that is not what it was after {count} writes ({least} to {most})");
    }
}

/// Updates `image`, a copy of the volume at `since`, to `export`, as docs/nbd.md shows.
fn backup(server: &Server, export: &str, since: &str, image: &Path) {
    const SCRIPT: &str = include_str!("backup.py");
    let mut nbdsh = client("nbdsh", "python3-libnbd").unwrap();
    let variables = [("URI", server.uri(export)), ("CONTEXT", format!("qemu:dirty-bitmap:{since}"))];
    succeed(nbdsh.envs(variables).env("IMAGE", image).args(["-c", SCRIPT]));
}

/// Makes random writes and trims after the diary's pages, by fio.
fn scribble(lab: &Lab, server: &Server, seed: u64) {
    let mut fio = client("fio", "fio").unwrap();
    let uri = format!("--uri={}", server.uri("vm"));
    let seed = format!("--randseed={}", seed + 1);
    fio.current_dir(lab.path("")).args(["--name=w", "--ioengine=nbd", &uri, &seed, "--rw=randtrimwrite"]);
    fio.args(["--offset=8M", "--size=56M", "--bsrange=4k-128k", "--io_size=6M", "--iodepth=16"]);
    succeed(fio.arg("--end_fsync=1"));
}

#[test]
fn an_incremental_backup_of_a_live_volume_restores_to_one_moment_also_after_kill_9() {
    for program in ["nbdcopy", "nbdsh", "qemu-img", "fio"] {
        if client(program, "libnbd-bin, python3-libnbd, qemu-utils or fio").is_none() {
            return;
        }
    }
    let lab = Lab::with_pool("512M");
    lab.import("vm", &[noise(1, 8 * MIB), vec![0; 24 * MIB], noise(2, MIB), vec![0; 31 * MIB]].concat());
    let mut server = Server::start(&lab);
    let (image, diary) = (lab.path("backup.img"), Diary::default());
    lab.ok(&["snapshot", "pool.img/vm@one"]);
    succeed(client("nbdcopy", "libnbd-bin").unwrap().arg(server.uri("vm@one")).arg(&image));
    let base = std::fs::read(&image).unwrap()[..PAGES * PAGE].to_vec();
    let names = ["one", "two", "three", "four"];
    for (round, pair) in names.windows(2).enumerate() {
        let (since, snapshot) = (pair[0], pair[1]);
        let export = format!("vm@{snapshot}");
        let is_last = snapshot == "four";
        let (least, most) = std::thread::scope(|scope| {
            let (lab, served, diary) = (&lab, &server, &diary);
            diary.stop.store(false, Ordering::SeqCst);
            let _end = End(diary);
            scope.spawn(move || diary.write(served.socket()));
            let scribbler = scope.spawn(move || scribble(lab, served, round as u64));
            diary.wait_for_more();
            let least = diary.answered();
            lab.ok(&["snapshot", &format!("pool.img/{export}")]);
            let most = diary.begun();
            diary.wait_for_more();
            // The copied snapshot does not change; the volume does.
            if !is_last {
                backup(served, &export, since, &image);
                assert_same(served, &export, &image);
            }
            scribbler.join().unwrap();
            (least, most)
        });
        // The last snapshot is compared by a server after a crash of the first one.
        if is_last {
            server.kill();
            server = Server::start(&lab);
            backup(&server, &export, since, &image);
            assert_same(&server, &export, &image);
        }
        diary.assert_one_moment(&base, &std::fs::read(&image).unwrap()[..PAGES * PAGE], least, most);
    }
    // Restored into a new volume, over several connections.
    lab.ok(&["create", "pool.img/restored", "--size", "64M"]);
    let mut nbdcopy = client("nbdcopy", "libnbd-bin").unwrap();
    succeed(nbdcopy.args(["--connections=4", "--flush"]).arg(&image).arg(server.uri("restored")));
    assert_same(&server, "restored", &image);
    assert_same(&server, "vm@four", &image);
    server.stop();
    lab.assert_clean();
}
