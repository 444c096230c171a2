//! New sizes.

use super::control::{control, drawn_volume};
use super::target::size_of;
use crate::driver::{Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Key};

pub static RESIZE: Operation<Volumes> = Operation {
    name: "resize",
    weight: |profile| match profile {
        Large => 10,
        Forks | Files => 4,
        Mixed | Hosts => 3,
        Faults | Cuts | Blocks | Calm | Ranges | Copies | Gathering | Quotas | Bounds => 2,
        _ => 0,
    },
    launch: |run, op| match drawn_volume(run, op) {
        Some(key) => resize(run, key, place::resized(&run.setup, size_of(run, key), op.draws[2])),
        None => Ok(()),
    },
};

pub fn resize(run: &mut Run, key: Key, size: u64) -> Result<(), Violation> {
    control(run, Control::Resize(key, size), |run| {
        let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
        (format!("resize {name} to {size} bytes"), async move { pool.resize(&name, size).await })
    })
}
