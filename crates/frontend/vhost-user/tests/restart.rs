//! A server that ends or dies, and the next one: no request is lost, none is carried out beside a later one.

mod support;

use std::time::Duration;

use forkdisk_vhost_user::ServerOptions;
use forkdisk_vhost_user::testing::Guest;
use support::{Fixture, MemoryDisk, Order, disk, one_disk};

const IN: u32 = 0;
const OUT: u32 = 1;

fn slow() -> Fixture {
    Fixture::new(ServerOptions::default(), || {
        vec![MemoryDisk { delay: Duration::from_millis(200), ..disk("d", 1 << 20) }]
    })
}

#[test]
fn requests_in_flight_are_answered_before_a_session_ends() {
    let server = slow();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 4096).unwrap();
    for slot in 0..8 {
        guest.queues[0].fill(slot, &[slot as u8 + 1; 512]).unwrap();
        guest.queues[0].submit(slot, OUT, slot.into(), 512, false).unwrap();
    }
    guest.queues[0].notify().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    server.order(Order::Disconnect("d".to_string()));
    let mut slots: Vec<u16> = (0..8).map(|_| guest.queues[0].wait(10).unwrap().slot).collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..8).collect::<Vec<_>>());
    guest.reconnect(&server.socket("d")).unwrap();
    assert_eq!(guest.request(IN, 7, &[], 512).unwrap(), (0, vec![8; 512]));
}

#[test]
fn the_next_server_carries_out_what_the_last_one_left() {
    let first = one_disk();
    let mut guest = Guest::connect(&first.socket("d"), 1, 64, 4096).unwrap();
    assert_eq!(guest.request(OUT, 0, &[9; 512], 0).unwrap().0, 0);
    drop(first);
    // Two requests as a server leaves them that was killed: taken, not answered; a third that was not taken.
    let queue = &mut guest.queues[0];
    for slot in [4, 2, 6] {
        queue.fill(slot, &[slot as u8; 512]).unwrap();
        queue.submit(slot, OUT, slot.into(), 512, false).unwrap();
    }
    guest.mark_in_flight(0, &[4 * 3, 2 * 3]).unwrap();
    let second = one_disk();
    guest.reconnect(&second.socket("d")).unwrap();
    let order: Vec<u16> = (0..3).map(|_| guest.queues[0].wait(10).unwrap().slot).collect();
    assert_eq!(order, [4, 2, 6]);
    for sector in [2, 4, 6] {
        assert_eq!(guest.request(IN, sector, &[], 512).unwrap(), (0, vec![sector as u8; 512]));
    }
}

#[test]
fn a_stopped_queue_says_where_it_stands() {
    use vhost::VhostBackend;
    let server = slow();
    let mut guest = Guest::connect(&server.socket("d"), 1, 64, 4096).unwrap();
    for slot in 0..5 {
        guest.queues[0].submit(slot, OUT, 0, 512, false).unwrap();
    }
    guest.queues[0].notify().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 5);
    for _ in 0..5 {
        assert!(guest.queues[0].next_answer().unwrap().is_some(), "answered before the queue has stopped");
    }
    guest.restart().unwrap();
    assert_eq!(guest.request(IN, 9, &[], 512).unwrap(), (0, vec![9; 512]));
}
