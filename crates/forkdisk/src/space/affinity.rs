//! Detection of streams, and reservations: a block for a stream, a chunk for a random writer. Hints only:
//! under pressure any writer takes any free page.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::types::{BLOCK_PAGES, Block, Epoch, PageAddr, VolumeId};

/// Most blocks reserved for streams.
const MAX_STREAM_BLOCKS: usize = 4096;
/// Most chunks reserved.
const MAX_CHUNKS: usize = 16_384;
/// Writers of one volume that are told apart.
const MAX_WRITERS: usize = 16;
/// Most blocks that are open for more chunks.
const MAX_OPEN_BLOCKS: usize = 64;
/// Most chunks remembered whose unused pages are no longer reserved.
const MAX_ABANDONED_CHUNKS: usize = 16_384;
/// A write of at least this many pages is a stream on its own.
const MIN_STREAM_WRITE_PAGES: u64 = 64;
/// Contiguous pages that smaller writes must have filled to be a stream. A random writer may hit the place
/// behind another write by chance once, but not repeatedly.
const MIN_STREAM_RUN_PAGES: u64 = 33;
/// Pages by which a stream's next write may begin behind the end of the last one: concurrent requests do not
/// always arrive in order.
const STREAM_GAP_PAGES: u64 = 16;

type Key = (VolumeId, u64);

/// A bounded map that forgets the oldest entries, and those of a volume in a time that does not depend on the others.
struct Bounded<V> {
    /// The values, each with the number of its entry in `order`.
    map: FxHashMap<Key, (V, u64)>,
    /// All keys, those of a volume side by side.
    keys: BTreeSet<Key>,
    /// Keys in the order of their insertion, with ascending numbers. An entry with another number than that of its
    /// value is out of date.
    order: VecDeque<(Key, u64)>,
    next: u64,
    limit: usize,
}

impl<V: Copy> Bounded<V> {
    fn new(limit: usize) -> Bounded<V> {
        let (map, keys, order) = Default::default();
        Bounded { map, keys, order, next: 0, limit }
    }

    fn get(&self, key: &Key) -> Option<V> {
        self.map.get(key).map(|&(value, _)| value)
    }

    fn insert(&mut self, key: Key, value: V) {
        if let Some((old, _)) = self.map.get_mut(&key) {
            *old = value;
            return;
        }
        self.next += 1;
        self.map.insert(key, (value, self.next));
        self.keys.insert(key);
        self.order.push_back((key, self.next));
        while self.map.len() > self.limit {
            self.remove_oldest();
        }
        // Mostly entries that are out of date.
        if self.order.len() > 2 * self.limit {
            let map = &self.map;
            self.order.retain(|(key, number)| map.get(key).is_some_and(|(_, current)| current == number));
        }
    }

    fn remove_oldest(&mut self) {
        let Some((key, number)) = self.order.pop_front() else { return };
        if self.map.get(&key).is_some_and(|&(_, current)| current == number) {
            self.map.remove(&key);
            self.keys.remove(&key);
        }
    }

    fn forget(&mut self, volume: VolumeId) {
        let of_volume: Vec<Key> = self.keys.range((volume, 0)..=(volume, u64::MAX)).copied().collect();
        for key in of_volume {
            self.map.remove(&key);
            self.keys.remove(&key);
        }
    }
}

/// The last write of one writer to a volume, and where its run began.
#[derive(Clone, Copy)]
struct Writer {
    run: u64,
    start: u64,
    end: u64,
    stream: bool,
}

/// Pages reserved for a virtual chunk.
#[derive(Clone, Copy)]
pub struct Chunk {
    /// Where the chunk's first page lies.
    pub first: PageAddr,
    /// Pages of the chunk.
    pub pages: u64,
    /// The epoch in which the volume had last been shared.
    pub shared_at: Epoch,
}

/// A chunk that its volume has left: the pages that were free then are no longer reserved.
#[derive(Clone, Copy)]
pub struct AbandonedChunk {
    /// The first page of the chunk.
    pub first: PageAddr,
    /// Pages of the chunk; `free` is how many of them were free.
    pub pages: u64,
    pub free: u64,
}

/// See the module.
pub struct Affinity {
    owned: Bounded<Block>,
    chunks: Bounded<Chunk>,
    /// Abandoned chunks, oldest first, and the pages free in them.
    abandoned: VecDeque<AbandonedChunk>,
    left_pages: u64,
    /// Recent writers of each volume, the latest last.
    writers: FxHashMap<VolumeId, VecDeque<Writer>>,
    /// Blocks in which chunks are placed, and the next page in each.
    open: VecDeque<(Block, u64)>,
    /// The block in which tables are placed.
    pub meta_block: Option<Block>,
    /// Where the next few gathered pages go.
    pub gathered: Option<PageAddr>,
}

impl Default for Affinity {
    fn default() -> Self {
        let (owned, chunks) = (Bounded::new(MAX_STREAM_BLOCKS), Bounded::new(MAX_CHUNKS));
        let (left, open) = (VecDeque::new(), VecDeque::new());
        Affinity {
            owned,
            chunks,
            abandoned: left,
            left_pages: 0,
            writers: FxHashMap::default(),
            open,
            meta_block: None,
            gathered: None,
        }
    }
}

