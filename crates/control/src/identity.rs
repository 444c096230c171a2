//! Identity of a block device: its WWN, its serial number, or the UUID from LVM, md or a partition
//! table. It is unique and stays the same when the device gets another name.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Longest identity that is stored, in bytes without its kind; longer ones lose their beginning.
const MAX_NAME_BYTES: usize = 60;

/// Returns the identity of the block device at `path` as `KIND:TEXT`; empty for a file and if the
/// kernel reports none.
pub fn of_device(path: &Path) -> String {
    identity(path, Path::new("/sys/dev/block"), Path::new("/run/udev/data"))
}

/// As [`of_device`], with other directories in place of /sys/dev/block and /run/udev/data.
fn identity(path: &Path, sys: &Path, udev: &Path) -> String {
    let Ok(found) = fs::metadata(path) else { return String::new() };
    if !found.file_type().is_block_device() {
        return String::new();
    }
    let number = format!("{}:{}", rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
    of_number(&number, sys, udev).unwrap_or_default()
}

fn of_number(number: &str, sys: &Path, udev: &Path) -> Option<String> {
    let dir = fs::canonicalize(sys.join(number)).ok()?;
    let Some(partition) = attribute(&dir.join("partition")) else { return of_disk(&dir) };
    if let Some(disk) = of_disk(dir.parent()?) {
        return Some(format!("{disk}-part{partition}"));
    }
    let line = |file: &Path, key: &str| {
        let text = fs::read_to_string(file).ok()?;
        text.lines().find_map(|line| line.strip_prefix(key).and_then(tidy))
    };
    let uuid = line(&dir.join("uevent"), "PARTUUID=");
    let uuid = uuid.or_else(|| line(&udev.join(format!("b{number}")), "E:ID_PART_ENTRY_UUID="));
    uuid.map(|uuid| format!("partuuid:{uuid}"))
}

/// Returns the identity of a whole device, given its sysfs directory.
fn of_disk(dir: &Path) -> Option<String> {
    let places = [
        ("wwn", "wwid"),
        ("wwn", "device/wwid"),
        ("serial", "serial"),
        ("serial", "device/serial"),
        ("dm", "dm/uuid"),
        ("md", "md/uuid"),
    ];
    places.iter().find_map(|(kind, file)| attribute(&dir.join(file)).map(|text| format!("{kind}:{text}")))
}

fn attribute(file: &Path) -> Option<String> {
    tidy(&fs::read_to_string(file).ok()?)
}

/// Joins the printable words of `text` with `_`; `None` if there are none.
fn tidy(text: &str) -> Option<String> {
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_graphic()).filter(|word| !word.is_empty()).collect();
    let text = words.join("_");
    let text = &text[text.len().saturating_sub(MAX_NAME_BYTES)..];
    (!text.is_empty()).then(|| text.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_identity_is_what_the_kernel_knows_of_the_device() {
        let dir = std::env::temp_dir().join(format!("forkdisk-identity-{}", std::process::id()));
        let (sys, udev, devices) = (dir.join("sys"), dir.join("udev"), dir.join("devices"));
        [&sys, &udev].iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        let device = |number: &str, name: &str, files: &[(&str, &str)]| {
            for (file, text) in files {
                let file = devices.join(name).join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, text).unwrap();
            }
            fs::create_dir_all(devices.join(name)).unwrap();
            symlink(devices.join(name), sys.join(number)).unwrap();
        };
        device("8:0", "sda", &[("device/wwid", "naa.5000c500a1b2c3d4\n"), ("device/serial", "x\n")]);
        device("8:1", "sda/sda1", &[("partition", "1\n")]);
        device("252:0", "vda", &[("serial", "disk  of\u{1}mine \n")]);
        device("252:16", "vdb", &[("serial", "\n")]);
        device("252:17", "vdb/vdb1", &[("partition", "1\n"), ("uevent", "DEVTYPE=partition\nPARTUUID=1234-5\n")]);
        device("252:18", "vdb/vdb2", &[("partition", "2\n")]);
        device("252:19", "vdb/vdb3", &[("partition", "3\n")]);
        fs::write(udev.join("b252:18"), "S:disk/by-x\nE:ID_PART_ENTRY_UUID=77-8\n").unwrap();
        device("253:0", "dm-0", &[("dm/uuid", &format!("LVM-{}", "0123456789abcdef".repeat(4)))]);
        device("7:0", "loop0", &[("loop/backing_file", "/x\n")]);
        let of = |number: &str| of_number(number, &sys, &udev).unwrap_or_default();
        assert_eq!(of("8:0"), "wwn:naa.5000c500a1b2c3d4");
        assert_eq!(of("8:1"), "wwn:naa.5000c500a1b2c3d4-part1");
        assert_eq!(of("252:0"), "serial:disk_of_mine");
        assert_eq!(of("252:17"), "partuuid:1234-5", "a disk without a serial number");
        assert_eq!((of("252:18"), of("252:19")), ("partuuid:77-8".into(), String::new()));
        assert_eq!(of("253:0").len(), "dm:".len() + MAX_NAME_BYTES);
        assert_eq!((of("7:0"), of("9:9")), (String::new(), String::new()));
        assert_eq!(identity(&devices.join("vda/serial"), &sys, &udev), "", "a file");
        fs::remove_dir_all(dir).unwrap();
    }
}
