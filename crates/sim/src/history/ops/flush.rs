//! Flushes.

use super::target::{handle, with};
use crate::driver::{Class, Ended, Operation, Start, Violation};
use crate::history::op::Profile::*;
use crate::history::run::{Run, Volumes};
use crate::model::Key;

pub static FLUSH: Operation<Volumes> = Operation {
    name: "flush",
    weight: |profile| match profile {
        Journal => 80,
        Faults => 12,
        Mixed | Races => 10,
        Full | Cuts | Large | Hosts => 8,
        Forks | Blocks | Ranges | Copies | Gathering | Names => 6,
        Quotas | Bounds => 5,
        Calm | Files | Transactions | Folders | Lifetimes | Comparing => 4,
        Crowd => 3,
        Heirs => 1,
        _ => 0,
    },
    launch: |run, op| with(run, op, |run, key| flush(run, Some(key))),
};

pub static FLUSH_POOL: Operation<Volumes> = Operation {
    name: "flush-pool",
    weight: |profile| match profile {
        Names => 2,
        Mixed => 1,
        _ => 0,
    },
    launch: |run, _| flush(run, None),
};

pub fn flush(run: &mut Run, key: Option<Key>) -> Result<(), Violation> {
    let start = run.known.model.tick();
    let pool = run.session.pool.clone();
    let text = key.map_or("flush the pool".into(), |key| format!("flush {}", run.known.model.name(key)));
    // A flush of one volume covers all.
    let end = |run: &mut Run, ended: &Ended<Volumes>| {
        if ended.is_ok() {
            run.known.model.flushed(None, ended.op.start);
        }
        Ok(())
    };
    let start = Start::new(Class::Flush, start, key.into_iter().collect(), text);
    match key {
        None => run.submit(start, async move { pool.flush().await.into() }, end),
        Some(key) => {
            let volume = handle(run, key)?;
            run.submit(start, async move { volume.flush().await.into() }, end)
        }
    };
    Ok(())
}
