//! Creation and changes of volumes.

use forkdisk::{
    Changes, CloneProperty, CreateOptions, ErrorKind, ForkOptions, GatherPolicy, NoSuchPolicy, SnapshotFlags,
    VolumeInfo,
};

use super::copier::policy;
use super::folders::{refuse_folder, volumes_of};
use super::rollback::split_snapshot;
use super::selection::selection;
use super::{refuse_attached, refuse_in_use};
use crate::call::{Call, settle_later};
use crate::failure::Failure;
use crate::lifetimes::{Given, given};
use crate::method::params;
use crate::origins;
use crate::reply::VolumeRecord;
use crate::session::Session;
use crate::size::human;

fn invalid(text: String) -> Failure {
    Failure::new(ErrorKind::Invalid, text)
}

fn strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

fn records(made: &[VolumeInfo]) -> Vec<VolumeRecord> {
    made.iter().map(VolumeRecord::from).collect()
}

/// Returns the options for a new volume of `size` bytes.
pub fn create_options(session: &Session, size: u64, chunk: Option<u64>) -> CreateOptions {
    let mut options = CreateOptions::new(size, session.now()).with_gather(GatherPolicy::USUAL);
    if let Some(chunk) = chunk {
        options.chunk = chunk;
    }
    options
}

/// Parses a policy of gathering.
///
/// # Errors
/// `Invalid` if the text names no policy.
pub fn gather_policy(name: &str) -> Result<GatherPolicy, Failure> {
    name.parse().map_err(|refused: NoSuchPolicy| invalid(refused.to_string()))
}

/// Refuses a disk of 0 bytes: only an empty file on a mount creates a volume of that length.
fn check_size(size: u64) -> Result<(), Failure> {
    if size > 0 { Ok(()) } else { Err(invalid("a volume needs a size above 0, as in --size 20G".to_string())) }
}

pub async fn create(session: &Session, p: params::Create, call: &Call) -> Result<Vec<VolumeRecord>, Failure> {
    check_size(p.size)?;
    let mut options = create_options(session, p.size, p.chunk);
    if let Some(name) = &p.break_policy {
        options.break_policy = policy(name)?;
    }
    options.quota = p.quota.unwrap_or(0);
    if let Some(name) = &p.gather {
        options.gather = gather_policy(name)?;
    }
    options.extension = given!(p, lease).of_new(session, call)?;
    Ok(records(&session.pool.create_all(&strs(&p.volumes), &options).await?))
}

pub async fn clone(session: &Session, p: params::Clone, call: &Call) -> Result<Vec<VolumeRecord>, Failure> {
    if !p.recursive {
        refuse_folder(session, p.source.split('@').next().unwrap_or_default(), "clones")?;
        session.pool.find(&p.source)?;
    }
    let changes = Changes::default().with_extension(given!(p, lease).of_new(session, call)?);
    let options = ForkOptions::new(session.now()).with_changes(changes);
    Ok(records(&session.pool.fork(&p.source, &strs(&p.volumes), &options).await?))
}

pub async fn snapshot(session: &Session, p: params::Snapshot, call: &Call) -> Result<Vec<VolumeRecord>, Failure> {
    let selection = selection!(p)?;
    let mut sources = p.snapshots.iter().map(|name| split_snapshot(name)).collect::<Result<Vec<_>, _>>()?;
    let mut inside: Vec<(String, &str)> = Vec::new();
    if p.recursive || !selection.is_everything() {
        for (name, snapshot) in sources {
            inside.extend(volumes_of(session, name)?.into_iter().map(|volume| (volume, snapshot)));
        }
        let now = session.now();
        inside.retain(|(volume, _)| session.pool.find(volume).is_ok_and(|info| selection.has(&info, now)));
        sources = inside.iter().map(|(volume, snapshot)| (volume.as_str(), *snapshot)).collect();
        if sources.is_empty() {
            return Err(selection.nothing());
        }
    } else {
        sources.iter().try_for_each(|(name, _)| refuse_folder(session, name, "takes a snapshot of"))?;
    }
    if p.dry_run {
        let infos = sources.iter().map(|(volume, _)| session.pool.find(volume)).collect::<Result<Vec<_>, _>>()?;
        let named = infos.into_iter().zip(&sources).map(|(mut info, (volume, snapshot))| {
            info.name = format!("{volume}@{snapshot}");
            info
        });
        return Ok(records(&named.collect::<Vec<_>>()));
    }
    let flags =
        SnapshotFlags::NONE.with_independent(p.independent).with_droppable(p.droppable).with_writable(p.writable);
    let extension = given!(p).of_new(session, call)?;
    Ok(records(&session.pool.snapshot_extended(&sources, flags, &extension, session.now()).await?))
}

