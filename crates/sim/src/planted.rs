//! The engine's switch for planted mistakes.

pub use forkdisk::planted::{Bug, set};
