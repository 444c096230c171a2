//! Checks whether the writes of a volume reach the disk in the order in which the engine accepted them (I5).
//!
//! The data of clients contains the operation's number, so that the disk knows to which operation a request
//! belongs.

use std::cell::RefCell;

use crate::pattern::{OTHER_CONTENTS_FLAG, SECTOR, is_zero, mark_of};

const BLOCK: u64 = 1 << 20;

/// A write that has not ended.
struct Open {
    op: u32,
    volume: u32,
    first: u64,
    last: u64,
    seen: bool,
    /// A later write that reached the disk first. It is an inversion once this one reaches the disk, too: a
    /// write that fails before (because its chunk cannot be read, for example) delays no other.
    passed_by: Option<u32>,
    /// There was little space in its time, or it came behind a neighbour for which that is true: it may have
    /// yielded.
    short: bool,
}

impl Open {
    fn is_near(&self, volume: u32, first: u64, last: u64) -> bool {
        self.volume == volume && self.first <= last + 1 && first <= self.last + 1
    }
}

/// The writes in flight, in the order of acceptance.
#[derive(Default)]
pub struct Order {
    open: RefCell<Vec<Open>>,
    broken: RefCell<Option<String>>,
}

impl Order {
    /// Notes that the engine receives a write now. Must be called in the same step.
    pub fn accept(&self, op: u32, volume: u32, offset: u64, len: u64) {
        // Without a whole sector it cannot be identified.
        let whole = (offset + len) / SECTOR as u64 > offset.div_ceil(SECTOR as u64);
        if whole {
            let (first, last) = (offset / BLOCK, (offset + len - 1) / BLOCK);
            let mut open = self.open.borrow_mut();
            let short = open.iter().any(|o| o.short && o.is_near(volume, first, last));
            open.push(Open { op, volume, first, last, seen: false, passed_by: None, short });
        }
    }

    /// Notes that it has ended, with any outcome.
    pub fn end(&self, op: u32) {
        let mut open = self.open.borrow_mut();
        if let Some(at) = open.iter().position(|o| o.op == op) {
            open.remove(at);
        }
    }

    /// Returns the first inversion found since the last call. Unless there is `ample` space now, writes in
    /// flight may wait for space, and be passed.
    pub fn broken(&self, ample: bool) -> Option<String> {
        let broken = self.broken.take();
        if ample {
            return broken;
        }
        for open in self.open.borrow_mut().iter_mut() {
            (open.short, open.passed_by) = (true, None);
        }
        None
    }

    /// Notes that a write request reaches the disk.
    pub(super) fn see(&self, bytes: &[u8]) {
        let mut open = self.open.borrow_mut();
        if open.iter().all(|o| o.seen) {
            return;
        }
        for sector in bytes.chunks_exact(SECTOR).filter(|sector| !is_zero(&sector[..8])) {
            let Some(op) = mark_of(sector).map(|value| value.op() & !OTHER_CONTENTS_FLAG) else { continue };
            let Some(at) = open.iter().position(|o| o.op == op && !o.seen) else { continue };
            let (late, new) = open.split_at_mut(at);
            let new = &mut new[0];
            new.seen = true;
            if let Some(by) = new.passed_by {
                let what = format!("the write of op {by} reached the disk before that of op {op}, accepted earlier");
                self.broken.borrow_mut().get_or_insert(what);
            }
            let near = |o: &&mut Open| !o.seen && !o.short && o.is_near(new.volume, new.first, new.last);
            for passed in late.iter_mut().filter(near) {
                passed.passed_by.get_or_insert(op);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::{Blends, Value};

    fn sector(op: u32) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR];
        Blends::default().fill(Value::mark(op, 1, 0), &mut bytes);
        bytes
    }

    #[test]
    fn a_neighbour_that_overtakes_is_noticed_and_others_may() {
        let order = Order::default();
        for (op, volume, block) in [(1, 1, 0), (2, 2, 0), (3, 1, 2), (4, 1, 1)] {
            order.accept(op, volume, block * BLOCK, 4096);
        }
        order.see(&sector(2));
        order.see(&sector(3));
        assert_eq!(order.broken(true), None, "another volume, another block");
        order.see(&[sector(1), sector(4)].concat());
        assert_eq!(order.broken(true), None, "one request with both, in order");
        order.end(1);
        order.accept(5, 1, 0, 4096);
        order.accept(6, 1, BLOCK, 4096);
        order.see(&sector(6));
        assert_eq!(order.broken(true), None, "5 may still fail");
        order.see(&sector(5));
        assert!(order.broken(true).is_some_and(|what| what.contains("op 6")));
    }

    #[test]
    fn a_write_that_fails_before_it_reaches_the_disk_may_be_passed() {
        let order = Order::default();
        order.accept(1, 1, 0, 4096);
        order.accept(2, 1, 0, 4096);
        order.see(&sector(2));
        order.end(1);
        order.see(&sector(1));
        assert_eq!(order.broken(true), None);
    }

    #[test]
    fn who_waits_for_space_may_be_passed() {
        let order = Order::default();
        (1..=3).for_each(|op| order.accept(op, 1, 0, 4096));
        order.see(&sector(2));
        assert_eq!(order.broken(false), None, "full");
        order.see(&sector(1));
        assert_eq!(order.broken(true), None, "it was passed while the pool was full");
        // 3 is still there, and may have to wait for space although there is some by now.
        order.accept(4, 1, 0, 4096);
        order.accept(5, 1, 0, 4096);
        order.see(&sector(5));
        order.see(&sector(4));
        assert_eq!(order.broken(true), None, "it came behind one that stepped aside");
        (1..=5).for_each(|op| order.end(op));
        (6..=7).for_each(|op| order.accept(op, 1, 0, 4096));
        order.see(&sector(7));
        assert_eq!(order.broken(true), None);
        order.see(&sector(6));
        assert!(order.broken(true).is_some(), "there was room all its time");
    }
}
