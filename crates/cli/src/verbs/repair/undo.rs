//! The undo file of a repair.
//!
//! Integers are little-endian: magic `fkdkundo`, UUID of the pool (16 bytes), number n of pages
//! (8); the two superblocks that the repair wrote, each with its offset in the pool (8) before its
//! 4096 bytes; n times an offset (8) and the old contents of the page there (4096 bytes), in the
//! order in which they are to be written back; XXH3 of all this (8).

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use forkdisk::{PAGE_SIZE, Replacement};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"fkdkundo";
const HEADER_BYTES: usize = 32;
const EACH_BYTES: usize = 8 + PAGE_SIZE;

/// Contents of an undo file, as described above.
pub struct UndoFile {
    uuid: [u8; 16],
    /// The superblocks that the repair wrote.
    pub superblocks: Vec<Replacement>,
    /// Old contents of the written pages.
    pub pages: Vec<Replacement>,
}

impl UndoFile {
    /// Creates the undo file of a repair that writes `new`, whose last two pages are superblocks, over `old`.
    pub fn of(uuid: [u8; 16], old: Vec<Replacement>, new: &[Replacement]) -> UndoFile {
        UndoFile { uuid, superblocks: new[new.len() - 2..].to_vec(), pages: old }
    }

    /// Writes it durably to a new file; refuses an existing one.
    pub fn write(&self, path: &Path) -> Result<()> {
        let at = || format!("{}: saving what the repair overwrites", path.display());
        let mut file = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                bail!("{} exists already; name another one with --undo-file", path.display())
            }
            file => file.with_context(at)?,
        };
        if let Err(error) = file.write_all(&self.encode()).and_then(|()| file.sync_all()) {
            // An incomplete file is useless.
            let _ = fs::remove_file(path);
            return Err(error).with_context(at).context("the pool was not written");
        }
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).with_context(at)
    }

    /// Reads an undo file.
    pub fn read(path: &Path) -> Result<UndoFile> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        UndoFile::decode(&bytes).with_context(|| format!("{} is not a complete undo file of a repair", path.display()))
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + (2 + self.pages.len()) * EACH_BYTES + 8);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&self.uuid);
        out.extend_from_slice(&(self.pages.len() as u64).to_le_bytes());
        for (offset, bytes) in self.superblocks.iter().chain(&self.pages) {
            out.extend_from_slice(&offset.to_le_bytes());
            out.extend_from_slice(&bytes[..]);
        }
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Option<UndoFile> {
        let (body, sum) = bytes.split_last_chunk::<8>()?;
        let (header, pages) = body.split_at_checked(HEADER_BYTES)?;
        let count = u64::from_le_bytes(header[24..].try_into().ok()?);
        let is_whole = header[..8] == *MAGIC
            && xxh3_64(body) == u64::from_le_bytes(*sum)
            && pages.len() as u64 == count.checked_add(2)?.checked_mul(EACH_BYTES as u64)?;
        if !is_whole {
            return None;
        }
        let page = |bytes: &[u8]| {
            let (offset, bytes) = bytes.split_first_chunk::<8>()?;
            Some((u64::from_le_bytes(*offset), Box::new(<[u8; PAGE_SIZE]>::try_from(bytes).ok()?)))
        };
        let mut superblocks = pages.chunks_exact(EACH_BYTES).map(page).collect::<Option<Vec<Replacement>>>()?;
        let pages = superblocks.split_off(2);
        Some(UndoFile { uuid: header[8..24].try_into().ok()?, superblocks, pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_found_again_and_nothing_half_is_taken() {
        let page = |n: u8| (u64::from(n) * 4096, Box::new([n; PAGE_SIZE]));
        let kept = UndoFile::of([7; 16], vec![page(1), page(2), page(3)], &[page(4), page(5), page(6)]);
        let bytes = kept.encode();
        let found = UndoFile::decode(&bytes).expect("whole");
        assert_eq!((found.uuid, found.pages), ([7; 16], vec![page(1), page(2), page(3)]));
        assert_eq!(found.superblocks, [page(5), page(6)]);
        for len in [0, 7, 40, 5000, bytes.len() - 1] {
            assert!(UndoFile::decode(&bytes[..len]).is_none(), "{len} bytes");
        }
        let mut changed = bytes;
        changed[6000] ^= 1;
        assert!(UndoFile::decode(&changed).is_none());
    }

    #[test]
    fn no_file_is_written_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.undo");
        let page = |n: u8| (u64::from(n) * 4096, Box::new([n; PAGE_SIZE]));
        let kept = UndoFile::of([7; 16], vec![page(1), page(2)], &[page(4), page(5)]);
        kept.write(&path).expect("written");
        let error = kept.write(&path).expect_err("it exists").to_string();
        assert!(error.contains("--undo-file"), "{error}");
        assert_eq!(UndoFile::read(&path).expect("whole").pages.len(), 2);
    }
}
