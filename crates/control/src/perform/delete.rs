//! Deletion of volumes and snapshots: all that are named or none.

use std::collections::HashSet;

use super::look::select;
use super::selection::selection;
use super::{SHOWN_COUNT, refuse_in_use};
use forkdisk::ErrorKind;

use crate::call::{Call, settle_later};
use crate::failure::Failure;
use crate::method::params;
use crate::reply::Deletion;
use crate::session::Session;

/// Deletes the objects; in a process of its own, or with `until_freed`, it waits until their space is free.
pub async fn delete(session: &Session, p: params::Delete, call: &Call) -> Result<Deletion, Failure> {
    let folders = folders_with_properties(session, &p);
    // A folder that is listed for its properties only is deleted as well.
    let is_empty = |name: &String| session.pool.volumes_in(name).is_ok_and(|all| all.is_empty());
    let is_only_folder = |name: &String| folders.contains(name) && is_empty(name);
    let (empty, objects): (Vec<_>, Vec<_>) = p.objects.iter().cloned().partition(is_only_folder);
    let names = match objects.is_empty() && !empty.is_empty() {
        true => Vec::new(),
        false => victims(session, &params::Delete { objects, ..p.clone() }).await?,
    };
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    session.pool.check_delete(&names)?;
    if !p.dry_run {
        for name in &names {
            refuse_in_use(session, &session.pool.find(name)?, "disconnect it first")?;
        }
    }
    let (mut frees, mut waits) = (None, None);
    if p.count {
        call.say("counting");
        frees = Some(session.pool.freed_by(&names).await?);
    }
    if !p.dry_run {
        session.pool.delete(&names).await?;
        for folder in &folders {
            match session.pool.remove_folder(folder) {
                // It is in use: something has been made in it.
                Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) => {}
                removed => removed?,
            }
        }
        if !folders.is_empty() {
            session.pool.flush().await?;
        }
        // The deletion is durable. If the file system under the pool is full, the space is freed later.
        waits = settle_later(session, call, p.until_freed).await?;
    }
    let deleted = names.iter().map(|name| name.to_string()).collect();
    Ok(Deletion { dry_run: p.dry_run, deleted, frees, waits })
}

/// Returns the folders with properties that are deleted with everything in them, inner ones first.
fn folders_with_properties(session: &Session, p: &params::Delete) -> Vec<String> {
    let is_within = |name: &str, object: &String| {
        name.strip_prefix(object.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let selects = !p.label.is_empty() || p.pattern.is_some() || p.older_than.is_some() || p.expires_before.is_some();
    let is_folder = |name: &String| session.pool.find(name).is_err();
    // To find them takes a look at every volume, which a deletion of volumes must not.
    if !p.recursive || selects || !p.objects.iter().any(is_folder) {
        return Vec::new();
    }
    let all = session.pool.folders_with_properties().into_iter().map(|info| info.name);
    let mut folders: Vec<String> = all.filter(|name| p.objects.iter().any(|object| is_within(name, object))).collect();
    folders.sort_by_key(|name| std::cmp::Reverse(name.len()));
    folders
}

/// Returns the names of all objects to delete, in the order of the list.
async fn victims(session: &Session, p: &params::Delete) -> Result<Vec<String>, Failure> {
    let selection = selection!(p)?;
    let selects = !selection.is_everything();
    if !selects && (p.objects.iter().any(String::is_empty) || p.objects.is_empty()) {
        return Err(Failure::new(ErrorKind::Invalid, "name what is to be deleted"));
    }
    let infos = select(session, &p.objects).await?;
    let now = session.now();
    let chosen: Vec<String> =
        infos.iter().filter(|info| selects && selection.has(info, now)).map(|info| info.name.clone()).collect();
    if selects && chosen.is_empty() {
        return Err(selection.nothing());
    }
    let wanted = if selects { chosen } else { p.objects.iter().map(|name| own_name(session, name)).collect() };
    let named: HashSet<&str> = wanted.iter().map(String::as_str).collect();
    let mut all: Vec<String> = infos.into_iter().map(|info| info.name).collect();
    if p.recursive {
        let goes = |name: &String| named.contains(name.as_str()) || is_snapshot_of(name, &named);
        all.retain(|name| !selects || goes(name));
        return Ok(all);
    }
    let found: HashSet<&String> = all.iter().collect();
    for name in &wanted {
        if !found.contains(name) {
            let text = format!("{name} is a folder: -r deletes everything in it");
            return Err(Failure::new(ErrorKind::Invalid, text));
        }
    }
    let snapshots_of = |name: &&String| is_snapshot_of(name, &named);
    let left: Vec<&String> = all.iter().filter(|name| !named.contains(name.as_str())).filter(snapshots_of).collect();
    if !left.is_empty() {
        let (shown, more) = shorten(&left);
        let text =
            format!("there are snapshots left: {shown}{more}; -r deletes them too (-n shows what it would delete)");
        return Err(Failure::new(ErrorKind::Busy, text));
    }
    Ok(all.iter().filter(|name| named.contains(name.as_str())).cloned().collect())
}

/// Returns the name of what is there, which is another one for a snapshot of a file that was removed on a mount.
fn own_name(session: &Session, name: &str) -> String {
    session.pool.find(name).map_or_else(|_| name.to_string(), |info| info.name)
}

fn is_snapshot_of(name: &str, volumes: &HashSet<&str>) -> bool {
    name.split_once('@').is_some_and(|(volume, _)| volumes.contains(volume))
}

fn shorten(names: &[&String]) -> (String, String) {
    let shown = names.iter().take(SHOWN_COUNT).map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
    let rest = names.len().saturating_sub(SHOWN_COUNT);
    (shown, if rest > 0 { format!(" and {rest} more") } else { String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_snapshots_is_cut() {
        let names: Vec<String> = (0..7).map(|i| format!("a@{i}")).collect();
        let names: Vec<&String> = names.iter().collect();
        assert_eq!(shorten(&names), ("a@0, a@1, a@2, a@3, a@4".into(), " and 2 more".into()));
        assert_eq!(shorten(&names[..1]), ("a@0".into(), String::new()));
    }
}