impl Affinity {
    /// Whether this write is part of a stream: it is large, or others lead up to it. A repeated call for the
    /// same write returns the same answer.
    pub fn is_stream(&mut self, volume: VolumeId, write: &Range<u64>) -> bool {
        let writers = self.writers.entry(volume).or_default();
        let same = |w: &Writer| (w.start, w.end) == (write.start, write.end);
        if let Some(writer) = writers.iter().rev().find(|w| same(w)) {
            return writer.stream;
        }
        let goes_on = |w: &Writer| (w.end..=w.end + STREAM_GAP_PAGES).contains(&write.start);
        let run = match writers.iter().rposition(goes_on) {
            Some(at) => writers.remove(at).map_or(write.start, |w| w.run),
            None => write.start,
        };
        if writers.len() >= MAX_WRITERS {
            writers.pop_front();
        }
        let stream = write.end - write.start >= MIN_STREAM_WRITE_PAGES || write.end - run >= MIN_STREAM_RUN_PAGES;
        writers.push_back(Writer { run, start: write.start, end: write.end, stream });
        stream
    }

    /// Returns a block with space for a chunk of `pages` pages, and the page in it. Blocks opened first are
    /// tried first.
    pub fn open_chunk(&mut self, pages: u64) -> Option<(Block, u64)> {
        while let Some((block, next)) = self.open.front_mut() {
            let first = next.next_multiple_of(pages);
            if first + pages <= BLOCK_PAGES {
                *next = first + pages;
                return Some((*block, first));
            }
            self.open.pop_front();
        }
        None
    }

    /// As [`open_chunk`](Self::open_chunk), at this place only.
    pub fn open_chunk_at(&mut self, first: PageAddr, pages: u64) -> bool {
        let (block, index) = (first.block(), first.index() as u64);
        let open = self.open.iter_mut().find(|(b, next)| *b == block && *next == index && index + pages <= BLOCK_PAGES);
        open.map(|(_, next)| *next += pages).is_some()
    }

    /// Notes that the block has space for chunks from page `next` on.
    pub fn leave_open(&mut self, block: Block, next: u64) {
        if self.open.len() >= MAX_OPEN_BLOCKS {
            self.open.pop_front();
        }
        self.open.push_back((block, next));
    }

    /// Returns the block reserved for a virtual block.
    pub fn owned(&self, volume: VolumeId, virtual_block: u64) -> Option<Block> {
        self.owned.get(&(volume, virtual_block))
    }

    /// Reserves a block for a virtual block, and closes it for chunks.
    pub fn own(&mut self, volume: VolumeId, virtual_block: u64, block: Block) {
        self.open.retain(|&(open, _)| open != block);
        self.owned.insert((volume, virtual_block), block);
    }

    /// Returns the pages reserved for a virtual chunk.
    pub fn chunk(&self, volume: VolumeId, chunk: u64) -> Option<Chunk> {
        self.chunks.get(&(volume, chunk))
    }

    /// Reserves pages for a virtual chunk.
    pub fn keep_chunk(&mut self, volume: VolumeId, chunk: u64, pages: Chunk) {
        self.chunks.insert((volume, chunk), pages);
    }

    /// Ends the reservation of a chunk and remembers its free pages.
    pub fn abandon_chunk(&mut self, left: AbandonedChunk) {
        if left.free == 0 {
            return;
        }
        if self.abandoned.len() >= MAX_ABANDONED_CHUNKS {
            self.remove_oldest_abandoned();
        }
        self.left_pages += left.free;
        self.abandoned.push_back(left);
    }

    /// Returns the number of free pages in abandoned chunks.
    pub fn abandoned_pages(&self) -> u64 {
        self.left_pages
    }

    /// Returns the chunk that was abandoned first.
    pub fn oldest_abandoned(&self) -> Option<AbandonedChunk> {
        self.abandoned.front().copied()
    }

    /// Notes that this many pages of the chunk abandoned first are in use.
    pub fn use_abandoned(&mut self, pages: u64) {
        if let Some(left) = self.abandoned.front_mut() {
            left.free -= pages;
            self.left_pages -= pages;
        }
    }

    /// Forgets the chunk abandoned first.
    pub fn remove_oldest_abandoned(&mut self) {
        if let Some(left) = self.abandoned.pop_front() {
            self.left_pages -= left.free;
        }
    }

    /// Ends all reservations of a volume.
    pub fn forget(&mut self, volume: VolumeId) {
        self.owned.forget(volume);
        self.chunks.forget(volume);
        self.writers.remove(&volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(bounded: &Bounded<u64>) -> Vec<(Key, u64)> {
        bounded.keys.iter().map(|&key| (key, bounded.get(&key).expect("it has a value"))).collect()
    }

    #[test]
    fn the_oldest_entries_go_first_and_a_volume_goes_as_a_whole() {
        let (a, b) = (VolumeId(1), VolumeId(2));
        let mut bounded = Bounded::new(4);
        for n in 0..6 {
            bounded.insert((if n % 2 == 0 { a } else { b }, n), n);
        }
        assert_eq!(values(&bounded), [((a, 2), 2), ((a, 4), 4), ((b, 3), 3), ((b, 5), 5)]);
        bounded.forget(a);
        // Again: younger than the others now.
        bounded.insert((a, 2), 7);
        bounded.insert((b, 3), 8);
        bounded.insert((a, 8), 8);
        assert_eq!(values(&bounded), [((a, 2), 7), ((a, 8), 8), ((b, 3), 8), ((b, 5), 5)]);
        bounded.insert((a, 9), 9);
        assert_eq!(values(&bounded), [((a, 2), 7), ((a, 8), 8), ((a, 9), 9), ((b, 5), 5)]);
    }

    #[test]
    fn entries_that_come_and_go_take_bounded_memory() {
        let mut bounded = Bounded::new(16);
        for n in 0..10_000 {
            bounded.insert((VolumeId(n), n), n);
            if n >= 8 {
                bounded.forget(VolumeId(n - 8));
            }
            assert!(bounded.order.len() <= 33 && bounded.map.len() == bounded.keys.len());
        }
        assert_eq!(bounded.map.len(), 8);
    }
}
