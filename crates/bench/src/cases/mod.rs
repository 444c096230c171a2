//! One file per case; `ram` and `file` hold common setups.

pub mod chunks;
pub mod counts;
pub mod cpu;
pub mod doors;
pub mod file;
pub mod fio;
pub mod fleet;
pub mod guest;
pub mod memory;
pub mod modelled;
pub mod nbd;
pub mod origin;
pub mod pools;
pub mod ram;
pub mod reopen;
pub mod serve;
pub mod server;
pub mod snapshots;
pub mod sparse;
pub mod w1;
pub mod w2;
pub mod w3;
pub mod w4;
pub mod w5;
pub mod wall;
