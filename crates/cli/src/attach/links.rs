//! Persistent names of attached volumes: links below `/dev/forkdisk`, independent of the kernel's device numbers.
//!
//! `POOL/VOLUME` uses the file name of the pool and exists only for pools in files;
//! `by-uuid/UUID/VOLUME` uses its identity and exists for every pool. The links are derived from
//! the attached devices: each refresh removes wrong ones.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

use forkdisk_control::runtime_dir;

use super::{Attachment, list};

const DIR: &str = "/dev/forkdisk";
const BY_UUID: &str = "by-uuid";

/// Creates missing links and removes wrong ones. A failure is logged only: the device works without its link.
pub fn refresh() {
    if let Err(error) = make_so(Path::new(DIR), &list()) {
        tracing::debug!(%error, "{DIR} cannot be changed");
    }
}

/// Returns the links of a device, without the leading `/dev/`.
pub fn links_of(device: &Path) -> Vec<PathBuf> {
    let all = wanted(Path::new(DIR), &list()).into_iter();
    all.filter(|(_, other)| other == device).map(|(name, _)| Path::new("forkdisk").join(name)).collect()
}

/// Returns the device behind a link below `/dev/forkdisk`, if `path` is one.
pub fn device_behind(path: &Path) -> Option<PathBuf> {
    path.starts_with(DIR).then(|| fs::canonicalize(path).or_else(|_| fs::read_link(path)).ok()).flatten()
}

/// Returns whether a link leads to `device`. Links of udev are relative.
fn leads_to(path: &Path, device: &Path) -> bool {
    fs::read_link(path).is_ok_and(|there| there == device || fs::canonicalize(path).is_ok_and(|there| there == device))
}

/// Returns whether `path` lies below `/dev/forkdisk`.
pub fn is_inside(path: &Path) -> bool {
    path.starts_with(DIR)
}

fn make_so(dir: &Path, attached: &[Attachment]) -> io::Result<()> {
    let wanted = wanted(dir, attached);
    remove_others(dir, Path::new(""), &wanted);
    for (name, device) in wanted {
        let path = dir.join(name);
        if leads_to(&path, &device) {
            continue;
        }
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        symlink(&device, &path)?;
    }
    Ok(())
}

/// Returns the links and their targets for these devices. If two pools have the same file name, the
/// pool whose links exist keeps the name.
fn wanted(dir: &Path, attached: &[Attachment]) -> BTreeMap<PathBuf, PathBuf> {
    let mut wanted = BTreeMap::new();
    let mut owners: BTreeMap<String, PathBuf> = BTreeMap::new();
    let is_there = |a: &&Attachment| {
        let name = name_of(&a.pool).map(|name| dir.join(name).join(&a.object));
        name.is_some_and(|name| leads_to(&name, &a.device))
    };
    for attachment in attached.iter().filter(is_there).chain(attached) {
        let object = Path::new(&attachment.object);
        if !object.components().all(|part| matches!(part, Component::Normal(_))) {
            continue;
        }
        if let Some(uuid) = runtime_dir::pool_identity(&attachment.pool) {
            let name = Path::new(BY_UUID).join(forkdisk::uuid_text(&uuid)).join(object);
            wanted.insert(name, attachment.device.clone());
        }
        if let Some(name) = name_of(&attachment.pool) {
            let owner = owners.entry(name.clone()).or_insert_with(|| attachment.pool.clone());
            if *owner == attachment.pool {
                wanted.insert(Path::new(&name).join(object), attachment.device.clone());
            }
        }
    }
    wanted
}

/// Returns the name of a pool that is a file, escaped as udev escapes names of devices.
fn name_of(pool: &Path) -> Option<String> {
    let is_file = fs::metadata(pool).is_ok_and(|found| found.is_file());
    let name = pool.file_name().filter(|name| is_file && *name != BY_UUID)?;
    Some(escape(name.to_string_lossy().as_bytes()))
}

fn escape(name: &[u8]) -> String {
    let part = |&byte: &u8| match byte {
        b if b.is_ascii_alphanumeric() || b"#+-.:=@_".contains(&b) => char::from(b).to_string(),
        b => format!("\\x{b:02x}"),
    };
    name.iter().map(part).collect()
}

fn remove_others(dir: &Path, inside: &Path, wanted: &BTreeMap<PathBuf, PathBuf>) {
    for entry in fs::read_dir(dir.join(inside)).into_iter().flatten().flatten() {
        let name = inside.join(entry.file_name());
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => {
                remove_others(dir, &name, wanted);
                // Fails for a folder that is not empty.
                let _ = fs::remove_dir(dir.join(&name));
            }
            Ok(kind)
                if kind.is_symlink() && !wanted.get(&name).is_some_and(|device| leads_to(&entry.path(), device)) =>
            {
                let _ = fs::remove_file(entry.path());
            }
            _ => {}
        }
    }
    if inside.as_os_str().is_empty() {
        let _ = fs::remove_dir(dir);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Means;
    use super::*;

    #[test]
    fn links_follow_what_is_attached_and_a_name_stays_with_the_pool_that_has_it() {
        let lab = tempfile::tempdir().unwrap();
        let pool = |folder: &str| {
            let dir = lab.path().join(folder);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("my pool"), b"x").unwrap();
            dir.join("my pool")
        };
        let (one, other, dir) = (pool("1"), pool("2"), lab.path().join("dev"));
        let attached = |device: &str, pool: &Path, object: &str| Attachment {
            device: PathBuf::from(device),
            pool: pool.to_path_buf(),
            object: object.to_string(),
            by: Means::Loop,
        };
        let links = |expected: &[(&str, &str)]| {
            for (name, device) in expected {
                assert_eq!(fs::read_link(dir.join("my\\x20pool").join(name)).unwrap(), Path::new(device));
            }
            let found = walk(&dir);
            assert_eq!(found, expected.len());
        };
        make_so(&dir, &[attached("/dev/l9", &other, "vm/1@s"), attached("/dev/l8", &other, "a")]).unwrap();
        links(&[("vm/1@s", "/dev/l9"), ("a", "/dev/l8")]);
        make_so(&dir, &[attached("/dev/l0", &one, "b"), attached("/dev/l8", &other, "a")]).unwrap();
        links(&[("a", "/dev/l8")]);
        make_so(&dir, &[attached("/dev/l0", &one, "b"), attached("/dev/l1", &one, "../out")]).unwrap();
        links(&[("b", "/dev/l0")]);
        make_so(&dir, &[]).unwrap();
        assert!(!dir.exists());
    }

    /// Counts the links.
    fn walk(dir: &Path) -> usize {
        let entries = fs::read_dir(dir).unwrap().flatten();
        entries.map(|entry| if entry.file_type().unwrap().is_dir() { walk(&entry.path()) } else { 1 }).sum()
    }
}
