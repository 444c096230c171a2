//! Front ends and guests that break the protocol: an error for them, and nothing for others.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use forkdisk_vhost_user::ServerOptions;
use forkdisk_vhost_user::testing::Guest;
use support::{Fixture, disk, is_served, one_disk};
use vhost::VhostBackend;

const IN: u32 = 0;
const OUT: u32 = 1;
const NEXT: u32 = 1;
const WRITE: u32 = 2;
const INDIRECT: u32 = 4;
/// Where the headers of the driver lie behind its rings.
const OUTSIDE: u64 = 1 << 40;

fn guest(server: &Fixture) -> Guest {
    Guest::connect(&server.socket("d"), 2, 64, 64 << 10).unwrap()
}

/// Offers the chain `head` on queue 0; the queue has to be given up, and the other one goes on.
fn breaks(server: &Fixture, mut guest: Guest, head: u16) {
    guest.queues[0].offer(head).unwrap();
    guest.queues[0].notify().unwrap();
    assert!(guest.queues[0].is_faulty_within(10).unwrap(), "the front end is told");
    assert_eq!(guest.queues[0].next_answer().unwrap(), None, "nothing is answered");
    let queue = &mut guest.queues[1];
    queue.submit(0, IN, 1, 512, true).unwrap();
    queue.notify().unwrap();
    assert_eq!(queue.wait(10).unwrap().status, 0, "the other queue is served");
    drop(guest);
    assert!(is_served(&server.socket("d")));
}

#[test]
fn a_loop_of_descriptors_ends_its_queue_only() {
    let server = one_disk();
    let guest = guest(&server);
    guest.queues[0].describe(0, 0, 16, NEXT, 1).unwrap();
    guest.queues[0].describe(1, 0, 16, NEXT, 0).unwrap();
    breaks(&server, guest, 0);
}

#[test]
fn a_table_that_contains_itself_ends_its_queue_only() {
    let server = one_disk();
    let guest = guest(&server);
    guest.queues[0].describe(0, 0, 16, INDIRECT, 0).unwrap();
    breaks(&server, guest, 0);
}

#[test]
fn descriptors_that_do_not_exist_end_their_queue_only() {
    for head in [64, 1000, u16::MAX] {
        let server = one_disk();
        let guest = guest(&server);
        breaks(&server, guest, head);
    }
    let server = one_disk();
    let guest = guest(&server);
    guest.queues[0].describe(0, 0, 16, NEXT, 64).unwrap();
    breaks(&server, guest, 0);
}

#[test]
fn tables_and_headers_outside_of_the_memory_end_their_queue_only() {
    for address in [OUTSIDE, u64::MAX - 15, u64::MAX - 31] {
        for flags in [INDIRECT, NEXT] {
            let server = one_disk();
            let guest = guest(&server);
            guest.queues[0].describe(0, address, 16, flags, 1).unwrap();
            guest.queues[0].describe(1, 4096, 1, WRITE, 0).unwrap();
            breaks(&server, guest, 0);
        }
    }
}

#[test]
fn requests_without_header_or_status_end_their_queue_only() {
    for (len, flags) in [(15, NEXT), (16, 0), (0, 0)] {
        let server = one_disk();
        let guest = guest(&server);
        guest.queues[0].describe(0, 4096, len, flags, 1).unwrap();
        guest.queues[0].describe(1, 8192, u32::from(flags == NEXT), WRITE, 0).unwrap();
        breaks(&server, guest, 0);
    }
}

#[test]
fn a_status_outside_of_the_memory_ends_its_queue_only() {
    let server = one_disk();
    let guest = guest(&server);
    guest.queues[0].describe(0, 4096, 16, NEXT, 1).unwrap();
    guest.queues[0].describe(1, OUTSIDE, 1, WRITE, 0).unwrap();
    breaks(&server, guest, 0);
}

#[test]
fn lengths_that_overflow_end_their_queue_only() {
    let server = one_disk();
    let guest = guest(&server);
    guest.queues[0].describe(0, 4096, u32::MAX, NEXT, 1).unwrap();
    guest.queues[0].describe(1, 4096, u32::MAX, WRITE, 0).unwrap();
    breaks(&server, guest, 0);
}

#[test]
fn data_outside_of_the_memory_is_an_error_of_the_request() {
    let server = one_disk();
    let mut guest = guest(&server);
    for address in [OUTSIDE, u64::MAX - 511, u64::MAX - 100] {
        for (kind, device_writes) in [(IN, true), (OUT, false)] {
            let queue = &mut guest.queues[0];
            queue.submit_at(0, kind, 0, (address, 512), device_writes).unwrap();
            queue.notify().unwrap();
            assert_eq!(queue.wait(10).unwrap().status, 1, "{address:#x}");
        }
    }
    assert_eq!(guest.request(IN, 0, &[], 512).unwrap(), (0, vec![0; 512]), "the disk is unchanged");
}

#[test]
fn an_index_beyond_the_ring_ends_its_queue_only() {
    let server = one_disk();
    let mut guest = guest(&server);
    guest.queues[0].lie_about_available(65).unwrap();
    guest.queues[0].notify().unwrap();
    assert!(guest.queues[0].is_faulty_within(10).unwrap());
    drop(guest);
    assert!(is_served(&server.socket("d")));
}

