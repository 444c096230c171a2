//! The transmission phase of one connection: carries out requests, each to its end, even if the
//! client disconnects. Replies are sent in the order in which requests end.

use std::rc::Rc;

use forkdisk::{Buf, Error, Operation, WriteFlags};
use forkdisk_uring::{Pass, Rt};

use super::budget::Permit;
use super::export::Export;
use super::fair::Started;
use super::outbox::{Failure, Outbox, Outcome, Reply};
use crate::codec::{Action, ErrorCode, ReplyStyle, ReplyTo, StatusExtent};

/// Bytes from which a read reports holes, if the reply style can carry them.
const SPARSE_READ_BYTES: usize = 4096;
/// Unit, from the beginning of the export, to which the place of a failed read is narrowed down.
const FAULT_BYTES: u64 = 4096;
/// Most extents of one context in a reply.
pub(super) const MAX_EXTENTS: usize = 1024;
/// Pieces of a map examined before other tasks run, and in all for one context of a reply.
const FIRST_LOOKUPS: usize = 256;
const MAX_LOOKUPS: usize = 4096;

/// State shared by the tasks of a connection's requests.
pub(super) struct Session<E: Export> {
    pub(super) rt: Rt,
    pub(super) export: E,
    pub(super) outbox: Rc<Outbox>,
    pub(super) style: ReplyStyle,
    /// Metadata contexts; their numbers are their positions, from 1 on.
    pub(super) contexts: Vec<E::Context>,
}

/// One request during its execution.
pub(super) struct Job {
    pub(super) to: ReplyTo,
    pub(super) permit: Permit,
    pub(super) started: Started,
    /// The export shows the same disk until this is dropped.
    pub(super) pass: Option<Pass>,
}

impl<E: Export> Session<E> {
    /// Returns the most bytes that the answer to BLOCK_STATUS takes.
    pub(super) fn status_bytes(&self, one: bool) -> usize {
        let extents = if one { 1 } else { MAX_EXTENTS };
        self.contexts.len() * extents * size_of::<StatusExtent>()
    }

    pub(super) async fn read(self: Rc<Self>, job: Job, buf: Buf, whole: bool) {
        let (offset, len) = (job.to.offset, buf.len());
        let outcome = if buf.is_empty() {
            Outcome::Data(buf)
        } else if whole || !self.style.has_chunks() || len < SPARSE_READ_BYTES {
            match self.export.read(offset, buf).await {
                (Ok(()), buf) => Outcome::Data(buf),
                (Err(error), buf) => self.read_failed(error, offset, buf).await,
            }
        } else {
            match self.export.read_sparse(offset, buf).await {
                (Ok(holes), buf) if holes.is_empty() => Outcome::Data(buf),
                (Ok(holes), buf) => Outcome::Sparse(buf, holes),
                (Err(error), buf) => self.read_failed(error, offset, buf).await,
            }
        };
        self.export.took(Operation::Read, job.permit.age());
        self.reply(job, outcome);
    }

    /// Builds the reply to a failed read, with the place of the failure if the reply style can carry it.
    async fn read_failed(&self, error: Error, offset: u64, buf: Buf) -> Outcome {
        let len = buf.len() as u64;
        drop(buf);
        let mut failure = failure(&error);
        if failure.code == ErrorCode::Io && self.style.has_chunks() {
            failure.at = self.first_fault(offset, len).await;
        }
        Outcome::Failed(failure)
    }

    /// Finds the beginning of the first unit that cannot be read, by bisection.
    async fn first_fault(&self, offset: u64, len: u64) -> Option<u64> {
        let fails = async |from: u64, to: u64| {
            let buf = Buf::zeroed((to - from) as usize);
            self.export.read(from, buf).await.0.is_err()
        };
        // Invariant: everything before `from` can be read; something before `to` cannot.
        let (mut from, mut to) = (offset, offset + len);
        while from / FAULT_BYTES != (to - 1) / FAULT_BYTES {
            let last = (to - 1) / FAULT_BYTES * FAULT_BYTES;
            let middle = (from + (to - from) / 2).next_multiple_of(FAULT_BYTES).min(last);
            if fails(from, middle).await { to = middle } else { from = middle }
        }
        fails(from, to).await.then_some(from)
    }

