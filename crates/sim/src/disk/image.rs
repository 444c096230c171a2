//! The contents of a simulated disk: sparse, and cheap to copy.
//!
//! Pages are shared between copies until one of them writes; a page that was never written reads as zeroes
//! and costs nothing. An image does not contain time, caches or lengths.

use std::rc::Rc;

/// Bytes of one page of an image.
pub const PAGE: usize = 4096;
const FAN_PAGES: usize = 64;

type Page = [u8; PAGE];
type Group = [Option<Rc<Page>>; FAN_PAGES];

/// Sparse contents; a clone shares everything with its source.
#[derive(Clone, Default)]
pub struct Image {
    groups: Vec<Option<Rc<Group>>>,
}

/// What a range is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zero bytes.
    Zero,
    /// Meaningless bytes, the same ones for the same number.
    Garbage(u64),
}

impl Image {
    fn page(&self, index: u64) -> Option<&Page> {
        let group = self.groups.get(index as usize / FAN_PAGES)?.as_ref()?;
        group[index as usize % FAN_PAGES].as_deref()
    }

    fn slot(&mut self, index: u64) -> &mut Option<Rc<Page>> {
        let (group, at) = (index as usize / FAN_PAGES, index as usize % FAN_PAGES);
        if self.groups.len() <= group {
            self.groups.resize(group + 1, None);
        }
        let group = self.groups[group].get_or_insert_with(|| Rc::new([const { None }; FAN_PAGES]));
        &mut Rc::make_mut(group)[at]
    }

    /// Copies `out.len()` bytes from `offset` on into `out`.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        for (page, within, range) in pieces(offset, out.len()) {
            let out = &mut out[range];
            match self.page(page) {
                Some(bytes) => out.copy_from_slice(&bytes[within..within + out.len()]),
                None => out.fill(0),
            }
        }
    }

    /// Whether the bytes from `offset` on are exactly `bytes`.
    pub fn holds(&self, offset: u64, bytes: &[u8]) -> bool {
        pieces(offset, bytes.len()).all(|(page, within, range)| {
            let bytes = &bytes[range];
            match self.page(page) {
                Some(page) => page[within..within + bytes.len()] == *bytes,
                None => bytes.iter().all(|&b| b == 0),
            }
        })
    }

    /// Writes `bytes` at `offset`.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (page, within, range) in pieces(offset, bytes.len()) {
            let bytes = &bytes[range];
            let slot = self.slot(page);
            if let Ok(whole) = <&Page>::try_from(bytes) {
                *slot = Some(Rc::new(*whole));
            } else {
                let page = Rc::make_mut(slot.get_or_insert_with(|| Rc::new([0; PAGE])));
                page[within..within + bytes.len()].copy_from_slice(bytes);
            }
        }
    }

    /// Fills `len` bytes from `offset` on.
    pub fn fill(&mut self, offset: u64, len: usize, fill: Fill) {
        for (page, within, range) in pieces(offset, len) {
            if fill == Fill::Zero {
                if self.page(page).is_none() {
                    continue;
                }
                if range.len() == PAGE {
                    *self.slot(page) = None;
                    continue;
                }
            }
            let at = page * PAGE as u64 + within as u64;
            let mut bytes = vec![0; range.len()];
            fill_bytes(fill, at, &mut bytes);
            self.write(at, &bytes);
        }
    }

    /// Zeroes everything from `len` on, as shortening and lengthening a file does.
    pub fn truncate(&mut self, len: u64) {
        let page = len / PAGE as u64;
        let within = (len % PAGE as u64) as usize;
        if within > 0 && self.page(page).is_some() {
            self.fill(len, PAGE - within, Fill::Zero);
        }
        let first = len.div_ceil(PAGE as u64) as usize;
        self.groups.truncate(first.div_ceil(FAN_PAGES));
        if !first.is_multiple_of(FAN_PAGES)
            && first / FAN_PAGES < self.groups.len()
            && self.groups[first / FAN_PAGES].is_some()
        {
            for at in first..first.next_multiple_of(FAN_PAGES) {
                *self.slot(at as u64) = None;
            }
        }
    }

    /// Returns the indexes of the pages that hold something, in ascending order.
    pub fn pages(&self) -> Vec<u64> {
        let mut found = Vec::new();
        for (g, group) in self.groups.iter().enumerate() {
            let Some(group) = group else { continue };
            found.extend((0..FAN_PAGES).filter(|&i| group[i].is_some()).map(|i| (g * FAN_PAGES + i) as u64));
        }
        found
    }
}

/// Returns in `out` the bytes that `fill` writes at `offset`.
pub fn fill_bytes(fill: Fill, offset: u64, out: &mut [u8]) {
    match fill {
        Fill::Zero => out.fill(0),
        Fill::Garbage(number) => {
            for (i, chunk) in out.chunks_mut(512).enumerate() {
                let mut rng = crate::rng::Rng::new(crate::rng::mix(&[number, offset / 512 + i as u64]));
                for word in chunk.chunks_mut(8) {
                    let bytes = rng.next().to_le_bytes();
                    word.copy_from_slice(&bytes[..word.len()]);
                }
            }
        }
    }
}

/// Splits a range into (page, offset in the page, range of the buffer).
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let within = (at % PAGE as u64) as usize;
        let n = (PAGE - within).min(len - done);
        done += n;
        Some((at / PAGE as u64, within, done - n..done))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(image: &Image, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0xee; len];
        image.read(offset, &mut out);
        out
    }

    #[test]
    fn a_copy_is_independent_and_sparse() {
        let mut a = Image::default();
        a.write(1 << 34, b"far away");
        a.write(4090, &[7; 10]);
        let b = a.clone();
        a.write(4094, &[9; 4]);
        assert_eq!(read(&b, 4088, 14), [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0]);
        assert_eq!(read(&a, 4092, 8), [7, 7, 9, 9, 9, 9, 7, 7]);
        assert_eq!(a.pages(), [0, 1, (1 << 34) / PAGE as u64]);
        assert!(b.holds(1 << 34, b"far away\0") && !b.holds(1 << 34, b"far way"));
    }

    #[test]
    fn fill_and_truncate_reach_exactly_their_range() {
        let mut image = Image::default();
        image.write(0, &[1; 3 * PAGE]);
        image.fill(100, 2 * PAGE, Fill::Zero);
        assert_eq!(image.pages(), [0, 2], "a page of zeroes costs nothing");
        assert_eq!(read(&image, 99, 2), [1, 0]);
        assert_eq!(read(&image, 2 * PAGE as u64 + 99, 2), [0, 1]);
        image.fill(8192, 512, Fill::Garbage(5));
        let garbage = read(&image, 8192, 512);
        assert!(garbage.iter().filter(|&&b| b > 1).count() > 400);
        image.truncate(8192 + 200);
        assert_eq!(read(&image, 8192, 201), [&garbage[..200], &[0]].concat());
        image.truncate(0);
        assert!(image.pages().is_empty());
    }
}
