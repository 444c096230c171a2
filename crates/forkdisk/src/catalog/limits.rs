//! Limits of what callers give: sizes, chunks, policies, texts.

use crate::error::{Error, ErrorKind, Result};
use crate::format::{GatherPolicy, MAX_ORIGIN_TEXT_BYTES, MAX_STAMPED_TEXT_BYTES, VolumeState};
use crate::types::{MAX_VOLUME_SIZE, VolumeId, is_chunk};

use super::CatalogEntry;

/// Refuses a volume of more than 1 PiB.
pub fn check_size(size: u64) -> Result<()> {
    match size <= MAX_VOLUME_SIZE {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Invalid, format!("{size} bytes is too large; a volume has at most 1 PiB"))),
    }
}

/// Refuses a bad policy of gathering.
pub fn check_gather(gather: GatherPolicy) -> Result<()> {
    match gather.is_valid() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Invalid, "bad policy of gathering: off, auto, idle, or 1% to 99%")),
    }
}

/// Refuses a bad chunk.
pub fn check_chunk(chunk: u64) -> Result<()> {
    match is_chunk(chunk) {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::Invalid,
            format!("bad chunk of {chunk} bytes: a power of two from 4 KiB to 64 MiB"),
        )),
    }
}

/// The number of a volume; refuses an origin and a snapshot.
pub fn writable_volume(volume: &CatalogEntry, name: &str) -> Result<VolumeId> {
    match volume.record.state {
        VolumeState::Origin => {
            let why = format!("{name:?} is an origin: its data lies outside of the pool, so this cannot be done to it");
            Err(Error::new(ErrorKind::Invalid, why))
        }
        VolumeState::Volume => Ok(volume.record.id),
        _ => Err(Error::new(ErrorKind::ReadOnly, format!("{name:?} is a snapshot and cannot be changed"))),
    }
}

/// Refuses a quota of more than 1 PiB.
pub fn check_quota(quota: u64) -> Result<()> {
    match quota <= MAX_VOLUME_SIZE {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Invalid, format!("bad quota of {quota} bytes: at most 1 PiB; 0 for none"))),
    }
}

/// Refuses texts that do not fit into the directory slot of an origin; `identity` is that of its device,
/// `None` for an origin of an older version without a stamp.
pub fn check_origin_text(name: &str, path: &str, identity: Option<&str>) -> Result<()> {
    let most = if identity.is_some() { MAX_STAMPED_TEXT_BYTES } else { MAX_ORIGIN_TEXT_BYTES };
    let identity = identity.unwrap_or_default();
    if name.len() + path.len() + identity.len() <= most {
        return Ok(());
    }
    let of = match identity {
        "" => String::new(),
        identity => format!(" and its identity ({identity:?})"),
    };
    let why = format!("the origin's name, the path of its device ({path:?}){of} are longer than {most} bytes together");
    Err(Error::new(ErrorKind::Invalid, format!("{why}; use a shorter name or path")))
}
