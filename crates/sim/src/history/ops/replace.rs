//! Volumes that get the contents of others, or their names.

use forkdisk::{Error, ErrorKind, Pool};

use super::control::{all, control, drawn_volume};
use crate::disk::LyingDevice;
use crate::driver::{Op, Operation, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Key};

pub static ROLLBACK: Operation<Volumes> = Operation {
    name: "rollback",
    weight: |profile| match profile {
        Forks => 9,
        Races => 6,
        Crowd | Large | Copies => 4,
        Mixed | Faults | Cuts | Blocks | Gathering | Quotas | Bounds => 3,
        Full | Calm | Files | Ranges | Hosts | Transactions | Folders | Lifetimes | Comparing => 2,
        _ => 0,
    },
    launch: |run, op| {
        let snapshot = place::choose(&place::snapshots(&run.known.model, None), op.draws[0]);
        snapshot.map_or(Ok(()), |snapshot| roll_back(run, snapshot))
    },
};

/// A volume gets the contents of another.
pub static REPLACE: Operation<Volumes> = Operation {
    name: "replace",
    weight: |profile| match profile {
        Files => 16,
        Gathering | Hosts => 2,
        _ => 0,
    },
    launch: replace,
};

/// A volume takes the name of another.
pub static USURP: Operation<Volumes> = Operation {
    name: "usurp",
    weight: |profile| match profile {
        Files => 8,
        _ => 0,
    },
    launch: usurp,
};

/// Rolls the volume of a snapshot back to it.
pub fn roll_back(run: &mut Run, snapshot: Key) -> Result<(), Violation> {
    let Some(volume) = run.known.model.get(snapshot).and_then(|v| v.of) else { return Ok(()) };
    control(run, Control::Rollback(volume, snapshot), |run| {
        let (pool, full) = (run.session.pool.clone(), run.known.model.name(snapshot));
        let name = run.known.model.name(volume);
        let short = full.rsplit('@').next().unwrap_or_default().to_owned();
        (format!("roll back to {full}"), async move { pool.rollback(&name, &short).await })
    })
}

/// As a file system does it: while the volume is open, published at once, made durable by a flush.
fn replace(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let Some(source) = place::choose(&all(run), op.draws[3]) else { return Ok(()) };
    let Some(key) = drawn_volume(run, op).filter(|&v| v != source) else { return Ok(()) };
    control(run, Control::Replace(key, source), |run| {
        let pool = run.session.pool.clone();
        let [name, source] = [key, source].map(|key| run.known.model.name(key));
        (format!("replace {name} by {source}"), async move {
            let (volume, source) = (pool.volume(&name)?, pool.volume(&source)?);
            volume.replace_with(&source).await?;
            flush_with_patience(&pool).await
        })
    })
}

/// The replaced volume is open or not.
fn usurp(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let mut free = place::volumes(&run.known.model);
    free.retain(|&key| place::snapshots(&run.known.model, Some(key)).is_empty());
    let Some(victim) = place::choose(&free, op.draws[3]) else { return Ok(()) };
    let Some(key) = drawn_volume(run, op).filter(|&v| v != victim) else { return Ok(()) };
    control(run, Control::Usurp(key, victim), |run| {
        let pool = run.session.pool.clone();
        let [from, to] = [key, victim].map(|key| run.known.model.name(key));
        (format!("rename {from} over {to}"), async move {
            let open = (to.len().is_multiple_of(2)).then(|| pool.volume(&to)).transpose()?;
            pool.rename_file(&from, &to, true)?;
            flush_with_patience(&pool).await?;
            drop(open);
            Ok(())
        })
    })
}

/// Retries a flush that the host has no space for: what it makes durable has already been done.
pub async fn flush_with_patience(pool: &Pool<LyingDevice>) -> Result<(), Error> {
    loop {
        match pool.flush().await {
            Err(e) if e.kind() == ErrorKind::NoSpace => {}
            outcome => return outcome,
        }
    }
}
