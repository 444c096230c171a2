//! Files that get their name when they are complete: a program that ends before that leaves no file
//! that could be taken for a complete one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, openat, renameat_with};
use rustix::io::Errno;

/// A new file that has no name yet.
pub struct NewFile {
    /// Open for reading and writing.
    pub file: File,
    target: PathBuf,
    /// Temporary name, on file systems without unnamed files.
    provisional: Option<PathBuf>,
}

impl NewFile {
    /// Creates an empty file for `target`.
    pub fn beside(target: &Path) -> Result<NewFile> {
        let failed = || format!("{}: cannot be written", target.display());
        let dir = folder(target);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let made = match openat(CWD, &dir, flags, Mode::from_raw_mode(0o666)) {
            Ok(fd) => (File::from(fd), None),
            Err(Errno::NOTSUP | Errno::ISDIR | Errno::INVAL) => {
                let path = provisional(target);
                let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
                (file.with_context(failed)?, Some(path))
            }
            Err(e) => return Err(io::Error::from(e)).with_context(failed),
        };
        Ok(NewFile { file: made.0, target: target.to_path_buf(), provisional: made.1 })
    }

    /// Returns a path by which other programs of this user reach the file while this process has it open.
    pub fn path(&self) -> PathBuf {
        let process = std::process::id();
        self.provisional.clone().unwrap_or_else(|| format!("/proc/{process}/fd/{}", self.file.as_raw_fd()).into())
    }

    /// Gives the file its name, durably; replaces an existing file only if `replace`.
    pub fn keep(mut self, replace: bool) -> Result<()> {
        let kept = self.name(replace);
        kept.with_context(|| format!("{}: cannot be given its name", self.target.display()))
    }

    fn name(&mut self, replace: bool) -> io::Result<()> {
        if self.provisional.is_none() {
            let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            let to = if replace { provisional(&self.target) } else { self.target.clone() };
            linkat(CWD, &own, CWD, &to, AtFlags::SYMLINK_FOLLOW)?;
            self.provisional = replace.then_some(to);
        }
        if let Some(from) = &self.provisional {
            let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
            renameat_with(CWD, from, CWD, &self.target, flags)?;
            self.provisional = None;
        }
        // Fails on file systems that cannot sync a folder and do not need to.
        let _ = File::open(folder(&self.target)).and_then(|dir| dir.sync_all());
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(path) = &self.provisional {
            // The file is incomplete. A failure here would hide the error that led to it.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn folder(target: &Path) -> PathBuf {
    let dir = target.parent().filter(|dir| !dir.as_os_str().is_empty());
    dir.map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Returns a temporary name beside the target that tells what the file is.
fn provisional(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    folder(target).join(format!(".{name}.{}.forkdisk-partial", std::process::id()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_has_its_name_when_it_is_whole_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let names = || std::fs::read_dir(dir.path()).unwrap().count();
        let mut new = NewFile::beside(&target).unwrap();
        new.file.write_all(b"half").unwrap();
        drop(new);
        assert_eq!(names(), 0);
        let mut new = NewFile::beside(&target).unwrap();
        new.file.write_all(b"whole").unwrap();
        new.keep(false).unwrap();
        assert_eq!((std::fs::read(&target).unwrap(), names()), (b"whole".to_vec(), 1));
        assert!(NewFile::beside(&target).unwrap().keep(false).is_err(), "another file has the name");
        let mut new = NewFile::beside(&target).unwrap();
        new.file.write_all(b"newer").unwrap();
        new.keep(true).unwrap();
        assert_eq!((std::fs::read(&target).unwrap(), names()), (b"newer".to_vec(), 1));
    }

    #[test]
    fn where_files_need_a_name_it_says_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let path = provisional(&target);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        let new = NewFile { file, target: target.clone(), provisional: Some(path.clone()) };
        assert!(path.to_string_lossy().ends_with(".forkdisk-partial"));
        new.keep(false).unwrap();
        assert!(target.exists() && !path.exists());
    }
}
