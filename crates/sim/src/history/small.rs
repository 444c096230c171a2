//! Short histories explored completely: a crash at every step, under every mask of the rule.
//!
//! Volume `a` has four pages, three of them written, and a snapshot `a@0` that shares them; `b` has four
//! pages, one of them written. Operations run in sequence.

use super::ops::clear::{Clearing, clear};
use super::ops::fork::{clone, snapshot};
use super::ops::{
    create::create, delete::delete, flush::flush, lives::reopen, rename::rename, replace::roll_back, resize::resize,
    share::share, upkeep::checkpoint, upkeep::grow_to, write::write,
};
use super::place::Place;
use super::run::{AllowedFailure, Run};
use super::{CrashPoint, Op, Setup, Stats, Violation};
use crate::driver::{Watch, World};
use crate::model::Key;

const PAGE: u64 = 4096;
/// Most masks tried at one crash point; if the rule has more, they are spread over all.
const MAX_MASKS: u64 = 600;

/// One operation with a fixed meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names, and the table below, say it")]
pub enum Small {
    Write,
    WriteFua,
    WritePart,
    WriteNew,
    WriteB,
    Flush,
    Discard,
    Zero,
    Create,
    Snapshot,
    DeleteSnapshot,
    Group,
    Clone,
    CloneRange,
    Rollback,
    Rename,
    Shrink,
    Extend,
    DeleteB,
    Grow,
    Checkpoint,
    Reopen,
}

impl Small {
    /// All operations.
    pub const ALL: &'static [Small] = &[
        Small::Write,
        Small::WriteFua,
        Small::WritePart,
        Small::WriteNew,
        Small::WriteB,
        Small::Flush,
        Small::Discard,
        Small::Zero,
        Small::Create,
        Small::Snapshot,
        Small::DeleteSnapshot,
        Small::Group,
        Small::Clone,
        Small::CloneRange,
        Small::Rollback,
        Small::Rename,
        Small::Shrink,
        Small::Extend,
        Small::DeleteB,
        Small::Grow,
        Small::Checkpoint,
        Small::Reopen,
    ];

    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Small::Write => "write",
            Small::WriteFua => "fua",
            Small::WritePart => "part",
            Small::WriteNew => "new",
            Small::WriteB => "write-b",
            Small::Flush => "flush",
            Small::Discard => "discard",
            Small::Zero => "zero",
            Small::Create => "create",
            Small::Snapshot => "snapshot",
            Small::DeleteSnapshot => "delete-snapshot",
            Small::Group => "group",
            Small::Clone => "clone",
            Small::CloneRange => "clone-range",
            Small::Rollback => "rollback",
            Small::Rename => "rename",
            Small::Shrink => "shrink",
            Small::Extend => "extend",
            Small::DeleteB => "delete-b",
            Small::Grow => "grow",
            Small::Checkpoint => "checkpoint",
            Small::Reopen => "reopen",
        }
    }

    /// Returns the operation with this name.
    pub fn from_name(name: &str) -> Option<Small> {
        Small::ALL.iter().copied().find(|op| op.name() == name)
    }

    /// Whether every operation of the history has something to work on.
    pub fn makes_sense(history: &[Small]) -> bool {
        let (mut b, mut snapshots, mut created, mut cloned) = (true, 1u32, false, false);
        history.iter().all(|op| match op {
            Small::WriteB | Small::CloneRange | Small::Group => b,
            Small::DeleteB => std::mem::replace(&mut b, false),
            Small::Snapshot => {
                snapshots += 1;
                true
            }
            Small::DeleteSnapshot => {
                let any = snapshots > 0;
                snapshots = snapshots.saturating_sub(1);
                any
            }
            Small::Rollback => snapshots > 0,
            Small::Create => !std::mem::replace(&mut created, true),
            Small::Clone => !std::mem::replace(&mut cloned, true),
            _ => true,
        })
    }
}

