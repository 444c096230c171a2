//! Programs that look at how much space a file takes before they decide how to copy it.
//!
//! `cp`, `mv` and `install` of GNU coreutils let the kernel copy a file (`copy_file_range`, which makes a clone here)
//! only if it has no holes; a sparse file they read and write piece by piece. So, and for nobody else, a file
//! that one of them has opened seems to have no holes; the clone has them all.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs;

/// Most of them that are remembered.
const MOST: usize = 1024;

/// Who has opened what and has not asked for its attributes since: (thread, node).
#[derive(Default)]
pub struct Copiers(RefCell<HashSet<(u32, u64)>>);

impl Copiers {
    /// Remembers that the thread `pid` has opened `node`, if it is one of them.
    pub fn opened(&self, pid: u32, node: u64) -> bool {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let is_one = is_copier(&name);
        if is_one {
            let mut known = self.0.borrow_mut();
            if known.len() >= MOST {
                known.clear();
            }
            known.insert((pid, node));
        }
        is_one
    }

    /// Whether the thread is one that has just opened `node`. Answered once.
    pub fn asks(&self, pid: u32, node: u64) -> bool {
        let mut known = self.0.borrow_mut();
        !known.is_empty() && known.remove(&(pid, node))
    }
}

fn is_copier(name: &str) -> bool {
    matches!(name.trim_end(), "cp" | "mv" | "install" | "ginstall")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_that_copy_are_meant() {
        assert!(is_copier("cp\n") && is_copier("mv\n"));
        assert!(!is_copier("cpio\n") && !is_copier("ls\n") && !is_copier(""));
        let copiers = Copiers::default();
        assert!(!copiers.opened(std::process::id(), 3) && !copiers.asks(std::process::id(), 3));
        copiers.0.borrow_mut().insert((7, 3));
        assert!(!copiers.asks(7, 4) && copiers.asks(7, 3) && !copiers.asks(7, 3));
    }
}
