//! How often each kind of operation comes in a history of each profile.

use super::op::Kind;

#[rustfmt::skip]
pub const MIXED: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 20), (Write, 40), (Append, 10), (Ragged, 3), (InPlace, 4), (Flush, 10), (FlushPool, 1),
        (Discard, 6), (Zero, 5), (Create, 3), (Snapshot, 6), (Group, 2), (Clone, 4), (CloneRange, 4),
        (Rollback, 3), (Rename, 2), (Resize, 3), (Delete, 7), (Grow, 1), (Checkpoint, 2), (Check, 1),
        (Settle, 1), (Reopen, 1), (Cut, 1), (Kill, 1), (SetChunk, 2), (Audit, 1), (Overlap, 1),
    ]
};

#[rustfmt::skip]
pub const FORKS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 10), (Write, 30), (Append, 4), (Ragged, 2), (Flush, 6), (Discard, 6), (Zero, 4), (Create, 2),
        (Snapshot, 14), (Group, 4), (Clone, 10), (CloneRange, 10), (Rollback, 9), (Rename, 3), (Resize, 4),
        (Delete, 16), (Checkpoint, 3), (Check, 1), (Settle, 1), (Reopen, 1), (Cut, 1), (Audit, 3),
    ]
};

#[rustfmt::skip]
pub const FULL: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 8), (Write, 40), (Append, 10), (InPlace, 12), (Flush, 8), (Discard, 8), (Zero, 4), (Create, 2),
        (Snapshot, 5), (Clone, 3), (CloneRange, 3), (Rollback, 2), (Delete, 8), (Grow, 2), (Fill, 4),
        (Checkpoint, 2), (Settle, 2), (Reopen, 1), (Cut, 1),
    ]
};

#[rustfmt::skip]
pub const FAULTS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 14), (Write, 36), (Append, 6), (Ragged, 2), (Flush, 12), (Discard, 5), (Zero, 4), (Create, 3),
        (Snapshot, 6), (Group, 1), (Clone, 4), (CloneRange, 10), (Rollback, 3), (Rename, 1), (Resize, 2),
        (Delete, 5), (Grow, 2), (Checkpoint, 4), (Fault, 7), (Settle, 1), (Cut, 1),
    ]
};

#[rustfmt::skip]
pub const RACES: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 30), (Write, 50), (Append, 4), (Flush, 10), (Discard, 16), (Zero, 8), (Snapshot, 8), (Group, 2),
        (Clone, 3), (CloneRange, 6), (Rollback, 6), (Delete, 8), (Create, 1), (Checkpoint, 4), (Cut, 1),
    ]
};

#[rustfmt::skip]
pub const CUTS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 4), (Write, 24), (Append, 3), (Ragged, 1), (Flush, 8), (Discard, 4), (Zero, 2), (Create, 2),
        (Snapshot, 4), (Group, 1), (Clone, 3), (CloneRange, 3), (Rollback, 3), (Rename, 1), (Resize, 2),
        (Delete, 5), (Grow, 1), (Checkpoint, 3), (Reopen, 1), (Cut, 5), (Kill, 3),
    ]
};

#[rustfmt::skip]
pub const BLOCKS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 8), (Write, 16), (Append, 40), (Flush, 6), (Discard, 5), (Zero, 4), (Create, 2), (Snapshot, 7),
        (Clone, 4), (CloneRange, 5), (Rollback, 3), (Resize, 2), (Delete, 8), (Checkpoint, 3), (Cut, 1),
        (Reopen, 1), (Check, 1), (Fill, 3),
    ]
};

#[rustfmt::skip]
pub const CALM: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 30), (Write, 40), (Append, 8), (Ragged, 4), (InPlace, 2), (Flush, 4), (Discard, 6), (Zero, 5),
        (Create, 2), (Snapshot, 5), (Clone, 3), (CloneRange, 4), (Rollback, 2), (Rename, 1), (Resize, 2),
        (Delete, 5), (Checkpoint, 1), (Reopen, 1), (SetChunk, 2), (Audit, 1),
    ]
};

#[rustfmt::skip]
pub const JOURNAL: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 20), (Write, 480), (InPlace, 20), (Flush, 80), (Discard, 200), (Zero, 40), (Create, 4),
        (Snapshot, 40), (Clone, 16), (CloneRange, 40), (Rename, 8), (Delete, 56), (Checkpoint, 1), (Cut, 1),
        (Kill, 1), (Reopen, 1),
    ]
};

#[rustfmt::skip]
pub const CROWD: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 6), (Write, 20), (Flush, 3), (Discard, 2), (Create, 8), (Snapshot, 40), (Group, 4), (Clone, 14),
        (CloneRange, 3), (Rollback, 4), (Rename, 2), (Delete, 12), (Checkpoint, 1), (Audit, 1), (Cut, 1),
        (Reopen, 1),
    ]
};

