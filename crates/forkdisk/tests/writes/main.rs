//! Where writes go and in which order: the engine on devices in memory whose every request is written
//! down, with a clock of its own.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod alone;
mod amplification;
mod commit;
mod flatten;
mod gather;
mod lab;
mod order;
mod quota;
mod ranges;
mod reopen;
mod space;
mod stripes;
mod times;
