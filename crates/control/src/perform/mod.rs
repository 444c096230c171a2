//! Execution of verbs on an open pool: one function per verb, the same for an idle and a served pool.

mod copier;
mod defrag;
mod delete;
mod export;
mod flatten;
mod folders;
mod fork;
mod host;
mod import;
mod look;
mod pool;
mod rollback;
mod selection;
mod volumes;

pub use volumes::gather_policy;

use forkdisk::{ErrorKind, VolumeInfo};

use crate::call::Call;
use crate::failure::Failure;
use crate::method::{Reply, Request, each_method};
use crate::origins;
use crate::session::Session;

/// Carries out `request`, completely or not at all; its effects are durable when this returns.
///
/// The future must be run to its end, as every future of a [`forkdisk::Pool`].
///
/// # Errors
/// [`Engine`](crate::FailureKind::Engine) with the kind of the pool's error, or `Invalid` for bad parameters, `Busy`
/// for something in use and `Io` for a file of the caller; [`Cancelled`](crate::FailureKind::Cancelled) if the caller
/// has disconnected, [`BrokenPipe`](crate::FailureKind::BrokenPipe) if the reader of an export has. The message says
/// what failed, where, and what to do.
pub async fn perform(session: &Session, request: Request, call: &Call) -> Result<Reply, Failure> {
    macro_rules! dispatch {
        ($($name:literal $params:ident => $reply:ty, $perform:path;)*) => {
            Ok(match request { $(Request::$params(p) => Reply::$params($perform(session, p, call).await?)),* })
        };
    }
    each_method!(dispatch)
}

/// Refuses a volume that is attached as a block device; the message says how to detach it. Nothing
/// else is safe for a file system that may be mounted on it.
fn refuse_attached(session: &Session, info: &VolumeInfo) -> Result<(), Failure> {
    let name = &info.name;
    // The device of a killed daemon uses nothing.
    if info.in_use == 0 {
        return Ok(());
    }
    let Some(device) = session.host().devices(name).into_iter().next() else { return Ok(()) };
    let text = format!("{name} is attached as {device}: `forkdisk detach {device}` first");
    Err(Failure::new(ErrorKind::Busy, text))
}

/// Refuses a volume in use; the message names its users and ends with the advice `otherwise`.
fn refuse_in_use(session: &Session, info: &VolumeInfo, otherwise: &str) -> Result<(), Failure> {
    if info.in_use == 0 {
        return Ok(());
    }
    refuse_attached(session, info)?;
    let mut users = session.users(info.id.0, &info.name);
    if users.is_empty() {
        users.push(format!("{} open handles", info.in_use));
    }
    let more = users.len().saturating_sub(SHOWN_COUNT);
    users.truncate(SHOWN_COUNT);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let text = format!("{} is in use by {}{more}: {otherwise}", info.name, users.join(", "));
    Err(Failure::new(ErrorKind::Busy, text))
}

/// Most entries of a list that a message shows.
const SHOWN_COUNT: usize = 5;