    pub(super) async fn write(self: Rc<Self>, job: Job, buf: Buf, flags: WriteFlags) {
        let (result, buf) = match buf.is_empty() {
            true => (Ok(()), buf),
            false => self.export.write(job.to.offset, buf, flags).await,
        };
        drop(buf);
        self.export.took(Operation::Write, job.permit.age());
        self.reply(job, outcome(result));
    }

    pub(super) async fn other(self: Rc<Self>, job: Job, action: Action) {
        let export = &self.export;
        let result = match action {
            Action::Flush => export.flush().await,
            Action::Trim { len: 0, .. } | Action::WriteZeroes { len: 0, .. } | Action::Cache { len: 0, .. } => Ok(()),
            Action::Trim { offset, len, fua } => export.trim(offset, len, fua).await,
            Action::Cache { offset, len } => export.cache(offset, len).await,
            Action::WriteZeroes { offset, len, fast: true, .. } if !export.zeroing_is_fast(offset, len) => {
                let text = "zeroing this range would be no faster than writing it".to_owned();
                let failure = Failure { code: ErrorCode::NotSupported, text, at: None };
                return self.reply(job, Outcome::Failed(Box::new(failure)));
            }
            Action::WriteZeroes { offset, len, fua, no_hole, .. } => {
                export.write_zeroes(offset, len, fua, no_hole).await
            }
            Action::BlockStatus { offset, len, one } => {
                let outcome = self.status(offset, len, one).await.unwrap_or_else(|e| Outcome::Failed(failure(&e)));
                return self.reply(job, outcome);
            }
            Action::Read { .. } | Action::Write { .. } | Action::Disconnect => Ok(()),
        };
        let operation = match action {
            Action::Flush => Some(Operation::Flush),
            Action::Trim { .. } => Some(Operation::Discard),
            Action::WriteZeroes { .. } => Some(Operation::Zero),
            _ => None,
        };
        if let Some(operation) = operation {
            export.took(operation, job.permit.age());
        }
        self.reply(job, outcome(result));
    }

    async fn status(&self, offset: u64, len: u64, one: bool) -> forkdisk::Result<Outcome> {
        let mut contexts = Vec::with_capacity(self.contexts.len());
        for (i, context) in self.contexts.iter().enumerate() {
            contexts.push((i as u32 + 1, self.extents(context, offset, len, one).await?));
        }
        Ok(Outcome::Status(contexts))
    }

    /// Returns the extents of one context, with bounded effort.
    async fn extents(
        &self,
        context: &E::Context,
        offset: u64,
        len: u64,
        one: bool,
    ) -> forkdisk::Result<Vec<StatusExtent>> {
        let most = if one { 1 } else { MAX_EXTENTS };
        let mut extents: Vec<StatusExtent> = Vec::new();
        let mut count = 0;
        let (mut at, end) = (offset, offset + len);
        for _ in 0..MAX_LOOKUPS / FIRST_LOOKUPS {
            for extent in self.export.status(context, at, end - at, FIRST_LOOKUPS).await? {
                at += extent.len;
                match extents.last_mut() {
                    Some(last) if last.flags == extent.flags => last.len += extent.len,
                    _ if count == most => return Ok(extents),
                    _ => {
                        extents.push(extent);
                        count += 1;
                    }
                }
            }
            if at >= end {
                break;
            }
            self.rt.yield_now().await;
        }
        Ok(extents)
    }

    /// Queues the reply and releases the place in the export; the memory is freed when the reply was sent.
    fn reply(&self, job: Job, outcome: Outcome) {
        let Job { to, permit, started, pass } = job;
        drop((started, pass));
        self.outbox.push(Reply { to, outcome, permit });
    }
}

fn outcome(result: forkdisk::Result<()>) -> Outcome {
    match result {
        Ok(()) => Outcome::Done,
        Err(error) => Outcome::Failed(failure(&error)),
    }
}

fn failure(error: &Error) -> Box<Failure> {
    tracing::debug!(%error, "a request failed");
    Box::new(Failure { code: ErrorCode::from_errno(error.errno()), text: error.to_string(), at: None })
}
