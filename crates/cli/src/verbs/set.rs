//! `set`: changes properties of a volume or pool.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::{CloneProperty, GatherPolicy, Writes, Zeroes};
use forkdisk_control::params;
use forkdisk_uring::Config;

use crate::config::keys;
use crate::global::Global;
use crate::host;
use crate::session::{
    Access, call, close_pool, daemon, open_device, open_device_in_turn, open_device_of_copy, open_pool,
};
use crate::size;
use crate::verbs::examples::examples;
use crate::verbs::init::random_uuid;
use crate::verbs::lifetime;
use crate::volatile_file::VolatileFile;

/// Default time between two heartbeats.
const BEAT: Duration = Duration::from_secs(1);

/// Change a property of a volume or folder, or of a pool as a whole
///
/// A folder has the properties quota and diverge, limits of all volumes below it together, and clone.PROPERTY, which
/// clones that are made below it inherit. With a slash at the end of its name it is made if it does not exist.
///
/// The properties uuid and multihost are those of a pool that no process has open: name the pool instead of a
/// volume.
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk set quota=30G /srv/pool.img/vm1",
    "forkdisk set expires=10m /srv/pool.img/kids/1",
    "forkdisk set label.owner=ci /srv/pool.img/kids/1",
    "forkdisk set diverge=2G /srv/pool.img/kids/1",
    "forkdisk set diverge=40G /srv/pool.img/kids",
    "forkdisk set clone.expires=1h /srv/pool.img/kids/",
    "forkdisk set reserve=20G /srv/pool.img/db",
    "forkdisk set writes=compare /srv/pool.img/memory",
])]
pub struct SetArgs {
    /// The change
    ///
    /// uuid=new: a new identity for a copy of a pool; the original may be open meanwhile.
    ///
    /// multihost=on|off|TIME: whether one host at a time may have open a pool on storage that several hosts share, as
    /// its heartbeat shows to the others; TIME between two heartbeats.
    #[arg(value_name = "PROPERTY=VALUE", value_parser = parse_property)]
    property: Property,

    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]|POOL/FOLDER")]
    volume: String,
}

/// Properties that are described by the parameters of the method.
pub const PROPERTIES: [(&str, &str); 15] = [
    ("chunk", "chunk"),
    ("break", "break_policy"),
    ("quota=SIZE|none", "quota"),
    ("diverge=SIZE|none", "diverge"),
    ("reserve=SIZE|none", "reserve"),
    ("gather", "gather"),
    ("copy-ahead", "copy_ahead"),
    ("when-full", "when_full"),
    ("path", "path"),
    ("expires=TIME|DATE|none", "expires"),
    ("label.KEY=VALUE", "labels"),
    ("lease=PID|none", "lease"),
    ("writes", "writes"),
    ("zeroes", "zeroes"),
    ("clone.PROPERTY=VALUE|none|inherit", "clone"),
];

#[derive(Clone)]
pub enum Property {
    Chunk(u64),
    CopyAhead(u64),
    WhenFull(String),
    Path(String),
    Break(String),
    Quota(u64),
    Diverge(u64),
    Reserve(u64),
    Gather(GatherPolicy),
    Expires(u64),
    /// As `KEY=VALUE`; without a value it is removed.
    Label(String),
    Lease(String),
    Writes(Writes),
    Zeroes(Zeroes),
    /// What clones below a folder inherit, as the method has it.
    Inherited(String),
    OfPool(PoolChange),
}

#[derive(Clone, Copy)]
pub enum PoolChange {
    NewUuid,
    /// Zero: no heartbeat.
    Heartbeat(Duration),
}

/// Parses `PROPERTY=VALUE`.
pub fn parse_property(text: &str) -> Result<Property> {
    let (name, value) = text.split_once('=').context("write PROPERTY=VALUE, as in chunk=128K")?;
    match name {
        "chunk" => Ok(Property::Chunk(size::parse(value)?)),
        "break" if matches!(value, "split" | "copy") => Ok(Property::Break(value.to_string())),
        "break" => bail!("there is no break policy '{value}': split and copy are"),
        "quota" if value == "none" => Ok(Property::Quota(0)),
        "quota" => Ok(Property::Quota(size::parse(value)?)),
        "diverge" if value == "none" => Ok(Property::Diverge(0)),
        "diverge" => Ok(Property::Diverge(bound(value)?)),
        "reserve" if value == "none" => Ok(Property::Reserve(0)),
        "reserve" => Ok(Property::Reserve(size::parse(value)?)),
        "gather" => Ok(Property::Gather(value.parse()?)),
        "copy-ahead" => Ok(Property::CopyAhead(size::parse(value)?)),
        "when-full" => Ok(Property::WhenFull(value.to_string())),
        "path" => Ok(Property::Path(value.to_string())),
        "expires" if value == "none" => Ok(Property::Expires(0)),
        "expires" => Ok(Property::Expires(lifetime::moment(value)?)),
        "lease" if value == "connection" => bail!(
            "the connection of this verb ends with it, and the volume would be deleted: name the number of a process"
        ),
        "lease" => Ok(Property::Lease(value.to_string())),
        "writes" => Ok(Property::Writes(value.parse()?)),
        "zeroes" => Ok(Property::Zeroes(value.parse()?)),
        name if name.starts_with("clone.") => Ok(Property::Inherited(inherited(&name["clone.".len()..], value)?)),
        name if name.starts_with("label.") => Ok(Property::Label(format!("{}={value}", &name["label.".len()..]))),
        "uuid" if value == "new" => Ok(Property::OfPool(PoolChange::NewUuid)),
        "uuid" => bail!("a pool gets a UUID that nothing else has: uuid=new"),
        "multihost" => Ok(Property::OfPool(PoolChange::Heartbeat(match value {
            "on" => BEAT,
            "off" => Duration::ZERO,
            time => keys::time(time)?,
        }))),
        _ => bail!(
            "there is no property '{name}' that can be set: chunk, break, quota, diverge, reserve, gather, \
             copy-ahead, when-full, path, expires, label.KEY, lease, writes, zeroes, clone.PROPERTY, uuid and \
             multihost are"
        ),
    }
}

