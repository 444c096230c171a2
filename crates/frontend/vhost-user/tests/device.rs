//! What a guest finds: data, flushes, discards, features, several queues, resizes.

mod support;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use forkdisk_vhost_user::ServerOptions;
use forkdisk_vhost_user::testing::{Guest, Request};
use support::{Fixture, MemoryDisk, Order, disk, one_disk};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn a_guest_reads_what_it_wrote() {
    let server = one_disk();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 4 << 20).unwrap();
    assert_eq!(guest.capacity().unwrap(), 8 << 20);
    assert_eq!(guest.request(IN, 3, &[], 1024).unwrap(), (OK, [vec![3; 512], vec![4; 512]].concat()));
    let data: Vec<u8> = (0..3 << 20).map(|n: u32| (n * 7 + n / 4096) as u8).collect();
    assert_eq!(guest.request(OUT, 17, &data, 0).unwrap().0, OK);
    assert_eq!(guest.request(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(guest.request(IN, 17, &[], data.len()).unwrap(), (OK, data.clone()));
    drop(guest);
    let (flushes, durable, bytes) = server.end().remove("d").unwrap();
    assert_eq!((flushes, durable), (1, 0));
    assert_eq!(bytes[17 * 512..17 * 512 + data.len()], data[..]);
}

#[test]
fn large_requests_in_whole_pages_are_not_copied() {
    let make = || vec![MemoryDisk { takes_no_copies: true, ..disk("d", 8 << 20) }];
    let server = Fixture::new(ServerOptions::default(), make);
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 4 << 20).unwrap();
    let address = guest.queues[0].data_address(0).next_multiple_of(4096);
    for (at, len, status) in
        [(0, 64 << 10, OK), (4096, 1 << 20, OK), (0, 4096, IO_ERROR), (512, 64 << 10, IO_ERROR), (0, 66_048, IO_ERROR)]
    {
        for (kind, is_read) in [(IN, true), (OUT, false)] {
            let queue = &mut guest.queues[0];
            queue.submit_at(0, kind, 8, (address + at, len), is_read).unwrap();
            queue.notify().unwrap();
            assert_eq!(queue.wait(10).unwrap().status, status, "{len} bytes at {at}, {kind}");
        }
    }
}

#[test]
fn every_kind_of_request_has_its_answer() {
    let server = one_disk();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 1 << 20).unwrap();
    let (status, id) = guest.request(GET_ID, 0, &[], 20).unwrap();
    assert_eq!((status, &id[..7]), (OK, &b"serial\0"[..]));
    assert_eq!(guest.request(DISCARD, 0, &[range(8, 8, 0), range(32, 8, 0)].concat(), 0).unwrap().0, OK);
    assert_eq!(guest.request(WRITE_ZEROES, 0, &range(16, 8, 1), 0).unwrap().0, OK);
    assert_eq!(guest.request(IN, 8, &[], 512).unwrap().1, vec![0xdd; 512]);
    assert_eq!(guest.request(IN, 33, &[], 512).unwrap().1, vec![0xdd; 512]);
    assert_eq!(guest.request(IN, 23, &[], 512).unwrap().1, vec![0; 512]);
    assert_eq!(guest.request(DISCARD, 0, &range(0, 8, 1), 0).unwrap().0, UNSUPPORTED);
    assert_eq!(guest.request(WRITE_ZEROES, 0, &range(0, 8, 2), 0).unwrap().0, UNSUPPORTED);
    assert_eq!(guest.request(DISCARD, 0, &[0; 15], 0).unwrap().0, UNSUPPORTED);
    assert_eq!(guest.request(99, 0, &[], 512).unwrap().0, UNSUPPORTED);
}

