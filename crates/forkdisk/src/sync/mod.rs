//! Waiting on one thread: an event, flushes of a device, locks on ranges, the order of writes, and generations of plans.

mod event;
mod flushes;
mod generation;
mod range;
mod turns;

pub use event::Event;
pub use flushes::Flushes;
pub use generation::{Generations, PlanGuard};
pub use range::{Hold, RangeGuard, RangeLocks};
pub use turns::{Came, Taken, Turn, Turns};
