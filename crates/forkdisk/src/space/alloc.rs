//! Where the next write goes.
//!
//! A stream (a write that is large, or small ones one behind the other) gets a block of its own in which
//! every page lies where it lies in the virtual block, so that a filled block can be mapped as one. A
//! random writer gets a chunk: its pages lie in the chunk as they lie in the virtual chunk, chunks one
//! behind the other. A chunk that begins a virtual block is laid at the beginning of a block: should it
//! turn out to begin a stream, the rest of the block is its own. When nothing of this is to be had, any
//! free page.

use crate::types::{BLOCK_PAGES, Block, PageAddr};

use super::{Bitmap, Miss, Refusal, Space, Want, bit};

impl Space {
    /// One or more contiguous pages for a write, at most as many as wanted.
    pub fn alloc_data(&mut self, want: Want) -> Result<(PageAddr, u64), Refusal> {
        let Want { volume, at, pages, chunk_pages, .. } = want;
        let (index, virtual_block) = (at.index(), at.block());
        let stream = self.affinity.is_stream(volume, &want.write) || chunk_pages >= BLOCK_PAGES;
        if let Some(block) = self.affinity.owned(volume, virtual_block)
            && let Some(run) = self.take(block, index, pages)
        {
            return Ok(run);
        }
        if !stream && let Some(run) = self.take_in_chunk(&want)? {
            return Ok(run);
        }
        if let Some(block) = self.begun_by_a_chunk(&want)
            && let Some(run) = self.take(block, index, pages)
        {
            self.affinity.own(volume, virtual_block, block);
            return Ok(run);
        }
        let before = virtual_block.checked_sub(1).and_then(|b| self.affinity.owned(volume, b));
        if let Some(block) = self.empty_block(before)? {
            self.affinity.own(volume, virtual_block, block);
            return Ok(self.take(block, index, pages).expect("an empty block has every page"));
        }
        loop {
            let found = self.free.iter().next().map(|(&block, bits)| (block, first_free(bits)));
            match found {
                Some((block, index)) => return Ok(self.take(block, index, pages).expect("it is free")),
                None if self.scan_leaf()? => {}
                None => return Err(Refusal::NoSpace),
            }
        }
    }

    fn take_in_chunk(&mut self, want: &Want) -> Result<Option<(PageAddr, u64)>, Miss> {
        let (chunk, within) = (want.at.0 / want.chunk_pages, want.at.0 % want.chunk_pages);
        let max = want.pages.min(want.chunk_pages - within);
        if let Some(first) = self.affinity.chunk(want.volume, chunk) {
            let page = PageAddr(first.0 + within);
            if let Some(run) = self.take(page.block(), page.index(), max) {
                return Ok(Some(run));
            }
        }
        let Some((block, next)) = self.room_for_chunk(want, chunk)? else { return Ok(None) };
        self.affinity.keep_chunk(want.volume, chunk, block.page(next as usize));
        // Somebody else may have taken the page under pressure.
        Ok(self.take(block, (next + within) as usize, max))
    }

    /// Where a chunk may lie: behind the one before it; in an empty block if it begins a virtual block; in
    /// a block that has room left.
    fn room_for_chunk(&mut self, want: &Want, chunk: u64) -> Result<Option<(Block, u64)>, Miss> {
        let pages = want.chunk_pages;
        let begins = (chunk * pages).is_multiple_of(BLOCK_PAGES);
        if !begins
            && let Some(before) = self.affinity.chunk(want.volume, chunk - 1)
            && self.affinity.open_chunk_at(PageAddr(before.0 + pages), pages)
        {
            return Ok(Some((before.block(), before.index() as u64 + pages)));
        }
        if !begins && let Some(room) = self.affinity.open_chunk(pages) {
            return Ok(Some(room));
        }
        if let Some(block) = self.empty_block(None)? {
            self.affinity.leave_open(block, pages);
            return Ok(Some((block, 0)));
        }
        Ok(self.affinity.open_chunk(pages))
    }

    /// The block at whose beginning the first chunk of this virtual block lies.
    fn begun_by_a_chunk(&self, want: &Want) -> Option<Block> {
        let chunk = want.at.block() * BLOCK_PAGES / want.chunk_pages;
        self.affinity.chunk(want.volume, chunk).filter(|first| first.index() == 0).map(PageAddr::block)
    }

    /// A block of which every page is free: the one behind `before` if possible.
    fn empty_block(&mut self, before: Option<Block>) -> Result<Option<Block>, Miss> {
        if let Some(next) = before.map(|b| Block(b.0 + 1))
            && self.empty.contains(&next)
        {
            return Ok(Some(next));
        }
        loop {
            if let Some(&block) = self.empty.first() {
                return Ok(Some(block));
            }
            if !self.scan_leaf()? {
                return Ok(None);
            }
        }
    }

    /// Hands out free pages of a block from `index` on, as many as lie in a row, at most `max`.
    fn take(&mut self, block: Block, index: usize, max: u64) -> Option<(PageAddr, u64)> {
        let bits = self.free.get_mut(&block)?;
        let end = (index + max as usize).min(BLOCK_PAGES as usize);
        let n = (index..end).find(|&i| !bit(bits, i)).unwrap_or(end) - index;
        if n == 0 {
            return None;
        }
        (index..index + n).for_each(|i| bits[i / 64] &= !(1 << (i % 64)));
        if *bits == [0; 4] {
            self.free.remove(&block);
        }
        self.empty.remove(&block);
        let first = block.page(index);
        (0..n as u64).for_each(|i| self.current.touch(PageAddr(first.0 + i)));
        self.known -= n as u64;
        self.available -= n as u64;
        self.handed_out += n as u64;
        Some((first, n as u64))
    }

    /// Pages for metadata, from space already known to be free, as contiguous as possible.
    pub fn alloc_meta(&mut self, n: u64) -> Option<Vec<(PageAddr, u64)>> {
        if self.known < n {
            return None;
        }
        let (mut out, mut left) = (Vec::new(), n);
        while left > 0 {
            let block = match self.affinity.meta_block.filter(|b| self.free.contains_key(b)) {
                Some(block) => block,
                None => *self.empty.first().or_else(|| self.free.keys().next())?,
            };
            self.affinity.meta_block = Some(block);
            let index = first_free(&self.free[&block]);
            let run = self.take(block, index, left)?;
            left -= run.1;
            out.push(run);
        }
        Some(out)
    }

    /// Searches until at least `pages` free pages are known.
    pub fn ensure_known(&mut self, pages: u64) -> Result<(), Refusal> {
        while self.known < pages {
            if !self.scan_leaf()? {
                return Err(Refusal::NoSpace);
            }
        }
        Ok(())
    }

    /// Replay: these pages were handed out before the crash.
    pub fn mark_allocated(&mut self, first: PageAddr, n: u64) -> Result<(), Miss> {
        for page in (first.0..first.0 + n).map(PageAddr) {
            let free = bit(&self.free_by_leaf(page.block())?, page.index());
            if self.is_touched(page) || !free {
                continue;
            }
            self.current.touch(page);
            self.available -= 1;
            self.handed_out += 1;
            if let Some(bits) = self.free.get_mut(&page.block())
                && bit(bits, page.index())
            {
                bits[page.index() / 64] &= !(1 << (page.index() % 64));
                self.known -= 1;
                self.empty.remove(&page.block());
            }
        }
        Ok(())
    }
}

fn first_free(bits: &Bitmap) -> usize {
    let word = bits.iter().position(|&w| w != 0).expect("a block in the list has a free page");
    word * 64 + bits[word].trailing_zeros() as usize
}
