//! Planted bugs, for the simulator: it switches one on and must find it.
//!
//! Each replaces one expression of the engine, or a few. The only form is `correct!(right, Bug::Name => wrong)`:
//! the right expression first, then the wrong ones, each behind the bug that it is. Without the cargo feature
//! `planted` the macro expands to the right expression, and neither `Bug` nor a switch exists.

macro_rules! bugs {
    ($($(#[$doc:meta])* $variant:ident = $name:literal $(in $group:ident)?,)*) => {
        /// One planted bug.
        #[cfg(feature = "planted")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Bug {
            $($(#[$doc])* $variant,)*
        }

        #[cfg(feature = "planted")]
        impl Bug {
            /// All of them.
            pub const ALL: &[Bug] = &[$(Bug::$variant,)*];

            /// Returns the histories that can show it.
            pub fn group(self) -> Group {
                match self {
                    $(Bug::$variant => group!($($group)?),)*
                }
            }

            /// Returns its name on the command line.
            pub fn name(self) -> &'static str {
                match self {
                    $(Bug::$variant => $name,)*
                }
            }
        }
    };
}

/// The histories that can show a bug.
#[cfg(feature = "planted")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// Those of pools.
    Pools,
    /// Those in which chunks are copied.
    Copies,
    /// Those with an origin.
    Origins,
}

#[cfg(feature = "planted")]
macro_rules! group {
    () => {
        Group::Pools
    };
    ($group:ident) => {
        Group::$group
    };
}

// A row without a group is one of the pools.
bugs! {
    /// Opening a pool ignores the log of counts.
    CountLogForgotten = "count-log-forgotten",
    /// The log stays in effect after its changes are in the pages.
    CountLogOutlivesPages = "count-log-outlives-pages",
    /// A segment overwrites the first ones of the log.
    CountLogOverwritten = "count-log-overwritten",
    /// The log is emptied before the pages with its changes are durable.
    CountLogEmptiedEarly = "count-log-emptied-early",
    /// A repair counts one reference where there are several.
    RepairCountsOnce = "repair-counts-once",
    /// The old log of counts stays in effect after a repair.
    RepairKeepsLog = "repair-keeps-log",
    /// A block that is demoted loses its count, and its pages do not get it.
    DemotionKeepsPageCounts = "demotion-keeps-page-counts",
    /// A leaf is promoted as soon as its first and last page are in place.
    PromotesIncompleteRun = "promotes-incomplete-run",
    /// On a full host, data is discarded early, before the journal durably records its release.
    DeadDiscardedBeforeDurable = "dead-discarded-before-durable",
    /// On a full host, tables are discarded early together with data.
    DeadTablesDiscarded = "dead-tables-discarded",
    /// Free pages that the host has allocated can be allocated while they are being discarded.
    RetainedDiscardedUnguarded = "retained-discarded-unguarded",
    /// Pages count as retained, and are discarded, after they came into use again.
    RetainedOutlivesAllocation = "retained-outlives-allocation",
    /// Pages that were discarded late are made available a second time, when they may be in use.
    RetainedReturnedTwice = "retained-returned-twice",
    /// Every mapped page is overwritten in place.
    WritesSharedInPlace = "writes-shared-in-place",
    /// A page whose other references are gone is overwritten in place before that is durable.
    WritesInPlaceTooEarly = "writes-in-place-too-early",
    /// A clone treats what it shares with its source as exclusive.
    CloneKeepsSharedAt = "clone-keeps-shared-at",
    /// A range clone's source treats what it now shares as exclusive.
    RangeCloneKeepsSharedAt = "range-clone-keeps-shared-at",
    /// A range clone's target treats what it received as newly written.
    RangeCloneRejuvenates = "range-clone-rejuvenates",
    /// A table that a range clone shares is not counted.
    SharedTableUncounted = "shared-table-uncounted",
    /// A range clone's target treats a table that it received as exclusive.
    SharedTableRejuvenates = "shared-table-rejuvenates",
    /// A table that a range clone replaces is forgotten with everything that only it held.
    ReplacedTableForgotten = "replaced-table-forgotten",
    /// The entry above a table contains one page less than the table maps.
    TableCountsOneShort = "table-counts-one-short",
    /// A volume that was rolled back treats what it shares with its snapshot as exclusive.
    RollbackLowersSharedAt = "rollback-lowers-shared-at",
    /// A snapshot's root is not counted.
    SnapshotWithoutCount = "snapshot-without-count",
    /// A rollback counts the snapshot's root once too often.
    RollbackCountsTwice = "rollback-counts-twice",
    /// A volume whose contents were replaced by those of another treats them as exclusive.
    ReplaceKeepsSourceAlone = "replace-keeps-source-alone",
    /// A deleted volume is forgotten before its space is released.
    DeleteKeepsCounts = "delete-keeps-counts",
    /// The shared cache keeps a page that is overwritten in place.
    SharedCacheKeepsOverwritten = "shared-cache-keeps-overwritten",
    /// The shared cache keeps a page that was freed and is written again.
    SharedCacheKeepsReused = "shared-cache-keeps-reused",
    /// The shared cache keeps a page to which a gathered page is moved.
    SharedCacheKeepsGathered = "shared-cache-keeps-gathered",
    /// The shared cache keeps a page to which a copied chunk is written.
    SharedCacheKeepsCopied = "shared-cache-keeps-copied" in Copies,
    /// The shared cache keeps a page to which the host clones another.
    SharedCacheKeepsCloned = "shared-cache-keeps-cloned" in Copies,
    /// The shared cache keeps what a read that failed left in its buffer.
    SharedCacheKeepsFailed = "shared-cache-keeps-failed",
    /// A read that is in flight while its page is overwritten leaves the old contents in the shared cache.
    SharedReadOutlivesWrite = "shared-read-outlives-write",
    /// A read that begins while its page is being overwritten leaves its contents in the shared cache.
    SharedReadDuringWrite = "shared-read-during-write",
    /// Recovery accepts a group without verifying its data checksums.
    VouchedNotVerified = "vouched-not-verified",
    /// A page covered by a checksum of a group on the device is written in place.
    VouchedWrittenInPlace = "vouched-written-in-place",
    /// A page covered by a checksum of a pending record is written in place, and the record is written
    /// unchanged.
    PendingChangedUnnoticed = "pending-changed-unnoticed",
    /// What only this process knows to be durable is treated as recorded on the device.
    ConfirmedTooEarly = "confirmed-too-early",
    /// A group that was written without a flush after it counts as durable.
    UnflushedBelievedDurable = "unflushed-believed-durable",
    /// A flush that finds nothing to write behind a group without a flush leaves the device as it is.
    UnflushedAnswersFlush = "unflushed-answers-flush",
    /// A commit that leaves its flush out ends the commit interval.
    UnflushedEndsInterval = "unflushed-ends-interval",
    /// A commit that no request asked for leaves out the flush that orders data and records, too.
    UnaskedGroupBeforeData = "unasked-group-before-data",
    /// A commit writes its groups while an early group is being written to the same place.
    EarlyGroupNotAwaited = "early-group-not-awaited",
    /// A commit takes an early group for its own, whatever that contains.
    EarlyGroupTakenUnseen = "early-group-taken-unseen",
    /// An early group that is not the commit's lies where the volatile log says that the commit's groups are, until
    /// these are written.
    EarlyGroupErasedLate = "early-group-erased-late",
    /// Recovery after a kill replays an early group although the volatile log has other records in its place.
    EarlyGroupOutrunsLog = "early-group-outruns-log",
    /// A commit does not wait for the overlapping groups before it flushes.
    OverlappingGroupNotAwaited = "overlapping-group-not-awaited",
    /// Overlapping groups are written although their data has to be durable first.
    OverlappingGroupBeforeData = "overlapping-group-before-data",
    /// Recovery does not seal the groups whose data it had to verify.
    RecoveryLeavesUnsealed = "recovery-leaves-unsealed",
    /// The checksum of data is computed from memory that another process changes before it is written.
    SharedMemoryNotCopied = "shared-memory-not-copied",
    /// FUA is acknowledged without a commit.
    FuaWithoutCommit = "fua-without-commit",
    /// Pages discarded since a snapshot count as unchanged.
    ChangesLeaveOutHoles = "changes-leave-out-holes",
    /// Where two maps have different tables of level 0, only the first page is compared.
    ChangesTakeTheFirstPage = "changes-take-the-first-page",
    /// A write is compared with what is there up to the first sector of each page.
    ComparesFirstSector = "compares-first-sector",
    /// A write that is the same as what it would replace in its first page is dropped as a whole.
    DropsWholeWrite = "drops-whole-write",
    /// A page of zeroes is neither written nor unmapped.
    ZeroesNeitherWrittenNorUnmapped = "zeroes-neither-written-nor-unmapped",
    /// Pages that running writes will map do not count towards a quota.
    QuotaForgetsClaims = "quota-forgets-claims",
    /// A bound does not include what is promised to writes under way.
    BoundForgetsClaims = "bound-forgets-claims",
    /// Pages that become free stay charged.
    FreedPagesStayCharged = "bound-keeps-freed-pages",
    /// A block that something else refers to is credited.
    SharedBlockCredited = "bound-credits-shared-block",
    /// Pages of different accounts become one block entry.
    PromotionMergesAccounts = "bound-merges-accounts",
    /// A range clone charges nothing and enters its own account.
    RangeCloneForgetsAccount = "bound-range-clone-forgets-account",
    /// Moved pages stay charged at their old places.
    GatherChargesTwice = "bound-gather-charges-twice",
    /// What is charged is not part of a checkpoint.
    ChargesNotCheckpointed = "bound-not-checkpointed",
    /// A change of another property of a volume begins its account anew.
    LabelResetsCharge = "bound-reset-by-label",
    /// The bound of a folder does not include what is promised to writes to other volumes.
    FolderForgetsClaims = "bound-folder-forgets-claims",
    /// A volume that is renamed counts in the folder that it was in.
    MoveKeepsFolder = "bound-move-keeps-folder",
    /// After an open nothing is charged to folders.
    FolderCountLostAtOpen = "bound-folder-lost-at-open",
    /// What is charged in a folder does not count in the folder that this is in.
    NestedFolderIgnored = "bound-nested-folder-ignored",
    /// What a deleted volume was charged for, and clones of it hold, does not count in its folder.
    DeletedAccountForgotten = "bound-deleted-account-forgotten",
    /// What clones inherit from a folder is not in what a checkpoint writes.
    InheritedNotCheckpointed = "bound-inherited-not-checkpointed",
    /// Clones of snapshots inherit nothing.
    SnapshotCloneInheritsNothing = "bound-snapshot-clone-inherits-nothing",
    /// What is kept free for a volume is taken by others.
    OthersTakeReserve = "reserve-taken-by-others",
    /// After an open nothing is kept free.
    ReserveEndsWithOpen = "reserve-ends-with-open",
    /// Breaks of shared pages are not bounded, only first writes.
    BreaksUnbounded = "bound-ignores-breaks",
    /// A flush does nothing for a volume that has mapped nothing new.
    FlushCoversOneVolume = "flush-covers-one-volume",
    /// A flush requested while a commit runs waits only for that commit.
    FlushJoinsRunningCommit = "flush-joins-running-commit",
    /// A flush that failed fails its callers, but not the pool.
    FailedFlushForgotten = "failed-flush-forgotten",
    /// The superblock is switched before the pages it points to are written.
    SuperblockBeforePages = "superblock-before-pages",
    /// The superblock is switched although the flush before it failed.
    SuperblockAfterFailedFlush = "superblock-after-failed-flush",
    /// A superblock whose checksum is wrong is accepted.
    TornSuperblockAccepted = "torn-superblock-accepted",
    /// A record that a checkpoint covers is extended afterwards.
    RecordsGrowOverMarks = "records-grow-over-marks",
    /// The volatile log of an earlier life of the pool is replayed.
    VolatileOfEarlierLife = "volatile-of-earlier-life",
    /// An entry of the volatile log is replayed whatever its checksum says.
    VolatileTornTaken = "volatile-torn-taken",
    /// Records of the volatile log are replayed although the journal has them.
    VolatileReplayedTwice = "volatile-replayed-twice",
    /// The volatile log is discarded before its records are durable.
    VolatileEndedEarly = "volatile-ended-early",
    /// The commit that takes over the records of the volatile log counts as one of the next life.
    VolatileTakenOverActive = "volatile-taken-over-active",
    /// Attributes are taken over from the volatile log into the journal, and not into memory.
    VolatileForgetsAttributes = "volatile-forgets-attributes",
    /// A record that does not fit into the volatile log is acknowledged all the same.
    NamesOutrunVolatileLog = "names-outrun-volatile-log",
    /// A chunk of an origin is overwritten as soon as its exception is in the volatile log.
    VolatileBelievedDurable = "volatile-believed-durable",
    /// Volumes without a name that a crash has left are not deleted by the next open.
    OrphansOutliveCrash = "orphans-outlive-crash",
    /// Acknowledged changes wait until a flush is requested.
    IntervalForgotten = "interval-forgotten",
    /// The superblock is written over the only whole one first.
    ChosenSuperblockFirst = "chosen-superblock-first",
    /// A checkpoint writes one superblock only, in turns, and of the two the older one counts.
    OlderSuperblockChosen = "older-superblock-chosen",
    /// An open that finds two different superblocks leaves the older one as it is.
    SuperblocksLeftDifferent = "superblocks-left-different",
    /// A page without references is allocated again before the checkpoint.
    FreedSpaceReusedAtOnce = "freed-space-reused-at-once",
    /// Space is allocated again while plans made before may still read or write it.
    PlanOutlivesPage = "plan-outlives-page",
    /// Pages that came into use again are discarded.
    DiscardAfterReuse = "discard-after-reuse",
    /// The rest of a new page is not zeroed.
    ZeroFillSkipped = "zero-fill-skipped",
    /// The rest of a broken page is zeroes.
    NeighboursLostInBreak = "neighbours-lost-in-break",
    /// A page is mapped before it is written.
    MappedBeforeWritten = "mapped-before-written",
    /// A page is mapped although its write failed.
    FailedWritePublished = "failed-write-published",
    /// Data that could not be read is copied all the same.
    CopyErrorSwallowed = "copy-error-swallowed",
    /// A write that finds no space maps the pages it had allocated before.
    FullLeavesHalf = "full-leaves-half",
    /// A write releases its range lock before it is on the device.
    LockReleasedEarly = "lock-released-early",
    /// A write goes before an earlier one next to it that has to wait.
    NeighbourOvertakes = "neighbour-overtakes",
    /// A write merged into another is acknowledged, but not written.
    TakenAlongForgotten = "taken-along-forgotten",
    /// A discard does not wait for writes to its range.
    DiscardIgnoresWriters = "discard-ignores-writers",
    /// A snapshot does not wait for writes in place that were planned before it.
    SnapshotIgnoresWriters = "snapshot-ignores-writers",
    /// A shrunk volume keeps its tail mapped.
    ShrinkKeepsTail = "shrink-keeps-tail",
    /// A new name is in the journal, but not in the checkpoint.
    RenameNotCheckpointed = "rename-not-checkpointed",
    /// The journal overwrites records that recovery still needs.
    JournalOverwritesTail = "journal-overwrites-tail",
    /// Replay starts behind records that were published while the checkpoint was written.
    ReplayStartsTooLate = "replay-starts-too-late",
    /// The parts of a transaction are separate entries of the volatile log.
    TransactionSplitInVolatileLog = "transaction-split-in-volatile-log",
    /// Each part of a transaction begins a group of the journal.
    TransactionSplitOverGroups = "transaction-split-over-groups",
    /// The superblock says that the journal may have transactions from the first checkpoint on only.
    FeatureBitAfterTransaction = "feature-bit-after-transaction",
    /// A rollback to another volume lets that one write in place what both have.
    RollbackKeepsSourceAlone = "rollback-keeps-source-alone",
    /// A rollback of an open volume is acknowledged before it is durable.
    LiveRollbackNotDurable = "live-rollback-not-durable",
    /// The record of a fork or rollback does not wait for the data of a source that is no snapshot.
    ForkBeforeData = "fork-before-data",
    /// A flush of the device is taken to cover writes that were in flight when it began.
    FlushCoversInFlight = "flush-covers-in-flight",
    /// Two volumes or folders exchange their names by three renames, one after the other.
    SwapInSteps = "swap-in-steps",
    /// A fork of a folder's snapshot has the present contents of the volumes.
    ForkOfSnapshotTakesVolume = "fork-of-snapshot-takes-volume",
    /// A rollback of a folder leaves its last volume as it is.
    FolderRollbackLeavesLast = "folder-rollback-leaves-last",
    /// A symbolic link, FIFO or socket becomes a regular file when its attributes are set.
    ChangedModeForgetsKind = "changed-mode-forgets-kind",
    /// Snapshots that are kept apart are found under another volume, but still belong to the one they were taken of.
    KeptSnapshotStaysWithVolume = "kept-snapshot-stays-with-volume",
    /// A symbolic link has a name, but not the path that it refers to.
    LinkNamedBeforeWritten = "link-named-before-written",
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
    /// A leaf of counts is rewritten without its common count.
    CommonCountsLost = "common-counts-lost",
    /// Count pages in memory stay in their state before the checkpoint.
    StaleCountsCached = "stale-counts-cached",
    /// An origin is written before the record of the copy is durable.
    OriginBeforeRecord = "origin-before-record" in Origins,
    /// The record of a copy is published before the copy is written.
    RecordBeforeCopy = "record-before-copy" in Origins,
    /// The record of an exception is written without a flush before it and without a data checksum.
    KeptNotVouched = "kept-not-vouched" in Origins,
    /// Exceptions of a deleted snapshot of an origin are released although an older one needs them.
    KeptLostOnDelete = "kept-lost-on-delete" in Origins,
    /// Exceptions of a deleted snapshot go to the oldest instead of the next older one.
    RelabelToOldest = "relabel-to-oldest" in Origins,
    /// Relabelling an exception to the next older snapshot removes it from the deleted one first, and may
    /// stop in between.
    ReleasedInSteps = "released-in-steps" in Origins,
    /// A read of a snapshot that goes to the origin does not lock the chunk.
    OriginReaderNotHeld = "origin-reader-not-held" in Origins,
    /// A snapshot of an origin is taken while writes are under way or not durable.
    OriginNotFlushed = "origin-not-flushed" in Origins,
    /// An exception of any snapshot counts for the newest.
    OldCopyTakenForNew = "old-copy-taken-for-new" in Origins,
    /// An independent snapshot treats the chain's copies as its own.
    IndependentNotKept = "independent-not-kept" in Origins,
    /// A write that begins in a chunk with an exception does not check the next chunk.
    SecondChunkForgotten = "second-chunk-forgotten" in Origins,
    /// A copy that could not be read from the origin is recorded all the same.
    OriginCopyErrorSwallowed = "origin-copy-error-swallowed" in Origins,
    /// A chunk that was copied out as the pool failed counts as copied out.
    OriginIgnoresFailedPool = "origin-ignores-failed-pool" in Origins,
    /// Nothing is copied out any more for a snapshot whose deletion is not durable yet.
    PendingDeletionBelieved = "pending-deletion-believed" in Origins,
    /// The root of a dead snapshot's map stays while its exceptions are released.
    ReapedRootStays = "reaped-root-stays" in Origins,
    /// New snapshots of an origin count as settled when its flush begins, not when it has ended.
    SettledTooEarly = "settled-too-early" in Origins,
    /// A failed flush of an origin reverts the snapshots that were new when it began, even if another flush
    /// made them durable meanwhile.
    SettledFromCopy = "settled-from-copy" in Origins,
    /// A write of an origin proceeds before the record that it reaches a sample is durable.
    WrittenNotedLate = "written-noted-late" in Origins,
    /// An origin's device is not verified when it is opened.
    OtherDeviceTaken = "other-device-taken" in Origins,
    /// A write of an origin proceeds when its old contents could not be copied out.
    WrittenWithoutCopy = "written-without-copy" in Origins,
    /// Reads of an origin that is being rolled back return the contents of its device.
    RollbackNotShown = "rollback-not-shown" in Origins,
    /// Contents that a rollback overwrites are not copied out for newer snapshots.
    RolledBackWithoutCopy = "rolled-back-without-copy" in Origins,
    /// A chunk counts as restored although it is in a cache only.
    BackBeforeFlush = "back-before-flush" in Origins,
    /// A written chunk is not recorded as restored.
    BackNotNoted = "back-not-noted" in Origins,
    /// The list of restored chunks outlives the rollback.
    BackListStays = "back-list-stays" in Origins,
    /// A rollback that has ended counts as ended before that is durable.
    RollbackEndBelieved = "rollback-end-believed" in Origins,
    /// The cursor of a rollback is one chunk ahead.
    CursorTooFar = "cursor-too-far" in Origins,
    /// The backing is copied while other writes to the same range may run.
    FlattenIgnoresWriters = "flatten-ignores-writers" in Origins,
    /// A clone counts as independent before all of its backing is copied.
    FlattenRecordFirst = "flatten-record-first" in Origins,
    /// The extension of a volume that is deleted stays in the directory.
    ExtensionOutlivesVolume = "extension-outlives-volume",
    /// The page of an extension that was changed is not part of the next checkpoint.
    ExtensionNotCheckpointed = "extension-not-checkpointed",
    /// A pool that is open has extensions before its superblock says so.
    FeatureBitAfterExtension = "feature-bit-after-extension",
    /// A clone does not have the extended attributes of its source.
    CloneForgetsXattrs = "clone-forgets-xattrs",
    /// A snapshot does not have the extended attributes of its volume.
    SnapshotForgetsXattrs = "snapshot-forgets-xattrs",
    /// The removal of a file's own name deletes the file, although it has others.
    RemovalIgnoresHardLinks = "removal-ignores-hard-links",
    /// A hard link that is read from the device does not count as a name of its file.
    LoadedHardLinkNotCounted = "loaded-hard-link-not-counted",
    /// A fork of a folder makes a file of each name of one.
    ForkMakesTwoFiles = "fork-makes-two-files",
    /// The time at which a volume expired before it was renewed stays in the index of those times.
    ExpiryIgnoresRenewal = "expiry-ignores-renewal",
    /// An expired volume is deleted although it is open.
    ExpiryIgnoresClients = "expiry-ignores-clients",
    /// The search for free pages finds those that were allocated since the last checkpoint.
    SearchFindsTaken = "search-finds-taken",
    /// Pages that a view walks over are allocated to others.
    ViewHoldsNothing = "view-holds-nothing",
    /// A view takes counts from checkpoints after its own.
    ViewTakesNewCounts = "view-takes-new-counts",
    /// A map table whose checksum is wrong is accepted.
    TableChecksumIgnored = "table-checksum-ignored",
    /// The copier treats a failed read or write as successful.
    CopierErrorSwallowed = "copier-error-swallowed" in Copies,
    /// A job that gets no buffer goes to the end of the queue.
    StarvedJobGoesLast = "starved-job-goes-last" in Copies,
    /// A chunk is mapped to its copy before that is written.
    CopyMappedBeforeWritten = "copy-mapped-before-written" in Copies,
    /// A write that joins a copy under way is forgotten.
    JoinedWriteLost = "joined-write-lost" in Copies,
    /// A write joins a copy that has been written already.
    JoinedWriteTooLate = "joined-write-too-late" in Copies,
    /// A client's bytes are overlaid at the wrong place of a copy.
    GivenBytesMisplaced = "given-bytes-misplaced" in Copies,
    /// A copy that was cancelled because another of the same write failed is mapped.
    CancelledCopyMapped = "cancelled-copy-mapped" in Copies,
    /// Holes of a chunk that is copied get the old contents of the new place.
    CopyFillsHoles = "copy-fills-holes" in Copies,
    /// A chunk is cloned over the client's bytes, after they were written.
    CloneOverGiven = "clone-over-given" in Copies,
    /// Of the writes merged into a chunk that is cloned only the first is written.
    JoinedBesideClone = "joined-beside-clone" in Copies,
    /// Pages are moved without a check whether they were written meanwhile.
    GatherIgnoresWrites = "gather-ignores-writes",
    /// Pages are copied while writes in place that were planned before are running.
    GatherOvertakesWriters = "gather-overtakes-writers",
    /// A page that was moved is released for everything that refers to it, and only one reference is updated.
    GatherFreesShared = "gather-frees-shared",
    /// The place that pages are copied to is not held while a checkpoint ends.
    GatherOutlivesCheckpoint = "gather-outlives-checkpoint",
    /// Pages that were moved count as newly written.
    GatherRejuvenates = "gather-rejuvenates",
    /// A table that is changed for everything that shares it counts as new.
    GatherMakesTablesYoung = "gather-makes-tables-young",
    /// Moved pages are not subtracted from the fragmentation.
    GatherKeepsSeams = "gather-keeps-seams",
    /// The exclusivity of a gathered block is treated as durable before the losses that caused it are.
    GatherForgetsLosses = "gather-forgets-losses",
    /// The move is in the journal before the copy is durable.
    GatherRecordBeforeData = "gather-record-before-data",
    /// The rest of a page that was provided in part is not completed from the source when the chunk is
    /// cloned.
    TornPageNotCompleted = "torn-page-not-completed",
}

/// The right expression, or the wrong one of the bug that is switched on. Only the chosen one is evaluated.
#[cfg(not(feature = "planted"))]
macro_rules! correct {
    ($right:expr, $(Bug::$bug:ident => $wrong:expr),+) => {
        $right
    };
}

#[cfg(feature = "planted")]
macro_rules! correct {
    ($right:expr, $(Bug::$bug:ident => $wrong:expr),+) => {
        $(if $crate::planted::is_on($crate::planted::Bug::$bug) { $wrong } else)+ { $right }
    };
}

pub(crate) use correct;

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
    pub(crate) fn is_on(bug: Bug) -> bool {
        CURRENT.get() == Some(bug)
    }

    /// Releases a guard too early, in a wrong expression that takes the place of the guard.
    pub(crate) fn released<T>(guard: T) -> Option<T> {
        drop(guard);
        None
    }
}

#[cfg(feature = "planted")]
pub use switch::set;
#[cfg(feature = "planted")]
pub(crate) use switch::{is_on, released};

#[cfg(test)]
mod tests {
    /// A product cannot have a planted bug: not even the names in a wrong expression are resolved.
    #[cfg(not(feature = "planted"))]
    #[test]
    fn without_the_feature_only_the_right_expression_is_compiled() {
        assert_eq!(correct!(1, Bug::NoSuchBug => no_such_function()), 1);
    }

    #[cfg(feature = "planted")]
    #[test]
    fn only_the_expression_of_the_bug_that_is_switched_on_is_evaluated() {
        use super::{Bug, set};

        let pick = || {
            let mut seen = Vec::new();
            correct!(seen.push(0), Bug::CountLogForgotten => seen.push(1), Bug::RepairKeepsLog => seen.push(2));
            seen
        };
        for (bug, expected) in [(None, 0), (Some(Bug::CountLogForgotten), 1), (Some(Bug::RepairKeepsLog), 2)] {
            set(bug);
            assert_eq!(pick(), [expected]);
        }
        set(None);
    }
}
