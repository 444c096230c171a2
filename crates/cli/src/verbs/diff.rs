//! `diff`: shows the differences of two volumes or snapshots.

use anyhow::{Result, bail};
use clap::Args;
use forkdisk_control::{Change, params};
use serde::Serialize;

use crate::address::{Address, same_pool};
use crate::global::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::session::{Access, with_pool};
use crate::verbs::examples::examples;

/// Show which parts of two volumes or snapshots differ
///
/// Without RIGHT, LEFT is a snapshot and is compared with its volume. Classes: different (both have data),
/// left_only (the right one has none), right_only.
#[derive(Args)]
#[command(after_help = examples!["forkdisk diff /srv/pool.img/vm1@monday /srv/pool.img/vm1"])]
pub struct DiffArgs {
    #[arg(value_name = "LEFT")]
    left: String,

    #[arg(value_name = "RIGHT")]
    right: Option<String>,

    #[command(flatten)]
    table: TableArgs,
}

/// A range in which the right side differs from the left; `exists` is false if the right side has no data there.
#[derive(Serialize)]
struct Record {
    offset: u64,
    length: u64,
    exists: bool,
}

impl From<&Change> for Record {
    fn from(change: &Change) -> Record {
        Record { offset: change.offset, length: change.length, exists: change.exists() }
    }
}

/// Compares maps, not data: shared parts are skipped in constant time.
pub fn run(args: DiffArgs, global: &Global) -> Result<()> {
    let left = global.object(&args.left)?;
    let right = match &args.right {
        Some(text) => global.object(text)?,
        None => own_volume(&left)?,
    };
    let addresses = [left, right];
    let pool = same_pool(&addresses)?;
    let [left, right] = addresses.map(|address| address.name);
    let changes = with_pool(global, &pool, Access::Read, async |caller| {
        let (mut changes, mut from) = (Vec::new(), Some(0));
        while let Some(at) = from {
            let method = params::Diff { left: left.clone(), right: right.clone(), from: at };
            let part = caller.call(method, None).await?;
            part.changes.into_iter().for_each(|change| add(&mut changes, change));
            from = part.next;
        }
        Ok(changes)
    })?;
    if global.output.json() {
        return print_json(&changes.iter().map(Record::from).collect::<Vec<_>>());
    }
    let header = [Column::Right("OFFSET"), Column::Right("LENGTH"), Column::Left("CLASS")];
    let cells = |change: &Change| vec![change.offset.to_string(), args.table.size(change.length), change.class.clone()];
    args.table.print(&header, &changes.iter().map(cells).collect::<Vec<_>>())
}

/// Appends `next`; rejoins a run that was cut between two parts.
fn add(changes: &mut Vec<Change>, next: Change) {
    match changes.last_mut() {
        Some(last) if last.class == next.class && last.offset + last.length == next.offset => {
            last.length += next.length;
        }
        _ => changes.push(next),
    }
}

fn own_volume(left: &Address) -> Result<Address> {
    if left.snapshot().is_none() {
        bail!("{} is a volume: name what to compare it with", left.show());
    }
    Ok(Address { pool: left.pool.clone(), name: left.volume().to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_was_cut_is_put_together() {
        let run = |offset, class: &str| Change { offset, length: 10, class: class.into() };
        let mut changes = Vec::new();
        for next in [run(0, "different"), run(10, "different"), run(20, "left_only"), run(40, "left_only")] {
            add(&mut changes, next);
        }
        let lengths: Vec<(u64, u64)> = changes.iter().map(|change| (change.offset, change.length)).collect();
        assert_eq!(lengths, [(0, 20), (20, 10), (40, 10)]);
    }
}
