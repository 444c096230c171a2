//! Event counters of other processes (eventfd): waiting for one, and adding to one.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use crate::executor::Rt;
use crate::handle::Handle;
use crate::op::{Work, outcome};
use crate::sys;

/// An eventfd that a peer passed or that this process created. No call blocks the thread, whatever the peer does
/// with the counter.
pub struct EventFd {
    handle: Rc<Handle>,
}

impl EventFd {
    /// Takes ownership of `fd`.
    ///
    /// # Errors
    /// `InvalidInput` if it is not an eventfd: reading another file could end at once every time, or block.
    pub fn from_fd(rt: &Rt, fd: OwnedFd) -> io::Result<EventFd> {
        let shown = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if shown.as_os_str() != "anon_inode:[eventfd]" {
            let text = format!("{} is not an eventfd", shown.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(EventFd { handle: Handle::new(rt.driver(), fd) })
    }

    /// Waits until the counter is not 0, and resets it.
    ///
    /// # Errors
    /// The kernel refuses to watch or to read it.
    pub async fn wait(&self) -> io::Result<()> {
        loop {
            outcome(self.handle.driver().start(&self.handle, Work::Readable).await.result)?;
            if sys::eventfd_take(self.handle.fd())? {
                return Ok(());
            }
        }
    }

    /// Adds 1 to the counter at the end of this turn of the executor. If the counter is at its maximum, the addition
    /// waits until the peer reads it.
    pub fn raise(&self) {
        drop(self.handle.driver().start(&self.handle, Work::Raise));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, block_on};

    #[test]
    fn a_counter_wakes_its_waiter_once() {
        block_on(Config::default(), |rt| async move {
            let fd = sys::eventfd().unwrap();
            let (ours, theirs) = (EventFd::from_fd(&rt, fd.try_clone().unwrap()).unwrap(), fd);
            let theirs = EventFd::from_fd(&rt, theirs).unwrap();
            theirs.raise();
            theirs.raise();
            ours.wait().await.unwrap();
            let again = rt.timeout(std::time::Duration::from_millis(20), ours.wait()).await;
            assert!(again.is_err(), "both additions were read at once");
        })
        .unwrap();
    }

    #[test]
    fn a_file_that_is_no_counter_is_refused() {
        block_on(Config::default(), |rt| async move {
            let file = std::fs::File::open("/dev/zero").unwrap();
            let refused = EventFd::from_fd(&rt, file.into()).err().unwrap();
            assert!(refused.to_string().contains("/dev/zero is not an eventfd"), "{refused}");
        })
        .unwrap();
    }
}
