//! The benchmarks of forkdisk, and their goals.
//!
//! A *case* measures one thing and returns [`Row`]s; [`Goals`] define which rows must exist and
//! what they must reach. Nothing here decides the consequences of a missed goal.
#![deny(unsafe_code)]
#![warn(missing_docs)]

#[allow(unsafe_code)]
mod bare;
mod callgrind;
mod cases;
mod clock;
mod control;
mod ending;
mod goals;
mod html;
pub mod limits;
mod load;
mod model;
mod mounted;
mod nbd;
mod part;
mod peers;
mod process;
mod raid5;
mod report;
mod rows;
mod runner;

pub use goals::{Goal, Goals};
pub use html::page;
pub use peers::{Lab, inside};
pub use report::table;
pub use rows::{Row, Samples, Sense};
pub use runner::{Benchmark, Options, Scale};
