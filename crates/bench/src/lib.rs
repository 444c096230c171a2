//! The workloads forkdisk is measured by, and the goals they are held against.
//!
//! A *case* measures one thing and answers with [`Row`]s; [`Goals`] say which rows must be there and
//! what they must reach. Nothing here decides what to do about a goal that was missed.
#![deny(unsafe_code)]
#![warn(missing_docs)]

#[allow(unsafe_code)]
mod bare;
mod cases;
mod clock;
mod ending;
mod goals;
mod html;
pub mod limits;
mod load;
mod model;
mod mounted;
mod part;
mod peers;
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
