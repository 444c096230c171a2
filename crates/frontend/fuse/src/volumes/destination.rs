//! Destination of a program that copies files, from its arguments. Reads only the kernel's tables
//! and no FUSE mount, which might be the one that waits for the answer.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::mount::{MountPoint, mounted_at, table_of};

/// Most symbolic links that are followed.
const MAX_LINKS_COUNT: usize = 40;

/// Returns whether thread `pid`, a `cp`, `mv` or `install`, copies to the mount at `dir`.
pub fn is_on(dir: &Path, pid: u32) -> bool {
    let Some(own) = mounted_at(dir) else { return false };
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let arguments: Vec<String> =
        arguments.split(|&b| b == 0).map(|a| String::from_utf8_lossy(a).into_owned()).collect();
    let (Some(to), Ok(here)) = (destination(&arguments), fs::read_link(format!("/proc/{pid}/cwd"))) else {
        return false;
    };
    let table = table_of(pid);
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    covering(&table, &resolve(&here.join(to), &table, &root)).is_some_and(|mount| mount.device == own.device)
}

/// Returns whether `path` lies on a FUSE mount in the mount namespace of this process.
pub fn is_on_fuse(path: &Path) -> bool {
    let table = table_of(std::process::id());
    covering(&table, path).is_none_or(|mount| mount.kind.starts_with("fuse"))
}

/// Returns the destination of a copy: the value of `-t`, or the last argument.
fn destination(arguments: &[String]) -> Option<&str> {
    let mut last = None;
    let mut rest = arguments.iter().skip(1).map(String::as_str).filter(|a| !a.is_empty());
    while let Some(argument) = rest.next() {
        if argument == "--" {
            return rest.next_back().or(last);
        }
        if let Some(long) = argument.strip_prefix("--") {
            let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
            if name.starts_with('t') && "target-directory".starts_with(name) {
                return value.or_else(|| rest.next());
            }
        } else if let Some(short) = argument.strip_prefix('-').filter(|short| !short.is_empty()) {
            // For options with a value, that is the rest of the word or the next argument.
            if let Some(at) = short.find(['t', 'S', 'm', 'o', 'g']) {
                let value = Some(&short[at + 1..]).filter(|value| !value.is_empty());
                match &short[at..=at] {
                    "t" => return value.or_else(|| rest.next()),
                    // `cp` and `mv` do not have these options.
                    _ if value.is_none() => drop(rest.next()),
                    _ => {}
                }
            }
        } else {
            last = Some(argument);
        }
    }
    last
}

/// Resolves a path to an absolute one, following links except on FUSE mounts.
fn resolve(path: &Path, table: &[(PathBuf, MountPoint)], root: &Path) -> PathBuf {
    let mut done = PathBuf::from("/");
    let mut left: Vec<PathBuf> = parts(path);
    let mut links = MAX_LINKS_COUNT;
    while let Some(part) = left.pop() {
        if part == Path::new("..") {
            done.pop();
            continue;
        }
        let next = done.join(&part);
        let is_safe = covering(table, &next).is_some_and(|mount| !mount.kind.starts_with("fuse"));
        let within = root.join(next.strip_prefix("/").unwrap_or(&next));
        match is_safe.then(|| fs::read_link(within).ok()).flatten().filter(|_| links > 0) {
            Some(link) => {
                links -= 1;
                if link.is_absolute() {
                    done = PathBuf::from("/");
                }
                left.extend(parts(&link));
            }
            None => done = next,
        }
    }
    done
}

/// Returns the components of a path in reverse order.
fn parts(path: &Path) -> Vec<PathBuf> {
    let is_part = |c: &Component<'_>| matches!(c, Component::Normal(_) | Component::ParentDir);
    path.components().rev().filter(is_part).map(|c| PathBuf::from(c.as_os_str())).collect()
}

/// Returns the mount that contains `path`: among those with the longest mount point, the last one.
fn covering<'a>(table: &'a [(PathBuf, MountPoint)], path: &Path) -> Option<&'a MountPoint> {
    let of = table.iter().filter(|(dir, _)| path.starts_with(dir));
    of.max_by_key(|(dir, _)| dir.as_os_str().len()).map(|(_, mount)| mount)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Option<String> {
        let arguments: Vec<String> = line.split(' ').map(String::from).collect();
        destination(&arguments).map(String::from)
    }

    #[test]
    fn the_destination_is_the_last_place_or_that_of_t() {
        for (line, to) in [
            ("cp a b", "b"),
            ("cp -a --sparse=auto a b d/", "d/"),
            ("cp -t d a b", "d"),
            ("cp -atd a b", "d"),
            ("cp --target-directory=d a", "d"),
            ("cp --target d a", "d"),
            ("cp -- a -b", "-b"),
            ("mv -S .old a b", "b"),
            ("mv a b -v", "b"),
            ("install -m 644 -o root a b", "b"),
            ("install -Dm644 a b", "b"),
        ] {
            assert_eq!(of(line).as_deref(), Some(to), "{line}");
        }
        assert_eq!(of("cp"), None);
    }

    #[test]
    fn links_are_followed_but_not_on_a_fuse_mount() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::os::unix::fs::symlink("real", dir.join("link")).unwrap();
        std::os::unix::fs::symlink(dir.join("link"), dir.join("far")).unwrap();
        let mount = |kind: &str, minor| MountPoint { kind: kind.into(), source: "x".into(), device: (0, minor) };
        let table = vec![(PathBuf::from("/"), mount("ext4", 1)), (dir.join("real/m"), mount("fuse.forkdisk", 2))];
        let resolved = |path: &str| resolve(&dir.join(path), &table, Path::new("/"));
        assert_eq!(resolved("far/m/../m/x"), dir.join("real/m/x"));
        assert_eq!(covering(&table, &resolved("far/m/x")).unwrap().device, (0, 2));
        assert_eq!(covering(&table, &resolved("far/x")).unwrap().device, (0, 1));
        assert_eq!(covering(&table, &resolved("real/mm")).unwrap().device, (0, 1));
        let all_fuse = vec![(PathBuf::from("/"), mount("fuse", 1))];
        assert_eq!(resolve(&dir.join("link"), &all_fuse, Path::new("/")), dir.join("link"));
    }
}
