//! Storage below a file or block device, to distinguish a copy of a pool from the pool by another path.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Devices whose storage is on other machines or in other processes, which /sys does not describe.
const FAR: [&str; 4] = ["nbd", "ublk", "rbd", "drbd"];

/// A place where bytes are stored.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    File {
        dev: u64,
        ino: u64,
    },
    /// A device by its number; for a partition with the number of its disk.
    Device {
        number: String,
        disk: Option<String>,
    },
}

/// Returns whether the two paths may lead to the same bytes; true also if that cannot be determined.
pub fn may_be_one(a: &Path, b: &Path) -> bool {
    let sys = Path::new("/sys/dev/block");
    match (places(a, sys), places(b, sys)) {
        (Ok(a), Ok(b)) => a.iter().any(|a| b.iter().any(|b| overlap(a, b))),
        _ => true,
    }
}

fn overlap(a: &Place, b: &Place) -> bool {
    match (a, b) {
        (Place::Device { number, disk }, Place::Device { number: other, disk: others }) => {
            number == other || disk.as_ref() == Some(other) || others.as_ref() == Some(number)
        }
        (a, b) => a == b,
    }
}

fn places(path: &Path, sys: &Path) -> io::Result<Vec<Place>> {
    let found = fs::metadata(path)?;
    if !found.file_type().is_block_device() {
        return Ok(vec![Place::File { dev: found.dev(), ino: found.ino() }]);
    }
    let number = format!("{}:{}", rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
    let mut out = Vec::new();
    under(&number, sys, &mut out)?;
    Ok(out)
}

/// Adds the storage below the device with this number.
fn under(number: &str, sys: &Path, out: &mut Vec<Place>) -> io::Result<()> {
    let dir = fs::canonicalize(sys.join(number))?;
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if FAR.iter().any(|far| name.starts_with(far)) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let dev = |dir: &Path| fs::read_to_string(dir.join("dev")).map(|text| text.trim().to_string());
    let disk = if dir.join("partition").exists() { Some(dev(dir.parent().unwrap_or(&dir))?) } else { None };
    // Other paths to the same storage may end at this device's number.
    out.push(Place::Device { number: number.to_string(), disk: disk.clone() });
    let whole = if disk.is_some() { dir.parent().unwrap_or(&dir) } else { &dir };
    if let Ok(backing) = fs::read_to_string(whole.join("loop/backing_file")) {
        out.extend(places(Path::new(backing.trim_end_matches('\n')), sys)?);
    }
    for slave in fs::read_dir(dir.join("slaves")).into_iter().flatten() {
        under(&dev(&slave?.path())?, sys, out)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_lies_under_a_device_is_followed_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let (sys, devices) = (dir.path().join("sys"), dir.path().join("devices"));
        fs::create_dir_all(&sys).unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        fs::write(&one, "").unwrap();
        fs::write(&two, "").unwrap();
        let device = |number: &str, name: &str, file: &str, text: &str| {
            let file = devices.join(name).join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
            fs::write(devices.join(name).join("dev"), format!("{number}\n")).unwrap();
            if !sys.join(number).exists() {
                symlink(devices.join(name), sys.join(number)).unwrap();
            }
        };
        device("7:0", "loop0", "loop/backing_file", &format!("{}\n", one.display()));
        device("7:1", "loop1", "loop/backing_file", &format!("{}\n", two.display()));
        device("259:0", "loop0/loop0p1", "partition", "1\n");
        device("8:0", "sda", "size", "1");
        device("8:1", "sda/sda1", "partition", "1\n");
        device("8:2", "sda/sda2", "partition", "2\n");
        device("253:0", "dm-0", "size", "1");
        fs::create_dir_all(devices.join("dm-0/slaves")).unwrap();
        symlink(devices.join("sda/sda1"), devices.join("dm-0/slaves/sda1")).unwrap();
        device("43:0", "nbd0", "size", "1");
        let of = |number: &str| {
            let mut out = Vec::new();
            under(number, &sys, &mut out).map(|()| out)
        };
        let meet = |a: &str, b: &str| of(a).unwrap().iter().any(|a| of(b).unwrap().iter().any(|b| overlap(a, b)));
        assert!(meet("7:0", "7:0") && !meet("7:0", "7:1"));
        assert!(meet("7:0", "259:0"), "a partition of a loop device");
        assert!(meet("8:0", "8:1") && !meet("8:1", "8:2"));
        assert!(meet("253:0", "8:1") && meet("253:0", "8:0") && !meet("253:0", "8:2"));
        assert!(of("43:0").is_err() && of("9:9").is_err());
        assert_eq!(of("7:0").unwrap()[1], places(&one, &sys).unwrap().remove(0));
        assert!(may_be_one(&one, &one) && !may_be_one(&one, &two));
        assert!(may_be_one(&one, &dir.path().join("gone")), "what cannot be found out");
    }
}
