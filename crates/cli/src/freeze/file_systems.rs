//! File systems mounted from a block device, also from its partitions and from devices above it
//! (device-mapper, md), in all visible mount namespaces.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use forkdisk_fuse::unescape;

/// Major and minor number of a block device or of a file system without a device, as in `7:0`.
pub type Numbers = (u32, u32);

/// A mounted file system, open at one of its mount points.
pub struct FileSystem {
    /// Number of the file system.
    pub numbers: Numbers,
    /// Mount point.
    pub at: PathBuf,
    /// Open file on its root there.
    pub file: File,
}

/// A line of a mount table.
struct Line {
    id: u64,
    device: Numbers,
    at: PathBuf,
    source: PathBuf,
    read_only: bool,
}

/// Returns the writable file systems mounted from any of `devices`, each once.
pub fn mounted_from(devices: &[PathBuf]) -> Result<Vec<FileSystem>> {
    let mut numbers = BTreeSet::new();
    for device in devices {
        with_those_above(&device.file_name().unwrap_or_default().to_string_lossy(), &mut numbers);
    }
    with_companions(&mut numbers);
    // By the number of the file system: one of several mount points suffices.
    let mut found: BTreeMap<Numbers, Vec<(PathBuf, Line)>> = BTreeMap::new();
    for table in tables() {
        let text = fs::read_to_string(table.join("mountinfo")).unwrap_or_default();
        let ours = text.lines().filter_map(parse).filter(|line| is_from(line, &numbers) && !line.read_only);
        ours.for_each(|line| found.entry(line.device).or_default().push((table.clone(), line)));
    }
    found.into_values().map(open).collect()
}

/// Returns the file systems that contain these files. Files that cannot be found are skipped.
pub fn those_of(files: &[PathBuf]) -> BTreeSet<Numbers> {
    let by_path = rustix::fs::OFlags::PATH.bits() as i32;
    let mount = |path: &PathBuf| mount_of(&File::options().read(true).custom_flags(by_path).open(path).ok()?);
    let mounts: BTreeSet<u64> = files.iter().filter_map(mount).collect();
    let text = tables().into_iter().map(|table| fs::read_to_string(table.join("mountinfo")).unwrap_or_default());
    let lines = text.flat_map(|text| text.lines().filter_map(parse).collect::<Vec<_>>());
    lines.filter(|line| mounts.contains(&line.id)).map(|line| line.device).collect()
}

/// Opens a file system at one of its mount points.
fn open(places: Vec<(PathBuf, Line)>) -> Result<FileSystem> {
    let shown = places.first().map_or_else(PathBuf::new, |(_, line)| line.at.clone());
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let opened = places.into_iter().find_map(|(table, line)| {
        let path = table.join("root").join(line.at.strip_prefix("/").ok()?);
        let file = File::options().read(true).custom_flags(nonblocking).open(path).ok()?;
        // Another file system may be mounted over it.
        (mount_of(&file)? == line.id).then_some(FileSystem { numbers: line.device, at: line.at, file })
    });
    opened.with_context(|| format!("{}: the file system mounted there cannot be opened", shown.display()))
}

/// Returns the id of the mount that contains an open file.
fn mount_of(file: &File) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?;
    text.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// Returns a folder of /proc for each mount namespace, this process's own first.
fn tables() -> Vec<PathBuf> {
    let space = |dir: &Path| fs::read_link(dir.join("ns/mnt")).ok();
    let own = PathBuf::from("/proc/self");
    let mut seen: BTreeSet<_> = space(&own).into_iter().collect();
    let mut tables = vec![own];
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let is_process = entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok());
        if is_process && space(&entry.path()).is_some_and(|space| seen.insert(space)) {
            tables.push(entry.path());
        }
    }
    tables
}

/// Parses a line such as `36 35 7:0 / /mnt rw,… shared:1 - ext4 /dev/loop0 rw,…`.
fn parse(line: &str) -> Option<Line> {
    let (place, rest) = line.split_once(" - ")?;
    let mut place = place.split(' ');
    let id = place.next()?.parse().ok()?;
    let device = parse_numbers(place.nth(1)?)?;
    let at = PathBuf::from(unescape(place.nth(1)?));
    let mut rest = rest.split(' ').skip(1);
    let source = PathBuf::from(unescape(rest.next()?));
    let read_only = rest.next()?.split(',').next() == Some("ro");
    Some(Line { id, device, at, source, read_only })
}

fn parse_numbers(text: &str) -> Option<Numbers> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Returns whether a mount is from one of the devices. A btrfs has its own numbers: only its source
/// identifies the device.
fn is_from(line: &Line, numbers: &BTreeSet<Numbers>) -> bool {
    let source = || {
        let found = fs::metadata(&line.source).ok().filter(|found| found.file_type().is_block_device())?;
        Some((rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev())))
    };
    numbers.contains(&line.device)
        || line.device.0 == 0
            && line.source.starts_with("/dev")
            && source().is_some_and(|source| numbers.contains(&source))
}

/// Adds the numbers of a block device, its partitions, and all devices above them.
fn with_those_above(name: &str, numbers: &mut BTreeSet<Numbers>) {
    let dir = Path::new("/sys/class/block").join(name);
    let own = fs::read_to_string(dir.join("dev")).ok().and_then(|text| parse_numbers(&text));
    if !own.is_some_and(|own| numbers.insert(own)) {
        return;
    }
    let names = |dir: &Path| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let partitions = names(&dir).into_iter().filter(|part| dir.join(part).join("partition").exists());
    for above in partitions.chain(names(&dir.join("holders"))) {
        with_those_above(&above, numbers);
    }
}

/// Adds the other devices of a btrfs if one of them is included: its mount names any of them as its source.
fn with_companions(numbers: &mut BTreeSet<Numbers>) {
    for entry in fs::read_dir("/sys/fs/btrfs").into_iter().flatten().flatten() {
        let devices = fs::read_dir(entry.path().join("devices")).into_iter().flatten().flatten();
        let of = |device: fs::DirEntry| parse_numbers(&fs::read_to_string(device.path().join("dev")).ok()?);
        let devices: Vec<Numbers> = devices.filter_map(of).collect();
        if devices.iter().any(|device| numbers.contains(device)) {
            numbers.extend(devices);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_table_is_taken_apart() {
        let text = "36 35 7:12 / /mnt/a\\040b rw,noatime shared:1 master:2 - ext4 /dev/loop12 rw,errors=ro";
        let line = parse(text).unwrap();
        assert_eq!((line.id, line.device, line.read_only), (36, (7, 12), false));
        assert_eq!((line.at, line.source), (PathBuf::from("/mnt/a b"), PathBuf::from("/dev/loop12")));
        assert!(parse("36 35 7:12 / /mnt").is_none());
    }

    #[test]
    fn nothing_is_mounted_from_a_device_that_does_not_exist() {
        assert!(mounted_from(&[PathBuf::from("/dev/loop-none")]).unwrap().is_empty());
    }

    #[test]
    fn an_open_file_tells_its_mount() {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let id = mount_of(&File::open("/proc").unwrap()).unwrap();
        assert!(table.lines().filter_map(parse).any(|line| line.id == id && line.at == Path::new("/proc")));
    }
}
