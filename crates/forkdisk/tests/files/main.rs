//! Files of mounts, by the verbs of the library: their names and extended attributes.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod hard_links;
mod xattrs;

use std::rc::Rc;

use forkdisk::device::{Buf, Segment};
use forkdisk::testing::{Inline, MemoryDevice};
use forkdisk::{Device, FormatOptions, OpenOptions, Pool};

const MIB: u64 = 1 << 20;

struct Lab {
    tasks: Inline,
    device: MemoryDevice,
    pool: Pool<MemoryDevice>,
}

fn lab() -> Lab {
    let (tasks, device) = (Inline::new(), MemoryDevice::new(64 * MIB));
    tasks.run(Pool::format(&device, &FormatOptions::new(64 * MIB, [1; 16], 0))).unwrap();
    let pool = tasks.run(Pool::open(device.clone(), Rc::new(tasks.clone()), OpenOptions::default())).unwrap();
    Lab { tasks, device, pool }
}

impl Lab {
    /// Opens the pool as a crash after a flush leaves it.
    pub fn crash(&mut self) {
        self.tasks.run(self.pool.flush()).unwrap();
        let copy = MemoryDevice::new(64 * MIB);
        for offset in (0..64 * MIB).step_by(MIB as usize) {
            let segment = || [Segment { offset, at: 0, len: MIB as usize }].into_iter().collect();
            let (read, buf) = self.tasks.run(self.device.read(Buf::zeroed(MIB as usize), segment()));
            read.unwrap();
            self.tasks.run(copy.write(buf, segment(), false)).0.unwrap();
        }
        self.device = copy;
        self.open();
    }

    pub fn reopen(&mut self) {
        self.tasks.run(self.pool.close()).unwrap();
        self.open();
    }

    fn open(&mut self) {
        let opened = Pool::open(self.device.clone(), Rc::new(self.tasks.clone()), OpenOptions::default());
        self.pool = self.tasks.run(opened).unwrap();
    }

    pub fn check(&self) {
        self.tasks.run(self.pool.wait_freed()).unwrap();
        assert!(self.tasks.run(self.pool.check()).unwrap().damage.is_empty());
    }

    /// The incompatible features that the superblock has.
    pub fn features(&self) -> u64 {
        let segment = Segment { offset: 0, at: 0, len: 4096 };
        let (read, buf) = self.tasks.run(self.device.read(Buf::zeroed(4096), [segment].into_iter().collect()));
        read.unwrap();
        u64::from_le_bytes(buf[40..48].try_into().unwrap())
    }
}
