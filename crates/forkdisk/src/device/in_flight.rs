//! Writes that pass to a device in the order of the calls, with a limit of bytes in flight.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

use super::{Buf, Device, IoResult, Segments};
use crate::runtime::Runtime;
use crate::sync::Event;

/// See the module.
pub struct InFlightLimit<D> {
    device: D,
    runtime: Rc<dyn Runtime>,
    most: u64,
    /// Bytes in flight.
    passing: Cell<u64>,
    /// Tickets that were issued, and the one that may pass next.
    given: Cell<u64>,
    turn: Cell<u64>,
    changed: Event,
}

/// A write in flight.
struct Passing<D> {
    gate: Rc<InFlightLimit<D>>,
    bytes: u64,
}

/// The outcome of a write.
#[derive(Default)]
struct Passed {
    outcome: Cell<Option<IoResult>>,
    is_there: Event,
}

impl<D: Device> InFlightLimit<D> {
    /// Limits the bytes in flight to `most`; a larger write passes alone.
    pub fn new(device: D, runtime: Rc<dyn Runtime>, most: u64) -> Rc<InFlightLimit<D>> {
        let (passing, given, turn, changed) = Default::default();
        Rc::new(InFlightLimit { device, runtime, most, passing, given, turn, changed })
    }

    /// As [`Device::write`]. It continues even if its future is dropped: later writes may wait behind it.
    pub fn write(self: &Rc<Self>, buf: Buf, segments: Segments, fua: bool) -> impl Future<Output = IoResult> + use<D> {
        let bytes = segments.iter().map(|s| s.len as u64).sum();
        let place = self.given.replace(self.given.get() + 1);
        let at_once = match self.pass(place, bytes) {
            Some(passing) => Ok((self.device.write(buf, segments, fua), passing)),
            None => Err((buf, segments)),
        };
        let passed = Rc::new(Passed::default());
        let (this, noted) = (self.clone(), passed.clone());
        self.runtime.spawn(Box::pin(async move {
            let outcome = match at_once {
                Ok((write, _passing)) => write.await,
                Err((buf, segments)) => {
                    let _passing = loop {
                        match this.pass(place, bytes) {
                            Some(passing) => break passing,
                            None => this.changed.wait().await,
                        }
                    };
                    this.device.write(buf, segments, fua).await
                }
            };
            noted.outcome.set(Some(outcome));
            noted.is_there.notify();
        }));
        async move {
            loop {
                match passed.outcome.take() {
                    Some(outcome) => break outcome,
                    None => passed.is_there.wait().await,
                }
            }
        }
    }

    /// Lets a write of `bytes` bytes pass if it is next and fits the limit.
    fn pass(self: &Rc<Self>, place: u64, bytes: u64) -> Option<Passing<D>> {
        let passing = self.passing.get();
        if self.turn.get() != place || passing > 0 && passing + bytes > self.most {
            return None;
        }
        self.turn.set(place + 1);
        self.passing.set(passing + bytes);
        self.changed.notify();
        Some(Passing { gate: self.clone(), bytes })
    }
}

impl<D> Drop for Passing<D> {
    fn drop(&mut self) {
        self.gate.passing.set(self.gate.passing.get() - self.bytes);
        self.gate.changed.notify();
    }
}
