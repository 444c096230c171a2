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
        pub fn name(self) -> String {
            let mut out = String::new();
            for c in format!("{self:?}").chars() {
                if c.is_ascii_uppercase() && !out.is_empty() {
                    out.push('-');
                }
                out.push(c.to_ascii_lowercase());
            }
            out
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
