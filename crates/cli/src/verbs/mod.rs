//! One file per verb: its options, and what it does.

pub mod bench;
pub mod check;
pub mod clone;
pub mod completions;
pub mod config;
pub mod copier;
pub mod create;
pub mod delete;
pub mod diff;
pub mod du;
pub mod export;
pub mod grow;
pub mod import;
pub mod init;
pub mod list;
pub mod man;
pub mod map;
pub mod rename;
pub mod resize;
pub mod rollback;
pub mod serve;
pub mod set;
pub mod snapshot;
pub mod stats;
pub mod stop;
pub mod top;
