//! A map table's page.

use crate::types::{PAGE_SIZE, TABLE_FANOUT};

use super::MapEntry;
use super::ordered::{decode_ordered, is_ordered};

/// Writes 256 entries into a page.
pub fn encode_table(entries: &[MapEntry; TABLE_FANOUT], page: &mut [u8]) {
    for (entry, out) in entries.iter().zip(page[..PAGE_SIZE].chunks_exact_mut(16)) {
        out.copy_from_slice(&entry.to_bytes());
    }
}

/// Reads 256 entries from a page of `level`, radix or ordered, or reports which one is damaged and how.
pub fn decode_table(page: &[u8], level: u8, pool_pages: u64) -> Result<Box<[MapEntry; TABLE_FANOUT]>, String> {
    if is_ordered(level) {
        return decode_ordered(page, level, pool_pages);
    }
    let mut entries = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
    for (i, (entry, bytes)) in entries.iter_mut().zip(page[..PAGE_SIZE].chunks_exact(16)).enumerate() {
        *entry = MapEntry::from_bytes(bytes.try_into().expect("16 bytes"));
        if let Some(flaw) = entry.flaw(level, pool_pages) {
            return Err(format!("entry {i}: {flaw}"));
        }
    }
    Ok(entries)
}
