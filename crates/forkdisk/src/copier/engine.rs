//! The copier itself: accepts jobs, starts their sub-jobs, ends them in order.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use crate::device::Device;
use crate::format::CopierSettings;
use crate::runtime::Runtime;
use crate::sync::Event;

use super::buffers::Buffers;
use super::job::{GateHold, WriteGate};
use super::job::{Progress, Pump};
use super::queue::{Choice, Limits, Queues};
use super::subjob::SubJob;
use super::throttle::Meter;
use super::{CLASSES_COUNT, Client, CopyClass, CopyStats, Job, JobHandle};

/// The copier of a pool. Cheap to clone; all clones are the same one.
pub struct Copier<D>(pub(super) Rc<Engine<D>>);

impl<D> Clone for Copier<D> {
    fn clone(&self) -> Self {
        Copier(self.0.clone())
    }
}

pub(super) struct Engine<D> {
    pub device: Rc<D>,
    pub runtime: Rc<dyn Runtime>,
    pub state: RefCell<State<D>>,
    /// A write was submitted, or a job failed: another job may now be admitted to write.
    pub turned: Event,
    /// When a timer will check the queues again.
    alarm: Cell<Option<Duration>>,
}

pub(super) struct State<D> {
    settings: CopierSettings,
    queues: Queues<D>,
    buffers: Buffers,
    meter: Meter,
    /// Jobs that have not ended, in the order of submission.
    live: BTreeMap<u64, Rc<Progress>>,
    next: u64,
    stats: CopyStats,
    by_user: [CopyStats; CLASSES_COUNT],
}

impl<D: Device> Copier<D> {
    /// Creates a copier; buffers come from `device`.
    pub fn new(device: Rc<D>, runtime: Rc<dyn Runtime>, settings: CopierSettings) -> Copier<D> {
        let state = State {
            settings,
            queues: Queues::default(),
            buffers: Buffers::new(settings.buffers, u64::from(settings.subjob_size)),
            meter: Meter::new(settings.throttle),
            live: BTreeMap::new(),
            next: 0,
            stats: CopyStats::default(),
            by_user: Default::default(),
        };
        let (turned, alarm) = (Event::default(), Cell::new(None));
        Copier(Rc::new(Engine { device, runtime, state: RefCell::new(state), turned, alarm }))
    }

    /// Returns its settings.
    pub fn settings(&self) -> CopierSettings {
        self.0.state.borrow().settings
    }

    /// Sets new settings, for everything that has not started yet.
    pub fn set(&self, settings: CopierSettings) {
        {
            let state = &mut *self.0.state.borrow_mut();
            state.buffers.resize(settings.buffers, u64::from(settings.subjob_size));
            if state.settings.throttle != settings.throttle {
                state.meter.set(settings.throttle);
            }
            state.settings = settings;
        }
        self.throttle_changed();
    }

    /// Must be called when a client's throttle has changed.
    pub fn throttle_changed(&self) {
        self.0.alarm.set(None);
        self.0.clone().pump();
    }

    /// Holds back writes of jobs until it is dropped.
    pub fn gate(&self) -> WriteGate {
        let engine: Rc<dyn Pump> = self.0.clone();
        WriteGate::new(Rc::downgrade(&engine))
    }

    /// Returns the statistics of all clients together, and bytes of buffers in use.
    pub fn stats(&self) -> (CopyStats, u64) {
        let state = self.0.state.borrow();
        (state.stats, state.buffers.in_use())
    }

    /// Returns the statistics of all clients of one class together.
    pub fn stats_of(&self, user: CopyClass) -> CopyStats {
        self.0.state.borrow().by_user[user as usize]
    }