#[test]
fn ranges_outside_of_the_disk_are_errors() {
    let server = one_disk();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 1 << 20).unwrap();
    let end = (8 << 20) / 512;
    assert_eq!(guest.request(IN, end - 1, &[], 512).unwrap().0, OK);
    for sector in [end, end - 1, u64::MAX, u64::MAX / 512, 1 << 55] {
        assert_eq!(guest.request(IN, sector, &[], 1024).unwrap().0, IO_ERROR, "{sector}");
        assert_eq!(guest.request(OUT, sector, &[1; 1024], 0).unwrap().0, IO_ERROR, "{sector}");
        assert_eq!(guest.request(DISCARD, 0, &range(sector, 2, 0), 0).unwrap().0, IO_ERROR, "{sector}");
    }
    assert_eq!(guest.request(OUT, 0, &[1; 100], 0).unwrap().0, IO_ERROR, "no whole sector");
    assert_eq!(guest.request(IN, 0, &[], 512).unwrap(), (OK, vec![0; 512]), "nothing was written");
}

#[test]
fn a_disk_for_reading_only_refuses_writes() {
    let server =
        Fixture::new(ServerOptions::default(), || vec![support::MemoryDisk { read_only: true, ..disk("d", 1 << 20) }]);
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 1 << 20).unwrap();
    assert_eq!(guest.features >> 5 & 1, 1);
    assert_eq!(guest.request(OUT, 0, &[1; 512], 0).unwrap().0, IO_ERROR);
    assert_eq!(guest.request(IN, 0, &[], 512).unwrap().0, OK);
}

#[test]
fn an_error_of_the_disk_is_an_error_of_the_request() {
    let server =
        Fixture::new(ServerOptions::default(), || vec![support::MemoryDisk { fails: true, ..disk("d", 1 << 20) }]);
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 1 << 20).unwrap();
    for kind in [IN, FLUSH] {
        assert_eq!(guest.request(kind, 0, &[], if kind == IN { 512 } else { 0 }).unwrap().0, IO_ERROR);
    }
    assert_eq!(guest.request(OUT, 0, &[1; 512], 0).unwrap().0, IO_ERROR);
}

#[test]
fn writes_are_durable_when_the_guest_turns_the_cache_off() {
    let server = one_disk();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 1 << 20).unwrap();
    assert_eq!(guest.config(32, 1).unwrap(), [1]);
    guest.request(OUT, 0, &[1; 512], 0).unwrap();
    guest.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    assert_eq!(guest.config(32, 1).unwrap(), [0]);
    guest.request(OUT, 0, &[2; 512], 0).unwrap();
    drop(guest);
    assert_eq!(server.end()["d"].1, 1);
}

#[test]
fn writes_are_durable_for_a_driver_without_flushes() {
    let server = one_disk();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 1 << 20).unwrap();
    guest.frontend.set_features(guest.features & !(1 << 9)).unwrap();
    guest.request(OUT, 0, &[2; 512], 0).unwrap();
    drop(guest);
    assert_eq!(server.end()["d"].1, 1);
}

#[test]
fn several_queues_are_served_at_once() {
    let server = one_disk();
    let mut guest = Guest::connect(&server.socket("d"), 4, 128, 4096).unwrap();
    let slots = guest.queues[0].slots();
    for (index, queue) in guest.queues.iter_mut().enumerate() {
        for slot in 0..slots {
            queue.fill(slot, &[(index as u8) << 6 | slot as u8; 4096]).unwrap();
            queue.submit(slot, OUT, (index as u64 * 1000 + u64::from(slot) * 8) & !7, 4096, false).unwrap();
        }
        queue.notify().unwrap();
    }
    for queue in &mut guest.queues {
        let mut seen: Vec<u16> = (0..slots)
            .map(|_| queue.wait(10).unwrap())
            .map(|done| {
                assert_eq!((done.status, done.written), (OK, 1));
                done.slot
            })
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..slots).collect::<Vec<_>>());
    }
    let queue = &mut guest.queues[3];
    queue.submit(0, IN, 3000 + 8 * 5, 4096, true).unwrap();
    queue.notify().unwrap();
    assert_eq!(queue.wait(10).unwrap().written, 4097);
    assert_eq!(queue.data(0, 4096).unwrap(), vec![3 << 6 | 5; 4096]);
}

