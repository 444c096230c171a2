//! An open file or socket as the ring knows it: its descriptor, and its place in the ring's table
//! of registered files if there was room.
//!
//! Every request holds the handle of its file until its last completion, so neither the
//! descriptor nor the place in the table can be given to another file while a request that names
//! them is still queued.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use io_uring::squeue::{Entry, Flags};
use io_uring::types::Fd;

use crate::driver::Driver;

pub(crate) struct Handle {
    fd: OwnedFd,
    slot: Option<u32>,
    driver: Rc<Driver>,
}

impl Handle {
    pub(crate) fn new(driver: &Rc<Driver>, fd: OwnedFd) -> Rc<Handle> {
        let slot = driver.register_file(fd.as_raw_fd());
        Rc::new(Handle { fd, slot, driver: driver.clone() })
    }

    /// As [`new`](Self::new), without a place in the table: the file is closed with its last request.
    pub(crate) fn unregistered(driver: &Rc<Driver>, fd: OwnedFd) -> Rc<Handle> {
        Rc::new(Handle { fd, slot: None, driver: driver.clone() })
    }

    pub(crate) fn driver(&self) -> &Rc<Driver> {
        &self.driver
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// What goes into the `fd` field of a request.
    pub(crate) fn target(&self) -> Fd {
        Fd(self.slot.map_or_else(|| self.fd.as_raw_fd(), |slot| slot as i32))
    }

    /// Marks a request made with [`target`](Self::target) as what it is.
    pub(crate) fn aim(&self, entry: Entry) -> Entry {
        if self.slot.is_some() { entry.flags(Flags::FIXED_FILE) } else { entry }
    }

    pub(crate) fn is_registered(&self) -> bool {
        self.slot.is_some()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.driver.unregister_file(slot);
        }
    }
}
