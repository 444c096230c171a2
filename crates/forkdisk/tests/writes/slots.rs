//! The two slots of the superblock when a checkpoint was cut off between them.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::testing::{FailingDevice, Inline, MemoryDevice, RequestKind};
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, PAGE_SIZE, Pool};

const SLOTS: [u64; 2] = [0, 128 * PAGE_SIZE as u64];

/// What happens to superblocks.
#[derive(Clone, Copy, PartialEq)]
enum Slots {
    Whole,
    /// The first one that is written is the last.
    CutAfterOne(Option<u64>),
    Unreadable(u64),
}

/// Returns the first page of the volume after an open.
fn reopened(device: &FailingDevice<MemoryDevice>) -> Vec<u8> {
    let (tasks, device) = (Inline::default(), device.clone());
    tasks.clone().run(async move {
        let pool = Pool::open(device, Rc::new(tasks), OpenOptions::default()).await.expect("it opens");
        let (result, buf) = pool.volume("v").expect("it is there").read(0, Buf::zeroed(PAGE_SIZE)).await;
        result.expect("a read");
        buf.to_vec()
    })
}

#[test]
fn what_an_open_has_shown_does_not_depend_on_one_slot() {
    let state = Rc::new(Cell::new(Slots::Whole));
    let seen = state.clone();
    let device = FailingDevice::new(MemoryDevice::new(64 << 20), move |request| {
        let is_slot = SLOTS.contains(&request.offset);
        let fails = match (seen.get(), request.kind) {
            (Slots::CutAfterOne(None), RequestKind::WriteData) if is_slot => {
                seen.set(Slots::CutAfterOne(Some(request.offset)));
                false
            }
            (Slots::CutAfterOne(Some(_)), RequestKind::WriteData) => is_slot,
            (Slots::Unreadable(slot), RequestKind::Read) => request.offset == slot,
            _ => false,
        };
        fails.then(|| io::Error::other("refused"))
    });
    let (tasks, at, cut) = (Inline::default(), device.clone(), state.clone());
    tasks.clone().run(async move {
        Pool::format(&at, &FormatOptions::new(64 << 20, [7; 16], 0)).await.expect("a new pool");
        let pool = Pool::open(at, Rc::new(tasks), OpenOptions::default()).await.expect("it opens");
        pool.create("v", &CreateOptions::new(1 << 20, 0)).await.expect("a new volume");
        // Not flushed: only the checkpoint has it.
        let volume = pool.volume("v").expect("just made");
        volume.write(0, Buf::copy_of(&[1; PAGE_SIZE]), false).await.0.expect("there is space");
        cut.set(Slots::CutAfterOne(None));
        pool.checkpoint().await.expect_err("its second superblock is refused");
    });
    let Slots::CutAfterOne(Some(newer)) = state.replace(Slots::Whole) else { panic!("no superblock was written") };
    assert!(reopened(&device) == [1; PAGE_SIZE], "it is in the newer superblock");
    state.set(Slots::Unreadable(newer));
    assert!(reopened(&device) == [1; PAGE_SIZE], "and stays, whatever becomes of that one");
}
