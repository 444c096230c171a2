//! forkdisk as an NBD server: what a request costs, how fast large ones are, and what idle exports take
//! away. Every round is done in turns with whom it is compared with.

pub mod cpu;
pub mod idle;
pub mod sequential;

use crate::rows::{Row, Samples};

fn row(case: &str, target: &str, metric: &str, unit: &str, samples: &Samples) -> Row {
    Row::new("serve", case, target, metric, unit, samples)
}
