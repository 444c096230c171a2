//! The engine's switch for planted bugs.

pub use forkdisk::planted::{Bug, Group, set};
