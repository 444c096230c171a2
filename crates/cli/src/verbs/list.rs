//! `list`: shows the volumes and snapshots of a pool.

use anyhow::Result;
use clap::Args;
use forkdisk_control::{VolumeRecord, params};

use crate::address::{names, same_pool};
use crate::global::Global;
use crate::output::{Column, TableArgs, percent_of, print_json};
use crate::session::{Access, call};
use crate::verbs::examples::examples;

/// List volumes and snapshots
#[derive(Args)]
#[command(after_help = examples!["forkdisk list /srv/pool.img", "forkdisk list -Hp /srv/pool.img/vm1"])]
pub struct ListArgs {
    #[arg(value_name = "ADDRESS")]
    objects: Vec<String>,

    #[command(flatten)]
    table: TableArgs,
}

/// Lists by name. On a terminal of 80 columns, some columns are left out; -H and --json show all.
pub fn run(args: ListArgs, global: &Global) -> Result<()> {
    let addresses = global.addresses(&args.objects)?;
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
        Column::Left("FLAGS"),
        Column::Left("DEPENDS-ON"),
        Column::Left("WHEN-FULL"),
        Column::Right("COPY-AHEAD"),
    ];
    let mut rows: Vec<Vec<String>> = found.iter().map(|record| row(record, &args.table)).collect();
    let shown = shown_columns(&rows, args.table.is_for_people());
    rows.iter_mut().for_each(|row| row.truncate(shown));
    args.table.print_fitting(&header[..shown], &rows, &SPARE)
}

/// Columns that a narrow terminal leaves out.
const SPARE: [&str; 8] = ["GATHER", "CHUNK", "COPY-AHEAD", "WHEN-FULL", "FRAGMENTED", "QUOTA", "DEPENDS-ON", "CREATED"];

/// Number of columns that apply to every pool; the rest is about origins.
const USUAL_COLUMNS: usize = 10;

/// Returns the number of columns to show: people see the columns about origins only if they contain a value.
fn shown_columns(rows: &[Vec<String>], for_people: bool) -> usize {
    let all = rows.first().map_or(USUAL_COLUMNS, Vec::len);
    let is_empty = rows.iter().all(|row| row[USUAL_COLUMNS..].iter().all(|cell| cell == "-"));
    if for_people && is_empty { USUAL_COLUMNS } else { all }
}

fn row(record: &VolumeRecord, table: &TableArgs) -> Vec<String> {
    let or_none = |text: String| if text.is_empty() { "-".to_string() } else { text };
    let flags: Vec<&str> = record.flags.names().collect();
    let protection = record.protection.as_ref();
    vec![
        record.name.clone(),
        record.kind.to_string(),
        table.size(record.size),
        table.size(record.referenced),
        table.size(record.chunk),
        or_none(record.origin.clone()),
        table.time(record.created),
        if record.quota == 0 { "-".to_string() } else { table.size(record.quota) },
        percent_of(record.scattered, record.referenced),
        record.gather.to_string(),
        or_none(flags.join(",")),
        or_none(record.depends_on.clone()),
        protection.map_or_else(|| "-".to_string(), |protection| protection.when_full.to_string()),
        protection.map_or_else(|| "-".to_string(), |protection| table.size(protection.copy_ahead)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_about_origins_are_for_pools_that_have_some_and_for_scripts() {
        let row = |last: &str| [vec!["-".to_string(); USUAL_COLUMNS + 3], vec![last.to_string()]].concat();
        assert_eq!(shown_columns(&[], true), USUAL_COLUMNS);
        assert_eq!(shown_columns(&[row("-"), row("-")], true), USUAL_COLUMNS);
        assert_eq!(shown_columns(&[row("-"), row("8M")], true), USUAL_COLUMNS + 4);
        assert_eq!(shown_columns(&[row("-")], false), USUAL_COLUMNS + 4);
    }
}
