//! Devices of origins: opened and closed together with the pool.

use std::fs;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::Ordering;

use forkdisk::{Changes, Device, Error, ErrorKind, OriginChange, OriginFull, OriginPlace, Pool, uuid_text};
use forkdisk_uring::{DeviceOptions, Rt, UringDevice};

use crate::call::{Call, settle_later};
use crate::failure::{Failure, FailureKind};
use crate::identity;
use crate::method::params;
use crate::observer::Step;
use crate::reply::{Deletion, VolumeRecord};
use crate::runtime_dir;
use crate::session::Session;

/// Default chunk of an origin, in bytes.
const DEFAULT_CHUNK_BYTES: u64 = 64 << 10;
/// Default copy-ahead for a sequential writer, in bytes.
const DEFAULT_AHEAD_BYTES: u64 = 8 << 20;
/// Default time that a write waits for space, in seconds.
const DEFAULT_WAIT_SECONDS: u32 = 60;

/// Returns the modification time of the file at `path`, in nanoseconds since 1970; 0 for a block
/// device and if the file cannot be examined.
fn modified(path: &Path) -> u64 {
    let of_file = |found: fs::Metadata| match found.file_type().is_block_device() {
        true => 0,
        false => (found.mtime().max(0) as u64).saturating_mul(1_000_000_000) + found.mtime_nsec().max(0) as u64,
    };
    fs::metadata(path).map_or(0, of_file)
}

/// Finds a use of the file or device that no lock reveals: as the backing file of a loop device, or
/// as swap. (A mounted or otherwise held block device refuses to be opened exclusively.) `sys` and
/// `swaps` are /sys/block and /proc/swaps.
fn used_by(path: &Path, sys: &Path, swaps: &Path) -> Option<String> {
    let place = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino(), m.rdev())).ok();
    let this = place(path)?;
    let same =
        |other: &Path| place(other).is_some_and(|it| (it.0, it.1) == (this.0, this.1) || this.2 != 0 && it.2 == this.2);
    for device in fs::read_dir(sys).into_iter().flatten().flatten() {
        let Ok(backing) = fs::read_to_string(device.path().join("loop/backing_file")) else { continue };
        if same(Path::new(backing.trim_end_matches('\n'))) {
            return Some(format!("it backs /dev/{}; detach that first (losetup -d)", device.file_name().display()));
        }
    }
    let swaps = fs::read_to_string(swaps).unwrap_or_default();
    let mut names = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    // Blanks in names appear as the octal escape \040.
    names.any(|name| same(Path::new(&name.replace("\\040", " ")))).then(|| "it is swap; swapoff it first".to_string())
}

fn open_device(runtime: &Rt, path: &str, read_only: bool) -> Result<(UringDevice, OriginPlace), Error> {
    let (text, path) = (path, Path::new(path));
    if let Some(why) = used_by(path, Path::new("/sys/block"), Path::new("/proc/swaps")) {
        return Err(Error::new(ErrorKind::Busy, format!("{} is in use: {why}", path.display())));
    }
    let options = DeviceOptions::default().with_read_only(read_only);
    let device = UringDevice::open(runtime, path, &options)?;
    // After the lock was taken no other forkdisk process changes the file.
    let place = OriginPlace::at(text, modified(path)).with_identity(identity::of_device(path));
    Ok((device, place))
}

/// Returns the length of a file or device in bytes.
fn length(path: &Path) -> Result<u64, Failure> {
    let failed = |e| Failure::from(Error::io(format!("reading the length of {}", path.display()), e));
    fs::File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0))).map_err(failed)
}

/// Opens the devices of all origins of `pool`; returns the origins whose device cannot be opened,
/// with the error. Everything else in the pool can be used without them.
pub async fn attach_origins(pool: &Pool<UringDevice>, runtime: &Rt, read_only: bool) -> Vec<(String, Error)> {
    let mut failed = Vec::new();
    for origin in pool.origins() {
        let attached = match open_device(runtime, &origin.path, read_only) {
            Ok((device, place)) => pool.attach_origin(&origin.name, device, &place).await,
            Err(error) => Err(error),
        };
        if let Err(error) = attached {
            failed.push((origin.name, error));
        }
    }
    failed
}

