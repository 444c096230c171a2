//! How volumes are copied: break policies, throttles, settings and figures of the copier.

use forkdisk::{BreakPolicy, ErrorKind, Throttle};

use crate::call::Call;
use crate::failure::Failure;
use crate::method::params;
use crate::reply::CopierRecord;
use crate::session::Session;

/// Returns the break policy called `name`.
pub fn policy(name: &str) -> Result<BreakPolicy, Failure> {
    match name {
        "split" => Ok(BreakPolicy::Split),
        "copy" => Ok(BreakPolicy::Copy),
        _ => Err(Failure::new(ErrorKind::Invalid, format!("there is no break policy '{name}': split and copy are"))),
    }
}

/// Applies the changes in `p` to the throttle `old`.
fn changed(old: Throttle, p: &params::Copier) -> Throttle {
    Throttle {
        percent: p.percent.unwrap_or(old.percent),
        bytes_per_second: p.bytes_per_second.unwrap_or(old.bytes_per_second),
    }
}

pub async fn copier(session: &Session, p: params::Copier, _: &Call) -> Result<CopierRecord, Failure> {
    let pool = &session.pool;
    let Some(name) = &p.volume else {
        let old = pool.copier().settings;
        let mut new = old;
        new.subjob_size = p.subjob_size.unwrap_or(old.subjob_size);
        new.split_count = p.split_count.unwrap_or(old.split_count);
        new.offload = p.offload.unwrap_or(old.offload);
        new.throttle = changed(old.throttle, &p);
        // Larger sub-jobs need larger buffers, unless the request sets their size.
        new.buffers = p.buffers.unwrap_or(old.buffers.max(new.least_buffers()));
        if new != old {
            pool.set_copier(new).await?;
        }
        return Ok(CopierRecord::of(&pool.copier(), None));
    };
    if p.subjob_size.is_some() || p.split_count.is_some() || p.buffers.is_some() || p.offload.is_some() {
        let text = "subjob_size, split_count, buffers and offload are the whole pool's: set them without a volume";
        return Err(Failure::new(ErrorKind::Invalid, text));
    }
    let old = pool.copying(name)?.throttle;
    let new = changed(old, &p);
    if new != old {
        pool.set_throttle(name, new).await?;
    }
    Ok(CopierRecord::of(&pool.copier(), Some((name.clone(), pool.copying(name)?))))
}
