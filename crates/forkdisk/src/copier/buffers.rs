//! A fixed amount of buffers, with a reserve for each copy class.

use crate::device::{BUF_ALIGN_BYTES, Buf};

use super::{CLASSES_COUNT, CopyClass};

/// Idle and used buffers, counted by their capacity.
pub struct Buffers {
    total: u64,
    reserve: u64,
    used: [u64; CLASSES_COUNT],
    /// Idle buffers, with the capacity of each.
    idle: Vec<(usize, Buf)>,
}

impl Buffers {
    /// Creates a store of at most `total` bytes, of which each class has a reserve of `reserve`.
    pub fn new(total: u64, reserve: u64) -> Buffers {
        assert!(total >= reserve * CLASSES_COUNT as u64, "the reserves fit the total");
        Buffers { total, reserve, used: [0; CLASSES_COUNT], idle: Vec::new() }
    }

    /// Sets new limits. Used buffers beyond them are not reused.
    pub fn resize(&mut self, total: u64, reserve: u64) {
        assert!(total >= reserve * CLASSES_COUNT as u64, "the reserves fit the total");
        (self.total, self.reserve) = (total, reserve);
        self.shed(0);
    }

    /// Returns the bytes in use.
    pub fn in_use(&self) -> u64 {
        self.used.iter().sum()
    }

    /// Returns a buffer of `len` bytes, contents unspecified, if `user` may have one now; a new one comes
    /// from `make`.
    pub fn take(&mut self, user: CopyClass, len: usize, make: impl FnOnce(usize) -> Buf) -> Option<Buf> {
        let room = capacity_for(len);
        if !self.may_have(user, room as u64) {
            return None;
        }
        let found = self.idle.iter().position(|&(counted, _)| counted == room);
        let mut buf = match found {
            Some(i) => self.idle.swap_remove(i).1,
            None => {
                self.shed(room as u64);
                make(room)
            }
        };
        self.used[user as usize] += room as u64;
        buf.set_len(len);
        Some(buf)
    }

    /// Takes back a buffer that [`take`](Self::take) returned for `len` bytes.
    pub fn give_back(&mut self, user: CopyClass, len: usize, buf: Buf) {
        let room = capacity_for(len);
        self.used[user as usize] -= room as u64;
        self.idle.push((room, buf));
        self.shed(0);
    }

    fn may_have(&self, user: CopyClass, bytes: u64) -> bool {
        let mine = self.used[user as usize] + bytes;
        if mine <= self.reserve {
            return true;
        }
        let beyond = |i: usize, used: u64| if i == user as usize { mine } else { used }.saturating_sub(self.reserve);
        let shared: u64 = self.used.iter().enumerate().map(|(i, &used)| beyond(i, used)).sum();
        shared <= self.total - self.reserve * CLASSES_COUNT as u64
    }

    fn idle_bytes(&self) -> u64 {
        self.idle.iter().map(|&(counted, _)| counted as u64).sum()
    }

    /// Drops idle buffers until there is space for `more` bytes.
    fn shed(&mut self, more: u64) {
        let mut idle: u64 = self.idle_bytes();
        while !self.idle.is_empty() && self.in_use() + idle + more > self.total {
            idle -= self.idle.remove(0).0 as u64;
        }
    }
}

/// Returns the capacity of a buffer for `len` bytes: few sizes, so that buffers can be reused.
fn capacity_for(len: usize) -> usize {
    match len {
        0..=BUF_ALIGN_BYTES => BUF_ALIGN_BYTES,
        n if n <= 64 << 10 => n.next_power_of_two(),
        n => n.next_multiple_of(64 << 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn take(buffers: &mut Buffers, user: CopyClass, len: u64) -> Option<Buf> {
        buffers.take(user, len as usize, Buf::zeroed)
    }

    #[test]
    fn everybody_has_a_reserve_and_the_rest_is_for_whoever_comes() {
        let mut buffers = Buffers::new(7 * 64 * KIB, 64 * KIB);
        let first: Vec<Buf> = std::iter::from_fn(|| take(&mut buffers, CopyClass::Break, 64 * KIB)).collect();
        assert_eq!(first.len(), 3, "its reserve and the two that are nobody's");
        let gather = take(&mut buffers, CopyClass::Gather, 64 * KIB).expect("its reserve");
        assert!(take(&mut buffers, CopyClass::Gather, 4 * KIB).is_none());
        for user in [CopyClass::Origin, CopyClass::Transfer, CopyClass::Flatten] {
            assert!(take(&mut buffers, user, 64 * KIB).is_some());
        }
        assert_eq!(buffers.in_use(), 7 * 64 * KIB);
        for buf in first {
            buffers.give_back(CopyClass::Break, 64 << 10, buf);
        }
        buffers.give_back(CopyClass::Gather, 64 << 10, gather);
        assert!((0..3).all(|_| take(&mut buffers, CopyClass::Gather, 64 * KIB).is_some()));
    }

    #[test]
    fn idle_buffers_of_another_size_make_room() {
        let mut buffers = Buffers::new(5 * 64 * KIB, 64 * KIB);
        for len in [4 * KIB, 8 * KIB, 64 * KIB, 5000] {
            let buf = take(&mut buffers, CopyClass::Break, len).expect("within its reserve");
            assert_eq!(buf.len() as u64, len);
            buffers.give_back(CopyClass::Break, len as usize, buf);
        }
        assert_eq!(buffers.idle_bytes(), (4 + 8 + 64) * KIB, "that for 5000 bytes was used before");
        buffers.resize(5 * 4 * KIB, 4 * KIB);
        assert!(buffers.idle_bytes() <= 20 * KIB);
        for user in [CopyClass::Break, CopyClass::Gather] {
            assert!(take(&mut buffers, user, 4 * KIB).is_some());
            assert!(take(&mut buffers, user, 4 * KIB).is_none(), "nothing is nobody's");
        }
        assert_eq!(buffers.in_use(), 8 * KIB);
    }
}
