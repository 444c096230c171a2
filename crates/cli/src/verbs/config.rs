//! `config`: shows the effective configuration and the source of each value.

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::config::{Given, KEYS, Key};
use crate::global::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::verbs::examples::examples;

/// Show the effective configuration and the source of each value
///
/// A flag takes precedence over an environment variable, that over the file, that over the default.
/// This verb takes the flags of `serve`.
#[derive(Args)]
#[command(after_help = examples!["forkdisk config"])]
pub struct ConfigArgs {
    #[command(flatten)]
    pub given: Given<true>,
}

/// A key as a JSON object.
#[derive(Serialize)]
struct Record {
    key: &'static str,
    /// Placeholder of a value, as in the help.
    takes: String,
    /// `null` if there is no value.
    value: Option<String>,
    from: String,
    flag: String,
    variable: String,
    default: Option<&'static str>,
    help: &'static str,
}

/// Shows every key.
pub fn run(global: &Global) -> Result<()> {
    let records: Vec<Record> = KEYS.iter().map(|key| record(key, global)).collect();
    if global.output.json() {
        return print_json(&records);
    }
    let header = [Column::Left("KEY"), Column::Left("VALUE"), Column::Left("FROM")];
    let cells = |record: &Record| {
        vec![record.key.to_string(), record.value.clone().unwrap_or_else(|| "-".to_string()), record.from.clone()]
    };
    TableArgs::default().print(&header, &records.iter().map(cells).collect::<Vec<_>>())
}

fn record(key: &'static Key, global: &Global) -> Record {
    let (value, _) = global.settings.get(key);
    let from = global.settings.source(key);
    let given = |text: &str| Some(text).filter(|text| !text.is_empty()).map(str::to_string);
    Record {
        key: key.name,
        takes: key.kind.value_name(),
        value: given(value),
        from,
        flag: format!("--{}", key.flag()),
        variable: key.variable(),
        default: Some(key.default).filter(|text| !text.is_empty()),
        help: key.help,
    }
}