    /// Accepts `job` for `client`. If nothing blocks it, its first reads are submitted before this returns.
    pub fn submit(&self, client: &Rc<Client>, job: Job<D>, given: Vec<super::ProvidedBytes>) -> JobHandle {
        let progress = {
            let now = self.0.runtime.now();
            let state = &mut *self.0.state.borrow_mut();
            state.next += 1;
            let job = Rc::new(job.queued(state.next, client.clone(), now));
            let progress = job.progress.clone();
            *progress.given.borrow_mut() = given;
            state.live.insert(progress.number, progress.clone());
            state.count(client, |stats| stats.queued += 1);
            state.queues.push(job);
            progress
        };
        self.0.clone().pump();
        let engine: Rc<dyn Pump> = self.0.clone();
        JobHandle { progress, engine: Rc::downgrade(&engine) }
    }
}

impl<D: Device> Engine<D> {
    /// Returns how long a transfer without a job has to wait; `held`: it has waited already.
    pub(super) fn wait(&self, client: &Client, held: bool) -> Option<Duration> {
        let (now, state) = (self.runtime.now(), &mut *self.state.borrow_mut());
        let wait = state.meter.wait(now).max(client.meter.borrow_mut().wait(now));
        if wait.is_some() && !held {
            state.count(client, |stats| stats.throttle_waits += 1);
        }
        wait
    }

    /// Charges `bytes` that such a transfer has moved since `since`.
    pub(super) fn charge(&self, client: &Client, bytes: u64, since: Duration) {
        let now = self.runtime.now();
        let took = now.saturating_sub(since);
        self.state.borrow_mut().meter.charge(bytes, took, now);
        client.meter.borrow_mut().charge(bytes, took, now);
    }
}

impl<D> State<D> {
    /// Counts for a client, for its class and for the copier.
    pub fn count(&mut self, client: &Client, change: impl Fn(&mut CopyStats)) {
        let mut stats = client.stats.get();
        change(&mut stats);
        client.stats.set(stats);
        change(&mut self.by_user[client.user() as usize]);
        change(&mut self.stats);
    }

    /// Whether everything that was submitted before `job` and lies near it has been written.
    pub fn is_turn_of(&self, job: &Progress, beside: impl Fn(u64) -> bool) -> bool {
        let earlier = self.live.range(..job.number);
        earlier.into_iter().all(|(&number, other)| other.is_fully_submitted() || !other.is_near(job) || beside(number))
    }

    /// Whether a gate holds the job back.
    pub fn is_held(&self, job: &Progress) -> bool {
        job.hold.as_ref().is_some_and(GateHold::is_closed) && self.queues.len() == 0
    }

    fn next(&mut self, now: Duration, make: impl Fn(usize) -> crate::device::Buf) -> Choice<D> {
        self.queues.sweep();
        let mut limits = Limits {
            now,
            subjob_size: u64::from(self.settings.subjob_size),
            split_count: self.settings.split_count as usize,
            meter: &mut self.meter,
            buffers: &mut self.buffers,
        };
        self.queues.next(&mut limits, make)
    }

    /// Accounts for a sub-job that starts.
    fn note_start(&mut self, sub: &SubJob<D>, now: Duration) {
        let (client, len) = (&sub.parts[0].job.progress.client, sub.buf_len() as u64);
        self.meter.start(len, now);
        client.meter.borrow_mut().start(len, now);
        self.count(client, |stats| stats.in_flight += 1);
        for (i, part) in sub.parts.iter().enumerate() {
            let job = &part.job.progress;
            let waited = job.starved.take().map_or(Duration::ZERO, |since| now.saturating_sub(since));
            let first = part.at == 0;
            self.count(&job.client, |stats| {
                stats.buffer_wait += waited;
                stats.merged += u64::from(i > 0);
                if first {
                    stats.queued -= 1;
                    stats.wait += now.saturating_sub(job.submitted_at);
                }
            });
            job.started.set(part.at + part.len);
            job.in_flight.set(job.in_flight.get() + 1);
        }
    }

    /// Accounts for a sub-job that has ended.
    fn note_end(&mut self, sub: &mut SubJob<D>, now: Duration) {
        let client = sub.parts[0].job.progress.client.clone();
        let (len, done, [reads, writes]) = (sub.buf_len(), sub.done, sub.requests);
        self.meter.end(now);
        client.meter.borrow_mut().end(now);
        self.buffers.give_back(client.user(), len, sub.take_buf());
        self.count(&client, |stats| {
            stats.in_flight -= 1;
            stats.reads += reads;
            stats.writes += writes;
            stats.bytes_read += done.read;
            stats.bytes_written += done.written;
            stats.bytes_offloaded += done.offloaded;
        });
        for part in &sub.parts {
            let job = &part.job.progress;
            job.in_flight.set(job.in_flight.get() - 1);
        }
    }

