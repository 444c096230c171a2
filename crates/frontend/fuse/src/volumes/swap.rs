//! Exchange of two names (`RENAME_EXCHANGE`).
//!
//! Carried out twice, an exchange is none. So what had the first name is in the mount record before the exchange: if
//! something else has it when the kernel sends the request again, the exchange has taken place.

use forkdisk::{Child, Device, VolumeId};
use serde::{Deserialize, Serialize};

use super::nodes::{SNAPSHOTS_NAME, parent};
use super::record::Change;
use super::{Failed, Outcome, Volumes};
use crate::codec::Reply;

/// Exchanges that are remembered: more than the kernel sends again.
const MAX_SWAPS: usize = 256;

/// An exchange that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedSwap {
    /// Id of its request.
    request: u64,
    /// Number of what had the first name before.
    first: u64,
    /// Whether the nodes of folders have been exchanged.
    has_ended: bool,
}

/// The last exchanges, the oldest first.
#[derive(Clone, Debug, Default)]
pub struct Swaps(Vec<PassedSwap>);

impl Swaps {
    pub fn resume(passed: &[PassedSwap]) -> Swaps {
        Swaps(passed.to_vec())
    }

    pub fn pass_on(&self) -> Vec<PassedSwap> {
        self.0.clone()
    }

    /// Notes that an exchange begins.
    pub fn begin(&mut self, request: u64, first: u64) {
        self.0.retain(|swap| swap.request != request);
        if self.0.len() >= MAX_SWAPS {
            self.0.remove(0);
        }
        self.0.push(PassedSwap { request, first, has_ended: false });
    }

    /// Notes that an exchange has taken place, with its nodes.
    pub fn end(&mut self, request: u64) {
        if let Some(swap) = self.0.iter_mut().rev().find(|swap| swap.request == request) {
            swap.has_ended = true;
        }
    }

    fn find(&self, request: u64) -> Option<PassedSwap> {
        self.0.iter().rev().find(|swap| swap.request == request).copied()
    }
}

impl<D: Device> Volumes<D> {
    /// Exchanges two names. As with a rename, the snapshots of files stay under the names that the files had.
    pub(super) fn exchange_names(&self, request: u64, from: (u64, &str), to: (u64, &str)) -> Outcome {
        let (a, b) = (self.path_in(from.0, from.1)?, self.path_in(to.0, to.1)?);
        if a == SNAPSHOTS_NAME || b == SNAPSHOTS_NAME {
            return Err(Failed(libc::EPERM));
        }
        for path in [&a, &b] {
            let child = self.pool.child(path)?;
            self.keep_folder(parent(path))?;
            match child {
                // It gets a record of its own, and so a number.
                Child::Folder(..) => self.keep_folder(path)?,
                Child::Volume(_) if a != b => self.keep_snapshots(path)?,
                Child::Volume(_) => {}
            }
        }
        if a == b {
            return Ok(Reply::Done);
        }
        let VolumeId(first) = self.pool.number_of(&a)?;
        self.swaps.borrow_mut().begin(request, first);
        self.record(|| Change::SwapBegun(request, first));
        self.pool.swap_files(&a, &b)?;
        self.end_swap(request, &a, &b);
        self.touch_folder(parent(&a))?;
        self.touch_folder(parent(&b))?;
        Ok(Reply::Done)
    }

    fn end_swap(&self, request: u64, a: &str, b: &str) {
        self.nodes.borrow_mut().exchanged(a, b);
        self.swaps.borrow_mut().end(request);
        self.record(|| Change::Swapped(request, a.to_string(), b.to_string()));
    }

    /// Returns whether the exchange of this request has taken place, and ends it if so.
    pub(super) fn has_swapped(&self, request: u64, from: (u64, &str), to: (u64, &str)) -> Outcome<bool> {
        let Some(swap) = self.swaps.borrow().find(request) else { return Ok(false) };
        if swap.has_ended {
            return Ok(true);
        }
        let (a, b) = (self.path_in(from.0, from.1)?, self.path_in(to.0, to.1)?);
        if self.pool.number_of(&a).is_ok_and(|VolumeId(now)| now == swap.first) {
            return Ok(false);
        }
        self.end_swap(request, &a, &b);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_exchanges_are_remembered_until_they_have_ended_and_after() {
        let mut swaps = Swaps::default();
        for request in 0..MAX_SWAPS as u64 + 2 {
            swaps.begin(request, request + 7);
        }
        swaps.end(5);
        let swaps = Swaps::resume(&swaps.pass_on());
        assert_eq!((swaps.find(1), swaps.0.len()), (None, MAX_SWAPS));
        assert_eq!(swaps.find(5), Some(PassedSwap { request: 5, first: 12, has_ended: true }));
        assert_eq!(swaps.find(6), Some(PassedSwap { request: 6, first: 13, has_ended: false }));
    }
}
