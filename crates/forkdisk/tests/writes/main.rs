//! Where writes go and in which order: the engine on devices in memory that record every request, with a
//! virtual clock.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod alone;
mod amplification;
mod bounds;
mod commit;
mod early;
mod flatten;
mod folder_bounds;
mod gather;
mod lab;
mod order;
mod overlap;
mod quota;
mod ranges;
mod reopen;
mod slots;
mod space;
mod stripes;
mod times;
mod unasked;
