//! Attaching by the kernel's NBD client, connected to the daemon's data socket.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;

use super::netlink::{Attributes, Family, find};
use super::{Attachment, Means, Owner, Target, claim, claim_as_it_is, handshake, number, wait_until};

const FAMILY: &str = "nbd";
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;
const INDEX: u16 = 1;
const SIZE: u16 = 2;
const BLOCK_SIZE: u16 = 3;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const SOCKET: u16 = 1;
const SOCKET_FD: u16 = 1;
const BACKEND: u16 = 10;

const READ_ONLY: u64 = 2;
/// A flush on one connection covers all connections.
const MULTI_CONN: u64 = 1 << 8;
const SECTOR: u64 = 512;
/// Alignment of a direct read.
const PAGE: usize = 4096;
/// Number of connections if the server allows several: the kernel gives each CPU one.
const CONNECTIONS: usize = 4;
/// Prefix of the identifier under which the kernel keeps a device's address.
const MARK: &str = "forkdisk:";

fn family() -> Result<Family> {
    let loaded = || Path::new("/sys/module/nbd").exists() || Path::new("/sys/block/nbd0").exists();
    if !loaded() {
        let probed = Command::new("modprobe").arg("nbd").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !probed.is_ok_and(|status| status.success()) && !loaded() {
            bail!("this kernel has no NBD client (modprobe nbd failed)");
        }
    }
    Family::find(FAMILY).context("this kernel's NBD client cannot be asked by netlink (Linux 4.12 and later)")
}

pub fn attach(owner: &mut Owner, target: &Target<'_>) -> Result<PathBuf> {
    let Owner::Daemon(_, socket) = owner else { bail!("the pool is mounted and not served") };
    let socket = socket.as_deref().context("the daemon's data socket has no path")?;
    let family = family()?;
    let mut streams = Vec::new();
    let mut export;
    loop {
        let mut stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
        export = handshake::choose(&mut stream, target.object)?;
        streams.push(stream);
        if u64::from(export.flags) & MULTI_CONN == 0 || streams.len() == CONNECTIONS {
            break;
        }
    }
    ensure!(export.size >= SECTOR, "it has {} bytes, and a block device has at least one sector", export.size);
    let flags = u64::from(export.flags) | if target.read_only { READ_ONLY } else { 0 };
    let sockets = streams.iter().fold(Attributes::default(), |all, stream| {
        all.nested(SOCKET, Attributes::default().with(SOCKET_FD, &stream.as_raw_fd().to_ne_bytes()))
    });
    let request = Attributes::default()
        .with(SIZE, &(export.size / SECTOR * SECTOR).to_ne_bytes())
        .with(BLOCK_SIZE, &SECTOR.to_ne_bytes())
        .with(SERVER_FLAGS, &flags.to_ne_bytes())
        .nested(SOCKETS, sockets)
        .text(BACKEND, &format!("{MARK}{}", target.address()));
    let answer = family.ask(CONNECT, 1, request).context("the kernel's NBD client")?;
    let index = find(&answer, INDEX).and_then(|index| Some(u32::from_ne_bytes(index.try_into().ok()?)));
    let device = PathBuf::from(format!("/dev/nbd{}", index.context("the kernel did not report the device")?));
    ensure!(wait_until(|| device.exists()), "{} does not appear", device.display());
    Ok(device)
}

/// Gives a device a new length. The kernel accepts it only with the identifier that the device was connected with.
pub fn grow(attachment: &Attachment, size: u64) -> Result<()> {
    let name = attachment.device.file_name().unwrap_or_default().to_string_lossy();
    let index = u32::try_from(number(&name)).context("the number of the device")?;
    let request = Attributes::default()
        .with(INDEX, &index.to_ne_bytes())
        .with(SIZE, &(size / SECTOR * SECTOR).to_ne_bytes())
        .text(BACKEND, &format!("{MARK}{}/{}", attachment.pool.display(), attachment.object));
    family()?.ask(RECONFIGURE, 1, request).context("the kernel's NBD client").map(drop)
}

pub fn detach(device: &Path) -> Result<()> {
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    let index = u32::try_from(number(&name)).context("the number of the device")?;
    // The cache of a dead device cannot be written back.
    let claimed = if is_left_behind(device) { claim_as_it_is(device)? } else { claim(device)? };
    family()?.ask(DISCONNECT, 1, Attributes::default().with(INDEX, &index.to_ne_bytes())).context(name.to_string())?;
    drop(claimed);
    let used = format!("/sys/block/{name}/pid");
    ensure!(wait_until(|| !Path::new(&used).exists()), "{} does not go", device.display());
    Ok(())
}

/// Returns whether the daemon behind a device has ended. The kernel keeps the device and fails
/// every request with an I/O error, so a direct read, which bypasses the page cache, detects it.
pub fn is_left_behind(device: &Path) -> bool {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let mut room = vec![0; 2 * PAGE];
    let at = room.as_ptr().align_offset(PAGE);
    let opened = File::options().read(true).custom_flags(direct).open(device);
    let read = opened.and_then(|device| device.read_at(&mut room[at..at + PAGE], 0));
    read.is_err_and(|error| error.raw_os_error() == Some(Errno::IO.raw_os_error()))
}

/// Returns the attachment of device `name` if it is an NBD device that `attach` connected.
pub fn look(name: &str) -> Option<Attachment> {
    let backend = fs::read_to_string(format!("/sys/block/{name}/backend")).ok()?;
    fs::metadata(format!("/sys/block/{name}/pid")).ok()?;
    let (pool, object) = split(backend.trim_end_matches('\n').strip_prefix(MARK)?)?;
    Some(Attachment { device: Path::new("/dev").join(name), pool, object, by: Means::Nbd })
}

/// Returns whether `attach` connected a device to this volume or snapshot; `dir` is the device's
/// folder in /sys/block.
pub fn is_of(dir: &Path, pool: &Path, object: &str) -> bool {
    let backend = fs::read_to_string(dir.join("backend")).unwrap_or_default();
    dir.join("pid").exists() && backend.trim_end_matches('\n') == format!("{MARK}{}/{object}", pool.display())
}

/// Returns the export of `pool` that a device is connected to. Makes no system call on a file system.
pub fn export_of(device: &Path, pool: &Path) -> Option<String> {
    let backend = fs::read_to_string(Path::new("/sys/block").join(device.file_name()?).join("backend")).ok()?;
    let name = backend.trim_end_matches('\n').strip_prefix(&format!("{MARK}{}/", pool.display()))?;
    Some(name.to_string())
}

/// Splits an address: the pool is the shortest leading part that is not a folder.
fn split(address: &str) -> Option<(PathBuf, String)> {
    let ends = address.char_indices().filter(|&(at, c)| c == '/' && at > 0).map(|(at, _)| at);
    let mut ends = ends.filter(|&at| fs::metadata(&address[..at]).is_ok_and(|found| !found.is_dir()));
    let end = ends.next()?;
    Some((PathBuf::from(&address[..end]), address[end + 1..].to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_ends_its_pool_where_the_file_is() {
        let dir = tempfile::tempdir().unwrap();
        let pool = dir.path().join("pool.img");
        fs::write(&pool, "").unwrap();
        let found = split(&format!("{}/vm/1@x", pool.display()));
        assert_eq!(found, Some((pool, "vm/1@x".to_string())));
        assert_eq!(split("/none/of/these"), None);
    }
}
