//! A full pool always reports errors, and space reported as free can be written.

use std::fs;
use std::io;
use std::thread;

use crate::harness::{Lab, POOL, Server, noise, wait_until};
use crate::nbd::Client;

const MIB: usize = 1 << 20;
const NO_SPACE: Option<i32> = Some(28);

/// Writes whole MiB from `at` on until there is no space; returns how many were written.
fn fill(client: &mut Client, at: u64) -> u64 {
    let mut written = 0;
    loop {
        match client.write((at + written) << 20, &noise(at + written, MIB), false) {
            Ok(()) => written += 1,
            Err(e) => {
                assert_eq!(e.raw_os_error(), NO_SPACE, "{e}");
                return written;
            }
        }
    }
}

#[test]
fn the_first_wait_for_space_and_the_first_failure_are_logged_once_per_full_pool() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "pool.img/b", "pool.img/c", "--size", "1G"]);
    // No warning before, since the low-water mark is 0.
    let server = Server::start_with(&lab, POOL, &["--wait-for-space", "1s", "--low-water", "0"]);
    let log = || fs::read_to_string(lab.path("serve.log")).unwrap();
    let count = |what: &str| log().matches(what).count();
    let [waits, fails] = ["a write waits for space", "writes fail with ENOSPC"];
    let mut b = Client::connect(server.socket(), "b").unwrap();
    b.write(0, &noise(9, 8 * MIB), true).unwrap();
    let mut a = Client::connect(server.socket(), "a").unwrap();
    for time in 1..=2 {
        assert_eq!((count(waits), count(fails)), (time - 1, time - 1));
        fill(&mut a, 100 * time as u64);
        // Other clients find no space, either.
        let others: Vec<_> = (0..3)
            .map(|i| {
                let mut c = Client::connect(server.socket(), "c").unwrap();
                thread::spawn(move || c.write(i << 20, &noise(i, MIB), false))
            })
            .collect();
        for other in others {
            assert_eq!(other.join().unwrap().unwrap_err().raw_os_error(), NO_SPACE);
        }
        assert_eq!((count(waits), count(fails)), (time, time), "{}", log());
        let line = log().lines().rfind(|line| line.contains(waits)).unwrap().to_string();
        assert!(line.contains("volume=a") && line.contains("grow the pool"), "{line}");
        if time == 1 {
            a.trim(100 << 20, (200 * MIB) as u32).unwrap();
            a.flush().unwrap();
            wait_until("there is room again", || {
                a.write(0, &noise(1, 4096), true).unwrap();
                log().contains("the pool has data space again")
            });
        }
    }
    drop((a, b));
    server.stop();
    lab.assert_clean();
}

#[test]
fn what_is_free_can_be_written_and_a_full_pool_has_nothing_free() {
    let lab = Lab::with_pool("200M");
    lab.ok(&["create", "pool.img/a", "pool.img/b", "--size", "1G"]);
    let server = Server::start_with(&lab, POOL, &["--when-full", "error"]);
    let free = || lab.json(&["stats", POOL])["free"].as_u64().unwrap();
    let mut a = Client::connect(server.socket(), "a").unwrap();
    let mut b = Client::connect(server.socket(), "b").unwrap();
    let write = |client: &mut Client, at: u64, len: u64| -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(MIB as u64);
            client.write(at + done, &noise(at + done, piece as usize), false)?;
            done += piece;
        }
        Ok(())
    };
    // Half of the pool in small pieces, of which every second is discarded.
    for piece in 0..(free() / 2) >> 18 {
        write(&mut b, piece << 18, 128 << 10).unwrap();
    }
    b.flush().unwrap();
    let whole = |bytes: u64| bytes - bytes % MIB as u64;
    for told in [whole(free() / 2), whole(free() / 4)] {
        assert!(told > 0);
        write(&mut a, told, told).unwrap_or_else(|e| panic!("{told} of more bytes: {e}"));
    }
    a.flush().unwrap();
    let told = free() & !4095;
    assert!(told > MIB as u64, "{told}");
    write(&mut a, 512 << 20, told).unwrap_or_else(|e| panic!("{told} bytes: {e}"));
    // Only a little more than that fits.
    let mut more = 0;
    while write(&mut a, (900 << 20) + more, 4096).is_ok() {
        more += 4096;
    }
    assert!(more < 2 * MIB as u64, "{more} bytes more than {told}");
    assert_eq!(free(), 0);
    drop((a, b));
    server.stop();
    lab.assert_clean();
}