#[test]
fn a_ring_wraps_many_times_without_event_index_too() {
    for without in [0, 1 << 29] {
        let server = one_disk();
        let mut guest = Guest::connect(&server.socket("d"), 1, 16, 4096).unwrap();
        guest.frontend.get_vring_base(0).unwrap();
        guest.features &= !without;
        guest.frontend.set_features(guest.features).unwrap();
        guest.restart().unwrap();
        for round in 0..20_000u32 {
            let queue = &mut guest.queues[0];
            queue.submit((round % 5) as u16, IN, u64::from(round % 1000), 512, true).unwrap();
            queue.notify().unwrap();
            let done = queue.wait(10).unwrap();
            assert_eq!(queue.data(done.slot, 1).unwrap(), [(round % 1000) as u8]);
        }
    }
}

#[test]
fn a_load_is_carried_out_with_and_without_event_index() {
    for without in [0, 1 << 29] {
        let server = one_disk();
        let mut guest = Guest::connect(&server.socket("d"), 1, 32, 4096).unwrap();
        guest.frontend.get_vring_base(0).unwrap();
        guest.features &= !without;
        guest.frontend.set_features(guest.features).unwrap();
        guest.restart().unwrap();
        let queue = &mut guest.queues[0];
        (0..8).for_each(|slot| queue.fill(slot, &[7; 4096]).unwrap());
        let write = |i: u64| Request { kind: OUT, offset: i % 200 * 4096, len: 4096 };
        let flush = Request { kind: FLUSH, offset: 0, len: 0 };
        let requests = (0..20_000).flat_map(|i| [write(i), flush]).chain([flush]);
        let events = queue.run(8, requests, Duration::from_secs(10)).unwrap();
        assert_eq!(events.requests, 40_001);
        assert!(events.waits <= events.requests && events.kicks <= events.requests, "{events:?}");
        let beyond = [Request { kind: IN, offset: 1 << 40, len: 4096 }];
        assert!(queue.run(8, beyond.into_iter(), Duration::from_secs(10)).is_err());
        drop(guest);
        let bytes = &server.end()["d"].2;
        assert!(bytes[..200 * 4096].iter().all(|&byte| byte == 7) && bytes[200 * 4096..].iter().any(|&byte| byte != 7));
    }
}

#[test]
fn a_new_size_is_announced() {
    let server = one_disk();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 1 << 20).unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&theirs).unwrap();
    server.order(Order::Grow("d".to_string(), 16 << 20));
    ours.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut header = [0; 12];
    ours.read_exact(&mut header).unwrap();
    assert_eq!(header, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], "CONFIG_CHANGE_MSG");
    assert_eq!(guest.capacity().unwrap(), 16 << 20);
    assert_eq!(guest.request(IN, (16 << 20) / 512 - 1, &[], 512).unwrap(), (OK, vec![0; 512]));
}

#[test]
fn memory_comes_and_goes_while_a_queue_is_served() {
    let server = one_disk();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 1 << 20).unwrap();
    let address = 1 << 30;
    let extra = guest.add_memory(address, 1 << 20).unwrap();
    let queue = &mut guest.queues[0];
    queue.submit_at(0, IN, 5, (address, 512), true).unwrap();
    queue.notify().unwrap();
    assert_eq!(queue.wait(10).unwrap().status, OK);
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(&extra.file, &mut byte, 0).unwrap();
    assert_eq!(byte, [5]);
    guest.remove_memory(&extra).unwrap();
    let queue = &mut guest.queues[0];
    queue.submit_at(0, IN, 5, (address, 512), true).unwrap();
    queue.notify().unwrap();
    assert_eq!(queue.wait(10).unwrap().status, IO_ERROR, "it is no memory of the guest any more");
    assert_eq!(guest.request(IN, 7, &[], 512).unwrap(), (OK, vec![7; 512]));
}

#[test]
fn a_polled_queue_answers_like_any_other() {
    let options = ServerOptions::default().with_max_poll(Duration::from_micros(200));
    let server = Fixture::new(options, || vec![disk("d", 1 << 20)]);
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 4096).unwrap();
    for round in 0..2000 {
        assert_eq!(guest.request(IN, round, &[], 512).unwrap(), (OK, vec![round as u8; 512]));
    }
}
