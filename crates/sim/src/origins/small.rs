//! Short histories of an origin explored completely: a crash at every step, masks of both disks.
//!
//! The origin has four chunks of a page, all written, and a snapshot; one chunk was written since. Operations
//! run in sequence, or two together; one flush of one disk may fail meanwhile.

use super::ops::delete::{Victim, delete};
use super::ops::fault::arm_flush;
use super::ops::flush::flush;
use super::ops::lives::{reopen, unprotect};
use super::ops::snapshot::{Sources, snapshot};
use super::ops::write::{Style, put, write};
use super::ops::{rollback::roll_back, sweep::touch, upkeep::checkpoint};
use super::run::Run;
use super::{Op, Setup};
use crate::disk::Crash;
use crate::driver::{CrashPoint, Life, Stats, Violation, Watch, World};

/// Most masks tried at one crash point; if there are more, they are spread over all.
const MAX_MASKS: u64 = 48;
/// The same if a flush fails: there are many such histories.
const MIN_MASKS: u64 = 6;

/// One operation with a fixed meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Small {
    Write,
    WriteFua,
    Other,
    Volume,
    Flush,
    Snapshot,
    Group,
    DeleteNewest,
    DeleteOldest,
    RollbackNewest,
    RollbackOldest,
    Unprotect,
    Checkpoint,
    Reopen,
    Kill,
}

impl Small {
    /// All operations.
    pub const ALL: &'static [Small] = &[
        Small::Write,
        Small::WriteFua,
        Small::Other,
        Small::Volume,
        Small::Flush,
        Small::Snapshot,
        Small::Group,
        Small::DeleteNewest,
        Small::DeleteOldest,
        Small::RollbackNewest,
        Small::RollbackOldest,
        Small::Unprotect,
        Small::Checkpoint,
        Small::Reopen,
        Small::Kill,
    ];

    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Small::Write => "write",
            Small::WriteFua => "fua",
            Small::Other => "other",
            Small::Volume => "volume",
            Small::Flush => "flush",
            Small::Snapshot => "snapshot",
            Small::Group => "group",
            Small::DeleteNewest => "delete-newest",
            Small::DeleteOldest => "delete-oldest",
            Small::RollbackNewest => "rollback-newest",
            Small::RollbackOldest => "rollback-oldest",
            Small::Unprotect => "unprotect",
            Small::Checkpoint => "checkpoint",
            Small::Reopen => "reopen",
            Small::Kill => "kill",
        }
    }

    /// Returns the operation with this name.
    pub fn from_name(name: &str) -> Option<Small> {
        Small::ALL.iter().copied().find(|op| op.name() == name)
    }
}

/// Operations that run concurrently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    /// One or two.
    pub ops: Vec<Small>,
    /// Steps between them.
    pub gap: u32,
    /// The n-th flush of a disk fails meanwhile (0: the pool's, 1: the origin's).
    pub strike: Option<(usize, u64)>,
}

impl Together {
    /// Returns a single operation.
    pub fn one(op: Small) -> Together {
        Together { ops: vec![op], gap: 0, strike: None }
    }
}

/// Runs a short history. Crashes are tried at every step of its last part and at the end, or only at the aim.
pub fn run_small(
    setup: &Setup,
    parts: &[Together],
    aim: Option<CrashPoint>,
    account: bool,
) -> (Stats, Option<Violation>, Vec<String>) {
    Run::conduct(setup, None, account, |run| {
        prepare(run)?;
        for (i, part) in parts.iter().enumerate() {
            let masks = if part.strike.is_some() { MIN_MASKS } else { MAX_MASKS };
            if i + 1 == parts.len() {
                run.watch = Some(Watch::new(aim, masks, part.strike.is_some()));
            }
            self::part(run, part, 100 * (i as u32 + 1))?;
        }
        for _ in 0..40 {
            // Background work continues after the acknowledgement.
            run.step()?;
        }
        run.watch = None;
        World::finish(run)
    })
}

fn prepare(run: &mut Run) -> Result<(), Violation> {
    touch(run, 1, (0..4).collect())?;
    small(run, Small::Flush, 2)?;
    run.drain()?;
    small(run, Small::Snapshot, 3)?;
    run.drain()?;
    touch(run, 4, vec![1])
}

fn part(run: &mut Run, part: &Together, number: u32) -> Result<(), Violation> {
    if let Some((disk, n)) = part.strike {
        arm_flush(run, disk, n);
    }
    for (i, &op) in part.ops.iter().enumerate() {
        for _ in 0..if i > 0 { part.gap } else { 0 } {
            run.step()?;
        }
        small(run, op, number + i as u32)?;
    }
    run.drain()?;
    if part.strike.is_some() {
        run.disarm();
        if run.session.has_failed() || run.session.faults_hit() > 0 {
            run.cut(Crash::Power, u64::from(number))?;
        }
    }
    Ok(())
}

fn small(run: &mut Run, op: Small, number: u32) -> Result<(), Violation> {
    let origin = run.known.origin;
    let newest = run.known.model.volumes().filter(|(_, v)| v.of == Some(origin)).count().saturating_sub(1) as u64;
    // For a snapshot: neither droppable nor writable; of the origin.
    let with = |first| Op::part(number, [first, 1, 1, 1, 0]);
    match op {
        Small::Write => put(run, number, 0, false),
        Small::WriteFua => put(run, number, 1, true),
        Small::Other => put(run, number, 2, false),
        Small::Volume => write(run, &Op { draws: [4, 1, 1, 8, 0], ..with(4) }, Style::Plain),
        Small::Flush => flush(run, &with(1)),
        Small::Snapshot => snapshot(run, &with(0), Sources::One),
        Small::Group => snapshot(run, &with(0), Sources::Group),
        Small::DeleteNewest => delete(run, &with(newest), Victim::OfOrigin).map(drop),
        Small::DeleteOldest => delete(run, &with(0), Victim::Oldest).map(drop),
        Small::RollbackNewest => roll_back(run, &with(newest)),
        Small::RollbackOldest => roll_back(run, &with(0)),
        Small::Unprotect => unprotect(run, &with(0)),
        Small::Checkpoint => checkpoint(run),
        Small::Reopen => reopen(run, &with(1)),
        Small::Kill => run.cut(Crash::Kill, 1),
    }
}

/// Whether every operation of the history has something to work on.
pub fn makes_sense(parts: &[Together]) -> bool {
    let mut snapshots = 1;
    parts.iter().flat_map(|part| &part.ops).all(|op| match op {
        Small::Snapshot | Small::Group => {
            snapshots += 1;
            true
        }
        Small::DeleteNewest | Small::DeleteOldest => {
            snapshots -= 1;
            snapshots >= 0
        }
        Small::Unprotect => {
            snapshots = 0;
            true
        }
        Small::RollbackNewest | Small::RollbackOldest => snapshots > 0,
        _ => true,
    })
}
