//! `set`: changes a volume's properties.

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk::GatherPolicy;
use forkdisk_control::params;

use crate::cli::Global;
use crate::output::print_if_json;
use crate::session::{Access, call};
use crate::size;

/// Change a property of a volume
///
/// Properties: chunk (how much room a first write reserves: 4K to 64M, a power of two); break (what a first write to a
/// shared chunk does: split or copy); quota (most bytes that the volume may hold, its own and shared with others; a write
/// beyond it fails with ENOSPC; none: no bound); gather (when scattered pages are brought together without anybody asking:
/// off; auto, while nobody reads or writes, as long as it moves little; idle, while nobody reads or writes; or a percentage
/// such as 20%, while the fragmentation is above it); of an origin:
/// copy-ahead (most that is kept ahead of a sequential writer), when-full (wait, wait:SECONDS, error, drop-oldest), path (where
/// the device of one that could not be opened is now).
#[derive(Args)]
pub struct SetArgs {
    /// What to change
    #[arg(value_name = "PROPERTY=VALUE", value_parser = parse_property)]
    property: Property,

    /// The volume
    #[arg(value_name = "POOL/VOLUME")]
    address: String,
}

#[derive(Clone)]
enum Property {
    Chunk(u64),
    CopyAhead(u64),
    WhenFull(String),
    Path(String),
    Break(String),
    Quota(u64),
    Gather(GatherPolicy),
}

fn parse_property(text: &str) -> Result<Property> {
    let (name, value) = text.split_once('=').context("write PROPERTY=VALUE, as in chunk=128K")?;
    match name {
        "chunk" => Ok(Property::Chunk(size::parse(value)?)),
        "break" if matches!(value, "split" | "copy") => Ok(Property::Break(value.to_string())),
        "break" => bail!("there is no break policy '{value}': split and copy are"),
        "quota" if value == "none" => Ok(Property::Quota(0)),
        "quota" => Ok(Property::Quota(size::parse(value)?)),
        "gather" => Ok(Property::Gather(value.parse()?)),
        "copy-ahead" => Ok(Property::CopyAhead(size::parse(value)?)),
        "when-full" => Ok(Property::WhenFull(value.to_string())),
        "path" => Ok(Property::Path(value.to_string())),
        _ => bail!(
            "there is no property '{name}' that can be set: chunk, break, quota, gather, copy-ahead, when-full and path are"
        ),
    }
}

/// Changes the property; what is stored already stays where it is.
pub fn run(args: SetArgs, global: &Global) -> Result<()> {
    let address = global.volume(&args.address)?;
    let mut method = params::Set {
        volume: address.name,
        chunk: None,
        break_policy: None,
        copy_ahead: None,
        when_full: None,
        path: None,
        quota: None,
        gather: None,
    };
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
        Property::Gather(policy) => method.gather = Some(policy.to_string()),
    }
    print_if_json(global, &call(global, &address.pool, Access::Write, method)?)
}
