//! Waiting on one thread: an event, locks on ranges, the order of writes, and generations of plans.

mod event;
mod generation;
mod range;
mod turns;

pub use event::Event;
pub use generation::{Generations, PlanGuard};
pub use range::{Hold, RangeGuard, RangeLocks};
pub use turns::{Came, Taken, Turn, Turns};