pub async fn rename(session: &Session, p: params::Rename, _: &Call) -> Result<VolumeRecord, Failure> {
    let volume_of = |name: &str| name.split_once('@').map(|(volume, _)| volume.to_string());
    if volume_of(&p.from) != volume_of(&p.to) {
        let text = format!("{} cannot become {}: a volume stays a volume, a snapshot stays with its own", p.from, p.to);
        return Err(invalid(text));
    }
    // The kernel keeps the name under which a device was attached.
    let snapshots = format!("{}@", p.from);
    for info in session.pool.list().iter().filter(|info| info.name == p.from || info.name.starts_with(&snapshots)) {
        refuse_attached(session, info)?;
    }
    session.pool.rename(&p.from, &p.to).await?;
    Ok((&session.pool.find(&p.to)?).into())
}

pub async fn resize(session: &Session, p: params::Resize, call: &Call) -> Result<VolumeRecord, Failure> {
    let info = session.pool.find(&p.volume)?;
    check_size(p.size)?;
    if info.is_origin() {
        crate::origins::resize(session, &p.volume, p.size).await?;
        session.host().changed(&p.volume).await;
        return Ok((&session.pool.find(&p.volume)?).into());
    }
    if p.size < info.size && !p.allow_shrink {
        let (name, old) = (&info.name, info.size);
        let text = format!(
            "{name} is {} ({old} bytes) long: cutting it down to {} loses what lies beyond; --allow-shrink does it",
            human(old),
            human(p.size)
        );
        return Err(invalid(text));
    }
    if p.size < info.size {
        refuse_attached(session, &info)?;
    }
    if p.size < info.size && !p.force {
        let otherwise = "disconnect it first, or --force makes the volume smaller under its users";
        refuse_in_use(session, &info, otherwise)?;
    }
    session.pool.resize(&p.volume, p.size).await?;
    session.host().changed(&p.volume).await;
    // Growing a volume frees nothing.
    let waits = if p.size < info.size { settle_later(session, call, true).await? } else { None };
    Ok(VolumeRecord { waits, ..(&session.pool.find(&p.volume)?).into() })
}

/// Parses a property that clones inherit, `PROPERTY=VALUE`; without a value it is removed.
fn inherited(text: &str) -> Result<(CloneProperty, Option<u64>), Failure> {
    let (name, value) = text.split_once('=').ok_or_else(|| invalid(format!("write PROPERTY=VALUE, not {text}")))?;
    let property: CloneProperty = name.parse().map_err(|unknown| invalid(format!("clone.{text}: {unknown}")))?;
    if value.is_empty() {
        return Ok((property, None));
    }
    let refuse = || invalid(format!("clone.{name}: no volume can have {value}"));
    property.value_of(value).map(|value| (property, Some(value))).ok_or_else(refuse)
}

pub async fn set(session: &Session, p: params::Set, call: &Call) -> Result<VolumeRecord, Failure> {
    let given = Given {
        expires: p.expires,
        labels: &p.labels,
        lease: p.lease.as_deref(),
        created_by: None,
        writes: p.writes.as_deref(),
        zeroes: p.zeroes.as_deref(),
        diverge: p.diverge,
        reserve: p.reserve,
    };
    let mut extension = given.changes(session, call)?;
    extension.inherited = p.clone.iter().map(|text| inherited(text)).collect::<Result<_, _>>()?;
    let changes = Changes::default()
        .with_extension(extension)
        .with_chunk(p.chunk)
        .with_break_policy(p.break_policy.as_deref().map(policy).transpose()?)
        .with_quota(p.quota)
        .with_gather(p.gather.as_deref().map(gather_policy).transpose()?)
        .with_copy_ahead(p.copy_ahead)
        .with_when_full(p.when_full.as_deref().map(origins::full_policy).transpose()?);
    match &p.path {
        Some(path) => origins::replace_device(session, &p.volume, path, &changes).await?,
        None => session.pool.set(&p.volume, &changes).await?,
    }
    let found = session
        .pool
        .find(&p.volume)
        .or_else(|error| session.pool.find_folder(p.volume.trim_end_matches('/')).map_err(|_| error))?;
    Ok((&found).into())
}
