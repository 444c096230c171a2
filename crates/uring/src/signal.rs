//! Asynchronous signals, through a signalfd.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use forkdisk::Error;

use crate::driver::Driver;
use crate::handle::Handle;
use crate::op::{Work, outcome};
use crate::sys;

/// Signals that are delivered here instead of to the process. The thread's signal mask is restored
/// when this is dropped, unless they are to be [ignored](Signals::ignore_from_now_on).
pub struct Signals {
    handle: Rc<Handle>,
    is_last: Cell<bool>,
    old_mask: libc::sigset_t,
}

impl Signals {
    pub(crate) fn new(driver: &Rc<Driver>, signals: &[i32]) -> forkdisk::Result<Signals> {
        let failed = |e: io::Error| Error::io("cannot take over signals", e);
        let fd = sys::signalfd(signals).map_err(failed)?;
        let old_mask = sys::block_signals(signals).map_err(failed)?;
        Ok(Signals { handle: Handle::new(driver, fd), is_last: Cell::new(false), old_mask })
    }

    /// Ignores all further signals, since the process is about to end.
    pub fn ignore_from_now_on(&self) {
        self.is_last.set(true);
    }

    /// Sends signals that have not been received to another process, and [ignores](Self::ignore_from_now_on) further
    /// ones.
    pub fn pass_on(&self, pid: u32) {
        self.ignore_from_now_on();
        while let Ok(Some(signal)) = sys::signalfd_next(self.handle.fd()) {
            sys::send_signal(pid, signal);
        }
    }

    /// Makes a signal that was received arrive again.
    pub fn give_back(&self, signal: i32) {
        sys::send_signal(std::process::id(), signal);
    }

    /// Waits for the next signal. Pending signals with the same number count once.
    ///
    /// # Errors
    /// The descriptor of the signals cannot be read.
    pub async fn recv(&self) -> io::Result<i32> {
        loop {
            if let Some(signal) = sys::signalfd_next(self.handle.fd())? {
                return Ok(signal);
            }
            outcome(self.handle.driver().start(&self.handle, Work::Readable).await.result)?;
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        if !self.is_last.get() {
            sys::restore_signals(&self.old_mask);
        }
    }
}
