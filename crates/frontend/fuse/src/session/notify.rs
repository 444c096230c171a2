//! Notifications from a file system to the kernel.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

/// Sends notifications about one mount, from any thread.
#[derive(Clone)]
pub struct Notifier {
    connection: Arc<OwnedFd>,
    /// Notifications in progress: the kernel may wait for requests of the mount meanwhile.
    in_progress: Arc<AtomicUsize>,
}

const INVALIDATE_INODE_CODE: i32 = 2;
const RESEND_CODE: i32 = 7;

impl Notifier {
    pub(super) fn new(connection: &impl AsFd) -> io::Result<Notifier> {
        Ok(Notifier { connection: Arc::new(connection.as_fd().try_clone_to_owned()?), in_progress: Arc::default() })
    }

    /// Returns whether a notification is in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.in_progress.load(Ordering::SeqCst) > 0
    }

    /// Makes the kernel write back and drop what it has cached for a node. Waits for the writes, so
    /// never call it on the thread that serves the mount.
    ///
    /// # Errors
    /// The kernel does not know the node, or the mount has ended.
    pub fn write_back(&self, node: u64) -> io::Result<()> {
        // The whole file.
        self.invalidate(node, 0)
    }

    /// Makes the kernel drop the cached attributes of a node, and nothing else. Does not wait.
    ///
    /// # Errors
    /// The kernel does not know the node, or the mount has ended.
    pub fn forget_attributes(&self, node: u64) -> io::Result<()> {
        self.invalidate(node, -1)
    }

    /// Makes the kernel drop what it has cached for `len` bytes of a node from `from` (0: to its end), and its
    /// attributes. Waits for requests that fill these pages, so never call it on the thread that serves the mount.
    ///
    /// # Errors
    /// The kernel does not know the node, or the mount has ended.
    pub fn forget(&self, node: u64, from: u64, len: u64) -> io::Result<()> {
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.send(node, signed(from), signed(len))
    }

    fn invalidate(&self, node: u64, from: i64) -> io::Result<()> {
        self.send(node, from, 0)
    }

    /// Makes the kernel send again what was received and not answered.
    pub(super) fn resend(&self) -> io::Result<()> {
        let message = [&16u32.to_ne_bytes()[..], &RESEND_CODE.to_ne_bytes(), &0u64.to_ne_bytes()].concat();
        rustix::io::write(&*self.connection, &message)?;
        Ok(())
    }

    fn send(&self, node: u64, from: i64, len: i64) -> io::Result<()> {
        let mut message = Vec::with_capacity(40);
        message.extend_from_slice(&40u32.to_ne_bytes());
        message.extend_from_slice(&INVALIDATE_INODE_CODE.to_ne_bytes());
        message.extend_from_slice(&0u64.to_ne_bytes());
        message.extend_from_slice(&node.to_ne_bytes());
        message.extend_from_slice(&from.to_ne_bytes());
        message.extend_from_slice(&len.to_ne_bytes());
        self.in_progress.fetch_add(1, Ordering::SeqCst);
        let written = rustix::io::write(&*self.connection, &message);
        self.in_progress.fetch_sub(1, Ordering::SeqCst);
        match written {
            // The kernel has nothing cached for the node.
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
