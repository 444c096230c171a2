//! Stops a session from elsewhere, passes it to another process, and what such a process has to know.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use super::{LEAVING_LOOK, PassedQueues, RequestLog, State};
use crate::off_thread::off_thread;
use crate::syscall_helper::MountCall;

/// How long another process, to which the mount is passed on, may take for the requests that a notification waits for.
const KEPT_LIMIT: Duration = Duration::from_secs(600);

/// Stops a session; usable anywhere on its thread.
#[derive(Clone)]
pub struct SessionHandle(Rc<State>);

impl SessionHandle {
    pub(super) fn new(state: &Rc<State>) -> SessionHandle {
        SessionHandle(state.clone())
    }

    /// Writes back what the kernel has cached and unmounts; [`Session::serve`] returns after that.
    /// If files are still open, they become unusable after a moment.
    pub async fn stop(&self) {
        let state = &self.0;
        if state.stopping.replace(true) {
            return;
        }
        state.wake();
        let (dir, syscall_helper) = (state.dir.clone(), state.syscall_helper.clone());
        let ended = off_thread(move || {
            let make = |call: MountCall| call.make(syscall_helper.as_ref());
            if let Err(error) = make(MountCall::WriteBackAll(dir.clone())) {
                tracing::warn!(%error, "writing back what the kernel has cached");
            }
            make(MountCall::Unmount(dir.clone())).or_else(|error| match error.errno {
                libc::EBUSY => make(MountCall::Detach(dir)).map(|()| tracing::warn!("{error}; unmounting lazily")),
                _ => Err(error),
            })
        });
        if let Err(error) = ended.await {
            tracing::debug!(%error, "unmounting");
        }
    }

    /// Stops to receive requests, waits for those in flight and returns the connection to the kernel for another
    /// process, which continues the mount with [`Session::resume`]. Requests wait in the kernel meanwhile. `None` if
    /// the mount is ending.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub async fn pass_on(&self) -> std::io::Result<Option<OwnedFd>> {
        let state = &self.0;
        if state.stopping.get() {
            return Ok(None);
        }
        state.leaving.set(true);
        state.wake();
        while !state.left.get() && !state.stopping.get() {
            state.rt.sleep_for(LEAVING_LOOK).await;
        }
        state.notifier.set_kept(KEPT_LIMIT);
        match state.stopping.get() {
            true => Ok(None),
            // It is not unmounted when its session is dropped.
            false => state.connection.as_fd().try_clone_to_owned().map(Some),
        }
    }

    /// Returns the queues of a mount that was passed on, if it has any.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn pass_on_queues(&self) -> std::io::Result<Option<PassedQueues<OwnedFd>>> {
        self.0.queues.borrow().as_ref().map(|queues| queues.pass_on()).transpose()
    }

    /// Returns whether requests come through queues of io_uring.
    pub fn has_queues(&self) -> bool {
        self.0.queues.borrow().is_some()
    }

    /// Returns the mount point.
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// Returns whether another process could continue the mount after a kill of this one ([`Session::take_over`]): the
    /// kernel can send requests again, or they are [logged](Self::log_requests).
    pub fn survives_a_kill(&self) -> bool {
        (self.0.resends.get() || self.0.log.get().is_some()) && !self.has_queues()
    }

    /// Returns whether the kernel can send requests again that were not answered (Linux 6.9). Known of a mount that
    /// this process or the one before has made.
    pub fn resends(&self) -> bool {
        self.0.resends.get()
    }

    /// Sets what is known of a mount of another process.
    pub fn set_resends(&self, resends: bool) {
        self.0.resends.set(resends);
    }

    /// Records that another process holds the connection after the end of this one, for `limit` at most: a helper that
    /// waits for the kernel then does not end the mount earlier.
    pub fn set_kept(&self, limit: Duration) {
        self.0.notifier.set_kept(limit);
    }

    /// Receives requests into `log` from now on. Only the first call has an effect.
    pub fn log_requests(&self, log: RequestLog) {
        let _ = self.0.log.set(log);
    }
}
