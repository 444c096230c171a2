//! Notifications from a file system to the kernel.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::notify_process::NotifyProcess;
use crate::notify_worker::Part;
use crate::syscall_helper::SyscallHelper;

/// Sends notifications about one mount, from any thread.
#[derive(Clone)]
pub struct Notifier(Arc<Inner>);

struct Inner {
    connection: OwnedFd,
    /// Notifications in progress: the kernel may wait for requests of the mount meanwhile.
    in_progress: AtomicUsize,
    /// Makes those for which the kernel waits. Without it this process makes them, and does not end after a kill while
    /// the kernel waits for a request of the mount.
    process: Option<NotifyProcess>,
}

const RESEND_CODE: i32 = 7;

impl Notifier {
    pub(super) fn new(connection: &impl AsFd, dir: &Path, helper: Option<SyscallHelper>) -> io::Result<Notifier> {
        let connection = connection.as_fd().try_clone_to_owned()?;
        let process = helper.map(|helper| NotifyProcess::new(helper, dir));
        Ok(Notifier(Arc::new(Inner { connection, in_progress: AtomicUsize::default(), process })))
    }

    /// Returns whether a notification is in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.0.in_progress.load(Ordering::SeqCst) > 0
    }

    /// Records that another process holds the connection after the end of this one, for `limit` at most.
    pub(super) fn set_kept(&self, limit: Duration) {
        if let Some(process) = &self.0.process {
            process.set_kept(limit);
        }
    }

    /// Makes the kernel write back and drop what it has cached for a node. Waits for the writes, so
    /// never call it on the thread that serves the mount.
    ///
    /// # Errors
    /// The kernel does not know the node, or the mount has ended.
    pub fn write_back(&self, node: u64) -> io::Result<()> {
        // The whole file.
        self.forget(node, 0, 0)
    }

    /// Makes the kernel drop the cached attributes of a node, and nothing else. Does not wait.
    ///
    /// # Errors
    /// The kernel does not know the node, or the mount has ended.
    pub fn forget_attributes(&self, node: u64) -> io::Result<()> {
        Part { node, from: -1, len: 0 }.drop_cached(self.0.connection.as_fd())
    }

    /// Makes the kernel drop what it has cached for `len` bytes of a node from `from` (0: to its end), and its
    /// attributes. Waits for requests that fill these pages, so never call it on the thread that serves the mount.
    ///
    /// # Errors
    /// The kernel does not know the node, or the mount has ended.
    pub fn forget(&self, node: u64, from: u64, len: u64) -> io::Result<()> {
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let (part, connection) = (Part { node, from: signed(from), len: signed(len) }, self.0.connection.as_fd());
        self.0.in_progress.fetch_add(1, Ordering::SeqCst);
        let made = self.0.process.as_ref().and_then(|process| process.drop_cached(part, connection));
        let dropped = made.unwrap_or_else(|| part.drop_cached(connection));
        self.0.in_progress.fetch_sub(1, Ordering::SeqCst);
        dropped
    }

    /// Makes the kernel send again what was received and not answered.
    pub(super) fn resend(&self) -> io::Result<()> {
        let message = [&16u32.to_ne_bytes()[..], &RESEND_CODE.to_ne_bytes(), &0u64.to_ne_bytes()].concat();
        rustix::io::write(&self.0.connection, &message)?;
        Ok(())
    }
}