/// Runs a short history. Crashes are tried at every step of the last operation and at the end, or
/// only at the aim.
pub fn run_small(
    setup: &Setup,
    ops: &[Small],
    aim: Option<CrashPoint>,
    account: bool,
) -> (Stats, Option<Violation>, Vec<String>) {
    Run::conduct(setup, None, account, |run| {
        prepare(run)?;
        for (i, &op) in ops.iter().enumerate() {
            if i + 1 == ops.len() {
                run.watch = Some(Watch::new(aim, MAX_MASKS, false));
            }
            small(run, op, i as u32 + 10)?;
            run.drain()?;
        }
        for _ in 0..40 {
            // Background work continues after the acknowledgement.
            run.step()?;
        }
        run.watch = None;
        World::finish(run)
    })
}

/// The volume that began as `a`, whatever its name is now.
const A: Key = 1;
/// The volume that began as `b`.
const B: Key = 2;

pub fn prepare(run: &mut Run) -> Result<(), Violation> {
    for name in ["a", "b"] {
        create(run, name.into(), 4 * PAGE)?;
        run.drain()?;
    }
    put(run, 1, A, 0, 3 * PAGE, false)?;
    put(run, 2, B, 0, PAGE, true)?;
    snapshot(run, vec![(A, "0".into())])?;
    run.drain()?;
    put(run, 3, A, PAGE, PAGE, true)
}

pub fn put(run: &mut Run, number: u32, key: Key, offset: u64, len: u64, fua: bool) -> Result<(), Violation> {
    let draws = [0, 0, 0, u64::from(!fua), 0];
    let op = Op::part(number, draws);
    write(run, &op, key, Some(Place { offset, len }), AllowedFailure::Nothing)?;
    run.drain()
}

pub fn small(run: &mut Run, op: Small, number: u32) -> Result<(), Violation> {
    let (a, b) = (A, B);
    let last = run.known.model.volumes().filter(|(_, v)| v.of == Some(a)).map(|(key, _)| key).last();
    match op {
        Small::Write => put(run, number, a, 0, PAGE, false),
        Small::WriteFua => put(run, number, a, PAGE, PAGE, true),
        Small::WritePart => put(run, number, a, 512, 1024, false),
        Small::WriteNew => put(run, number, a, 3 * PAGE, 512, false),
        Small::WriteB => put(run, number, b, 0, 2 * PAGE, false),
        Small::Flush => flush(run, Some(a)),
        Small::Discard => clear(run, a, Clearing::Discard, 0, PAGE),
        Small::Zero => clear(run, a, Clearing::Zero { fua: false }, PAGE + 512, PAGE),
        Small::Create => create(run, "n".into(), 2 * PAGE),
        Small::Snapshot => snapshot(run, vec![(a, format!("s{number}"))]),
        Small::DeleteSnapshot => last.map_or(Ok(()), |key| delete(run, vec![key])),
        Small::Group => {
            let name = format!("g{number}");
            snapshot(run, vec![(a, name.clone()), (b, name)])
        }
        Small::Clone => clone(run, a, "c".into()),
        Small::CloneRange => share(run, (a, 0), (b, PAGE), 2 * PAGE),
        Small::Rollback => last.map_or(Ok(()), |key| roll_back(run, key)),
        Small::Rename => rename(run, a, format!("r{number}")),
        Small::Shrink => resize(run, a, PAGE + 1024),
        Small::Extend => resize(run, a, 6 * PAGE),
        Small::DeleteB => {
            let mut all: Vec<Key> =
                run.known.model.volumes().filter(|(_, v)| v.of == Some(b)).map(|(k, _)| k).collect();
            all.push(b);
            delete(run, all)
        }
        Small::Grow => grow_to(run, 1 << 20),
        Small::Checkpoint => {
            checkpoint(run);
            Ok(())
        }
        Small::Reopen => reopen(run),
    }
}