/// Parses a property that clones inherit, and returns it as the method has it.
fn inherited(name: &str, value: &str) -> Result<String> {
    if value == "inherit" {
        name.parse::<CloneProperty>().with_context(|| format!("clone.{name}"))?;
        return Ok(format!("{name}="));
    }
    if name == "expires" {
        let after = if value == "none" { 0 } else { lifetime::age(value)? };
        return Ok(format!("expires={after}"));
    }
    Ok(match parse_property(&format!("{name}={value}"))? {
        Property::Chunk(bytes) | Property::Quota(bytes) | Property::Diverge(bytes) | Property::Reserve(bytes) => {
            format!("{name}={bytes}")
        }
        Property::Break(policy) => format!("{name}={policy}"),
        Property::Gather(policy) => format!("{name}={policy}"),
        Property::Writes(policy) => format!("{name}={policy}"),
        Property::Zeroes(policy) => format!("{name}={policy}"),
        _ => bail!(
            "clones inherit no property '{name}': chunk, break, quota, gather, diverge, reserve, expires, writes and \
             zeroes are those that they can inherit"
        ),
    })
}

/// Parses a bound: 0 would remove it.
fn bound(value: &str) -> Result<u64> {
    match size::parse(value)? {
        0 => bail!("diverge=0 allows no write that needs space: use at least 4K, or none for no bound"),
        bytes => Ok(bytes),
    }
}

/// Changes the property; data that is stored already is not moved.
pub fn run(args: SetArgs, global: &Global) -> Result<()> {
    if let Property::OfPool(change) = args.property {
        return change_pool(&global.pool(Some(Path::new(&args.volume)))?, change, global);
    }
    let (object, slash) = match args.volume.strip_suffix('/') {
        Some(folder) => (folder, "/"),
        None => (args.volume.as_str(), ""),
    };
    let address = global.object(object)?;
    let mut method = params::Set { volume: format!("{}{slash}", address.name), ..params::Set::default() };
    match args.property {
        Property::Chunk(chunk) => method.chunk = Some(chunk),
        Property::Break(policy) => method.break_policy = Some(policy),
        Property::CopyAhead(bytes) => method.copy_ahead = Some(bytes),
        Property::WhenFull(policy) => method.when_full = Some(policy),
        Property::Path(path) => {
            let absolute = std::path::absolute(&path).with_context(|| path.clone())?;
            method.path = Some(absolute.to_string_lossy().into_owned());
        }
        Property::Quota(quota) => method.quota = Some(quota),
        Property::Diverge(bytes) => method.diverge = Some(bytes),
        Property::Reserve(bytes) => method.reserve = Some(bytes),
        Property::Gather(policy) => method.gather = Some(policy.to_string()),
        Property::Expires(time) => method.expires = Some(time),
        Property::Label(label) => method.labels.push(label),
        Property::Lease(lease) => method.lease = Some(lease),
        Property::Writes(policy) => method.writes = Some(policy.to_string()),
        Property::Zeroes(policy) => method.zeroes = Some(policy.to_string()),
        Property::Inherited(text) => method.clone.push(text),
        Property::OfPool(_) => unreachable!("done above"),
    }
    global.print_if_json(&call(global, &address.pool, Access::Write, method)?)
}

/// Changes the superblock of a pool that no process has open.
fn change_pool(path: &Path, change: PoolChange, global: &Global) -> Result<()> {
    let shown = path.display();
    if daemon(global, path)?.is_some() {
        bail!(
            "{shown} is served, and this can only be changed while nothing has it open: `forkdisk stop {shown}` first"
        );
    }
    let uuid = random_uuid()?;
    forkdisk_uring::block_on(Config::default(), |runtime| async move {
        let open = || match change {
            PoolChange::NewUuid => open_device_of_copy(&runtime, path),
            PoolChange::Heartbeat(_) => open_device(&runtime, path, Access::Write),
        };
        let (device, _lock) = open_device_in_turn(global, &runtime, open).await?;
        // Replays the journal and volatile log, and refuses a pool that another host has open.
        let volatile_file = VolatileFile::of(path, false);
        let options = host::open_options().with_volatile(volatile_file.log());
        let pool = open_pool(device.clone(), &runtime, path, options).await?;
        close_pool(&pool).await.with_context(|| format!("{shown}: closing the pool"))?;
        volatile_file.remove();
        let changed = match change {
            PoolChange::NewUuid => forkdisk::set_uuid(&device, uuid).await,
            PoolChange::Heartbeat(interval) => forkdisk::set_heartbeat(&device, interval).await,
        };
        changed.with_context(|| shown.to_string())
    })??;
    global.print_if_json(&match change {
        PoolChange::NewUuid => serde_json::json!({ "uuid": forkdisk::uuid_text(&uuid) }),
        PoolChange::Heartbeat(interval) => serde_json::json!({ "multihost": interval.as_secs_f64() }),
    })
}
