//! Disks and connections in memory, for measurements and tests of the server alone.

mod disk;
mod stream;

pub use disk::{MemoryExport, MemoryExports};
pub use stream::MemoryStream;
