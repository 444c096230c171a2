//! The ring itself, with entries of 64 bytes or, where the kernel has commands that need them, of 128.

use io_uring::squeue::{Entry, Entry128, PushError};
use io_uring::types::SubmitArgs;
use io_uring::{CompletionQueue, IoUring, Parameters, Submitter};

/// An entry that waits for room.
pub(crate) enum Request {
    Narrow(Entry),
    /// For a wide ring only.
    Wide(Box<Entry128>),
}

/// The ring.
pub(crate) enum Ring {
    Narrow(IoUring<Entry>),
    Wide(IoUring<Entry128>),
}

/// State of the submission queue.
#[derive(Clone, Copy)]
pub(crate) struct Submission {
    pub(crate) is_empty: bool,
    /// The kernel has work for this thread.
    pub(crate) has_work: bool,
    pub(crate) overflows: bool,
}

impl Ring {
    pub(crate) fn params(&self) -> &Parameters {
        match self {
            Ring::Narrow(ring) => ring.params(),
            Ring::Wide(ring) => ring.params(),
        }
    }

    pub(crate) fn is_wide(&self) -> bool {
        matches!(self, Ring::Wide(_))
    }

    pub(crate) fn submitter(&self) -> Submitter<'_> {
        match self {
            Ring::Narrow(ring) => ring.submitter(),
            Ring::Wide(ring) => ring.submitter(),
        }
    }

    pub(crate) fn completion(&mut self) -> CompletionQueue<'_> {
        match self {
            Ring::Narrow(ring) => ring.completion(),
            Ring::Wide(ring) => ring.completion(),
        }
    }

    pub(crate) fn submission(&mut self) -> Submission {
        match self {
            Ring::Narrow(ring) => {
                let queue = ring.submission();
                Submission { is_empty: queue.is_empty(), has_work: queue.taskrun(), overflows: queue.cq_overflow() }
            }
            Ring::Wide(ring) => {
                let queue = ring.submission();
                Submission { is_empty: queue.is_empty(), has_work: queue.taskrun(), overflows: queue.cq_overflow() }
            }
        }
    }

    /// Queues an entry; fails if there is no room.
    ///
    /// # Safety
    /// All memory that the entry points to stays valid until its last completion.
    pub(crate) unsafe fn push(&mut self, entry: &Entry) -> Result<(), PushError> {
        match self {
            // SAFETY: as required of the caller.
            Ring::Narrow(ring) => unsafe { ring.submission().push(entry) },
            // SAFETY: as required of the caller.
            Ring::Wide(ring) => unsafe { ring.submission().push(&entry.clone().into()) },
        }
    }

    /// As [`push`](Self::push), for a wide ring.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn push_wide(&mut self, entry: &Entry128) -> Result<(), PushError> {
        match self {
            Ring::Narrow(_) => unreachable!("the caller looked"),
            // SAFETY: as required of the caller.
            Ring::Wide(ring) => unsafe { ring.submission().push(entry) },
        }
    }

    /// Submits all entries and waits for `want` completions, within the limits of `args` if there are any.
    pub(crate) fn enter(&self, want: usize, args: Option<&SubmitArgs<'_, '_>>) -> std::io::Result<usize> {
        match args {
            Some(args) => self.submitter().submit_with_args(want, args),
            None => self.submitter().submit_and_wait(want),
        }
    }
}
