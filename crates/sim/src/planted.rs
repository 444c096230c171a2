//! Planted bugs: those of the engine, and lies of the device.
//!
//! A lie is a bug that a device can have: it acknowledges what it does not do. The engine has no line for it; the
//! device of the simulator, [`LyingDevice`](crate::disk::LyingDevice), tells it.

use std::cell::Cell;

use forkdisk::planted;
pub use forkdisk::planted::{Bug, Group, set};

macro_rules! lies {
    ($($(#[$doc:meta])* $variant:ident = $name:literal in $group:ident,)*) => {
        /// A lie of a device.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Lie {
            $($(#[$doc])* $variant,)*
        }

        impl Lie {
            /// All of them.
            pub const ALL: &[Lie] = &[$(Lie::$variant,)*];

            fn name(self) -> &'static str {
                match self {
                    $(Lie::$variant => $name,)*
                }
            }

            fn group(self) -> Group {
                match self {
                    $(Lie::$variant => Group::$group,)*
                }
            }
        }
    };
}

lies! {
    /// A flush of neither journal nor superblock is acknowledged, not done: the journal is written before the data
    /// it refers to is durable.
    DataFlushSkipped = "data-flush-skipped" in Pools,
    /// A flush after a write to the journal is acknowledged, not done.
    JournalFlushSkipped = "journal-flush-skipped" in Pools,
    /// A failed flush is retried once, and the second result is the answer.
    FailedFlushRetried = "failed-flush-retried" in Pools,
    /// Writes of the second superblock are acknowledged, not done.
    SecondSuperblockSkipped = "second-superblock-skipped" in Pools,
    /// A new length is acknowledged, and set only for a write beyond the old one.
    GrowLengthNotDurable = "grow-length-not-durable" in Pools,
    /// The first flush of an origin's device is acknowledged, not done: its stamp is taken of contents that a power
    /// cut may still revert.
    StampedUnflushed = "stamped-unflushed" in Origins,
}

/// A planted bug of either kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Planted {
    /// One of the engine.
    Engine(Bug),
    /// One of the device.
    Device(Lie),
}

impl Planted {
    /// Returns all of them.
    pub fn all() -> Vec<Planted> {
        let of_engine = Bug::ALL.iter().map(|&bug| Planted::Engine(bug));
        of_engine.chain(Lie::ALL.iter().map(|&lie| Planted::Device(lie))).collect()
    }

    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Planted::Engine(bug) => bug.name(),
            Planted::Device(lie) => lie.name(),
        }
    }

    /// Returns the histories that can show it.
    pub fn group(self) -> Group {
        match self {
            Planted::Engine(bug) => bug.group(),
            Planted::Device(lie) => lie.group(),
        }
    }
}

thread_local! {
    static LIE: Cell<Option<Lie>> = const { Cell::new(None) };
}

/// Switches a bug on for this thread (`None`: all off).
pub fn plant(bug: Option<Planted>) {
    let (of_engine, lie) = match bug {
        Some(Planted::Engine(bug)) => (Some(bug), None),
        Some(Planted::Device(lie)) => (None, Some(lie)),
        None => (None, None),
    };
    planted::set(of_engine);
    LIE.set(lie);
}

/// Whether devices tell this lie.
pub(crate) fn is_told(lie: Lie) -> bool {
    LIE.get() == Some(lie)
}
