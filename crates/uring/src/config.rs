//! Sizes of a ring, all with defaults that suit one pool and its clients.

/// Sizes of a ring and of its registered buffers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Submission queue entries; the kernel rounds up to a power of two. More requests
    /// may be in flight: those that find the queue full wait in order.
    pub entries: u32,
    /// `(bytes, count)` for each size of registered buffer, in rising order of bytes, each a
    /// multiple of 4096. Empty for none.
    pub buffers: Vec<(usize, usize)>,
}

impl Default for Config {
    fn default() -> Config {
        Config { entries: 256, buffers: vec![(4 << 10, 1024), (64 << 10, 64), (1 << 20, 8)] }
    }
}

forkdisk::setters! {
    Config {
        with_entries entries: u32,
        with_buffers buffers: Vec<(usize, usize)>,
    }
}
