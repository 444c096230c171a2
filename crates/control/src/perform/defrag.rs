//! Gathering the scattered pages of a volume.

use std::sync::atomic::Ordering;

use forkdisk::ErrorKind;

use crate::call::Call;
use crate::failure::Failure;
use crate::method::params;
use crate::observer::Step;
use crate::reply::Gathering;
use crate::session::Session;

/// Gathers the volume's pages. If the caller disconnects meanwhile, what was done by then remains.
pub async fn defrag(session: &Session, p: params::Defrag, call: &Call) -> Result<Gathering, Failure> {
    let before = session.pool.find(&p.object)?.scattered;
    let tell = |done, total| {
        call.observer.reached(Step::bytes("gathering", done, Some(total)));
        !call.cancelled.load(Ordering::Relaxed)
    };
    let report = session.pool.gather(&p.object, tell).await?;
    if call.cancelled.load(Ordering::Relaxed) {
        return Err(Failure::new(ErrorKind::Io, "gathering was cancelled; another `defrag` continues it"));
    }
    let after = session.pool.find(&p.object)?;
    Ok(Gathering {
        name: after.name,
        referenced: after.referenced,
        before,
        after: after.scattered,
        moved: report.moved,
        left: report.left,
        host_full: report.host_full,
    })
}
