//! What starts next: one queue per copy class, in the order of submission, and what of its head can start
//! now.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::device::Buf;
use crate::planted::correct;

use super::buffers::Buffers;
use super::job::{Progress, Queued};
use super::throttle::Meter;
use super::{CLASSES_COUNT, Client, CopyClass};

/// With as many sub-jobs of a client in flight, a small copy for an origin waits for others to be written with it.
const COLLECTING_COUNT: u64 = 4;
/// Copies of so many bytes wait for no others: a metered disk counts longer requests more than once.
const COLLECTED_BYTES: u64 = 256 << 10;

/// A part of a job, made into (a part of) a sub-job.
pub struct Part<D> {
    pub job: Rc<Queued<D>>,
    /// Where it starts in its job, and its length, in bytes.
    pub at: u64,
    pub len: u64,
}

/// Result of the search for something to start.
pub enum Choice<D> {
    /// Start this: a buffer, and the contiguous parts it is for.
    Start(Buf, SmallVec<[Part<D>; 1]>),
    /// Nothing can start. If a throttle is the reason: try again after this time.
    Nothing(Option<Duration>),
}

/// The limits that apply to a search.
pub struct Limits<'a> {
    pub now: Duration,
    pub subjob_size: u64,
    pub split_count: usize,
    pub meter: &'a mut Meter,
    pub buffers: &'a mut Buffers,
}

/// Jobs that have not started completely.
pub struct Queues<D> {
    of: [VecDeque<Rc<Queued<D>>>; CLASSES_COUNT],
    /// The class that is examined first: classes are served round robin.
    turn: usize,
}

impl<D> Default for Queues<D> {
    fn default() -> Self {
        Queues { of: std::array::from_fn(|_| VecDeque::new()), turn: 0 }
    }
}

/// What can start at the head of one queue.
enum Head<D> {
    Start(Buf, SmallVec<[Part<D>; 1]>),
    Wait(Duration),
    Nothing,
}

impl<D> Queues<D> {
    /// Adds a job at the end of its queue.
    pub fn push(&mut self, job: Rc<Queued<D>>) {
        self.of[job.progress.client.user() as usize].push_back(job);
    }

    /// Removes the jobs that will not start anything more.
    pub fn sweep(&mut self) {
        let done = |p: &Progress| p.has_failed() || p.started.get() == p.len;
        for queue in &mut self.of {
            queue.retain(|job| !done(&job.progress));
        }
    }

    /// Returns the number of jobs waiting to start.
    pub fn len(&self) -> usize {
        self.of.iter().map(VecDeque::len).sum()
    }

    /// Finds what can start now; a new buffer comes from `make`.
    pub fn next(&mut self, limits: &mut Limits<'_>, make: impl Fn(usize) -> Buf) -> Choice<D> {
        if self.len() == 0 {
            return Choice::Nothing(None);
        }
        let held = limits.meter.wait(limits.now);
        let mut soonest: Option<Duration> = None;
        for i in 0..CLASSES_COUNT {
            let user = (self.turn + i) % CLASSES_COUNT;
            match self.head(user, held, limits, &make) {
                Head::Start(buf, parts) => {
                    self.turn = (user + 1) % CLASSES_COUNT;
                    return Choice::Start(buf, parts);
                }
                Head::Wait(time) => soonest = Some(soonest.map_or(time, |s| s.min(time))),
                Head::Nothing => {}
            }
        }
        Choice::Nothing(soonest)
    }

    fn head(
        &mut self,
        user: usize,
        held: Option<Duration>,
        limits: &mut Limits<'_>,
        make: &impl Fn(usize) -> Buf,
    ) -> Head<D> {
        let mut soonest: Option<Duration> = None;
        // Clients whose first job cannot start now: their later jobs wait as well.
        let mut blocked: SmallVec<[*const Client; 4]> = SmallVec::new();
        for i in 0..self.of[user].len() {
            let job = self.of[user][i].clone();
            let progress = &job.progress;
            let client = Rc::as_ptr(&progress.client);
            if progress.has_failed() || blocked.contains(&client) {
                continue;
            }
            if progress.in_flight.get() >= limits.split_count {
                blocked.push(client);
                continue;
            }
            let own = progress.client.meter.borrow_mut().wait(limits.now);
            if let Some(time) = own.max(held) {
                note_throttled(&progress.client);
                soonest = Some(soonest.map_or(time, |s| s.min(time)));
                blocked.push(client);
                continue;
            }
            progress.client.held.set(false);
            let parts = self.parts(user, i, limits.subjob_size);
            let len: u64 = parts.iter().map(|p| p.len).sum();
            if len < COLLECTED_BYTES.min(limits.subjob_size) && waits_for_others(&parts[0]) {
                blocked.push(client);
                continue;
            }
            if let Some(buf) = limits.buffers.take(progress.client.user(), len as usize, make) {
                return Head::Start(buf, parts);
            }
            correct!(note_starved(progress, limits.now), Bug::StarvedJobGoesLast => self.of[user].rotate_left(1));
            break;
        }
        soonest.map_or(Head::Nothing, Head::Wait)
    }

    /// Returns the next part of job `i` of a queue, and whole jobs behind it that continue where it ends.
    fn parts(&self, user: usize, i: usize, subjob_size: u64) -> SmallVec<[Part<D>; 1]> {
        let queue = &self.of[user];
        let first = queue[i].clone();
        let at = first.progress.started.get();
        let len = (first.progress.len - at).min(subjob_size);
        let (mut whole, mut total) = (at + len == first.progress.len, len);
        let mut parts: SmallVec<[Part<D>; 1]> = SmallVec::new();
        parts.push(Part { job: first.clone(), at, len });
        for next in queue.iter().skip(i + 1) {
            if !Rc::ptr_eq(&next.progress.client, &first.progress.client) {
                continue;
            }
            let before = &parts.last().expect("the first is in").job;
            let fits = whole && total + next.progress.len <= subjob_size && !next.progress.has_failed();
            if !fits || !next.continues(before, !is_collected(&first)) {
                break;
            }
            whole = true;
            total += next.progress.len;
            parts.push(Part { job: next.clone(), at: 0, len: next.progress.len });
        }
        parts
    }
}

/// Whether a copy may be written together with others that are read from elsewhere: random writes to an origin make
/// such copies.
fn is_collected<D>(job: &Queued<D>) -> bool {
    job.progress.client.user() == CopyClass::Origin
}

/// Whether a copy that has not begun waits until one of several in flight has ended.
fn waits_for_others<D>(part: &Part<D>) -> bool {
    let in_flight = part.job.progress.client.stats.get().in_flight;
    is_collected(&part.job) && part.at == 0 && in_flight >= COLLECTING_COUNT
}

fn note_starved(job: &Progress, now: Duration) {
    if job.starved.get().is_none() {
        job.starved.set(Some(now));
        let mut stats = job.client.stats.get();
        stats.buffer_waits += 1;
        job.client.stats.set(stats);
    }
}

fn note_throttled(client: &Client) {
    if !client.held.replace(true) {
        let mut stats = client.stats.get();
        stats.throttle_waits += 1;
        client.stats.set(stats);
    }
}

/// For messages and statistics.
impl CopyClass {
    /// Returns its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            CopyClass::Break => "break",
            CopyClass::Gather => "gather",
            CopyClass::Origin => "origin",
            CopyClass::Transfer => "transfer",
            CopyClass::Flatten => "flatten",
        }
    }
}
