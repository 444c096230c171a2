//! What the verbs, the daemon and `attach` share about mounts: a mount that a daemon serves, and the helper process
//! for system calls on a mount.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use forkdisk::GatherPolicy;
use forkdisk_control::{Client, params};
use forkdisk_fuse::{MountOptions, OverIoUring, SyscallHelper, connect, unmount};

/// Returns how the serving process starts the verb `on-mount`: from its own executable, even if that was replaced
/// meanwhile.
pub fn syscall_helper() -> SyscallHelper {
    SyscallHelper { program: "/proc/self/exe".into(), args: ["on-mount", "--"].map(OsString::from).to_vec() }
}

/// Parses `auto`, `yes` or `no`.
pub fn over_io_uring(word: &str) -> Result<OverIoUring> {
    Ok(match word {
        "auto" => OverIoUring::Auto,
        "yes" => OverIoUring::Yes,
        "no" => OverIoUring::No,
        other => bail!("fuse_uring={other}: auto, yes or no is expected"),
    })
}

/// Mounts, and has the daemon that serves the pool serve the mount. Returns its directory, without links.
pub fn mount_served(
    client: &mut Client,
    dir: &Path,
    options: &MountOptions,
    (gather, show_snapshots): (GatherPolicy, bool),
) -> Result<PathBuf> {
    let dir = dir.canonicalize().with_context(|| dir.display().to_string())?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let connection = connect(&dir, options)?;
    let (gather, dir_text) = (Some(gather.to_string()), dir.display().to_string());
    let mount = params::Mount { dir: dir_text, uid, gid, gather, show_snapshots };
    if let Err(failure) = client.call(mount, Some(connection.as_fd()), |_| {}) {
        // Closing the connection ends all calls that already wait for it.
        drop(connection);
        let _ = unmount(&dir, true);
        return Err(failure.into());
    }
    Ok(dir)
}
