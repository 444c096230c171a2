//! The pool's volumes as exports, some of which nobody may open for a while.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forkdisk::{Buf, Error, ErrorKind, Pool, Result};
use forkdisk_control::Guard;
use forkdisk_nbd::Exports;
use forkdisk_uring::UringDevice;

/// Names that are closed to new users, with how often.
#[derive(Clone, Default)]
pub struct Fences(Rc<RefCell<BTreeMap<String, usize>>>);

impl Fences {
    /// Closes `name` until the guard is dropped.
    pub fn close(&self, name: &str) -> Fence {
        *self.0.borrow_mut().entry(name.to_string()).or_default() += 1;
        Fence { fences: self.clone(), name: name.to_string() }
    }

    fn is_closed(&self, name: &str) -> bool {
        self.0.borrow().contains_key(name)
    }
}

/// Keeps an export closed.
pub struct Fence {
    fences: Fences,
    name: String,
}

impl Guard for Fence {}

impl Drop for Fence {
    fn drop(&mut self) {
        let mut fences = self.fences.0.borrow_mut();
        if let Some(count) = fences.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                fences.remove(&self.name);
            }
        }
    }
}

/// Every volume and snapshot of a pool, but for those that are closed.
pub struct Served {
    pub pool: Pool<UringDevice>,
    pub fences: Fences,
}

impl Exports for Served {
    type Export = <Pool<UringDevice> as Exports>::Export;

    fn list(&self) -> Vec<(String, String)> {
        Exports::list(&self.pool)
    }

    fn open(&self, name: &str) -> Result<Self::Export> {
        if self.fences.is_closed(name) || name.is_empty() && self.has_fences() {
            let text = format!("{name} is closed while it is rolled back; try again");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Exports::open(&self.pool, name)
    }

    fn buffer(&self, len: usize) -> Buf {
        Pool::buffer(&self.pool, len)
    }
}

impl Served {
    /// The default export is one of them by another name.
    fn has_fences(&self) -> bool {
        !self.fences.0.borrow().is_empty()
    }
}
