//! An open file or socket as the ring knows it.
//!
//! Every request holds the handle of its file until its last completion, so the number of the descriptor cannot be
//! given to another file while a request that names it is still queued.
//!
//! Files are not put into the ring's table of registered files. Before Linux 6.13 the kernel lets go of a file that
//! was taken out of the table only when every earlier request of the ring that used a registered file or buffer has
//! ended, whatever its file, and then after a second: a connection stays open for as long as anybody waits for another.
//! A file that is named by its descriptor is closed when its descriptor and its own last request are gone
//! (docs/decisions/0032-no-registered-files.md).

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

    /// What goes into the `fd` field of a request.
    pub(crate) fn target(&self) -> Fd {
        Fd(self.fd.as_raw_fd())
    }
}
