//! Memory that outlives the process: a file on tmpfs, mapped shared.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use memmap2::MmapMut;

use crate::at_once;

/// A mapped file in memory. No other process writes it while this lives.
pub struct SharedMemory {
    map: MmapMut,
    /// Holds the lock.
    _file: File,
}

impl SharedMemory {
    /// Opens the file at `path`. If it is missing, creates it with `len` bytes if `make` is set,
    /// else returns `None`. All of its memory is allocated, so that no store can fail.
    ///
    /// # Errors
    /// `Unsupported` if the folder is not in memory (tmpfs), `WouldBlock` if another process has the file open.
    pub fn open(path: &Path, len: usize, make: bool) -> io::Result<Option<SharedMemory>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(make).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = match options.open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !make => return Ok(None),
            Err(e) => return Err(e),
        };
        if !at_once::is_in_memory(file.as_fd())? {
            if file.metadata()?.len() == 0 {
                let _ = fs::remove_file(path);
            }
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the folder is not in memory (tmpfs)"));
        }
        // Several processes may read what was left: the pool's own lock separates writers from them.
        let lock = if make { libc::LOCK_EX } else { libc::LOCK_SH };
        // SAFETY: a call on an open descriptor.
        if unsafe { libc::flock(file.as_raw_fd(), lock | libc::LOCK_NB) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let found = file.metadata()?.len() as usize;
        let len = if found >= len || !make { found } else { len };
        if len == 0 {
            return Ok(None);
        }
        // SAFETY: as above; it returns an error number.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len as libc::off_t) } {
            0 => {}
            error => {
                if found == 0 {
                    let _ = fs::remove_file(path);
                }
                return Err(io::Error::from_raw_os_error(error));
            }
        }
        // SAFETY: the file lies in a folder that only this user can access, is locked, and its
        // storage is allocated: no other process shortens or writes it while it is mapped.
        let map = unsafe { MmapMut::map_mut(&file)? };
        Ok(Some(SharedMemory { map, _file: file }))
    }
}

impl AsMut<[u8]> for SharedMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lasts_and_has_one_owner() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let path = dir.path().join("memory");
        assert!(SharedMemory::open(&path, 8192, false).unwrap().is_none());
        let mut first = SharedMemory::open(&path, 8192, true).unwrap().unwrap();
        first.as_mut()[8000..8003].copy_from_slice(b"kep");
        assert_eq!(SharedMemory::open(&path, 8192, true).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(SharedMemory::open(&path, 8192, false).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        drop(first);
        let _reader = SharedMemory::open(&path, 4096, false).unwrap().unwrap();
        let mut second = SharedMemory::open(&path, 4096, false).unwrap().unwrap();
        assert_eq!((second.as_mut().len(), &second.as_mut()[8000..8003]), (8192, &b"kep"[..]));
    }

    #[test]
    fn a_folder_on_a_disk_is_refused() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("memory");
        match SharedMemory::open(&path, 8192, true) {
            Err(e) => assert!(e.kind() == io::ErrorKind::Unsupported && !path.exists()),
            Ok(_) => assert!(at_once::is_in_memory(File::open(dir.path()).unwrap().as_fd()).unwrap()),
        }
    }
}
