//! Deletions of volumes and snapshots.

use forkdisk::{Error, Pool};

use super::control::{control, strs};
use super::replace::flush_with_patience;
use crate::disk::LyingDevice;
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Key};
use crate::rng::Rng;

pub static DELETE: Operation<Volumes> = Operation {
    name: "delete",
    weight: |profile| match profile {
        Journal => 56,
        Transactions | Folders | Lifetimes | Comparing => 20,
        Forks => 16,
        Crowd | Files | Copies | Gathering | Hosts => 12,
        Full | Races | Blocks | Ranges | Large => 8,
        Mixed => 7,
        Faults | Cuts | Calm => 5,
        Quotas | Bounds => 4,
        Names => 3,
        Heirs => 1,
        _ => 0,
    },
    launch: delete_one,
};

fn delete_one(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let (volumes, snapshots) = (place::volumes(&run.known.model), place::snapshots(&run.known.model, None));
    let mut rng = Rng::new(op.draws[1]);
    if rng.one_in(2) && !snapshots.is_empty() {
        return delete(run, vec![*rng.pick(&snapshots)]);
    }
    let volume = place::choose(&volumes, op.draws[0]);
    let mut victims = place::snapshots(&run.known.model, volume);
    match volume {
        Some(volume) if volumes.len() >= 2 || !victims.is_empty() => {
            victims.push(volume);
            delete(run, victims)
        }
        _ => Ok(()),
    }
}

/// Deletes all of them at once.
pub fn delete(run: &mut Run, keys: Vec<Key>) -> Result<(), Violation> {
    control(run, Control::Delete(keys.clone()), |run| {
        let pool = run.session.pool.clone();
        let names: Vec<String> = keys.iter().map(|&key| run.known.model.name(key)).collect();
        (format!("delete {}", names.join(" ")), async move {
            match &names[..] {
                [name] if name.len().is_multiple_of(2) => remove(&pool, name).await,
                names => pool.delete(&strs(names)).await,
            }
        })
    })
}

/// Removed while it is open, deleted at its last close.
async fn remove(pool: &Pool<LyingDevice>, name: &str) -> Result<(), Error> {
    let open = pool.volume(name)?;
    pool.remove_file(name)?;
    flush_with_patience(pool).await?;
    drop(open);
    Ok(())
}
