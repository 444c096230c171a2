//! Who has a pool open: the holders of a lock on its file, as the kernel lists them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The process that holds a lock on the file at `path`: `forkdisk serve (pid 123)`.
pub fn holder(path: &Path) -> Option<String> {
    let inode = fs::metadata(path).ok()?.ino();
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let own = std::process::id();
    let pid = lock_holders(&locks, inode).into_iter().find(|&pid| pid != own && has_open(pid, path))?;
    Some(format!("{} (pid {pid})", command(pid)))
}

/// Process ids in the text of `/proc/locks` that hold a lock on the file with this inode number.
/// A line reads `1: FLOCK  ADVISORY  WRITE 123 fe:00:4711 0 EOF`; waiting ones have `->` after the number.
fn lock_holders(locks: &str, inode: u64) -> Vec<u32> {
    let holder = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, kind, _, _, pid, file, ..] = fields[..] else { return None };
        let same = kind != "->" && file.rsplit(':').next()?.parse() == Ok(inode);
        if same { pid.parse().ok() } else { None }
    };
    locks.lines().filter_map(holder).collect()
}

/// Whether `pid` has this very file open: inode numbers alone are not unique across file systems.
/// Another user's process cannot be looked into and counts as yes.
fn has_open(pid: u32, path: &Path) -> bool {
    let Ok(wanted) = fs::metadata(path) else { return true };
    let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return true };
    open.flatten().any(|fd| {
        fs::metadata(fd.path()).is_ok_and(|found| (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()))
    })
}

/// Program and verb of a process, without paths and options.
fn command(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|&b| b == 0).map(String::from_utf8_lossy);
    let program = words.next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default().to_string();
    let verb = words.find(|word| !word.is_empty() && !word.starts_with('-'));
    match (program.as_str(), verb) {
        ("", _) => "another process".to_string(),
        ("forkdisk", Some(verb)) => format!("forkdisk {verb}"),
        _ => program,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_found_by_inode_and_waiters_are_not_holders() {
        let locks = "1: FLOCK  ADVISORY  WRITE 41 fe:00:4711 0 EOF\n\
                     2: POSIX  ADVISORY  READ 42 fe:00:4712 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 43 fe:00:4711 0 EOF\n\
                     3: OFDLCK ADVISORY  WRITE -1 fe:00:4711 0 0\n";
        assert_eq!(lock_holders(locks, 4711), [41]);
        assert_eq!(lock_holders(locks, 1), []);
    }
}
