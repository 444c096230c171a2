//! `top`: the activity of a served pool, second by second. [`rates`] computes a view from two
//! readings of the counters; [`screen`] shows it on a terminal, [`table`] as text.

pub mod rates;
pub mod screen;
pub mod table;
