//! `list`: the volumes and snapshots of a pool.

use anyhow::{Result, bail};
use clap::Args;
use forkdisk::VolumeInfo;

use crate::address::{Address, same_pool};
use crate::cli::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::record::{VolumeRecord, kind};
use crate::session::{Access, Session, with_pool};

/// List volumes and snapshots
#[derive(Args)]
pub struct ListArgs {
    /// A pool, or folders, volumes and snapshots in it
    #[arg(value_name = "ADDRESS")]
    addresses: Vec<String>,

    #[command(flatten)]
    table: TableArgs,
}

/// Lists by name.
pub fn run(args: ListArgs, global: &Global) -> Result<()> {
    let addresses = global.addresses(&args.addresses)?;
    let pool = same_pool(&addresses)?;
    let found = with_pool(&pool, Access::Read, |session| async move { select(&session, &addresses) })?;
    if global.output.json() {
        return print_json(&found.iter().map(VolumeRecord::from).collect::<Vec<_>>());
    }
    let header = [
        Column::Left("NAME"),
        Column::Left("TYPE"),
        Column::Right("SIZE"),
        Column::Right("REFERENCED"),
        Column::Right("CHUNK"),
        Column::Left("ORIGIN"),
        Column::Left("CREATED"),
    ];
    let rows: Vec<Vec<String>> = found.iter().map(|info| row(info, &args.table)).collect();
    args.table.print(&header, &rows)
}

fn row(info: &VolumeInfo, table: &TableArgs) -> Vec<String> {
    let origin = if info.origin.is_empty() { "-" } else { &info.origin };
    vec![
        info.name.clone(),
        kind(info).to_string(),
        table.size(info.size),
        table.size(info.referenced),
        table.size(info.chunk),
        origin.to_string(),
        table.time(info.created),
    ]
}

/// The volumes and snapshots that `addresses` mean, by name: of a pool all of them, of a folder all
/// in it, of a volume itself and its snapshots. One that means nothing is an error.
pub fn select(session: &Session, addresses: &[Address]) -> Result<Vec<VolumeInfo>> {
    let mut all = session.pool.list();
    for address in addresses {
        if !address.name.is_empty() && !all.iter().any(|info| covers(&address.name, &info.name)) {
            bail!("{}: there is no such volume or snapshot; `forkdisk list` shows what there is", address.show());
        }
    }
    all.retain(|info| addresses.iter().any(|address| covers(&address.name, &info.name)));
    Ok(all)
}

/// Whether the object `name` is meant by `wanted`, a name, a folder or everything.
fn covers(wanted: &str, name: &str) -> bool {
    match name.strip_prefix(wanted) {
        Some(rest) => wanted.is_empty() || rest.is_empty() || rest.starts_with(['@', '/']),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_covers_itself_its_snapshots_and_its_folder() {
        for (wanted, name, is_meant) in [
            ("", "a", true),
            ("a", "a", true),
            ("a", "a@x", true),
            ("a", "a/b@x", true),
            ("a", "ab", false),
            ("a@x", "a@x", true),
            ("a@x", "a@xy", false),
            ("a@x", "a", false),
        ] {
            assert_eq!(covers(wanted, name), is_meant, "{wanted} {name}");
        }
    }
}