/// Closes the devices of all origins, so that the pool records the state in which each was left.
///
/// # Errors
/// The first failure to close an origin cleanly; the others are closed all the same.
pub async fn detach_origins(pool: &Pool<UringDevice>) -> Result<(), Error> {
    let mut outcome = Ok(());
    for origin in pool.origins().into_iter().filter(|origin| origin.open) {
        if let Some(snapshot) = origin.rolling {
            let (name, path) = (&origin.name, &origin.path);
            tracing::warn!(
                "{name} is not all back at {snapshot}: until it is, {path} by itself is not what {name} shows; that \
                 goes on whenever the pool is served, and `rollback` waits for it"
            );
        }
        let closed = pool.detach_origin(&origin.name, || modified(Path::new(&origin.path))).await;
        outcome = outcome.and(closed);
    }
    outcome
}

/// Parses `wait`, `wait:SECONDS`, `error` or `drop-oldest`.
pub fn full_policy(text: &str) -> Result<OriginFull, Failure> {
    let unknown = || {
        let text = format!("{text:?} is no policy for a full pool: wait, wait:SECONDS, error or drop-oldest");
        Failure::new(ErrorKind::Invalid, text)
    };
    match text.split_once(':') {
        Some(("wait", seconds)) => Ok(OriginFull::Wait(seconds.parse().map_err(|_| unknown())?)),
        None if text == "wait" => Ok(OriginFull::Wait(DEFAULT_WAIT_SECONDS)),
        None if text == "error" => Ok(OriginFull::Error),
        None if text == "drop-oldest" => Ok(OriginFull::DropOldest),
        _ => Err(unknown()),
    }
}

/// Refuses a file or device that begins with a pool's superblock: as an origin it could be written
/// while it is open as a pool.
fn refuse_pool(path: &Path) -> Result<(), Failure> {
    let Some(uuid) = runtime_dir::pool_identity(path) else { return Ok(()) };
    let (path, uuid) = (path.display(), uuid_text(&uuid));
    let what = format!("{path} is a forkdisk pool itself ({uuid}) and is not protected");
    let help = format!(
        "snapshot its volumes instead; if it is a pool no more, wipe it first (wipefs does not know it: \
                        dd if=/dev/zero of={path} bs=1M count=1 conv=notrunc)"
    );
    Err(Failure::new(ErrorKind::Invalid, format!("{what}: {help}")))
}

pub async fn protect(session: &Session, p: params::Protect, _: &Call) -> Result<VolumeRecord, Failure> {
    let when_full = full_policy(p.when_full.as_deref().unwrap_or("wait"))?;
    // Before it is opened, since the pool of this session would be reported as in use.
    refuse_pool(Path::new(&p.path))?;
    let (device, place) = open_device(&session.runtime, &p.path, false)?;
    let options = forkdisk::ProtectOptions::new(place, session.now())
        .with_chunk(p.chunk.unwrap_or(DEFAULT_CHUNK_BYTES))
        .with_copy_ahead(p.copy_ahead.unwrap_or(DEFAULT_AHEAD_BYTES))
        .with_when_full(when_full);
    Ok((&session.pool.protect(&p.volume, device, &options).await?).into())
}

pub async fn unprotect(session: &Session, p: params::Unprotect, call: &Call) -> Result<Deletion, Failure> {
    session.pool.check_unprotect(&p.volume, p.recursive)?;
    let of_it = |name: &String| name.split('@').next() == Some(&p.volume) && name.contains('@');
    let mut deleted: Vec<String> = session.pool.list().into_iter().map(|info| info.name).filter(of_it).collect();
    deleted.push(p.volume.clone());
    let mut waits = None;
    if !p.dry_run {
        session.pool.unprotect(&p.volume, p.recursive).await?;
        waits = settle_later(session, call, true).await?;
    }
    Ok(Deletion { dry_run: p.dry_run, deleted, frees: None, waits })
}

/// Returns the snapshot that a rollback of the origin is restoring.
pub fn rolling(session: &Session, volume: &str) -> Option<String> {
    session.pool.origins().into_iter().find(|origin| origin.name == volume)?.rolling
}

