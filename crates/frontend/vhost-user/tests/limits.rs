//! What one front end can take away from others: nothing. Each test is a fault that a review found.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forkdisk_vhost_user::ServerOptions;
use forkdisk_vhost_user::testing::Guest;
use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, memfd_create};
use support::{Fixture, MemoryDisk, disk, is_served, one_disk};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const IN: u32 = 0;
const OUT: u32 = 1;

fn guest(server: &Fixture) -> Guest {
    Guest::connect(&server.socket("d"), 2, 64, 64 << 10).unwrap()
}

fn two_disks(delay: Duration) -> Fixture {
    Fixture::new(ServerOptions::default(), move || vec![MemoryDisk { delay, ..disk("d", 1 << 20) }, disk("e", 1 << 20)])
}

fn memfd(flags: MemfdFlags, len: u64) -> File {
    let file = File::from(memfd_create("limits", flags | MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

fn eventfd(value: u64, flags: EventfdFlags) -> EventFd {
    let fd: OwnedFd = rustix::event::eventfd(0, flags | EventfdFlags::CLOEXEC).unwrap();
    File::from(fd.try_clone().unwrap()).write_all(&value.to_ne_bytes()).unwrap();
    // SAFETY: the descriptor is owned by nothing else.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

fn region(guest_phys_addr: u64, memory_size: u64, file: &File) -> VhostUserMemoryRegionInfo {
    let (userspace_addr, mmap_handle) = (1 << 60 | guest_phys_addr, file.as_raw_fd());
    VhostUserMemoryRegionInfo { guest_phys_addr, memory_size, userspace_addr, mmap_offset: 0, mmap_handle }
}

fn message(code: u32, body: &[u8]) -> Vec<u8> {
    [&code.to_ne_bytes()[..], &1u32.to_ne_bytes(), &(body.len() as u32).to_ne_bytes(), body].concat()
}

#[test]
fn parts_of_huge_pages_are_no_memory() {
    let server = one_disk();
    let mut guest = guest(&server);
    let huge = memfd(MemfdFlags::HUGETLB, 2 << 20);
    assert!(guest.frontend.add_mem_region(&region(1 << 30, 4096, &huge)).is_err());
    guest.frontend.get_vring_base(0).unwrap();
    let given = VhostUserInflight { mmap_size: 4096, mmap_offset: 0, num_queues: 1, queue_size: 64 };
    assert!(guest.frontend.set_inflight_fd(&given, huge.as_raw_fd()).is_err());
}

#[test]
fn a_counter_that_never_ends_does_not_keep_the_thread() {
    let server = two_disks(Duration::ZERO);
    let mut guest = guest(&server);
    guest.frontend.get_vring_base(0).unwrap();
    guest.frontend.get_vring_base(1).unwrap();
    guest.queues[0].kick = eventfd(u64::MAX - 1, EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK);
    guest.restart().unwrap();
    assert!(is_served(&server.socket("e")));
    assert_eq!(guest.request(IN, 3, &[], 512).unwrap(), (0, vec![3; 512]));
}

#[test]
fn a_guest_that_reads_no_notifications_is_served() {
    let server = one_disk();
    let mut guest = guest(&server);
    for _ in 0..200 {
        guest.queues[0].call = eventfd(u64::MAX - 1, EventfdFlags::empty());
        guest.frontend.set_vring_call(0, &guest.queues[0].call).unwrap();
    }
    guest.queues[0].call = eventfd(0, EventfdFlags::NONBLOCK);
    guest.frontend.set_vring_call(0, &guest.queues[0].call).unwrap();
    assert_eq!(guest.request(IN, 3, &[], 512).unwrap(), (0, vec![3; 512]));
}

#[test]
fn a_message_has_few_files() {
    let server = one_disk();
    let stream = UnixStream::connect(server.socket("d")).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let file = memfd(MemfdFlags::empty(), 4096);
    let files: Vec<RawFd> = vec![file.as_raw_fd(); 32];
    let text = message(5, &[0; 4000]);
    let taken = text.iter().take_while(|byte| stream.send_with_fds(&[&[**byte][..]], &files).is_ok()).count();
    assert!(taken < text.len(), "the session ends");
    drop(stream);
    assert!(is_served(&server.socket("d")));
}

#[test]
fn memory_that_requests_still_use_counts() {
    let server = two_disks(Duration::from_secs(1));
    let mut guest = guest(&server);
    let refused = (0..20u16).any(|slot| {
        guest.queues[0].submit(slot, OUT, 0, 512, false).unwrap();
        guest.queues[0].notify().unwrap();
        let files: Vec<File> = (0..28).map(|_| memfd(MemfdFlags::empty(), 4096)).collect();
        let extra = files.iter().enumerate().map(|(n, file)| region((1 << 40) + n as u64 * 4096, 4096, file));
        let added: Vec<_> = extra.take_while(|region| guest.frontend.add_mem_region(region).is_ok()).collect();
        guest.queues[1].submit(slot, OUT, 0, 512, false).unwrap();
        guest.queues[1].notify().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        added.iter().for_each(|region| guest.frontend.remove_mem_region(region).unwrap());
        added.len() < 28
    });
    assert!(refused, "regions that were removed count while requests use them");
    assert!(is_served(&server.socket("e")));
}

#[test]
fn answers_that_a_killed_server_did_not_announce_are_announced() {
    let first = one_disk();
    let mut guest = Guest::connect(&first.socket("d"), 1, 64, 4096).unwrap();
    assert_eq!(guest.request(IN, 0, &[], 512).unwrap().0, 0);
    drop(first);
    // The second request is answered in the ring, and the guest was not notified.
    let queue = &mut guest.queues[0];
    queue.submit(0, IN, 1, 512, true).unwrap();
    let used = queue.data_address(0) - (1 << 20) + (128 << 10);
    guest.memory.write_obj(0u32, GuestAddress(used + 12)).unwrap();
    guest.memory.write_obj(513u32, GuestAddress(used + 16)).unwrap();
    guest.memory.write_obj(2u16, GuestAddress(used + 2)).unwrap();
    while guest.queues[0].call.read().is_ok() {}
    let second = one_disk();
    guest.reconnect(&second.socket("d")).unwrap();
    assert_eq!(guest.queues[0].wait(10).unwrap().slot, 0);
    assert!((0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        guest.queues[0].call.read().is_ok()
    }));
}

#[test]
fn a_server_that_stops_takes_no_front_ends() {
    let server = two_disks(Duration::from_secs(1));
    let mut slow = guest(&server);
    slow.queues[0].submit(0, OUT, 0, 512, false).unwrap();
    slow.queues[0].notify().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let (at, start) = (server.socket("e"), Instant::now());
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        Guest::connect(&at, 1, 64, 4096).is_ok()
    });
    server.end();
    assert!(!late.join().unwrap() && start.elapsed() < Duration::from_secs(8));
}

#[test]
fn a_front_end_that_gives_its_connection_away_can_leave() {
    let server = one_disk();
    let stream = UnixStream::connect(server.socket("d")).unwrap();
    stream.send_with_fds(&[&message(21, &[])[..]], &[stream.as_raw_fd()]).unwrap();
    drop(stream);
    assert!(is_served(&server.socket("d")));
}

#[test]
fn a_refused_table_of_memory_changes_no_queue() {
    let server = one_disk();
    let mut guest = guest(&server);
    // The same addresses of the front end are others of the guest, and the rings of queue 1 lie outside.
    let memory_size = guest.queues[1].data_address(0) - (1 << 20);
    let userspace_addr = guest.memory.get_host_address(GuestAddress(0)).unwrap() as u64;
    let moved = VhostUserMemoryRegionInfo { userspace_addr, ..region(1 << 40, memory_size, &guest.file) };
    assert!(guest.frontend.set_mem_table(&[moved]).is_err());
    assert_eq!(guest.request(IN, 2, &[], 512).unwrap(), (0, vec![2; 512]));
}
