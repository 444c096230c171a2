//! A volume goes back a thousand times under its clients, with kills between: after each answer no byte of what was
//! written since the snapshot, through any door.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::harness::{LIMIT, Lab, POOL, Server, noise, wait_until};
use crate::mount_served::Both;
use crate::nbd::Client;
use crate::switch::{Control, IN, OUT, connect, disk, kill, serve_disks, show};

const PAGE: usize = 4096;
const PAGES: usize = 64;
const SIZE: usize = PAGES * PAGE;
const HALF: usize = SIZE / 2;
const ROUNDS: usize = 1000;
/// Rounds between two kills.
const KILL_EVERY: usize = 100;

/// A pool with the volume `v` and its snapshot `v@clean`, and the contents of both.
fn lab() -> (Lab, Vec<u8>) {
    let (lab, clean) = (Lab::with_pool("256M"), noise(1, SIZE));
    lab.import("v", &clean);
    lab.ok(&["snapshot", &format!("{POOL}/v@clean")]);
    (lab, clean)
}

/// What a round writes to each fifth page.
fn written(round: usize) -> Vec<u8> {
    (round as u64 + 1).to_le_bytes().repeat(PAGE / 8)
}

/// Whether each word is as in the snapshot, or of a round: writes may be under way.
fn is_of_rounds(found: &[u8], clean: &[u8]) -> bool {
    let is_of_one = |word: &[u8]| (1..=ROUNDS as u64).contains(&u64::from_le_bytes(word.try_into().unwrap()));
    found.chunks(8).zip(clean.chunks(8)).all(|(word, clean)| word == clean || is_of_one(word))
}

/// Reads all, and writes the pages `own` one after the other, until `ends`; a client that lost its connection connects
/// again. Returns how many writes were answered.
fn keep_using(server: &Path, own: Range<usize>, clean: &[u8], ends: &AtomicBool) -> usize {
    let (mut count, mut client) = (0, None);
    while !ends.load(Ordering::Relaxed) {
        let Some(connected) = &mut client else {
            client = Client::connect(server, "v").ok();
            continue;
        };
        let (at, data) = ((own.start + count % own.len()) * PAGE, written(count % ROUNDS));
        let done = connected.write(at as u64, &data, false).and_then(|()| connected.read(0, SIZE));
        let Ok(found) = done else {
            client = None;
            continue;
        };
        let page = &found[at..at + PAGE];
        assert!(page == data || page == &clean[at..at + PAGE], "write {count}: parts of a page, or another one");
        assert!(is_of_rounds(&found, clean), "bytes that no client wrote");
        count += 1;
    }
    count
}

#[test]
fn under_nbd_clients_that_read_and_write() {
    let (lab, clean) = lab();
    let mut server = Server::start(&lab);
    let socket = server.socket().to_path_buf();
    let (mut own, mut control) = (Client::connect(&socket, "v").unwrap(), Control::connect(&server));
    let (ends, mut times) = (AtomicBool::new(false), Vec::new());
    let server = std::thread::scope(|scope| {
        let own_pages = [PAGES / 2..PAGES * 3 / 4, PAGES * 3 / 4..PAGES];
        let (path, clean, over) = (&socket, &clean, &ends);
        let using = |own| scope.spawn(move || keep_using(path, own, clean, over));
        let others = own_pages.map(using);
        for round in 0..ROUNDS {
            for page in (round % 5..PAGES / 2).step_by(5) {
                own.write((page * PAGE) as u64, &written(round), false).unwrap();
            }
            times.push(control.roll_back("v@clean"));
            assert!(own.read(0, HALF).unwrap() == clean[..HALF], "round {round}: bytes of before");
            if round % KILL_EVERY == KILL_EVERY / 2 {
                server.kill();
                server = Server::start(&lab);
                assert_eq!(server.socket(), socket);
                (own, control) = (Client::connect(&socket, "v").unwrap(), Control::connect(&server));
                assert!(own.read(0, HALF).unwrap() == clean[..HALF], "round {round}: after a kill");
            }
        }
        ends.store(true, Ordering::Relaxed);
        for other in others {
            assert!(other.join().unwrap() > ROUNDS / 10);
        }
        server
    });
    show("live rollbacks of an NBD export", times);
    drop(own);
    server.stop();
    lab.assert_clean();
}

#[test]
fn under_a_virtual_machine_with_requests_in_flight() {
    let (lab, clean) = lab();
    let mut server = serve_disks(&lab);
    let (mut guest, socket) = (connect(&disk(&lab, "v")), disk(&lab, "v"));
    let (mut control, mut times) = (Control::connect(&server), Vec::new());
    for round in 0..ROUNDS {
        for page in (round % 5..PAGES).step_by(5) {
            guest.request(OUT, (page * PAGE / 512) as u64, &written(round), 0).unwrap();
        }
        for slot in 0..8 {
            guest.queues[1].submit(slot, IN, 0, SIZE as u32, true).unwrap();
        }
        guest.queues[1].notify().unwrap();
        times.push(control.roll_back("v@clean"));
        let (status, found) = guest.request(IN, 0, &[], SIZE).unwrap();
        assert!(status == 0 && found == clean, "round {round}: bytes of before");
        for _ in 0..8 {
            let done = guest.queues[1].wait(LIMIT.as_secs()).unwrap();
            let found = guest.queues[1].data(done.slot, SIZE).unwrap();
            assert!(done.status == 0 && is_of_rounds(&found, &clean), "round {round}: bytes that were never written");
        }
        if round % KILL_EVERY == KILL_EVERY / 2 {
            kill(server);
            server = serve_disks(&lab);
            control = Control::connect(&server);
            guest.reconnect(&socket).unwrap();
            assert!(guest.request(IN, 0, &[], SIZE).unwrap().1 == clean, "round {round}: after a kill");
        }
    }
    show("live rollbacks of a virtual machine's disk", times);
    drop(guest);
    server.stop();
    assert!(lab.contents("v") == clean);
    lab.assert_clean();
}

#[test]
fn under_programs_with_a_file_of_a_mount_open() {
    let (lab, clean) = lab();
    let Some(both) = Both::start(&lab) else { return };
    let open = || File::options().read(true).write(true).open(both.path("v")).unwrap();
    let (file, ends, mut times) = (open(), AtomicBool::new(false), Vec::new());
    let mut control = Control::connect(both.server());
    let read = |file: &File| {
        let mut found = vec![0; SIZE];
        file.read_exact_at(&mut found, 0).unwrap();
        found
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (file, mut count) = (open(), 0);
            while !ends.load(Ordering::Relaxed) {
                assert!(is_of_rounds(&read(&file), &clean), "bytes that were never written");
                count += 1;
            }
            count
        });
        for round in 0..ROUNDS {
            for page in (round % 5..PAGES).step_by(5) {
                file.write_all_at(&written(round), (page * PAGE) as u64).unwrap();
            }
            times.push(control.roll_back("v@clean"));
            assert!(read(&file) == clean, "round {round}: bytes of before");
        }
        ends.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > ROUNDS / 10);
    });
    show("live rollbacks of a file", times);
    drop(file);
    both.stop();
    wait_until("the server has ended", || lab.contents("v") == clean);
    lab.assert_clean();
}
