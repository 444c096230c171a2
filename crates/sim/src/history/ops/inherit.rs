//! What clones inherit from a folder: they have it at once, and it is durable.

use std::cell::RefCell;
use std::rc::Rc;

use forkdisk::{Changes, CloneProperty, ErrorKind, ExtensionChanges, ForkOptions, Mode};

use super::control::{control, is_crowded};
use crate::driver::{Op, Operation, PATIENCE_STEPS, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::Control;
use crate::rng::Rng;

/// Sets which quota clones inherit from a folder, when nothing else is in flight.
pub static SET_INHERITED: Operation<Volumes> = Operation {
    name: "set-inherited",
    weight: |profile| match profile {
        Bounds => 3,
        _ => 0,
    },
    launch: set_inherited,
};

/// Clones a volume or snapshot into that folder.
pub static CLONE_INTO: Operation<Volumes> = Operation {
    name: "clone-into",
    weight: |profile| match profile {
        Bounds => 4,
        _ => 0,
    },
    launch: clone_into,
};

/// The folder.
const FOLDER: &str = "i";
/// Quotas that no volume reaches, so that no write is refused for them.
const QUOTAS: [u64; 3] = [1 << 40, 1 << 41, 1 << 42];

/// What clones inherit, and what was wrong with one.
#[derive(Default)]
pub struct Inheriting {
    /// Whether the folder was made.
    is_made: bool,
    quota: u64,
    wrong: Rc<RefCell<Option<String>>>,
}

fn set_inherited(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.drain()?;
    judge_inherited(run)?;
    let sound = run.session.disk.faults_hit() == 0 && run.session.pool.info().mode != Mode::Failed;
    if !sound || !run.known.pending.is_empty() {
        return Ok(());
    }
    let mut rng = Rng::new(op.draws[1]);
    let quota = (!rng.one_in(4)).then(|| *rng.pick(&QUOTAS));
    run.say(|| format!("clones below {FOLDER} inherit a quota of {quota:?}"));
    let inherited = ExtensionChanges::default().with_inherited([(CloneProperty::Quota, quota)].into());
    let (pool, changes) = (run.session.pool.clone(), Changes::default().with_extension(inherited));
    let set = async move { pool.set(&format!("{FOLDER}/"), &changes).await };
    match run.session.exec.run(PATIENCE_STEPS, set)? {
        Err(e) if e.kind() == ErrorKind::NoSpace => return Ok(()),
        done => done.map_err(|e| Violation::new("P4", format!("what is inherited from {FOLDER}: {e}")))?,
    }
    (run.world.inherited.is_made, run.world.inherited.quota) = (true, quota.unwrap_or(0));
    Ok(())
}

fn clone_into(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.wait(|o| o.class.is_control())?;
    let all = [place::volumes(&run.known.model), place::snapshots(&run.known.model, None)].concat();
    let Some(key) = place::choose(&all, op.draws[0]).filter(|_| !is_crowded(run)) else { return Ok(()) };
    run.world.names += 1;
    let (source, name) = (run.known.model.name(key), format!("{FOLDER}/{}", run.world.names));
    let (quota, wrong) = (run.world.inherited.quota, run.world.inherited.wrong.clone());
    control(run, Control::Fork(vec![(key, name.clone())]), |run| {
        let pool = run.session.pool.clone();
        (format!("fork {source} to {name}"), async move {
            let made = pool.fork(&source, &[&name], &ForkOptions::new(1)).await?;
            if made[0].quota != quota {
                *wrong.borrow_mut() = Some(format!("{name} has a quota of {}, not of {quota}", made[0].quota));
            }
            Ok(())
        })
    })
}

/// Checks that the folder has what was set and that all clones inherited it. Must be called when nothing is in flight.
pub fn judge_inherited(run: &mut Run) -> Result<(), Violation> {
    if let Some(wrong) = run.world.inherited.wrong.borrow_mut().take() {
        return Err(Violation::new("P4", wrong));
    }
    let is_judged = run.world.inherited.is_made && run.session.pool.info().mode != Mode::Failed;
    if !is_judged || !run.known.pending.is_empty() {
        return Ok(());
    }
    let found = run.session.pool.find_folder(FOLDER).map_err(|e| Violation::new("P4", e.to_string()))?;
    let quota = found.inherited.get(&CloneProperty::Quota).copied().unwrap_or(0);
    if quota != run.world.inherited.quota {
        let what = format!("clones below {FOLDER} inherit a quota of {quota}, not of {}", run.world.inherited.quota);
        return Err(Violation::new("P4", what));
    }
    Ok(())
}
