//! `list`: the volumes and snapshots of a pool.

use anyhow::Result;
use clap::Args;
use forkdisk_control::{VolumeRecord, params};

use crate::address::{names, same_pool};
use crate::cli::Global;
use crate::output::{Column, TableArgs, percent_of, print_json};
use crate::session::{Access, call};

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
    let found = call(global, &pool, Access::Read, params::List { objects: names(addresses) })?;
    if global.output.json() {
        return print_json(&found);
    }
    let header = [
        Column::Left("NAME"),
        Column::Left("TYPE"),
        Column::Right("SIZE"),
        Column::Right("REFERENCED"),
        Column::Right("CHUNK"),
        Column::Left("ORIGIN"),
        Column::Left("CREATED"),
        Column::Right("QUOTA"),
        Column::Right("FRAGMENTED"),
        Column::Left("GATHER"),
    ];
    let rows: Vec<Vec<String>> = found.into_iter().map(|record| row(record, &args.table)).collect();
    args.table.print(&header, &rows)
}

fn row(record: VolumeRecord, table: &TableArgs) -> Vec<String> {
    vec![
        record.name,
        record.kind,
        table.size(record.size),
        table.size(record.referenced),
        table.size(record.chunk),
        record.origin.unwrap_or_else(|| "-".to_string()),
        table.time(record.created),
        record.quota.map_or_else(|| "-".to_string(), |quota| table.size(quota)),
        percent_of(record.scattered, record.referenced),
        record.gather,
    ]
}
