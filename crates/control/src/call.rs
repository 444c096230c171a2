//! What accompanies a request besides its parameters, and the wait for the space that a verb freed.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use forkdisk::ErrorKind;

use crate::failure::Failure;
use crate::observer::{Observer, Silent, Step};
use crate::session::Session;

/// What accompanies a request besides its parameters.
#[derive(Clone)]
pub struct Call {
    /// Receives the verb's progress.
    pub observer: Rc<dyn Observer>,
    /// The caller's file, for verbs that read or write one.
    pub file: Option<Rc<OwnedFd>>,
    /// Descriptors that go with the answer.
    pub given: Rc<RefCell<Vec<OwnedFd>>>,
    /// Set when the caller has disconnected: verbs that can be undone end then.
    pub cancelled: Arc<AtomicBool>,
    /// The number of the control connection that the request came by.
    pub connection: Option<u64>,
    /// What makes new volumes, if the request does not say: the user of the connection.
    pub created_by: Option<String>,
}

impl Default for Call {
    fn default() -> Call {
        let given = Rc::default();
        Call {
            observer: Rc::new(Silent),
            file: None,
            given,
            cancelled: Arc::default(),
            connection: None,
            created_by: None,
        }
    }
}

impl Call {
    pub(crate) fn say(&self, what: &str) {
        self.observer.reached(Step::lasting(what));
    }

    pub(crate) fn file(&self) -> Result<std::fs::File, Failure> {
        let none = || {
            let text = "no file came with the request: its descriptor is passed with SCM_RIGHTS";
            Failure::new(ErrorKind::Invalid, text)
        };
        let fd = self.file.as_ref().ok_or_else(none)?;
        Ok(fd.try_clone().map_err(|e| Failure::file("the file cannot be used", e))?.into())
    }
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

/// As [`settle`], for verbs with an effect that does not depend on the freed space. If the file system
/// under the pool is full, returns the message that says that the space is freed later. A daemon frees it in the
/// background, unless `wait`.
pub(crate) async fn settle_later(session: &Session, call: &Call, wait: bool) -> Result<Option<String>, Failure> {
    if session.host().is_daemon() && !wait {
        session.settle_soon();
        return Ok(None);
    }
    match settle(session, call).await {
        Err(failure) if failure.kind == ErrorKind::NoSpace => Ok(Some(failure.message)),
        settled => settled.map(|()| None),
    }
}