    /// Ends the jobs that are over, unless one before them that lies near has not ended.
    fn reap(&mut self, now: Duration) -> Vec<Rc<Progress>> {
        let mut ended: Vec<Rc<Progress>> = Vec::new();
        for job in self.live.values() {
            let before = |other: &Rc<Progress>| !other.ended.get() && other.number < job.number && other.is_near(job);
            if job.is_over() && !self.live.values().take_while(|o| o.number < job.number).any(before) {
                job.ended.set(true);
                ended.push(job.clone());
            }
        }
        for job in &ended {
            self.live.remove(&job.number);
            self.note_job(job, now);
        }
        ended
    }

    fn note_job(&mut self, job: &Progress, now: Duration) {
        let took = now.saturating_sub(job.submitted_at);
        let never_started = job.started.get() == 0;
        let given: u64 = job.given.take().iter().map(|g| g.range.len() as u64).sum();
        let (failed, cancelled) = job.end();
        self.count(&job.client, |stats| {
            stats.queued -= u64::from(never_started);
            stats.jobs += 1;
            stats.cancelled += u64::from(cancelled);
            stats.failed += u64::from(failed && !cancelled);
            stats.bytes_given += given;
            stats.latency += took;
            stats.longest = stats.longest.max(took);
        });
    }
}

impl<D: Device> Pump for Engine<D> {
    fn pump(self: Rc<Self>) {
        loop {
            let now = self.runtime.now();
            let choice = self.state.borrow_mut().next(now, |len| self.device.buffer(len));
            match choice {
                Choice::Start(buf, parts) => self.start(SubJob::new(buf, parts), now),
                Choice::Nothing(wait) => {
                    if let Some(wait) = wait {
                        self.wake_in(wait, now);
                    }
                    // No gate holds any more.
                    if self.state.borrow().queues.len() > 0 {
                        self.turned.notify();
                    }
                    break;
                }
            }
        }
        let ended = self.state.borrow_mut().reap(self.runtime.now());
        if !ended.is_empty() {
            // A failed job delays no other writes any more.
            self.turned.notify();
        }
        ended.iter().for_each(|job| job.changed.notify());
    }

    fn recheck_order(&self) {
        self.turned.notify();
    }
}

impl<D: Device> Engine<D> {
    fn start(self: &Rc<Self>, mut sub: SubJob<D>, now: Duration) {
        self.state.borrow_mut().note_start(&sub, now);
        sub.offloads = self.state.borrow().settings.offload && sub.can_offload();
        // Submitted now, in order; a separate task waits for its end.
        let reading = sub.start_reading();
        let engine = self.clone();
        self.runtime.spawn(Box::pin(async move {
            sub.run(&engine, reading).await;
            engine.state.borrow_mut().note_end(&mut sub, engine.runtime.now());
            drop(sub);
            engine.pump();
        }));
    }

    /// Checks the queues again after `wait`, unless that happens earlier anyway.
    fn wake_in(self: &Rc<Self>, wait: Duration, now: Duration) {
        let at = now + wait;
        if self.alarm.get().is_some_and(|alarm| alarm <= at) {
            return;
        }
        self.alarm.set(Some(at));
        let engine = self.clone();
        self.runtime.spawn(Box::pin(async move {
            engine.runtime.sleep(wait).await;
            if engine.alarm.get() == Some(at) {
                engine.alarm.set(None);
            }
            engine.pump();
        }));
    }
}

#[cfg(test)]
impl<D> Engine<D> {
    /// Whether nothing is queued, in flight, or held.
    pub fn is_idle(&self) -> bool {
        let state = self.state.borrow();
        state.live.is_empty() && state.queues.len() == 0 && state.buffers.in_use() == 0
    }
}
