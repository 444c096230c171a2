//! The keeper holds the connections of mounts to the kernel, so that a kill of the daemon does not end them. Programs
//! on these mounts, and the loop devices on them, wait until another daemon serves the pool.
//!
//! It is the service manager's store of descriptors, or without a manager a small process of our own. A mount stays
//! with it until it is unmounted, whatever becomes of the daemon.

mod process;
mod separate;
mod store;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Result;
use forkdisk_control::params;
use forkdisk_uring::Inherited;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::notify::Notifier;
use separate::SeparateProcess;
use store::Store;

pub use process::run;
pub use store::is_of_store;

/// A mount that a killed daemon has left.
pub struct Left {
    /// How it was requested.
    pub mount: params::Mount,
    /// The connection to the kernel.
    pub connection: OwnedFd,
    /// The files of the mount record.
    pub record: [OwnedFd; 2],
    /// The request log, if the mount has one.
    pub log: Option<OwnedFd>,
}

/// The descriptors of a mount.
#[derive(Clone, Copy)]
pub struct Descriptors<'a> {
    /// The connection to the kernel.
    pub connection: BorrowedFd<'a>,
    /// The files of the mount record.
    pub record: [BorrowedFd<'a>; 2],
    /// The request log, if the mount has one.
    pub log: Option<BorrowedFd<'a>>,
}

/// What holds the mounts of a pool.
pub enum Keeper {
    Process(SeparateProcess),
    Store(Store),
}

impl Keeper {
    /// Returns the keeper that has been used before, with the mounts that it holds: it holds them further on.
    /// `handed`: descriptors that the service manager handed over.
    pub fn with_left(uuid: Option<&[u8; 16]>, handed: Vec<Inherited>) -> Result<(Option<Keeper>, Vec<Left>)> {
        let (keeper, found) = match (handed.is_empty(), uuid.and_then(SeparateProcess::running)) {
            (false, _) => (Some(Keeper::Store(Store::new(Rc::new(Notifier::from_environment())))), store::left(handed)),
            (true, None) => (None, Vec::new()),
            (true, Some(process)) => {
                let left = process.left()?;
                (Some(Keeper::Process(process)), left)
            }
        };
        let (left, ended): (Vec<Left>, Vec<Left>) = found.into_iter().partition(|left| is_mounted(&left.connection));
        if let Some(keeper) = &keeper {
            ended.iter().try_for_each(|left| keeper.release(Path::new(&left.mount.dir)))?;
        }
        Ok((keeper, left))
    }

    /// Returns a keeper for pool `uuid`: the service manager's store if there is a manager, else a process that waits
    /// for `limit` for another daemon.
    pub fn start(uuid: &[u8; 16], limit: Duration) -> Result<Keeper> {
        let notifier = Notifier::from_environment();
        match notifier.has_manager() {
            true => Ok(Keeper::Store(Store::new(Rc::new(notifier)))),
            false => SeparateProcess::start(uuid, limit).map(Keeper::Process),
        }
    }

    /// Lets it hold a mount, instead of what it holds for the same folder.
    pub fn hold(&self, mount: params::Mount, descriptors: Descriptors<'_>) -> Result<()> {
        match self {
            Keeper::Process(process) => process.hold(mount, descriptors),
            Keeper::Store(store) => store.hold(&mount, descriptors),
        }
    }

    /// Lets it close the descriptors of the mount on `dir`, which has ended.
    pub fn release(&self, dir: &Path) -> Result<()> {
        match self {
            Keeper::Process(process) => process.release(dir),
            Keeper::Store(store) => store.release(dir),
        }
    }
}

/// Returns whether the kernel still uses a connection.
fn is_mounted(connection: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(connection, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec::default())).is_ok() && !fds[0].revents().contains(PollFlags::ERR)
}