#[test]
fn the_same_descriptor_twice_is_two_requests() {
    let server = one_disk();
    let mut guest = guest(&server);
    let queue = &mut guest.queues[0];
    queue.submit(0, IN, 3, 512, true).unwrap();
    queue.offer(0).unwrap();
    queue.notify().unwrap();
    assert_eq!((queue.wait(10).unwrap().status, queue.wait(10).unwrap().status), (0, 0));
}

#[test]
fn memory_that_is_taken_away_ends_the_session_and_writes_nothing() {
    take_memory_away(4096);
}

#[test]
fn memory_of_a_large_write_that_is_taken_away_is_not_written() {
    take_memory_away(64 << 10);
}

/// Takes the memory of a write of `len` bytes away before it is carried out.
fn take_memory_away(len: u32) {
    let server = one_disk();
    let mut guest = guest(&server);
    assert_eq!(guest.request(OUT, 0, &[7; 4096], 0).unwrap().0, 0);
    let queue = &mut guest.queues[1];
    let kept = queue.data_address(0).next_multiple_of(4096);
    queue.submit_at(0, OUT, 0, (kept, len), false).unwrap();
    guest.file.set_len(kept).unwrap();
    guest.queues[1].notify().unwrap();
    let ended = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        guest.frontend.get_features().is_err()
    });
    assert!(ended, "the session has ended");
    // The guest's own mapping is gone, too: it must not be touched any more.
    std::mem::forget(guest);
    assert!(is_served(&server.socket("d")));
    let (_, _, bytes) = server.end().remove("d").unwrap();
    assert_eq!(bytes[..4096], [7; 4096]);
}

/// Sends a message without files and returns what comes back; empty if the connection was closed.
fn say(stream: &mut UnixStream, code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let message = [&code.to_ne_bytes()[..], &flags.to_ne_bytes(), &(body.len() as u32).to_ne_bytes(), body].concat();
    if stream.write_all(&message).is_err() {
        return Vec::new();
    }
    let mut reply = vec![0; 4096];
    match stream.read(&mut reply) {
        Ok(count) => reply.truncate(count),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => reply.clear(),
        Err(error) => panic!("request {code}: the session has not ended: {error}"),
    }
    reply
}

#[test]
fn messages_that_are_refused_end_their_session_only() {
    let server = one_disk();
    let unknown = [(0, 1, vec![]), (45, 1, vec![]), (u32::MAX, 1, vec![]), (22, 1, vec![0; 8])];
    let lengths = [(2, 1, vec![0; 7]), (5, 1, vec![1]), (8, 1, vec![]), (24, 1, vec![0; 3]), (37, 1, vec![0; 40])];
    let versions = [(1, 0, vec![]), (1, 2, vec![]), (1, 5, vec![])];
    let values = [
        (2, 1, u64::MAX.to_ne_bytes().to_vec()),
        (16, 1, u64::MAX.to_ne_bytes().to_vec()),
        (8, 1, [99u32.to_ne_bytes(), 64u32.to_ne_bytes()].concat()),
        (8, 1, [0u32.to_ne_bytes(), 3u32.to_ne_bytes()].concat()),
        (10, 1, [0u32.to_ne_bytes(), 70_000u32.to_ne_bytes()].concat()),
        (12, 1, 0u64.to_ne_bytes().to_vec()),
        (18, 1, [0u32.to_ne_bytes(), 2u32.to_ne_bytes()].concat()),
        (25, 1, [0u32.to_ne_bytes(), 8u32.to_ne_bytes(), 0u32.to_ne_bytes(), [9; 4], [9; 4]].concat()),
        (31, 1, vec![0xff; 24]),
    ];
    for (code, flags, body) in unknown.into_iter().chain(lengths).chain(versions).chain(values) {
        let mut stream = UnixStream::connect(server.socket("d")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(say(&mut stream, code, flags, &body), [], "request {code}");
        drop(stream);
    }
    assert!(is_served(&server.socket("d")));
}

#[test]
fn half_a_message_does_not_keep_others_out() {
    let options = ServerOptions::default();
    let server = Fixture::new(options, || vec![disk("d", 1 << 20), disk("e", 1 << 20)]);
    let mut half = UnixStream::connect(server.socket("d")).unwrap();
    half.write_all(&[1, 0, 0, 0, 1]).unwrap();
    assert!(is_served(&server.socket("e")), "another disk");
    drop(half);
    assert!(is_served(&server.socket("d")));
}

#[test]
fn a_second_front_end_is_refused_while_the_first_is_connected() {
    let server = one_disk();
    let mut first = guest(&server);
    assert!(Guest::connect(&server.socket("d"), 1, 64, 4096).is_err());
    assert_eq!(first.request(IN, 9, &[], 512).unwrap(), (0, vec![9; 512]));
    drop(first);
    assert!(is_served(&server.socket("d")));
}

#[test]
fn files_that_are_no_event_descriptors_are_refused() {
    use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
    let server = one_disk();
    let guest = guest(&server);
    let zero = std::fs::File::open("/dev/zero").unwrap();
    assert!(zero.as_raw_fd() > 2);
    // SAFETY: the descriptor is owned by nothing else.
    let event = unsafe { vmm_sys_util::eventfd::EventFd::from_raw_fd(zero.into_raw_fd()) };
    assert!(guest.frontend.set_vring_call(0, &event).is_err());
    assert!(guest.frontend.get_features().is_ok(), "the refusal was the reply");
}
