//! The map of a volume: a radix tree of tables, shared between volumes until one of them writes.
//!
//! Everything here is synchronous and works on tables in memory. If one is missing, a function returns
//! [`Stop`]; the caller loads the table and calls again. Every function may be repeated after a `Stop`: it
//! either changed nothing or only copied tables without changing their contents.

mod charges;
mod edit;
mod entries;
mod family;
mod lookup;
mod move_pages;
mod range;
mod release;
mod store;

pub use edit::{Editor, Stop, count_seams};
pub use entries::Entries;
pub use family::{Family, Member};
pub use lookup::{Home, Run, lookup};
pub use move_pages::{Movable, seams_if, seams_of};
pub use range::{Shared, shared_level};
pub use store::{NodeId, Placed, TableMiss, Tables};
