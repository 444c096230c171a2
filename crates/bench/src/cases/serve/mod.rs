//! forkdisk as an NBD server: cost of a request, speed of large requests, and cost of idle exports.
//! Every round alternates with the peers.

pub mod cpu;
pub mod idle;
pub mod sequential;

use crate::rows::{Row, Samples};

fn row(case: &str, target: &str, metric: &str, unit: &str, samples: &Samples) -> Row {
    Row::new("serve", case, target, metric, unit, samples)
}
