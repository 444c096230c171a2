//! Verbs on the daemon that serves the pool; fail in a process that is no daemon.

use crate::call::Call;
use crate::failure::Failure;
use crate::method::params;
use crate::reply::{Device, Done, Status, Switched, Upgraded};
use crate::session::Session;

pub async fn status(session: &Session, _: params::Status, _: &Call) -> Result<Status, Failure> {
    session.host().status()
}

pub async fn mount(session: &Session, p: params::Mount, call: &Call) -> Result<Done, Failure> {
    session.host().mount(p, call.file()?.into()).await?;
    Ok(Done::default())
}

pub async fn attach(session: &Session, p: params::Attach, _: &Call) -> Result<Device, Failure> {
    Ok(Device { device: session.host().attach(p).await? })
}

pub async fn detach(session: &Session, p: params::Detach, _: &Call) -> Result<Done, Failure> {
    session.host().detach(p.device).await?;
    Ok(Done::default())
}

pub async fn vhost_user(session: &Session, p: params::VhostUser, _: &Call) -> Result<Done, Failure> {
    session.host().vhost_user(p).await?;
    Ok(Done::default())
}

pub async fn switch(session: &Session, p: params::Switch, _: &Call) -> Result<Switched, Failure> {
    session.host().switch(p).await
}

/// Returns when the new program is about to take over; it sends the answer.
pub async fn upgrade(session: &Session, p: params::Upgrade, _: &Call) -> Result<Upgraded, Failure> {
    session.host().upgrade(p.program).await?;
    Ok(Upgraded::default())
}

pub async fn stop(session: &Session, p: params::Stop, _: &Call) -> Result<Done, Failure> {
    session.host().stop(p.force).await?;
    Ok(Done::default())
}
