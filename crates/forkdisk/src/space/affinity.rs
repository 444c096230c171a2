//! What is kept for whom: a block for a stream, a chunk for a random writer. Hints only: under
//! pressure anybody takes any free page.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::types::{Block, PageAddr, VolumeId};

/// Most blocks kept for streams.
const MAX_OWNED: usize = 4096;
/// Most chunks kept.
const MAX_CHUNKS: usize = 16_384;

type Key = (VolumeId, u64);

/// A bounded map that forgets the oldest.
struct Bounded<V> {
    map: FxHashMap<Key, V>,
    order: VecDeque<Key>,
    limit: usize,
}

impl<V: Copy> Bounded<V> {
    fn new(limit: usize) -> Bounded<V> {
        Bounded { map: FxHashMap::default(), order: VecDeque::new(), limit }
    }

    fn insert(&mut self, key: Key, value: V) {
        if self.map.insert(key, value).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > self.limit {
            let oldest = self.order.pop_front().expect("longer than the limit");
            self.map.remove(&oldest);
        }
    }

    fn forget(&mut self, volume: VolumeId) {
        self.map.retain(|(v, _), _| *v != volume);
        self.order.retain(|(v, _)| *v != volume);
    }
}

/// See the module.
pub struct Affinity {
    owned: Bounded<Block>,
    chunks: Bounded<PageAddr>,
    /// The block that random writers' chunks are laid out in, and the next page in it.
    pub chunk_block: Option<(Block, u64)>,
    /// The block that tables are laid out in.
    pub meta_block: Option<Block>,
}

impl Default for Affinity {
    fn default() -> Self {
        let (owned, chunks) = (Bounded::new(MAX_OWNED), Bounded::new(MAX_CHUNKS));
        Affinity { owned, chunks, chunk_block: None, meta_block: None }
    }
}

impl Affinity {
    /// The block kept for a virtual block.
    pub fn owned(&self, volume: VolumeId, virtual_block: u64) -> Option<Block> {
        self.owned.map.get(&(volume, virtual_block)).copied()
    }

    /// Keeps a block for a virtual block.
    pub fn own(&mut self, volume: VolumeId, virtual_block: u64, block: Block) {
        self.owned.insert((volume, virtual_block), block);
    }

    /// Where a virtual chunk's pages are kept.
    pub fn chunk(&self, volume: VolumeId, chunk: u64) -> Option<PageAddr> {
        self.chunks.map.get(&(volume, chunk)).copied()
    }

    /// Keeps pages for a virtual chunk.
    pub fn keep_chunk(&mut self, volume: VolumeId, chunk: u64, first: PageAddr) {
        self.chunks.insert((volume, chunk), first);
    }

    /// Nothing is kept for a volume any more.
    pub fn forget(&mut self, volume: VolumeId) {
        self.owned.forget(volume);
        self.chunks.forget(volume);
    }
}
