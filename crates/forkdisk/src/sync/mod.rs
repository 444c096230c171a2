//! Waiting on one thread: an event, the order of writes to a range, and generations of plans.

mod event;
mod generation;
mod range;

pub use event::Event;
pub use generation::{Generations, PlanGuard};
pub use range::{Hold, RangeGuard, RangeLocks};
