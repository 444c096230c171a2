//! An open file or socket in requests of the ring.
//!
//! Every request holds the handle of its file until its last completion, so the number of the
//! descriptor cannot be reused for another file while a request with that number is still queued.
//!
//! Files are not put into the ring's table of registered files. Before Linux 6.13 the kernel releases
//! a file that was removed from the table only when every earlier request of the ring that used a
//! registered file or buffer has ended, for whatever file, and then after a second: a connection would
//! stay open while a request waits on another. A file used by its descriptor is closed when its
//! descriptor and its own last request are gone (docs/decisions/0032-no-registered-files.md).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use io_uring::types::Fd;

use crate::driver::Driver;

pub(crate) struct Handle {
    fd: OwnedFd,
    driver: Rc<Driver>,
}

impl Handle {
    pub(crate) fn new(driver: &Rc<Driver>, fd: OwnedFd) -> Rc<Handle> {
        Rc::new(Handle { fd, driver: driver.clone() })
    }

    pub(crate) fn driver(&self) -> &Rc<Driver> {
        &self.driver
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the value for the `fd` field of a request.
    pub(crate) fn target(&self) -> Fd {
        Fd(self.fd.as_raw_fd())
    }
}
