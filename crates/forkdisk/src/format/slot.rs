//! The pages of the directory: eight slots of 512 bytes, each with the record of a volume or with an extension.

use crate::types::{PAGE_SIZE, VolumeId};

use super::extension::SLOT_STATE;
use super::volume::DIRECTORY_SLOT_BYTES;
use super::{Extension, VolumeRecord};

/// Slots in a directory page.
pub const SLOTS_PER_PAGE: usize = PAGE_SIZE / DIRECTORY_SLOT_BYTES;

/// What a slot of the directory has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectorySlot {
    /// The record of a volume, a snapshot, a folder or an origin.
    Volume(VolumeRecord),
    /// The extension of the volume with this number.
    Extension(VolumeId, Extension),
}

impl DirectorySlot {
    fn encode(&self, out: &mut [u8]) {
        match self {
            DirectorySlot::Volume(record) => record.encode(out),
            DirectorySlot::Extension(of, extension) => extension.encode_slot(*of, out),
        }
    }

    fn decode(slot: &[u8], pool_pages: u64) -> Option<DirectorySlot> {
        match slot[0] {
            SLOT_STATE => Extension::decode_slot(slot).map(|(of, found)| DirectorySlot::Extension(of, found)),
            _ => VolumeRecord::decode(slot, pool_pages).map(DirectorySlot::Volume),
        }
    }
}

/// Writes a directory page.
pub fn encode_directory_page(slots: &[Option<&DirectorySlot>; SLOTS_PER_PAGE], page: &mut [u8]) {
    page[..PAGE_SIZE].fill(0);
    for (slot, out) in slots.iter().zip(page.chunks_exact_mut(DIRECTORY_SLOT_BYTES)) {
        if let Some(slot) = slot {
            slot.encode(out);
        }
    }
}

/// Reads a directory page, or reports which slot is damaged.
pub fn decode_directory_page(page: &[u8], pool_pages: u64) -> Result<Vec<Option<DirectorySlot>>, String> {
    let slots = page[..PAGE_SIZE].chunks_exact(DIRECTORY_SLOT_BYTES).enumerate();
    slots
        .map(|(i, slot)| match slot[0] {
            0 => Ok(None),
            _ => DirectorySlot::decode(slot, pool_pages).map(Some).ok_or_else(|| format!("slot {i} makes no sense")),
        })
        .collect()
}
