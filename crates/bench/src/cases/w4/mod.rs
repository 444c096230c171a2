//! Many snapshots of an origin in place (W4): writes under 1 to 1,000 of them, chained and
//! independent; random writes; reads of the oldest; cost of deleting one.

pub mod delete;
pub mod many;
pub mod peers;
pub mod random;
pub mod read;

use crate::model::Label;

fn label(case: &str) -> Label<'_> {
    Label { workload: "w4", case, target: "forkdisk" }
}
