//! A pool that one process closes and another one opens to continue what the first had open.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::testing::{Inline, MemoryDevice};
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool, VolumeId};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;

fn open(tasks: &Inline, device: &MemoryDevice, keep_removed: bool) -> Pool<MemoryDevice> {
    let options = OpenOptions::default().with_keep_removed(keep_removed);
    tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), options)).unwrap()
}

/// Returns a closed pool with two volumes that were removed while they were open.
fn with_removed(tasks: &Inline) -> (MemoryDevice, [VolumeId; 2]) {
    let device = MemoryDevice::new(64 * MIB);
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [5; 16], 1))).unwrap();
    let pool = open(tasks, &device, false);
    let volumes = ["a", "b"].map(|name| {
        tasks.run(pool.create(name, &CreateOptions::new(MIB, 1))).unwrap();
        let volume = pool.volume(name).unwrap();
        let mut page = Buf::zeroed(PAGE);
        page.fill(name.as_bytes()[0]);
        tasks.run(volume.write(0, page, false)).0.unwrap();
        pool.remove_file(name).unwrap();
        volume
    });
    tasks.run(pool.close()).unwrap();
    let ids = [volumes[0].id(), volumes[1].id()];
    drop(volumes);
    (device, ids)
}

#[test]
fn a_removed_volume_can_be_opened_again_by_the_process_that_continues() {
    let tasks = Inline::default();
    let (device, [a, b]) = with_removed(&tasks);
    let pool = open(&tasks, &device, true);
    let volume = pool.volume_by_id(a).unwrap();
    assert!(pool.list().is_empty(), "it has no name");
    let (result, page) = tasks.run(volume.read(0, Buf::zeroed(PAGE)));
    result.unwrap();
    assert!(page.iter().all(|&byte| byte == b'a'));
    // The other one goes with the first checkpoint, this one with its last close.
    tasks.run(pool.checkpoint()).unwrap();
    tasks.run(pool.wait_freed()).unwrap();
    assert!(pool.volume_by_id(b).is_err());
    let (result, _) = tasks.run(volume.read(0, Buf::zeroed(PAGE)));
    result.unwrap();
    drop(volume);
    tasks.run(pool.wait_freed()).unwrap();
    assert!(pool.volume_by_id(a).is_err());
    tasks.run(pool.close()).unwrap();
    let pool = open(&tasks, &device, false);
    assert!(pool.recovery().clean && pool.list().is_empty());
}

#[test]
fn removed_volumes_go_when_no_process_continues() {
    let tasks = Inline::default();
    let (device, ids) = with_removed(&tasks);
    let pool = open(&tasks, &device, false);
    tasks.run(pool.wait_freed()).unwrap();
    assert!(ids.iter().all(|&id| pool.volume_by_id(id).is_err()));
}
