//! Breaking sharing (W2): large blocks in order, random pages, many snapshots.

pub mod copy;
pub mod instructions;
pub mod random;
pub mod snapshots;
pub mod split;
pub mod thin;
pub mod wall;

use crate::load::{Job, random, sequential};
use crate::model::Label;

const PAGE: usize = 4096;

/// One cell of the table: the volume's chunk and the size of the writes.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    pub name: &'static str,
    pub chunk: u64,
    pub len: usize,
}

const fn cell(name: &'static str, chunk_kib: u64, len_kib: usize) -> Cell {
    Cell { name, chunk: chunk_kib << 10, len: len_kib << 10 }
}

/// The published table, and small blocks.
pub const CELLS: [Cell; 16] = [
    cell("1m-256k", 1024, 256),
    cell("1m-512k", 1024, 512),
    cell("2m-256k", 2048, 256),
    cell("2m-512k", 2048, 512),
    cell("2m-1m", 2048, 1024),
    cell("4m-256k", 4096, 256),
    cell("4m-512k", 4096, 512),
    cell("4m-1m", 4096, 1024),
    cell("4m-2m", 4096, 2048),
    cell("8m-256k", 8192, 256),
    cell("8m-512k", 8192, 512),
    cell("8m-1m", 8192, 1024),
    cell("8m-2m", 8192, 2048),
    cell("8m-4m", 8192, 4096),
    cell("64k-4k", 64, 4),
    cell("64k-64k", 64, 64),
];

impl Cell {
    /// Returns whether a copying break has data to copy: a write does not cover its chunk.
    pub fn copies(&self) -> bool {
        (self.len as u64) < self.chunk
    }

    /// Returns the requests of `dd oflag=direct` over `span` bytes: one at a time, in order.
    pub fn dd(&self, span: u64) -> Job {
        Job { write: true, len: self.len, depth: 1, offsets: sequential(span, self.len) }
    }
}

/// Returns writes of `count` different pages of `span` bytes.
fn pages(span: u64, count: u64, depth: usize, seed: u64) -> Job {
    Job { write: true, len: PAGE, depth, offsets: random(span, PAGE, count as usize, seed) }
}

fn label(case: &str) -> Label<'_> {
    Label { workload: "w2", case, target: "forkdisk" }
}
