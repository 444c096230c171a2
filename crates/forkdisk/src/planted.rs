//! Known mistakes, for the simulator: it switches one on and must find it.
//!
//! Without the cargo feature `planted` every question is answered by a constant `false`.

/// One mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Bug {
    DemotionKeepsPageCounts,
    PromotesIncompleteRun,
    WritesSharedInPlace,
    CloneKeepsSharedAt,
    SnapshotWithoutCount,
    DataFlushSkipped,
    JournalFlushSkipped,
    FuaWithoutCommit,
    SuperblockBeforePages,
    SuperblockAfterFailedFlush,
    FreedSpaceReusedAtOnce,
    ZeroFillSkipped,
    NeighboursLostInBreak,
    OlderSuperblockChosen,
    StaleIncarnationReplayed,
    RecoveryReplaysTwice,
    MappedBeforeWritten,
    FailedFlushForgotten,
    DiscardAfterReuse,
    DeleteKeepsCounts,
    GrowLengthNotDurable,
}

#[cfg(feature = "planted")]
mod switch {
    use std::cell::Cell;

    use super::Bug;

    thread_local! {
        static CURRENT: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Switches `bug` on for this thread (`None`: all off).
    pub fn set(bug: Option<Bug>) {
        CURRENT.set(bug);
    }

    /// Whether `bug` is switched on.
    pub(crate) fn planted(bug: Bug) -> bool {
        CURRENT.get() == Some(bug)
    }

    impl Bug {
        /// All of them.
        pub const ALL: &[Bug] = &[
            Bug::DemotionKeepsPageCounts,
            Bug::PromotesIncompleteRun,
            Bug::WritesSharedInPlace,
            Bug::CloneKeepsSharedAt,
            Bug::SnapshotWithoutCount,
            Bug::DataFlushSkipped,
            Bug::JournalFlushSkipped,
            Bug::FuaWithoutCommit,
            Bug::SuperblockBeforePages,
            Bug::SuperblockAfterFailedFlush,
            Bug::FreedSpaceReusedAtOnce,
            Bug::ZeroFillSkipped,
            Bug::NeighboursLostInBreak,
            Bug::OlderSuperblockChosen,
            Bug::StaleIncarnationReplayed,
            Bug::RecoveryReplaysTwice,
            Bug::MappedBeforeWritten,
            Bug::FailedFlushForgotten,
            Bug::DiscardAfterReuse,
            Bug::DeleteKeepsCounts,
            Bug::GrowLengthNotDurable,
        ];

        /// Its name on the command line.
        pub fn name(self) -> &'static str {
            match self {
                Bug::DemotionKeepsPageCounts => "demotion-keeps-page-counts",
                Bug::PromotesIncompleteRun => "promotes-incomplete-run",
                Bug::WritesSharedInPlace => "writes-shared-in-place",
                Bug::CloneKeepsSharedAt => "clone-keeps-shared-at",
                Bug::SnapshotWithoutCount => "snapshot-without-count",
                Bug::DataFlushSkipped => "data-flush-skipped",
                Bug::JournalFlushSkipped => "journal-flush-skipped",
                Bug::FuaWithoutCommit => "fua-without-commit",
                Bug::SuperblockBeforePages => "superblock-before-pages",
                Bug::SuperblockAfterFailedFlush => "superblock-after-failed-flush",
                Bug::FreedSpaceReusedAtOnce => "freed-space-reused-at-once",
                Bug::ZeroFillSkipped => "zero-fill-skipped",
                Bug::NeighboursLostInBreak => "neighbours-lost-in-break",
                Bug::OlderSuperblockChosen => "older-superblock-chosen",
                Bug::StaleIncarnationReplayed => "stale-incarnation-replayed",
                Bug::RecoveryReplaysTwice => "recovery-replays-twice",
                Bug::MappedBeforeWritten => "mapped-before-written",
                Bug::FailedFlushForgotten => "failed-flush-forgotten",
                Bug::DiscardAfterReuse => "discard-after-reuse",
                Bug::DeleteKeepsCounts => "delete-keeps-counts",
                Bug::GrowLengthNotDurable => "grow-length-not-durable",
            }
        }
    }
}

#[cfg(feature = "planted")]
pub(crate) use switch::planted;
#[cfg(feature = "planted")]
pub use switch::set;

/// Whether `bug` is switched on: never, in a product.
#[cfg(not(feature = "planted"))]
pub(crate) const fn planted(_bug: Bug) -> bool {
    false
}
