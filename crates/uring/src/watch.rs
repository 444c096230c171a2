//! Any descriptor that can be polled, as something to await. What is read and written stays the owner's
//! business.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use crate::driver::Driver;
use crate::executor::Rt;
use crate::handle::Handle;
use crate::op::{Work, outcome};

/// A descriptor that is watched. It should not block, so that a false alarm does no harm.
pub struct Watched {
    handle: Rc<Handle>,
}

impl Watched {
    /// Takes over `fd`.
    pub fn new(rt: &Rt, fd: OwnedFd) -> Watched {
        let driver: &Rc<Driver> = rt.driver();
        Watched { handle: Handle::new(driver, fd) }
    }

    /// Resolves when there is something to read, or an end or an error to be found out by reading.
    pub async fn readable(&self) -> io::Result<()> {
        outcome(self.handle.driver().start(&self.handle, Work::Readable).await.result).map(drop)
    }
}

impl AsFd for Watched {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.fd()
    }
}
