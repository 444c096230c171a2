//! The map of a volume: a radix tree of tables, shared between volumes until one of them writes.
//!
//! Everything here is synchronous and works on tables in memory. What is not there is answered by
//! [`Stop`]; the caller loads it and asks again. Every function may be repeated after a `Stop`: it
//! either changed nothing or only copied tables without changing what they say.

mod edit;
mod entries;
mod lookup;
mod range;
mod release;
mod store;

pub use edit::{Editor, Stop};
pub use lookup::{Run, lookup};
pub use store::{NodeId, Placed, TableMiss, Tables};
