//! Waiting on one thread: events, flushes of a device, range locks, the write queue, and generations of
//! plans.

mod event;
mod flushes;
mod range_lock;
mod write_queue;

pub use event::Event;
pub use event::{Generations, PlanGuard};
pub use flushes::Flushes;
pub use range_lock::{LockMode, RangeGuard, RangeLocks};
pub use write_queue::{Admitted, MergedWrite, QueuedWrite, WriteQueue};