#[rustfmt::skip]
pub const FILES: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 8), (Write, 30), (Append, 8), (Ragged, 2), (Flush, 4), (Discard, 4), (Zero, 2), (Create, 6),
        (Snapshot, 5), (Clone, 2), (CloneRange, 5), (Replace, 16), (Usurp, 8), (Rollback, 2), (Rename, 2),
        (Resize, 4), (Delete, 12), (Checkpoint, 3), (Audit, 1), (Check, 1), (Settle, 1), (Reopen, 1), (Cut, 2),
        (Kill, 1),
    ]
};

#[rustfmt::skip]
pub const RANGES: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 12), (Write, 40), (Append, 6), (Flush, 6), (Discard, 4), (Zero, 2), (Create, 3), (Snapshot, 5),
        (Clone, 3), (CloneRange, 26), (Rollback, 2), (Resize, 2), (Delete, 8), (Checkpoint, 6), (Audit, 1),
        (Check, 2), (Settle, 2), (Reopen, 2), (Cut, 2), (Kill, 1),
    ]
};

#[rustfmt::skip]
pub const LARGE: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 12), (Write, 40), (Append, 10), (Ragged, 3), (Flush, 8), (Discard, 8), (Zero, 6), (Create, 3),
        (Snapshot, 6), (Group, 2), (Clone, 5), (CloneRange, 8), (Rollback, 4), (Rename, 1), (Resize, 10),
        (Delete, 8), (Checkpoint, 3), (Audit, 2), (Overlap, 1), (Settle, 1), (Reopen, 1), (Cut, 1),
        (SetChunk, 3),
    ]
};

#[rustfmt::skip]
pub const COPIES: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 12), (Write, 30), (Append, 8), (Ragged, 4), (Burst, 14), (InPlace, 2), (Flush, 6), (Discard, 4),
        (Zero, 4), (Create, 2), (Snapshot, 22), (Group, 2), (Clone, 6), (CloneRange, 6), (Rollback, 4),
        (Resize, 2), (Delete, 12), (Checkpoint, 2), (Reopen, 1), (Cut, 1), (Fault, 3), (SetChunk, 3),
        (SetCopying, 6), (SetCopier, 4),
    ]
};

#[rustfmt::skip]
pub const GATHERING: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 8), (Write, 44), (Append, 3), (Ragged, 1), (InPlace, 4), (Burst, 6), (Flush, 6), (Discard, 2),
        (Zero, 1), (Create, 2), (Snapshot, 10), (Clone, 6), (CloneRange, 4), (Rollback, 3), (Replace, 2),
        (Resize, 2), (Delete, 12), (Checkpoint, 4), (Gather, 30), (SetGather, 3), (SetCopying, 8),
        (SetCopier, 4), (Settle, 2), (Reopen, 1), (Cut, 1), (Fault, 1), (Fill, 1),
    ]
};

#[rustfmt::skip]
pub const HOSTS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 8), (Write, 40), (Append, 8), (InPlace, 4), (Flush, 8), (Discard, 8), (Zero, 3), (Create, 4),
        (Snapshot, 6), (Clone, 3), (CloneRange, 4), (Replace, 2), (Rollback, 2), (Resize, 3), (Delete, 12),
        (Checkpoint, 6), (Gather, 2), (Grow, 1), (Fault, 9), (Settle, 2), (Reopen, 2), (Cut, 2),
        (Kill, 1),
    ]
};

#[rustfmt::skip]
pub const HEIRS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Heir, 80), (Read, 4), (Write, 6), (Burst, 2), (Flush, 1), (Discard, 1), (Snapshot, 1), (Clone, 1),
        (CloneRange, 1), (Delete, 1), (Checkpoint, 2), (Gather, 2), (SetGather, 2), (Settle, 1), (Reopen, 1),
        (Cut, 1),
    ]
};

#[rustfmt::skip]
pub const NAMES: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Names, 60), (Unnamed, 24), (Read, 2), (Write, 16), (Flush, 6), (FlushPool, 2), (Discard, 2),
        (Create, 2), (Snapshot, 3), (Clone, 1), (CloneRange, 2), (Rename, 3), (Delete, 3), (Checkpoint, 4),
        (Settle, 1), (Reopen, 2), (Cut, 2), (Kill, 2), (Fault, 1),
    ]
};

#[rustfmt::skip]
pub const QUOTAS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 6), (Write, 40), (Append, 12), (Ragged, 3), (Burst, 12), (InPlace, 6), (Flush, 5),
        (Discard, 10), (Zero, 4), (Create, 3), (Snapshot, 5), (Clone, 3), (CloneRange, 5), (Rollback, 3),
        (Rename, 1), (Resize, 2), (Delete, 4), (Checkpoint, 3), (SetQuota, 8), (SetCopying, 2), (Reopen, 2),
        (Cut, 2),
    ]
};

#[rustfmt::skip]
pub const TRANSACTIONS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 4), (Write, 16), (Flush, 4), (CreateAll, 12), (CloneAll, 12), (SetAll, 16), (Snapshot, 4), (Group, 4),
        (Rollback, 2), (Rename, 2), (Delete, 20), (Checkpoint, 2), (Check, 1), (Settle, 1), (Reopen, 2), (Cut, 3),
        (Kill, 3),
    ]
};
