//! The fuzz targets of the server, without libFuzzer: every input of the corpus, and random mutations of them.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

#[path = "../../../../fuzz/src/mutate.rs"]
mod mutate;
#[path = "../../../../fuzz/src/rings.rs"]
mod rings;

use mutate::fuzz;
use rings::Rings;

#[test]
fn any_rings_leave_other_disks_served() {
    let rings = Rings::default();
    fuzz("vhost_rings", 3000, |input| rings.run(input));
}

#[test]
fn any_messages_leave_other_disks_served() {
    let rings = Rings::default();
    fuzz("vhost_messages", 3000, |input| rings.run_messages(input));
}
