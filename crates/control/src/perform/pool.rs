//! Verbs on the pool as a whole.

use forkdisk::{ErrorKind, PoolInfo};
use forkdisk_monitor::Statistics;

use crate::call::Call;
use crate::failure::Failure;
use crate::method::params;
use crate::reply::Check;
use crate::session::Session;
use crate::size::human;

pub async fn grow(session: &Session, p: params::Grow, _: &Call) -> Result<PoolInfo, Failure> {
    let old = session.pool.info().size;
    if p.size < old {
        let text = format!("the pool has {} ({old} bytes) already: it can only grow", human(old));
        return Err(Failure::new(ErrorKind::Invalid, text));
    }
    session.pool.grow(p.size).await?;
    Ok(session.pool.info())
}

pub async fn check(session: &Session, _: params::Check, call: &Call) -> Result<Check, Failure> {
    call.say("checking");
    match session.pool.check().await {
        Ok(found) => Ok(found.into()),
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(Check::of_damage(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

pub async fn stats(session: &Session, _: params::Stats, _: &Call) -> Result<PoolInfo, Failure> {
    Ok(session.pool.info())
}

pub async fn statistics(session: &Session, _: params::Statistics, _: &Call) -> Result<Box<Statistics>, Failure> {
    Ok(forkdisk_monitor::statistics(&session.pool, session.host().server()).into())
}
