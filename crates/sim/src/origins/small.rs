//! Short histories of an origin explored completely: a crash at every step, masks of both disks.
//!
//! The origin has four chunks of a page, all written, and a snapshot; one chunk was written since. Operations
//! run in sequence, or two together; one flush of one disk may fail meanwhile.

use super::run::Run;
use super::{Kind, Op, Setup};
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
        run.prepare()?;
        for (i, part) in parts.iter().enumerate() {
            let masks = if part.strike.is_some() { MIN_MASKS } else { MAX_MASKS };
            if i + 1 == parts.len() {
                run.watch = Some(Watch::new(aim, masks, part.strike.is_some()));
            }
            run.part(part, 100 * (i as u32 + 1))?;
        }
        for _ in 0..40 {
            // Background work continues after the acknowledgement.
            run.step()?;
        }
        run.watch = None;
        World::finish(run)
    })
}

impl Run {
    fn prepare(&mut self) -> Result<(), Violation> {
        self.touch(1, (0..4).collect())?;
        self.small(Small::Flush, 2)?;
        self.drain()?;
        self.small(Small::Snapshot, 3)?;
        self.drain()?;
        self.touch(4, vec![1])
    }

    fn part(&mut self, part: &Together, number: u32) -> Result<(), Violation> {
        if let Some((disk, n)) = part.strike {
            self.arm_flush(disk, n);
        }
        for (i, &op) in part.ops.iter().enumerate() {
            for _ in 0..if i > 0 { part.gap } else { 0 } {
                self.step()?;
            }
            self.small(op, number + i as u32)?;
        }
        self.drain()?;
        if part.strike.is_some() {
            self.disarm();
            if self.session.has_failed() || self.session.faults_hit() > 0 {
                self.cut(Crash::Power, u64::from(number))?;
            }
        }
        Ok(())
    }

    fn small(&mut self, op: Small, number: u32) -> Result<(), Violation> {
        let origin = self.known.origin;
        let newest = self.known.model.volumes().filter(|(_, v)| v.of == Some(origin)).count().saturating_sub(1) as u64;
        // For a snapshot: neither droppable nor writable; of the origin.
        let with = |kind, first| Op { kind, number, gap: 0, draws: [first, 1, 1, 1] };
        match op {
            Small::Write => self.put(number, 0, false),
            Small::WriteFua => self.put(number, 1, true),
            Small::Other => self.put(number, 2, false),
            Small::Volume => self.write(&Op { draws: [4, 1, 1, 8], ..with(Kind::Write, 4) }),
            Small::Flush => self.flush(&with(Kind::Flush, 1)),
            Small::Snapshot => self.snapshot(&with(Kind::Snapshot, 0)),
            Small::Group => self.snapshot(&with(Kind::Group, 0)),
            Small::DeleteNewest => self.delete(&with(Kind::DeleteAndCut, newest)).map(drop),
            Small::DeleteOldest => self.delete(&with(Kind::DeleteOldest, 0)).map(drop),
            Small::RollbackNewest => self.roll_back(&with(Kind::Rollback, newest)),
            Small::RollbackOldest => self.roll_back(&with(Kind::Rollback, 0)),
            Small::Unprotect => self.unprotect(&with(Kind::Unprotect, 0)),
            Small::Checkpoint => self.upkeep("checkpoint", |pool| async move { pool.checkpoint().await.into() }),
            Small::Reopen => self.reopen(&with(Kind::Reopen, 1)),
            Small::Kill => self.cut(Crash::Kill, 1),
        }
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
