//! New volumes.

use super::control::{control, is_crowded, names_of_one, new_name, strs};
use super::copying;
use super::properties::{drawn_properties, options_with};
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile;
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::Control;
use crate::rng::Rng;

pub static CREATE: Operation<Volumes> = Operation {
    name: "create",
    weight: |profile| match profile {
        Crowd => 8,
        Files => 6,
        Journal | Hosts => 4,
        Mixed | Faults | Ranges | Large | Quotas | Bounds => 3,
        Forks | Full | Cuts | Blocks | Calm | Copies | Gathering | Names => 2,
        Races => 1,
        _ => 0,
    },
    launch: create_one,
};

/// Creates several volumes with properties, all or none.
pub static CREATE_ALL: Operation<Volumes> = Operation {
    name: "create-all",
    weight: |profile| match profile {
        Transactions | Folders | Lifetimes | Comparing => 12,
        _ => 0,
    },
    launch: create_some,
};

/// Creates a volume of drawn size.
pub fn create_one(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if is_crowded(run) {
        return Ok(());
    }
    if matches!(run.setup.profile, Profile::Transactions | Profile::Folders | Profile::Lifetimes | Comparing) {
        return create_some(run, op);
    }
    let (name, size) = (new_name(run, "v"), place::size(&run.setup, op.draws[2]));
    create(run, name, size)
}

pub fn create(run: &mut Run, name: String, size: u64) -> Result<(), Violation> {
    control(run, Control::Create(name.clone(), size), |run| {
        let (pool, copies) = (run.session.pool.clone(), run.setup.profile == Profile::Copies);
        (format!("create {name}, {size} bytes"), async move {
            pool.create(&name, &copying::options(size, &name, copies)).await.map(drop)
        })
    })
}

fn create_some(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if is_crowded(run) {
        return Ok(());
    }
    let mut rng = Rng::new(op.draws[1]);
    let size = place::size(&run.setup, op.draws[2]);
    let (names, properties) = (names_of_one(run, "v", &mut rng), drawn_properties(run, &mut rng));
    control(run, Control::CreateAll(names.clone(), size, properties), |run| {
        let pool = run.session.pool.clone();
        (format!("create {}, {size} bytes, {properties:?}", names.join(" ")), async move {
            pool.create_all(&strs(&names), &options_with(size, properties)).await.map(drop)
        })
    })
}
