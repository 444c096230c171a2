//! Identity of this host, for pools with a heartbeat, and the clock.

use std::fs::{self, File};
use std::io::{self, Read};
use std::time::{SystemTime, UNIX_EPOCH};

use forkdisk::{HostIdentity, OpenOptions};

/// Returns the default options, with the clock and the identity of this host and this open.
pub fn open_options() -> OpenOptions {
    OpenOptions::default().with_host(identity()).with_clock(Some(nanoseconds_since_1970))
}

/// Returns `None` if the kernel does not report its boot id; pools with a heartbeat are refused then.
fn identity() -> Option<HostIdentity> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Some(HostIdentity::new(name, boot_id().ok()?, random().ok()?))
}

/// Returns the kernel's id of this boot.
pub fn boot_id() -> io::Result<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|two| two[0] << 4 | two[1]).collect();
    bytes.try_into().map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Returns the time in nanoseconds since 1970.
pub fn nanoseconds_since_1970() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// Returns 16 random bytes.
pub fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_the_same_at_every_open_and_each_open_is_another() {
        let (one, other) = (identity().unwrap(), identity().unwrap());
        assert!(one.boot == other.boot && one.boot != [0; 16]);
        assert_ne!(one.open, other.open);
    }
}
