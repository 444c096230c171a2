//! What a run expects while requests fail on either disk, or the pool is full.

use forkdisk::{Error, ErrorKind};

use super::run::{Inflight, Run};
use crate::driver::{Class, Life, Violation};

/// Checks the rules for every acknowledgement and refusal.
pub fn judge_outcome(run: &mut Run, op: &Inflight, error: Option<&Error>, vanished: bool) -> Result<(), Violation> {
    let of_origin = op.keys.first() == Some(&run.known.origin);
    let Some(error) = error else {
        let acknowledges = matches!(op.class, Class::Flush | Class::Change) && of_origin;
        return match run.world.origin_failed {
            Some(failed) if acknowledges && op.start > failed => {
                Err(Violation::new("P8", format!("acknowledged after the origin had failed: {}", op.text)))
            }
            _ => Ok(()),
        };
    };
    let message = format!("{}: {error:?}", op.text);
    match error.kind() {
        ErrorKind::NoSpace => judge_full(run, op, message),
        ErrorKind::Io | ErrorKind::Failed | ErrorKind::Corrupt if run.session.faults_hit() > 0 => {
            if matches!(op.class, Class::Flush) && of_origin {
                let now = run.known.model.tick();
                run.world.origin_failed.get_or_insert(now);
            }
            Ok(())
        }
        ErrorKind::Io | ErrorKind::Failed | ErrorKind::Corrupt => {
            Err(Violation::new("P6", format!("an error although no request failed: {message}")))
        }
        ErrorKind::NotFound | ErrorKind::Busy if vanished => Ok(()),
        _ => Err(Violation::new("P4", format!("refused without a reason: {message}"))),
    }
}

/// P9: ENOSPC only from what needs space, and only when there is none.
pub fn judge_full(run: &Run, op: &Inflight, message: String) -> Result<(), Violation> {
    if run.session.faults_hit() > 0 {
        return Ok(());
    }
    if !op.needs_space {
        let what = format!("needs no space, but was refused for want of it: {message}");
        return Err(Violation::new("P9", what));
    }
    let info = run.session.pool.info();
    if info.unused > info.size / 2 {
        let what = format!("{} of {} bytes are free, but: {message}", info.unused, info.size);
        return Err(Violation::new("P9", what));
    }
    Ok(())
}
