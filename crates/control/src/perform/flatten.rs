//! Making clones of an origin's snapshots independent.

use std::sync::atomic::Ordering;

use forkdisk::ErrorKind;

use crate::call::Call;
use crate::failure::Failure;
use crate::method::params;
use crate::observer::Step;
use crate::reply::Flattening;
use crate::session::Session;

/// Copies everything that shows through. If the caller disconnects meanwhile, what was copied
/// remains and the next call continues there.
pub async fn flatten(session: &Session, p: params::Flatten, call: &Call) -> Result<Flattening, Failure> {
    let tell = |done, total| {
        call.observer.reached(Step::bytes("flattening", done, Some(total)));
        !call.cancelled.load(Ordering::Relaxed)
    };
    let report = session.pool.flatten(&p.volume, tell).await?;
    if !report.independent {
        return Err(Failure::new(ErrorKind::Io, "flattening was cancelled; another `flatten` continues it"));
    }
    let after = session.pool.find(&p.volume)?;
    Ok(Flattening { name: after.name, referenced: after.referenced, copied: report.copied })
}
