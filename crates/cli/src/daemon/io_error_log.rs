//! Logging of failures that clients see as a plain I/O error, with their cause; repetitions are not logged.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::{Error, ErrorKind, VolumeId};
use forkdisk_nbd::codec::ErrorCode;

/// A cause is logged again if it was not seen for this long.
const QUIET: Duration = Duration::from_secs(60);

/// Time at which each kind of failure of each volume was seen last.
#[derive(Clone, Default)]
pub struct IoErrorLog(Rc<RefCell<HashMap<(VolumeId, ErrorKind), Instant>>>);

impl IoErrorLog {
    /// Logs the failure of a request (`what`) to a volume, unless its cause was logged recently.
    pub fn note(&self, id: VolumeId, what: &str, name: impl FnOnce() -> String, error: &Error) {
        if is_told_as_such(error) && self.is_news((id, error.kind()), Instant::now()) {
            tracing::warn!("a {what} of {} has failed with an I/O error: {error}{}", name(), advice(error.kind()));
        }
    }

    fn is_news(&self, cause: (VolumeId, ErrorKind), now: Instant) -> bool {
        let mut seen = self.0.borrow_mut();
        seen.retain(|_, last| now.duration_since(*last) < QUIET);
        seen.insert(cause, now).is_none()
    }
}

/// Returns whether the client's error code is a plain I/O error.
fn is_told_as_such(error: &Error) -> bool {
    ErrorCode::from_errno(error.errno()) == ErrorCode::Io
}

/// Returns advice for errors whose message has none.
fn advice(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Io => "; see the kernel's log for what is wrong with the device",
        ErrorKind::Corrupt => "; forkdisk check tells what is damaged",
        ErrorKind::Failed => "; stop forkdisk serve and start it again once the cause is gone",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_news_once_until_it_has_been_quiet() {
        let (io_errors, start) = (IoErrorLog::default(), Instant::now());
        let cause = (VolumeId(1), ErrorKind::Busy);
        let seen = |second| io_errors.is_news(cause, start + Duration::from_secs(second));
        assert_eq!([0, 1, 59, 110, 169].map(seen), [true, false, false, false, false]);
        assert!(io_errors.is_news((VolumeId(1), ErrorKind::Io), start + Duration::from_secs(169)), "another cause");
        assert!(io_errors.is_news((VolumeId(2), ErrorKind::Busy), start + Duration::from_secs(169)), "another volume");
        assert!(seen(229), "again after a minute");
        assert_eq!(io_errors.0.borrow().len(), 1, "what is over is forgotten");
    }

    #[test]
    fn what_has_a_code_of_its_own_is_not_told() {
        let told = |kind| is_told_as_such(&Error::new(kind, "x"));
        assert!(told(ErrorKind::Busy) && told(ErrorKind::Io) && told(ErrorKind::Failed) && told(ErrorKind::Corrupt));
        assert!(!told(ErrorKind::NoSpace) && !told(ErrorKind::Invalid) && !told(ErrorKind::ReadOnly));
    }
}
