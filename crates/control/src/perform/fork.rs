//! Forks of volumes and folders.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use forkdisk::{Changes, Child, ErrorKind, ForkOptions};

use super::copier::policy;
use super::volumes::gather_policy;
use crate::call::Call;
use crate::failure::Failure;
use crate::lifetimes::given;
use crate::method::params;
use crate::reply::Forked;
use crate::session::Session;

/// Most descriptors that a message can carry (SCM_MAX_FD of the kernel).
const MAX_PASSED_COUNT: usize = 253;

/// Returns a pair of sockets for each child: before the fork, so that nothing is made if they cannot be connected.
fn sockets(session: &Session, source: &str, count: usize) -> Result<Vec<(OwnedFd, OwnedFd)>, Failure> {
    let folder = source.split('@').next().unwrap_or_default();
    if let Ok(Child::Folder(..)) = session.pool.child(folder) {
        let text = format!("{folder} is a folder: its children are folders, which cannot be connected");
        return Err(Failure::new(ErrorKind::Invalid, text));
    }
    if count > MAX_PASSED_COUNT {
        let text = format!("at most {MAX_PASSED_COUNT} volumes can be connected at once, and not {count}");
        return Err(Failure::new(ErrorKind::Invalid, text));
    }
    let room = session.host().room()?;
    if count > room {
        let text = format!("{count} connections do not fit: {room} more clients can connect (max_connections)");
        return Err(Failure::new(ErrorKind::Busy, text));
    }
    let pair = |_| UnixStream::pair().map(|(ours, theirs)| (ours.into(), theirs.into()));
    (0..count).map(pair).collect::<Result<_, _>>().map_err(|error| Failure::file("a pair of sockets", error))
}

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
    let sockets = if p.connect { sockets(session, &p.source, children.len())? } else { Vec::new() };
    let made = session.pool.fork(&p.source, &children, &options).await?;
    for (info, (ours, theirs)) in made.iter().zip(sockets) {
        session.host().connect(&info.name, ours);
        call.given.borrow_mut().push(theirs);
    }
    Ok(made.iter().map(|info| Forked::new(info, session.host().place(&info.name))).collect())
}
