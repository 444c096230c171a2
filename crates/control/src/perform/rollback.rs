//! Rollbacks: a volume gets the contents of a snapshot or of another volume.

use forkdisk::{ErrorKind, VolumeInfo};

use super::folders::refuse_folder;
use super::{refuse_attached, refuse_in_use};
use crate::call::{Call, settle_later};
use crate::failure::Failure;
use crate::method::params;
use crate::origins;
use crate::reply::VolumeRecord;
use crate::session::{Guard, Session};

/// Splits `volume@snapshot`.
pub fn split_snapshot(name: &str) -> Result<(&str, &str), Failure> {
    let parts = name.split_once('@');
    parts.ok_or_else(|| {
        Failure::new(ErrorKind::Invalid, format!("{name} is a volume: name a snapshot, as in {name}@name"))
    })
}

/// Refuses volumes in use, with `force` after their clients were disconnected. These are kept away while the guards
/// live, so that none reconnects before the old contents are gone.
pub async fn without_clients(
    session: &Session,
    call: &Call,
    volumes: &[&str],
    force: bool,
) -> Result<Vec<Box<dyn Guard>>, Failure> {
    let mut kept_away = Vec::new();
    if force {
        call.say("disconnecting clients");
        for volume in volumes {
            kept_away.push(session.host().evict(volume).await);
        }
    }
    for volume in volumes {
        let otherwise =
            "disconnect it first, --force disconnects the clients of the export, --live goes back under them";
        refuse_in_use(session, &session.pool.find(volume)?, otherwise)?;
    }
    Ok(kept_away)
}

pub async fn rollback(session: &Session, p: params::Rollback, call: &Call) -> Result<VolumeRecord, Failure> {
    let (volume, snapshot) = split_snapshot(&p.snapshot)?;
    refuse_folder(session, volume, "rolls back")?;
    session.pool.find(&p.snapshot)?;
    if p.live {
        return roll_back_live(session, volume, &p.snapshot, call).await;
    }
    // Also with `force`, and before clients are disconnected: users of a mounted device cannot be disconnected.
    refuse_attached(session, &session.pool.find(volume)?)?;
    // Completes a rollback that was interrupted: the new one must also revert what was written since that one began.
    origins::rolled_back(session, volume, call).await.map_err(|failure| {
        Failure::new(failure.kind, format!("the rollback to {} has not begun: {}", p.snapshot, failure.message))
    })?;
    let kept_away = without_clients(session, call, &[volume], p.force).await?;
    session.pool.rollback(volume, snapshot).await?;
    session.host().changed(volume).await;
    drop(kept_away);
    if session.pool.find(volume)?.is_origin() {
        origins::rolled_back(session, volume, call).await?;
    }
    let waits = settle_later(session, call, false).await?;
    Ok(VolumeRecord { waits, ..(&session.pool.find(volume)?).into() })
}

pub async fn rollback_to(session: &Session, p: params::RollbackTo, call: &Call) -> Result<VolumeRecord, Failure> {
    let info = session.pool.find(&p.volume)?;
    let to = match p.to {
        Some(to) => to,
        None => origin_of(session, &info)?,
    };
    session.pool.find(&to)?;
    if p.live {
        return roll_back_live(session, &p.volume, &to, call).await;
    }
    // Also with `force`, and before clients are disconnected: users of a mounted device cannot be disconnected.
    refuse_attached(session, &info)?;
    let kept_away = without_clients(session, call, &[&p.volume], p.force).await?;
    session.pool.rollback_to(&p.volume, &to).await?;
    session.host().changed(&p.volume).await;
    drop(kept_away);
    let waits = settle_later(session, call, false).await?;
    Ok(VolumeRecord { waits, ..(&session.pool.find(&p.volume)?).into() })
}

/// Returns the snapshot that a volume was cloned from.
fn origin_of(session: &Session, info: &VolumeInfo) -> Result<String, Failure> {
    let name = &info.name;
    let origin = info.origin_id.and_then(|_| session.pool.find(&info.origin).ok());
    match origin {
        Some(origin) if origin.is_snapshot() => Ok(origin.name),
        Some(origin) => {
            let text = format!(
                "{name} was cloned from the volume {}, which may have changed since: --to {} takes what it has now",
                origin.name, origin.name
            );
            Err(Failure::new(ErrorKind::Invalid, text))
        }
        None => Err(Failure::new(
            ErrorKind::NotFound,
            format!("{name} is no clone, or what it was cloned from is gone: --to names another source"),
        )),
    }
}

/// Gives a volume other contents under its clients.
async fn roll_back_live(session: &Session, name: &str, to: &str, call: &Call) -> Result<VolumeRecord, Failure> {
    let (info, source) = (session.pool.find(name)?, session.pool.find(to)?);
    if info.is_origin() {
        let text = format!("{name} is an origin, which is rolled back without clients: --force disconnects them");
        return Err(Failure::new(ErrorKind::Invalid, text));
    }
    refuse_shorter(&info, &source)?;
    call.say("writing back what is cached");
    let exchange = session.host().exchange(name).await?;
    session.pool.rollback_live(name, to).await?;
    let shown = exchange.taken_place().await;
    drop(exchange);
    if source.size != info.size {
        session.host().changed(name).await;
    }
    shown?;
    let waits = settle_later(session, call, false).await?;
    Ok(VolumeRecord { waits, ..(&session.pool.find(name)?).into() })
}

/// Refuses a live rollback after which a disk in use would be shorter.
pub fn refuse_shorter(info: &VolumeInfo, source: &VolumeInfo) -> Result<(), Failure> {
    if source.size >= info.size || info.in_use == 0 {
        return Ok(());
    }
    let (to, new, name, old) = (&source.name, source.size, &info.name, info.size);
    let text = format!("{to} has {new} bytes, {name} {old}: a disk in use does not get smaller; disconnect it first");
    Err(Failure::new(ErrorKind::Busy, text))
}
