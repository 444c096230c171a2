//! Control operations as calls of the engine.

use forkdisk::{BreakPolicy, Changes, CreateOptions, Error, ErrorKind, GatherPolicy, Pool, VolumeInfo};

use super::copying;
use crate::disk::SimDisk;
use crate::model::{Control, Key, Properties};

/// Retries a flush that the host has no space for: what it makes durable has already been done.
async fn flush(pool: &Pool<SimDisk>) -> Result<(), Error> {
    loop {
        match pool.flush().await {
            Err(e) if e.kind() == ErrorKind::NoSpace => {}
            outcome => return outcome,
        }
    }
}

/// As a file system does it: while the volume is open, published at once, made durable by a flush.
async fn replace(pool: &Pool<SimDisk>, volume: &str, source: &str) -> Result<(), Error> {
    let (volume, source) = (pool.volume(volume)?, pool.volume(source)?);
    volume.replace_with(&source).await?;
    flush(pool).await
}

/// The replaced volume is open or not.
async fn usurp(pool: &Pool<SimDisk>, from: &str, to: &str) -> Result<(), Error> {
    let open = (to.len().is_multiple_of(2)).then(|| pool.volume(to)).transpose()?;
    pool.rename_file(from, to, true)?;
    flush(pool).await?;
    drop(open);
    Ok(())
}

/// Removed while it is open, deleted at its last close.
async fn remove(pool: &Pool<SimDisk>, name: &str) -> Result<(), Error> {
    let open = pool.volume(name)?;
    pool.remove_file(name)?;
    flush(pool).await?;
    drop(open);
    Ok(())
}

/// The percentage above which volumes are gathered that are gathered at all.
const GATHERED_PERCENT: u8 = 90;

fn policies(properties: Properties) -> (BreakPolicy, GatherPolicy) {
    let break_policy = if properties.copies { BreakPolicy::Copy } else { BreakPolicy::Split };
    (break_policy, if properties.gathers { GatherPolicy::Above(GATHERED_PERCENT) } else { GatherPolicy::Off })
}

/// Returns the properties that the pool shows of a volume.
pub fn properties_of(pool: &Pool<SimDisk>, info: &VolumeInfo) -> Properties {
    let copying = pool.copying(&info.name).map(|copying| copying.break_policy);
    let (copies, gathers) = (copying.is_ok_and(|policy| policy == BreakPolicy::Copy), info.gather != GatherPolicy::Off);
    Properties { chunk: info.chunk, copies, quota: info.quota, gathers }
}

fn strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

/// A control operation in the engine's terms.
pub enum Verb {
    Create(String, u64),
    CreateAll(Vec<String>, u64, Properties),
    Set(String, Properties),
    Snapshot(Vec<(String, String)>),
    Clone(String, String),
    CloneAll(String, Vec<String>),
    Rollback(String, String),
    Rename(String, String),
    Resize(String, u64),
    Delete(Vec<String>),
    Replace(String, String),
    Usurp(String, String),
}

impl Verb {
    /// Translates a control operation; `name` returns the names.
    pub fn of(control: &Control, name: impl Fn(&Key) -> String) -> Verb {
        match control {
            Control::Create(new, size) => Verb::Create(new.clone(), *size),
            Control::Snapshot(all) => Verb::Snapshot(all.iter().map(|(key, s)| (name(key), s.clone())).collect()),
            Control::Clone(source, new) => Verb::Clone(name(source), new.clone()),
            Control::CreateAll(all, size, properties) => Verb::CreateAll(all.clone(), *size, *properties),
            Control::CloneAll(source, all) => Verb::CloneAll(name(source), all.clone()),
            Control::Set(key, properties) => Verb::Set(name(key), *properties),
            Control::Rollback(volume, snapshot) => {
                let short = name(snapshot).rsplit('@').next().unwrap_or_default().to_owned();
                Verb::Rollback(name(volume), short)
            }
            Control::Rename(key, new) => Verb::Rename(name(key), new.clone()),
            Control::Resize(key, size) => Verb::Resize(name(key), *size),
            Control::Replace(key, source) => Verb::Replace(name(key), name(source)),
            Control::Usurp(key, victim) => Verb::Usurp(name(key), name(victim)),
            Control::Delete(keys) => Verb::Delete(keys.iter().map(name).collect()),
        }
    }

    /// Carries it out; it is durable when this returns. `copies`: most new volumes break sharing by copying.
    pub async fn carry_out(self, pool: &Pool<SimDisk>, copies: bool) -> Result<(), Error> {
        match self {
            Verb::Create(name, size) => {
                let options = copying::options(size, &name, copies);
                pool.create(&name, &options).await.map(drop)
            }
            Verb::Snapshot(sources) => {
                let sources: Vec<(&str, &str)> = sources.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
                pool.snapshot(&sources, 1).await.map(drop)
            }
            Verb::Clone(source, name) => pool.clone_volume(&source, &name, 1).await.map(drop),
            Verb::CreateAll(names, size, properties) => {
                let Properties { chunk, quota, .. } = properties;
                let (break_policy, gather) = policies(properties);
                let options = CreateOptions::new(size, 1)
                    .with_chunk(chunk)
                    .with_quota(quota)
                    .with_break_policy(break_policy)
                    .with_gather(gather);
                pool.create_all(&strs(&names), &options).await.map(drop)
            }
            Verb::CloneAll(source, names) => pool.clone_all(&source, &strs(&names), 1).await.map(drop),
            Verb::Set(name, properties) => {
                let (break_policy, gather) = policies(properties);
                let changes = Changes::default()
                    .with_chunk(properties.chunk)
                    .with_quota(properties.quota)
                    .with_break_policy(break_policy)
                    .with_gather(gather);
                pool.set(&name, &changes).await
            }
            Verb::Rollback(volume, snapshot) => pool.rollback(&volume, &snapshot).await,
            Verb::Rename(from, to) => pool.rename(&from, &to).await,
            Verb::Resize(name, size) => pool.resize(&name, size).await,
            Verb::Replace(volume, source) => replace(pool, &volume, &source).await,
            Verb::Usurp(from, to) => usurp(pool, &from, &to).await,
            Verb::Delete(names) if names.len() == 1 && names[0].len().is_multiple_of(2) => {
                remove(pool, &names[0]).await
            }
            Verb::Delete(names) => {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                pool.delete(&names).await
            }
        }
    }
}
