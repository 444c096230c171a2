//! Waiting on one thread: events, flushes of a device, range locks, the write queue, and generations of
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
