//! `top`: what a served pool does, second by second. [`rates`] makes a view out of two looks at the
//! counters; [`screen`] shows it on a terminal, [`table`] as text.

pub mod rates;
pub mod screen;
pub mod table;
