//! Waiting on one thread: an event, flushes of a device, locks on ranges, the order of writes, and generations of
//! plans.

mod event;
mod flushes;
mod plans;
mod range_lock;
mod write_queue;

pub use event::Event;
pub use flushes::Flushes;
pub use plans::{Generations, PlanGuard};
pub use range_lock::{LockMode, RangeGuard, RangeLocks};
pub use write_queue::{Admitted, MergedWrite, QueuedWrite, WriteQueue};
