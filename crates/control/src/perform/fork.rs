//! Forks of volumes and folders.

use forkdisk::{Changes, ForkOptions};

use super::copier::policy;
use super::volumes::gather_policy;
use crate::call::Call;
use crate::failure::Failure;
use crate::lifetimes::given;
use crate::method::params;
use crate::reply::Forked;
use crate::session::Session;

pub async fn fork(session: &Session, p: params::Fork, call: &Call) -> Result<Vec<Forked>, Failure> {
    let changes = Changes::default()
        .with_extension(given!(p, lease, writes).of_new(session, call)?)
        .with_chunk(p.chunk)
        .with_break_policy(p.break_policy.as_deref().map(policy).transpose()?)
        .with_quota(p.quota)
        .with_gather(p.gather.as_deref().map(gather_policy).transpose()?);
    let options =
        ForkOptions::new(session.now()).with_changes(changes).with_uid(p.uid).with_gid(p.gid).with_mode(p.mode);
    let children: Vec<&str> = p.children.iter().map(String::as_str).collect();
    let made = session.pool.fork(&p.source, &children, &options).await?;
    Ok(made.iter().map(|info| Forked::new(info, session.host().place(&info.name))).collect())
}
