//! Execution of verbs on an open pool: one function per verb, the same for an idle and a served pool.

mod copier;
mod defrag;
mod delete;
mod export;
mod flatten;
mod host;
mod import;
mod look;
mod pool;
mod volumes;

pub use volumes::gather_policy;

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use forkdisk::{ErrorKind, VolumeInfo};

use crate::failure::Failure;
use crate::method::{Reply, Request, each_method};
use crate::observer::{Observer, Silent, Step};
use crate::origins;
use crate::session::Session;

/// What accompanies a request besides its parameters.
#[derive(Clone)]
pub struct Call {
    /// Receives the verb's progress.
    pub observer: Rc<dyn Observer>,
    /// The caller's file, for verbs that read or write one.
    pub file: Option<Rc<OwnedFd>>,
    /// Set when the caller has disconnected: verbs that can be undone end then.
    pub cancelled: Arc<AtomicBool>,
}

impl Default for Call {
    fn default() -> Call {
        Call { observer: Rc::new(Silent), file: None, cancelled: Arc::default() }
    }
}

impl Call {
    fn say(&self, what: &str) {
        self.observer.reached(Step::lasting(what));
    }

    fn file(&self) -> Result<std::fs::File, Failure> {
        let none = || {
            let text = "no file came with the request: its descriptor is passed with SCM_RIGHTS";
            Failure::new(ErrorKind::Invalid, text)
        };
        let fd = self.file.as_ref().ok_or_else(none)?;
        Ok(fd.try_clone().map_err(|e| Failure::file("the file cannot be used", e))?.into())
    }
}

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

/// Waits until deletions have freed their space, so that the next verb can use it.
pub(crate) async fn settle(session: &Session, call: &Call) -> Result<(), Failure> {
    call.say("giving space back");
    session.pool.wait_freed().await.map_err(|error| {
        let failure = Failure::from(error);
        let text = format!("it is done, but its space is not free yet: {}", failure.message);
        Failure::new(failure.kind, text)
    })
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

/// As [`settle`], for verbs whose effect does not depend on the freed space. If the file system
/// under the pool is full, returns the message that says that the space is freed later.
pub(crate) async fn settle_later(session: &Session, call: &Call) -> Result<Option<String>, Failure> {
    match settle(session, call).await {
        Err(failure) if failure.kind == ErrorKind::NoSpace => Ok(Some(failure.message)),
        settled => settled.map(|()| None),
    }
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
