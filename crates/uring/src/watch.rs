//! Asynchronous readiness of a descriptor. Reading and writing is left to the
//! owner.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use crate::driver::Driver;
use crate::executor::Rt;
use crate::handle::Handle;
use crate::op::{Work, outcome};

/// A watched descriptor. It should be non-blocking, so that a false wakeup is harmless.
#[non_exhaustive]
pub struct Watched {
    handle: Rc<Handle>,
}

impl Watched {
    /// Takes ownership of `fd`.
    pub fn new(rt: &Rt, fd: OwnedFd) -> Watched {
        let driver: &Rc<Driver> = rt.driver();
        Watched { handle: Handle::new(driver, fd) }
    }

    /// Waits until a read would return data, the end or an error.
    ///
    /// # Errors
    /// The descriptor cannot be watched.
    pub async fn readable(&self) -> io::Result<()> {
        outcome(self.handle.driver().start(&self.handle, Work::Readable).await.result).map(drop)
    }
}

impl AsFd for Watched {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.fd()
    }
}