/// Waits until a rollback under way is complete; fails if the caller disconnects or the daemon ends
/// before that.
pub async fn rolled_back(session: &Session, origin: &str, call: &Call) -> Result<(), Failure> {
    let Some(snapshot) = rolling(session, origin) else { return Ok(()) };
    let tell = |done, total| {
        call.observer.reached(Step::bytes("bringing back", done, Some(total)));
        !call.cancelled.load(Ordering::Relaxed)
    };
    let not_all = format!("{origin} is not all back at {snapshot}; that goes on whenever the pool is served");
    match session.pool.wait_rollback(origin, tell).await {
        Ok(()) if rolling(session, origin).as_ref() != Some(&snapshot) => Ok(()),
        Ok(()) => Err(Failure::new(FailureKind::Cancelled, format!("{not_all}: the wait was cancelled"))),
        Err(error) => Err(Failure::new(Failure::from(error.clone()).kind, format!("{not_all}: {error}"))),
    }
}

/// Sets the length of an origin to that of its device, which must have grown.
pub async fn resize(session: &Session, volume: &str, size: u64) -> Result<(), Failure> {
    let find = || session.pool.origins().into_iter().find(|origin| origin.name == volume);
    let not_one = || Failure::new(ErrorKind::Invalid, format!("{volume} is not an origin"));
    let origin = find().ok_or_else(not_one)?;
    let len = match origin.open {
        true => length(Path::new(&origin.path))?,
        false => open_device(&session.runtime, &origin.path, true)?.0.len(),
    };
    if size != len || len < origin.size {
        let text = format!(
            "{volume} is an origin: it is as long as its device, {}, which has {len} bytes ({} when it was opened \
             last). \
             Make the device longer first, then give the length that it has (--size); shorter it cannot become",
            origin.path, origin.size
        );
        return Err(Failure::new(ErrorKind::Invalid, text));
    }
    if origin.open && size == origin.size {
        return Ok(());
    }
    if origin.open {
        session.pool.detach_origin(volume, || modified(Path::new(&origin.path))).await?;
    }
    let (device, place) = open_device(&session.runtime, &origin.path, false)?;
    Ok(session.pool.attach_changed_origin(volume, device, &place, OriginChange::Longer).await?)
}

/// Opens the device of an origin at `path`, and makes other changes in the same commit. The contents may have been
/// copied to another device; the samples are compared.
pub async fn replace_device(session: &Session, volume: &str, path: &str, changes: &Changes) -> Result<(), Failure> {
    let (device, place) = open_device(&session.runtime, path, false)?;
    Ok(session.pool.attach_origin_and_set(volume, device, &place, OriginChange::Identity, changes).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_has_as_a_loop_device_or_swap_is_in_use() {
        let dir = std::env::temp_dir().join(format!("forkdisk-used-by-{}", std::process::id()));
        let (sys, swaps) = (dir.join("block"), dir.join("swaps"));
        fs::create_dir_all(sys.join("loop7/loop")).unwrap();
        fs::create_dir_all(sys.join("sda")).unwrap();
        let files = ["looped.img", "swap file", "free.img"].map(|name| dir.join(name));
        files.iter().for_each(|file| fs::write(file, "x").unwrap());
        fs::write(sys.join("loop7/loop/backing_file"), format!("{}\n", files[0].display())).unwrap();
        let line = files[1].display().to_string().replace(' ', "\\040");
        fs::write(&swaps, format!("Filename Type Size Used Priority\n{line} file 4 0 -2\n")).unwrap();
        let link = dir.join("link.img");
        std::os::unix::fs::symlink(&files[0], &link).unwrap();
        let why = |path: &Path| used_by(path, &sys, &swaps);
        assert!(why(&files[0]).is_some_and(|why| why.contains("/dev/loop7")));
        assert!(why(&link).is_some_and(|why| why.contains("/dev/loop7")), "by another name");
        assert!(why(&files[1]).is_some_and(|why| why.contains("swap")));
        assert_eq!((why(&files[2]), why(&dir.join("missing"))), (None, None));
        assert_eq!(used_by(&files[0], &dir.join("none"), &dir.join("none")), None);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn policies_are_read() {
        assert_eq!(full_policy("wait").unwrap(), OriginFull::Wait(60));
        assert_eq!(full_policy("wait:5").unwrap(), OriginFull::Wait(5));
        assert_eq!(full_policy("error").unwrap(), OriginFull::Error);
        assert_eq!(full_policy("drop-oldest").unwrap(), OriginFull::DropOldest);
        for bad in ["", "wait:", "wait:x", "drop", "error:5"] {
            assert!(full_policy(bad).is_err(), "{bad}");
        }
    }
}
