//! Rollback of everything in a folder, and which names are those of folders.

use std::collections::HashMap;

use forkdisk::{Child, ErrorKind};

use super::refuse_attached;
use super::rollback::{refuse_shorter, split_snapshot, without_clients};
use crate::call::{Call, settle_later};
use crate::failure::Failure;
use crate::method::params;
use crate::reply::{Done, VolumeRecord};
use crate::session::Session;

/// Refuses the name of a folder where `verb` needs `recursive` for it.
pub fn refuse_folder(session: &Session, name: &str, verb: &str) -> Result<(), Failure> {
    match session.pool.child(name) {
        Ok(Child::Folder(..)) if !name.is_empty() => {
            let text = format!("{name} is a folder: -r {verb} everything in it");
            Err(Failure::new(ErrorKind::Invalid, text))
        }
        _ => Ok(()),
    }
}

/// Returns the volume, or all volumes in the folder of this name.
pub fn volumes_of(session: &Session, name: &str) -> Result<Vec<String>, Failure> {
    if session.pool.find(name).is_ok() {
        return Ok(vec![name.to_string()]);
    }
    let missing = |_| Failure::new(ErrorKind::NotFound, format!("there is no volume or folder {name}"));
    let volumes = session.pool.volumes_in(name).map_err(missing)?;
    if volumes.is_empty() {
        return Err(Failure::new(ErrorKind::NotFound, format!("there is no volume in the folder {name}")));
    }
    Ok(volumes)
}

pub async fn swap(session: &Session, p: params::Swap, _: &Call) -> Result<Done, Failure> {
    // The kernel keeps the name under which a device was attached.
    for name in [&p.first, &p.second] {
        for volume in volumes_of(session, name)? {
            refuse_attached(session, &session.pool.find(&volume)?)?;
            for snapshot in session.pool.snapshots_of(&volume)? {
                refuse_attached(session, &snapshot)?;
            }
        }
    }
    session.pool.swap(&p.first, &p.second).await?;
    Ok(Done {})
}

pub async fn rollback(session: &Session, p: params::RollbackFolder, call: &Call) -> Result<Vec<VolumeRecord>, Failure> {
    let (folder, snapshot) = split_snapshot(&p.snapshot)?;
    let names = session.pool.check_rollback_folder(folder, snapshot)?;
    if p.live {
        return roll_back_live(session, (folder, snapshot), &names, call).await;
    }
    // Also with `force`, and before clients are disconnected: users of a mounted device cannot be disconnected.
    for name in &names {
        refuse_attached(session, &session.pool.find(name)?)?;
    }
    let volumes: Vec<&str> = names.iter().map(String::as_str).collect();
    let kept_away = without_clients(session, call, &volumes, p.force).await?;
    let names = session.pool.rollback_folder(folder, snapshot).await?;
    for name in &names {
        session.host().changed(name).await;
    }
    drop(kept_away);
    records(session, &names, call).await
}

/// Gives the volumes in a folder the contents of their snapshots under their clients.
async fn roll_back_live(
    session: &Session,
    (folder, snapshot): (&str, &str),
    names: &[String],
    call: &Call,
) -> Result<Vec<VolumeRecord>, Failure> {
    let mut sizes = HashMap::new();
    for name in names {
        let (info, source) = (session.pool.find(name)?, session.pool.find(&format!("{name}@{snapshot}"))?);
        refuse_shorter(&info, &source)?;
        sizes.insert(name, info.size);
    }
    call.say("writing back what is cached");
    let mut exchanges = Vec::new();
    for name in names {
        exchanges.push(session.host().exchange(name).await?);
    }
    let rolled = session.pool.rollback_folder_live(folder, snapshot).await?;
    let mut shown = Ok(());
    for exchange in exchanges {
        shown = shown.and(exchange.taken_place().await);
    }
    for name in &rolled {
        if sizes.get(name) != Some(&session.pool.find(name)?.size) {
            session.host().changed(name).await;
        }
    }
    shown?;
    records(session, &rolled, call).await
}

/// What the verb answers about volumes that were rolled back.
async fn records(session: &Session, names: &[String], call: &Call) -> Result<Vec<VolumeRecord>, Failure> {
    let waits = settle_later(session, call, false).await?;
    let record = |name: &String| Ok(VolumeRecord { waits: waits.clone(), ..(&session.pool.find(name)?).into() });
    names.iter().map(record).collect()
}
