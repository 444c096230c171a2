//! NBD URIs, as the NBD project's uri.md defines them.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Returns the URI of an export on a unix socket: `nbd+unix:///export?socket=PATH`. An empty
/// `export` is the default export. Characters with a meaning in URIs are percent-encoded.
pub fn nbd_uri(socket: &Path, export: &str) -> String {
    let mut uri = String::from("nbd+unix:///");
    encode(&mut uri, export.as_bytes(), b"/@:");
    uri.push_str("?socket=");
    encode(&mut uri, socket.as_os_str().as_bytes(), b"/");
    uri
}

/// Appends `bytes`, percent-encoded except letters, digits, `-._~` and those in `plain`.
fn encode(uri: &mut String, bytes: &[u8], plain: &[u8]) {
    for &b in bytes {
        if b.is_ascii_alphanumeric() || b"-._~".contains(&b) || plain.contains(&b) {
            uri.push(b.into());
        } else {
            write!(uri, "%{b:02X}").expect("a String takes everything");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn names_and_paths_stay_readable() {
        let uri = nbd_uri(Path::new("/run/forkdisk/a.sock"), "vms/web@monday");
        assert_eq!(uri, "nbd+unix:///vms/web@monday?socket=/run/forkdisk/a.sock");
        assert_eq!(nbd_uri(Path::new("s"), ""), "nbd+unix:///?socket=s");
    }

    #[test]
    fn syntax_and_foreign_bytes_are_encoded() {
        let uri = nbd_uri(Path::new(OsStr::from_bytes(b"/a b&c=d+\xff")), "x?y#z%\u{e9}");
        assert_eq!(uri, "nbd+unix:///x%3Fy%23z%25%C3%A9?socket=/a%20b%26c%3Dd%2B%FF");
    }
}
