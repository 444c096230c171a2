//! Files that a front end passed. Closing one may block, as may every other call on it: it can be a socket that
//! lingers, or lie in a file system of the front end that does not answer. They are closed by a thread of their own.

use std::fs::File;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

/// A file of a front end that was not looked at.
#[derive(Debug)]
pub struct ForeignFile(Option<File>);

impl From<File> for ForeignFile {
    fn from(file: File) -> ForeignFile {
        ForeignFile(Some(file))
    }
}

impl ForeignFile {
    /// Returns the file, after it was found to be of a kind that does not block.
    pub fn into_known(mut self) -> File {
        self.0.take().expect("present until dropped")
    }
}

impl AsFd for ForeignFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for ForeignFile {
    fn drop(&mut self) {
        let Some(file) = self.0.take() else { return };
        if let Err(unsent) = closer().send(file) {
            // The thread has ended, which it does with the process only.
            mem::forget(unsent);
        }
    }
}

fn closer() -> &'static Sender<File> {
    static CLOSER: OnceLock<Sender<File>> = OnceLock::new();
    CLOSER.get_or_init(|| {
        let (files, received) = channel::<File>();
        let started =
            std::thread::Builder::new().name("close".to_string()).spawn(move || received.iter().for_each(drop));
        if let Err(error) = started {
            tracing::error!("no thread closes files of front ends: {error}");
        }
        files
    })
}
