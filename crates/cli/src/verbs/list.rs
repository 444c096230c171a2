//! `list`: shows the volumes and snapshots of a pool.

use anyhow::Result;
use clap::Args;
use forkdisk::VolumeKind;
use forkdisk_control::{VolumeRecord, params};

use crate::address::{names, same_pool};
use crate::global::Global;
use crate::output::{Column, TableArgs, percent_of, print_json};
use crate::session::{Access, call};
use crate::verbs::examples::examples;
use crate::verbs::lifetime::SelectArgs;

/// List volumes and snapshots, and folders with bounds
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk list /srv/pool.img",
    "forkdisk list -Hp /srv/pool.img/vm1",
    "forkdisk list /srv/pool.img --label owner=ci --match 'kids/*'",
])]
pub struct ListArgs {
    #[arg(value_name = "ADDRESS")]
    objects: Vec<String>,

    #[command(flatten)]
    select: SelectArgs,

    #[command(flatten)]
    table: TableArgs,
}

/// Lists by name. On a terminal of 80 columns, some columns are left out; -H and --json show all.
pub fn run(args: ListArgs, global: &Global) -> Result<()> {
    let addresses = global.addresses(&args.objects)?;
    let pool = same_pool(&addresses)?;
    let SelectArgs { label, pattern, older_than, expires_before } = args.select;
    let method = params::List { objects: names(addresses), label, pattern, older_than, expires_before };
    let found = call(global, &pool, Access::Read, method)?;
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
        Column::Left("EXPIRES"),
        Column::Left("LEASE"),
        Column::Left("LABELS"),
        Column::Right("DIVERGE"),
        Column::Right("RESERVE"),
        Column::Right("DIVERGED"),
        Column::Left("LAST-USED"),
        Column::Left("CREATED-BY"),
    ];
    let rows: Vec<Vec<String>> = found.iter().map(|record| row(record, &args.table)).collect();
    let shown = shown_columns(&rows, header.len(), args.table.is_for_people());
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| shown.iter().map(|&column| row[column].clone()).collect()).collect();
    let header: Vec<Column> = shown.iter().map(|&column| header[column]).collect();
    args.table.print_fitting(&header, &rows, &SPARE)
}

/// Columns that a narrow terminal leaves out.
const SPARE: [&str; 9] =
    ["GATHER", "CHUNK", "COPY-AHEAD", "WHEN-FULL", "FRAGMENTED", "QUOTA", "DEPENDS-ON", "CREATED", "LABELS"];

/// Number of columns that apply to every pool.
const USUAL_COLUMNS: usize = 10;
/// Number of columns that people see if they contain a value; the rest is for scripts.
const SOME_COLUMNS: usize = 20;

/// Returns the columns to show, out of `all`.
fn shown_columns(rows: &[Vec<String>], all: usize, for_people: bool) -> Vec<usize> {
    let has_value = |column: usize| rows.iter().any(|row| row[column] != "-");
    let is_shown = |&column: &usize| column < USUAL_COLUMNS || column < SOME_COLUMNS && has_value(column);
    (0..all).filter(|column| !for_people || is_shown(column)).collect()
}

fn row(record: &VolumeRecord, table: &TableArgs) -> Vec<String> {
    let or_none = |text: String| if text.is_empty() { "-".to_string() } else { text };
    let flags: Vec<&str> = record.flags.names().collect();
    let protection = record.protection.as_ref();
    let of_volume = |text: String| if record.kind == VolumeKind::Folder { "-".to_string() } else { text };
    let time = |seconds| if seconds == 0 { "-".to_string() } else { table.time(seconds) };
    let labels: Vec<String> = record.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    vec![
        record.name.clone(),
        record.kind.to_string(),
        of_volume(table.size(record.size)),
        table.size(record.referenced),
        of_volume(table.size(record.chunk)),
        or_none(record.origin.clone()),
        time(record.created),
        if record.quota == 0 { "-".to_string() } else { table.size(record.quota) },
        of_volume(percent_of(record.scattered, record.referenced)),
        of_volume(record.gather.to_string()),
        or_none(flags.join(",")),
        or_none(record.depends_on.clone()),
        protection.map_or_else(|| "-".to_string(), |protection| protection.when_full.to_string()),
        protection.map_or_else(|| "-".to_string(), |protection| table.size(protection.copy_ahead)),
        time(record.expires),
        or_none(record.lease.clone()),
        or_none(labels.join(",")),
        if record.diverge == 0 { "-".to_string() } else { table.size(record.diverge) },
        if record.reserve == 0 { "-".to_string() } else { table.size(record.reserve) },
        if record.diverge + record.reserve == 0 { "-".to_string() } else { table.size(record.diverged) },
        time(record.last_used),
        or_none(record.created_by.clone()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_see_columns_with_values_and_scripts_see_all() {
        let all = SOME_COLUMNS + 2;
        let row = |values: &[usize]| -> Vec<String> {
            (0..all).map(|column| if values.contains(&column) { "8M" } else { "-" }.to_string()).collect()
        };
        let usual: Vec<usize> = (0..USUAL_COLUMNS).collect();
        assert_eq!(shown_columns(&[], all, true), usual);
        assert_eq!(shown_columns(&[row(&[]), row(&[all - 1])], all, true), usual);
        assert_eq!(shown_columns(&[row(&[12]), row(&[])], all, true), [&usual[..], &[12]].concat());
        assert_eq!(shown_columns(&[row(&[])], all, false), (0..all).collect::<Vec<_>>());
    }
}
