//! Changing properties in both superblocks of a pool that is not open.

use std::time::Duration;

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BEATS_APART, SUPERBLOCK_PAGES, Superblock};
use crate::store::read_superblock;
use crate::types::PAGE_SIZE;

use super::repair::{Replacement, replace_pages};

/// Gives a pool that was closed in order another UUID, so that it and the pool it was copied from are two.
/// Nothing else may have it open. A crash leaves the old UUID or the new one.
///
/// # Errors
///
/// `Busy` if the pool was not closed in order: open it for writing first.
pub async fn set_uuid<D: Device>(device: &D, uuid: [u8; 16]) -> Result<()> {
    change(device, |old| Superblock { uuid, ..old }).await
}

/// Gives a pool a heartbeat, with which one host at a time has it open, or removes it (zero). `interval`:
/// time between two beats in whole milliseconds, 100 ms to 60 s.
///
/// # Errors
///
/// `Invalid` for another interval, and those of [`set_uuid`].
pub async fn set_heartbeat<D: Device>(device: &D, interval: Duration) -> Result<()> {
    let heartbeat = u32::try_from(interval.as_millis()).unwrap_or(u32::MAX);
    let is_whole = Duration::from_millis(heartbeat.into()) == interval;
    if !is_whole || heartbeat != 0 && !BEATS_APART.contains(&heartbeat) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("bad heartbeat of {interval:?}: 100 ms to 60 s, or 0 for none"),
        ));
    }
    change(device, |old| Superblock { heartbeat, ..old }).await
}

async fn change<D: Device>(device: &D, to: impl FnOnce(Superblock) -> Superblock) -> Result<()> {
    let found = read_superblock(device).await?;
    if !found.superblock.clean {
        let why = "the pool was not closed in order; open it for writing first, which replays its journal";
        return Err(Error::new(ErrorKind::Busy, why));
    }
    let generation = found.superblock.generation + 1;
    let next = Superblock { generation, ..to(found.superblock) };
    // The slot that was not chosen comes first: the other may be the only valid one.
    let pages = [1 - found.slot, found.slot].map(|slot| page(&next, slot));
    replace_pages(device, &pages).await
}

fn page(superblock: &Superblock, slot: usize) -> Replacement {
    let mut page = Box::new([0; PAGE_SIZE]);
    superblock.encode(SUPERBLOCK_PAGES[slot], &mut page[..]);
    (SUPERBLOCK_PAGES[slot].offset(), page)
}
