//! Supported kernels.

use forkdisk::{Error, ErrorKind};

use crate::sys;

/// The oldest supported kernel.
const OLDEST: (u32, u32) = (5, 15);
/// Environment variable that allows unsupported kernels.
const ANY: &str = "FORKDISK_ANY_KERNEL";

/// Fails if this kernel is too old.
pub(crate) fn check() -> forkdisk::Result<()> {
    let release = sys::kernel_release();
    match is_new_enough(&release) || std::env::var_os(ANY).is_some_and(|value| value == "1") {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Unsupported, too_old(&release))),
    }
}

/// The first kernel with FUSE over io_uring.
const FUSE_COMMANDS: (u32, u32) = (6, 14);

/// Returns whether this kernel may have FUSE over io_uring. A distribution may have left it out.
pub(crate) fn has_fuse_commands() -> bool {
    is_since(&sys::kernel_release(), FUSE_COMMANDS)
}

/// Returns whether a release is supported; true if it cannot be parsed.
fn is_new_enough(release: &str) -> bool {
    is_since(release, OLDEST)
}

/// Returns whether a release is `oldest` or later; true if it cannot be parsed.
fn is_since(release: &str, oldest: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|text| text.parse::<u32>());
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= oldest,
        _ => true,
    }
}

fn too_old(release: &str) -> String {
    format!(
        "forkdisk needs Linux {}.{} or later, this is {release}; if its io_uring is newer than that, set {ANY}=1 in \
         the environment to try it",
        OLDEST.0, OLDEST.1
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        let old = ["5.14.0-427.el9.x86_64", "5.9.0", "4.18.0-553", "5.4", "2.6.78"];
        let new = ["5.15.0", "5.15.0-91-generic", "6.1.176", "6.12.95+deb12-amd64", "6.18", "10.0-rc1", "strange", ""];
        assert!(old.iter().all(|release| !is_new_enough(release)));
        assert!(new.iter().all(|release| is_new_enough(release)));
        assert!(check().is_ok(), "the tests run here");
        assert!(is_since("6.14.0-rc1", FUSE_COMMANDS) && !is_since("6.13.9", FUSE_COMMANDS));
        let said = too_old("5.14.0-427.el9.x86_64");
        assert!(said.starts_with("forkdisk needs Linux 5.15 or later, this is 5.14.0-427.el9.x86_64"), "{said}");
    }
}
