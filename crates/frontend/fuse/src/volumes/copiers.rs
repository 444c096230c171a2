//! Detection of programs that look at a file's allocated space to decide how to copy it.
//!
//! `cp`, `mv` and `install` of GNU coreutils let the kernel copy a file (`copy_file_range`, which
//! makes a clone here) only if it has no holes; they read and write a sparse file piece by piece.
//! So a file that such a program copies to a place on this mount is reported to it without holes;
//! the clone has all of them. If it copies elsewhere, it sees the holes: otherwise the copy would
//! lose them. A version without `copy_file_range` (coreutils before 9.0) sees the holes, too.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs;
use std::path::Path;

use super::destination::is_on;

/// Most opens that are remembered.
const MAX_COPIERS_COUNT: usize = 1024;
/// Symbol of the system call in a program that uses it.
const SYSTEM_CALL: &[u8] = b"copy_file_range";
/// Largest program in bytes that is searched for it.
const MAX_COPY_BYTES: u64 = 64 << 20;

/// Opens by such programs that have not queried attributes since: (thread, node).
#[derive(Default)]
pub struct Copiers {
    asking: RefCell<HashSet<(u32, u64)>>,
    /// Programs by device, inode, length and modification time, each with whether it has the system call.
    programs: RefCell<Vec<(Program, bool)>>,
}

type Program = (u64, u64, u64, i64);

impl Copiers {
    /// Remembers that thread `pid` has opened `node`, if it is such a program and copies to the mount at `dir`.
    pub fn opened(&self, pid: u32, node: u64, dir: &Path) -> bool {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let is_one = is_copier(&name) && is_on(dir, pid) && self.has_system_call(pid);
        if is_one {
            let mut known = self.asking.borrow_mut();
            if known.len() >= MAX_COPIERS_COUNT {
                known.clear();
            }
            known.insert((pid, node));
        }
        is_one
    }

    /// Returns whether the thread is such a program and has just opened `node`; true only once.
    pub fn asks(&self, pid: u32, node: u64) -> bool {
        let mut known = self.asking.borrow_mut();
        !known.is_empty() && known.remove(&(pid, node))
    }

    /// Returns whether the program has `copy_file_range`; true if it cannot be read.
    fn has_system_call(&self, pid: u32) -> bool {
        use std::os::unix::fs::MetadataExt;
        let path = format!("/proc/{pid}/exe");
        // Not for a program on a FUSE mount: it may be on this mount, which this thread serves.
        let is_safe = fs::read_link(&path).is_ok_and(|program| !super::destination::is_on_fuse(&program));
        let Some(found) = is_safe.then(|| fs::metadata(&path).ok()).flatten().filter(|m| m.len() <= MAX_COPY_BYTES)
        else {
            return true;
        };
        let program = (found.dev(), found.ino(), found.len(), found.mtime());
        if let Some((_, has)) = self.programs.borrow().iter().find(|(known, _)| *known == program) {
            return *has;
        }
        let has = fs::read(&path).map_or(true, |bytes| contains(&bytes, SYSTEM_CALL));
        let mut programs = self.programs.borrow_mut();
        programs.truncate(15);
        programs.insert(0, (program, has));
        has
    }
}

fn is_copier(name: &str) -> bool {
    matches!(name.trim_end(), "cp" | "mv" | "install" | "ginstall")
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_that_copy_are_meant() {
        assert!(is_copier("cp\n") && is_copier("mv\n"));
        assert!(!is_copier("cpio\n") && !is_copier("ls\n") && !is_copier(""));
        let (copiers, own) = (Copiers::default(), std::process::id());
        assert!(!copiers.opened(own, 3, Path::new("/")) && !copiers.asks(own, 3));
        copiers.asking.borrow_mut().insert((7, 3));
        assert!(!copiers.asks(7, 4) && copiers.asks(7, 3) && !copiers.asks(7, 3));
    }

    #[test]
    fn a_program_without_the_system_call_is_recognised() {
        assert!(contains(b"..copy_file_range\0..", SYSTEM_CALL) && !contains(b"..copy_file..", SYSTEM_CALL));
        let copiers = Copiers::default();
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let has = copiers.has_system_call(other.id());
        let programs = copiers.programs.borrow().len();
        let again = copiers.has_system_call(other.id());
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(!has && !again, "it sleeps and copies nothing");
        assert_eq!((programs, copiers.programs.borrow().len()), (1, 1), "it is searched once");
        assert!(copiers.has_system_call(other.id()), "a program that cannot be read");
    }
}
