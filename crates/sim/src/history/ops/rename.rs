//! New names.

use super::control::{control, drawn_volume, new_name};
use crate::driver::{Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Key};

pub static RENAME: Operation<Volumes> = Operation {
    name: "rename",
    weight: |profile| match profile {
        Journal => 8,
        Forks | Names => 3,
        Mixed | Crowd | Files | Transactions | Folders | Lifetimes | Comparing => 2,
        Faults | Cuts | Calm | Large | Quotas | Bounds => 1,
        _ => 0,
    },
    launch: |run, op| match drawn_volume(run, op) {
        Some(key) => {
            let name = new_name(run, "r");
            rename(run, key, name)
        }
        None => Ok(()),
    },
};

pub fn rename(run: &mut Run, key: Key, to: String) -> Result<(), Violation> {
    control(run, Control::Rename(key, to.clone()), |run| {
        let (pool, from) = (run.session.pool.clone(), run.known.model.name(key));
        (format!("rename {from} to {to}"), async move { pool.rename(&from, &to).await })
    })
}
