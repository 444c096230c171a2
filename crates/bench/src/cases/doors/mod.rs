//! Every way to a volume, a *door*, beside the same doors of other programs: CPU per request, wakes of an idle daemon,
//! and requests per second on a disk.

mod clock;
mod cpu;
mod idle;
mod subjects;

pub use clock::run as run_clock;
pub use cpu::run as run_cpu;
pub use idle::run as run_idle;

use crate::rows::{Row, Samples};

fn row(case: &str, target: &str, metric: &str, unit: &str, samples: &Samples) -> Row {
    Row::new("doors", case, target, metric, unit, samples)
}
