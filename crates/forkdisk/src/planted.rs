//! Known mistakes, for the simulator: it switches one on and must find it.
//!
//! Each is one line of the engine that asks `planted`. Without the cargo feature `planted` the
//! answer is the constant `false` and the line is gone.

macro_rules! bugs {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// One mistake.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Bug {
            $($(#[$doc])* $variant,)*
        }

        #[cfg(feature = "planted")]
        impl Bug {
            /// All of them.
            pub const ALL: &[Bug] = &[$(Bug::$variant,)*];

            /// Whether it takes an origin to show.
            pub fn is_of_origins(self) -> bool {
                self as usize >= Bug::OriginBeforeRecord as usize && self as usize <= Bug::FlattenRecordFirst as usize
            }

            /// Its name on the command line.
            pub fn name(self) -> &'static str {
                match self {
                    $(Bug::$variant => $name,)*
                }
            }
        }
    };
}

bugs! {
    /// Opening a pool, the log of counts is passed over.
    CountLogForgotten = "count-log-forgotten",
    /// The log goes on counting when the pages have all that it says.
    CountLogOutlivesPages = "count-log-outlives-pages",
    /// A segment is written over the first ones of the log.
    CountLogOverwritten = "count-log-overwritten",
    /// The log is emptied before the pages that have what it says are durable.
    CountLogEmptiedEarly = "count-log-emptied-early",
    /// A repair counts one reference where there are several.
    RepairCountsOnce = "repair-counts-once",
    /// After a repair the old log of counts goes on counting.
    RepairKeepsLog = "repair-keeps-log",
    /// A block that is demoted loses its count, and its pages do not get it.
    DemotionKeepsPageCounts = "demotion-keeps-page-counts",
    /// A leaf is promoted as soon as its first and last page are in place.
    PromotesIncompleteRun = "promotes-incomplete-run",
    /// On a full host, data is given back early before the journal says durably that it was given up.
    DeadDiscardedBeforeDurable = "dead-discarded-before-durable",
    /// On a full host, tables are given back early together with data.
    DeadTablesDiscarded = "dead-tables-discarded",
    /// Every mapped page is overwritten in place.
    WritesSharedInPlace = "writes-shared-in-place",
    /// What nobody else refers to any more is overwritten in place before that is durable.
    WritesInPlaceTooEarly = "writes-in-place-too-early",
    /// A clone takes what it shares with its source for its own.
    CloneKeepsSharedAt = "clone-keeps-shared-at",
    /// A range clone's source takes what it now shares for its own.
    RangeCloneKeepsSharedAt = "range-clone-keeps-shared-at",
    /// A range clone's target takes what it got for newly written.
    RangeCloneRejuvenates = "range-clone-rejuvenates",
    /// A table that a range clone shares is not counted.
    SharedTableUncounted = "shared-table-uncounted",
    /// A range clone's target takes a table that it got for its own.
    SharedTableRejuvenates = "shared-table-rejuvenates",
    /// A table that a range clone takes the place of is forgotten with all that only it held.
    ReplacedTableForgotten = "replaced-table-forgotten",
    /// The entry above a table says that it maps one page less than it does.
    TableCountsOneShort = "table-counts-one-short",
    /// A volume that was rolled back takes what it shares with its snapshot for its own.
    RollbackLowersSharedAt = "rollback-lowers-shared-at",
    /// A snapshot's root is not counted.
    SnapshotWithoutCount = "snapshot-without-count",
    /// A rollback counts the snapshot's root once too often.
    RollbackCountsTwice = "rollback-counts-twice",
    /// A volume whose contents became those of another goes on as if they were its own only.
    ReplaceKeepsSourceAlone = "replace-keeps-source-alone",
    /// A deleted volume is forgotten before its space is given back.
    DeleteKeepsCounts = "delete-keeps-counts",
    /// The journal is written before the data it speaks of is durable.
    DataFlushSkipped = "data-flush-skipped",
    /// A commit ends before its journal records are durable.
    JournalFlushSkipped = "journal-flush-skipped",
    /// Recovery takes a group without looking at the data that it vouches for.
    VouchedNotVerified = "vouched-not-verified",
    /// A page that a group on the device vouches for is written in place.
    VouchedWrittenInPlace = "vouched-written-in-place",
    /// A page that a pending record vouches for is written in place, and the record is written as it is.
    PendingChangedUnnoticed = "pending-changed-unnoticed",
    /// What only this process knows to be durable is taken for something that the device says.
    ConfirmedTooEarly = "confirmed-too-early",
    /// Recovery leaves groups as they were that it had to look at the data for.
    RecoveryLeavesUnsealed = "recovery-leaves-unsealed",
    /// FUA is acknowledged without a commit.
    FuaWithoutCommit = "fua-without-commit",
    /// What was discarded since a snapshot counts as unchanged.
    ChangesLeaveOutHoles = "changes-leave-out-holes",
    /// Where two maps have different tables of level 0, only the first page is compared.
    ChangesTakeTheFirstPage = "changes-take-the-first-page",
    /// What writes under way will map does not count towards a quota.
    QuotaForgetsClaims = "quota-forgets-claims",
    /// A flush does nothing for a volume that has mapped nothing new.
    FlushCoversOneVolume = "flush-covers-one-volume",
    /// Who asks while a commit runs is content with that one.
    FlushJoinsRunningCommit = "flush-joins-running-commit",
    /// A flush that failed is tried once more, and that is believed.
    FailedFlushRetried = "failed-flush-retried",
    /// A flush that failed fails its callers, but not the pool.
    FailedFlushForgotten = "failed-flush-forgotten",
    /// The superblock is turned over before what it points to is written.
    SuperblockBeforePages = "superblock-before-pages",
    /// The superblock is turned over although the flush before it failed.
    SuperblockAfterFailedFlush = "superblock-after-failed-flush",
    /// A superblock whose checksum is wrong is believed.
    TornSuperblockAccepted = "torn-superblock-accepted",
    /// A record that a checkpoint covers is made longer afterwards.
    RecordsGrowOverMarks = "records-grow-over-marks",
    /// The volatile log of an earlier life of the pool is replayed.
    VolatileOfEarlierLife = "volatile-of-earlier-life",
    /// An entry of the volatile log is replayed whatever its checksum says.
    VolatileTornTaken = "volatile-torn-taken",
    /// Records of the volatile log are replayed although the journal has them.
    VolatileReplayedTwice = "volatile-replayed-twice",
    /// The volatile log is given up before what it held is durable.
    VolatileEndedEarly = "volatile-ended-early",
    /// The commit that takes over what the volatile log held counts as one of the next life.
    VolatileTakenOverActive = "volatile-taken-over-active",
    /// Attributes are taken over from the volatile log into the journal, and not into memory.
    VolatileForgetsAttributes = "volatile-forgets-attributes",
    /// What has no room in the volatile log is acknowledged all the same.
    NamesOutrunVolatileLog = "names-outrun-volatile-log",
    /// A chunk of an origin is overwritten as soon as the volatile log says where it is kept.
    VolatileBelievedDurable = "volatile-believed-durable",
    /// Volumes without a name that a crash has left are not deleted by the next open.
    OrphansOutliveCrash = "orphans-outlive-crash",
    /// What is acknowledged waits until somebody asks for a flush.
    IntervalForgotten = "interval-forgotten",
    /// The superblock is written over the only whole one first.
    ChosenSuperblockFirst = "chosen-superblock-first",
    /// The second superblock is never written again.
    SecondSuperblockSkipped = "second-superblock-skipped",
    /// A checkpoint writes one superblock only, in turns, and of the two the older one counts.
    OlderSuperblockChosen = "older-superblock-chosen",
    /// A page of which nothing is left is handed out again before the checkpoint.
    FreedSpaceReusedAtOnce = "freed-space-reused-at-once",
    /// Space is handed out again while plans made before may still read or write it.
    PlanOutlivesPage = "plan-outlives-page",
    /// Pages that came into use again are discarded.
    DiscardAfterReuse = "discard-after-reuse",
    /// The rest of a new page is whatever lay there.
    ZeroFillSkipped = "zero-fill-skipped",
    /// The rest of a broken page is zeroes.
    NeighboursLostInBreak = "neighbours-lost-in-break",
    /// A page is mapped before it is written.
    MappedBeforeWritten = "mapped-before-written",
    /// A page is mapped although its write failed.
    FailedWritePublished = "failed-write-published",
    /// What could not be read is copied all the same.
    CopyErrorSwallowed = "copy-error-swallowed",
    /// A write that finds no space maps the pages it had found before.
    FullLeavesHalf = "full-leaves-half",
    /// A write gives up its range before it is on the device.
    LockReleasedEarly = "lock-released-early",
    /// A write goes before an earlier one next to it that has to wait.
    NeighbourOvertakes = "neighbour-overtakes",
    /// A write that another takes along is acknowledged, but not written.
    TakenAlongForgotten = "taken-along-forgotten",
    /// A discard does not wait for writes to its range.
    DiscardIgnoresWriters = "discard-ignores-writers",
    /// A snapshot does not wait for writes in place that were planned before it.
    SnapshotIgnoresWriters = "snapshot-ignores-writers",
    /// A shrunk volume keeps its tail mapped.
    ShrinkKeepsTail = "shrink-keeps-tail",
    /// A new name is in the journal, but not in the checkpoint.
    RenameNotCheckpointed = "rename-not-checkpointed",
    /// The pool counts on its new length before the device has it.
    GrowLengthNotDurable = "grow-length-not-durable",
    /// The journal goes round over records that recovery still needs.
    JournalOverwritesTail = "journal-overwrites-tail",
    /// A checkpoint leaves out what was published while it was written.
    ReplayStartsTooLate = "replay-starts-too-late",
    /// Records that the checkpoint contains are replayed once more.
    RecoveryReplaysTwice = "recovery-replays-twice",
    /// Records of an earlier open are replayed.
    StaleIncarnationReplayed = "stale-incarnation-replayed",
    /// Records of an earlier round of the journal are replayed.
    EarlierRoundReplayed = "earlier-round-replayed",
    /// A checkpoint writes count pages where the current ones are.
    CountSlotOverwritten = "count-slot-overwritten",
    /// A count page is read from the slot that an unfinished checkpoint wrote.
    OrphanedCountSlotTaken = "orphaned-count-slot-taken",
    /// A leaf of counts is written anew without the references noted above it.
    CommonCountsLost = "common-counts-lost",
    /// Count pages in memory stay as they were before the checkpoint.
    StaleCountsCached = "stale-counts-cached",
    /// An origin is written before the record of the copy is durable.
    OriginBeforeRecord = "origin-before-record",
    /// The record of a copy is published before the copy is written.
    RecordBeforeCopy = "record-before-copy",
    /// The record of a chunk that is kept goes without a flush before it and without a checksum.
    KeptNotVouched = "kept-not-vouched",
    /// What was kept for a deleted snapshot of an origin is given up although an older one needs it.
    KeptLostOnDelete = "kept-lost-on-delete",
    /// What was kept for a deleted snapshot goes to the oldest instead of the next older one.
    RelabelToOldest = "relabel-to-oldest",
    /// Handing a kept chunk on to the next older snapshot takes it from the deleted one first, and may stop in between.
    ReleasedInSteps = "released-in-steps",
    /// A read of a snapshot that goes to the origin does not hold the chunk.
    OriginReaderNotHeld = "origin-reader-not-held",
    /// A snapshot of an origin is taken while writes are under way or not durable.
    OriginNotFlushed = "origin-not-flushed",
    /// Whatever is kept for any snapshot counts for the newest.
    OldCopyTakenForNew = "old-copy-taken-for-new",
    /// An independent snapshot takes the chain's copies for its own.
    IndependentNotKept = "independent-not-kept",
    /// A write that begins in a chunk that is kept does not look at the next.
    SecondChunkForgotten = "second-chunk-forgotten",
    /// A copy that could not be read from the origin is kept all the same.
    OriginCopyErrorSwallowed = "origin-copy-error-swallowed",
    /// A chunk that was kept when the pool failed is taken for kept.
    OriginIgnoresFailedPool = "origin-ignores-failed-pool",
    /// Nothing is kept any more for a snapshot whose deletion is not durable yet.
    PendingDeletionBelieved = "pending-deletion-believed",
    /// The root of a dead snapshot's map stays while what was kept for it is given back.
    ReapedRootStays = "reaped-root-stays",
    /// New snapshots of an origin count as settled when its flush begins, not when it has ended.
    SettledTooEarly = "settled-too-early",
    /// A failed flush of an origin takes back the snapshots that were new when it began, whatever another flush made
    /// durable meanwhile.
    SettledFromCopy = "settled-from-copy",
    /// A write of an origin goes on before the record is durable that it reaches a sample.
    WrittenNotedLate = "written-noted-late",
    /// What an origin's device is recognised by is taken of contents that a power cut may still take back.
    StampedUnflushed = "stamped-unflushed",
    /// An origin's device is not looked at when it is opened.
    OtherDeviceTaken = "other-device-taken",
    /// A write of an origin goes on when its old contents could not be kept.
    WrittenWithoutCopy = "written-without-copy",
    /// An origin that is being rolled back is read as its device is.
    RollbackNotShown = "rollback-not-shown",
    /// What a rollback overwrites is not kept for newer snapshots.
    RolledBackWithoutCopy = "rolled-back-without-copy",
    /// A chunk counts as back although that is in a cache only.
    BackBeforeFlush = "back-before-flush",
    /// Nobody notes that a chunk that is written is back.
    BackNotNoted = "back-not-noted",
    /// The list of chunks that are back outlives the rollback.
    BackListStays = "back-list-stays",
    /// A rollback that has ended counts as that before it is durable.
    RollbackEndBelieved = "rollback-end-believed",
    /// The cursor of a rollback is one chunk ahead.
    CursorTooFar = "cursor-too-far",
    /// What shows through is copied while others may write there.
    FlattenIgnoresWriters = "flatten-ignores-writers",
    /// A clone counts as independent before all that shows through is its own.
    FlattenRecordFirst = "flatten-record-first",
    /// The search for free pages finds those that were handed out since the last checkpoint.
    SearchFindsTaken = "search-finds-taken",
    /// What a view walks over is given to others.
    ViewHoldsNothing = "view-holds-nothing",
    /// A view takes counts from checkpoints after its own.
    ViewTakesNewCounts = "view-takes-new-counts",
    /// A map table whose checksum is wrong is believed.
    TableChecksumIgnored = "table-checksum-ignored",
    /// The copier takes what it could not read or write for copied.
    CopierErrorSwallowed = "copier-error-swallowed",
    /// A job that gets no buffer goes to the end of the queue.
    StarvedJobGoesLast = "starved-job-goes-last",
    /// A chunk is mapped to its copy before that is written.
    CopyMappedBeforeWritten = "copy-mapped-before-written",
    /// A write that joins a copy under way is forgotten.
    JoinedWriteLost = "joined-write-lost",
    /// A write joins a copy that has been written already.
    JoinedWriteTooLate = "joined-write-too-late",
    /// A client's bytes are laid over the wrong place of a copy.
    GivenBytesMisplaced = "given-bytes-misplaced",
    /// A copy that was cancelled because another of the same write failed is mapped.
    CancelledCopyMapped = "cancelled-copy-mapped",
    /// Holes of a chunk that is copied get whatever lies in the new place.
    CopyFillsHoles = "copy-fills-holes",
    /// A chunk is cloned over the client's bytes, after they were written.
    CloneOverGiven = "clone-over-given",
    /// Of the writes that go along with a chunk that is cloned only the first is written.
    JoinedBesideClone = "joined-beside-clone",
    /// Pages are moved without looking whether they were written meanwhile.
    GatherIgnoresWrites = "gather-ignores-writes",
    /// Pages are copied while writes in place that were planned before are under way.
    GatherOvertakesWriters = "gather-overtakes-writers",
    /// A page that was moved is given up for all who refer to it, and only one of them follows.
    GatherFreesShared = "gather-frees-shared",
    /// The place that pages are copied to is not held while a checkpoint ends.
    GatherOutlivesCheckpoint = "gather-outlives-checkpoint",
    /// Pages that were moved count as newly written.
    GatherRejuvenates = "gather-rejuvenates",
    /// A table that is changed for all who share it counts as new.
    GatherMakesTablesYoung = "gather-makes-tables-young",
    /// What was moved is not taken off the figure of fragmentation.
    GatherKeepsSeams = "gather-keeps-seams",
    /// A block that was brought into one piece does not know what a crash would share again.
    GatherForgetsLosses = "gather-forgets-losses",
    /// The move is in the journal before the copy is durable.
    GatherRecordBeforeData = "gather-record-before-data",
    /// The rest of a page that was given in part is not what the source holds when the chunk is cloned.
    TornPageNotCompleted = "torn-page-not-completed",
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
