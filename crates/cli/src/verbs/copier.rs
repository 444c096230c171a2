//! `copier`: shows and changes the settings of the pool's copier, and shows its figures.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_control::{CopierRecord, params};

use crate::global::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::session::{Access, call};
use crate::size;
use crate::verbs::examples::examples;

/// Show or set how data is copied when shared chunks are broken
///
/// Settings are stored in the pool and apply to running copies at once.
#[derive(Args)]
#[command(after_help = examples!["forkdisk copier /srv/pool.img --set throttle=50%"])]
pub struct CopierArgs {
    /// The pool
    pool: Option<PathBuf>,

    /// Change a setting
    ///
    /// throttle: the share of the time in which copies may be in flight, such as 50%; the most bytes copied per
    /// second, such as 100M/s; or none.
    #[arg(long, value_name = "SETTING=VALUE", num_args = 1.., value_parser = parse_setting)]
    set: Vec<Setting>,

    #[arg(long, value_name = "NAME")]
    volume: Option<String>,

    #[command(flatten)]
    table: TableArgs,
}

/// Settings that are described by the parameters of the method.
pub const SETTINGS: [(&str, &str); 4] = [
    ("subjob_size", "subjob_size"),
    ("split_count", "split_count"),
    ("buffers", "buffers"),
    ("offload=on|off", "offload"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    SubjobSize(u32),
    SplitCount(u32),
    Buffers(u64),
    Offload(bool),
    Percent(u8),
    BytesPerSecond(u64),
    NoThrottle,
}

fn parse_setting(text: &str) -> Result<Setting> {
    let (name, value) = text.split_once('=').context("write SETTING=VALUE, as in throttle=50%")?;
    let small = |bytes: u64| u32::try_from(bytes).with_context(|| format!("'{value}' is too large"));
    Ok(match name {
        "subjob_size" => Setting::SubjobSize(small(size::parse(value)?)?),
        "split_count" => Setting::SplitCount(value.parse().with_context(|| format!("'{value}' is not a number"))?),
        "buffers" => Setting::Buffers(size::parse(value)?),
        "throttle" => return parse_throttle(value),
        "offload" => Setting::Offload(match value {
            "on" => true,
            "off" => false,
            _ => bail!("'{value}' is neither on nor off"),
        }),
        _ => bail!("there is no setting '{name}': subjob_size, split_count, buffers, throttle and offload are"),
    })
}

fn parse_throttle(value: &str) -> Result<Setting> {
    if value == "none" {
        return Ok(Setting::NoThrottle);
    }
    if let Some(percent) = value.strip_suffix('%') {
        let percent = percent.parse().ok().filter(|p| (1..=100).contains(p));
        return Ok(Setting::Percent(percent.with_context(|| format!("'{value}' is not 1% to 100%"))?));
    }
    match value.strip_suffix("/s").map(size::parse) {
        Some(rate) => Ok(Setting::BytesPerSecond(rate?)),
        None => bail!("'{value}' is no throttle: write 50%, 100M/s or none"),
    }
}

fn method(args: &CopierArgs) -> params::Copier {
    let mut method = params::Copier {
        volume: args.volume.clone(),
        subjob_size: None,
        split_count: None,
        buffers: None,
        offload: None,
        percent: None,
        bytes_per_second: None,
    };
    for setting in &args.set {
        match *setting {
            Setting::SubjobSize(bytes) => method.subjob_size = Some(bytes),
            Setting::SplitCount(n) => method.split_count = Some(n),
            Setting::Buffers(bytes) => method.buffers = Some(bytes),
            Setting::Offload(on) => method.offload = Some(on),
            Setting::Percent(percent) => method.percent = Some(percent),
            Setting::BytesPerSecond(rate) => method.bytes_per_second = Some(rate),
            Setting::NoThrottle => (method.percent, method.bytes_per_second) = (Some(100), Some(0)),
        }
    }
    method
}

/// Changes settings, then shows them.
pub fn run(args: CopierArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let access = if args.set.is_empty() { Access::Read } else { Access::Write };
    let record = call(global, &path, access, method(&args))?;
    if global.output.json() {
        return print_json(&record);
    }
    let rows = rows(&record, &args.table);
    args.table.print(&[Column::Left("PROPERTY"), Column::Left("VALUE")], &rows)
}

fn throttle(record: &CopierRecord, table: &TableArgs) -> String {
    let share = (record.percent < 100).then(|| format!("{}%", record.percent));
    let rate = (record.bytes_per_second > 0).then(|| format!("{}/s", table.size(record.bytes_per_second)));
    let both: Vec<String> = share.into_iter().chain(rate).collect();
    if both.is_empty() { "none".to_string() } else { both.join(" ") }
}

fn rows(record: &CopierRecord, table: &TableArgs) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let mut add = |name: &str, value: String| rows.push(vec![name.to_string(), value]);
    if let Some(policy) = &record.break_policy {
        add("break", policy.clone());
    }
    add("throttle", throttle(record, table));
    if record.volume.is_none() {
        add("subjob_size", table.size(record.subjob_size.into()));
        add("split_count", record.split_count.to_string());
        add("buffers", table.size(record.buffers));
        add("buffers_in_use", table.size(record.buffers_in_use));
        add("offload", if record.offload { "on" } else { "off" }.to_string());
    }
    for (name, count) in [
        ("queued", record.queued),
        ("in_flight", record.in_flight),
        ("jobs", record.jobs),
        ("failed", record.failed),
        ("cancelled", record.cancelled),
        ("merged", record.merged),
        ("buffer_waits", record.buffer_waits),
        ("throttle_waits", record.throttle_waits),
    ] {
        add(name, count.to_string());
    }
    for (name, bytes) in [
        ("bytes_read", record.bytes_read),
        ("bytes_written", record.bytes_written),
        ("bytes_offloaded", record.bytes_offloaded),
        ("bytes_given", record.bytes_given),
    ] {
        add(name, table.size(bytes));
    }
    let jobs = record.jobs.max(1);
    add("mean_wait", format!("{} us", record.wait / jobs));
    add("mean_latency", format!("{} us", record.latency / jobs));
    add("longest", format!("{} us", record.longest));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_nonsense_is_refused() {
        for (text, setting) in [
            ("subjob_size=1M", Setting::SubjobSize(1 << 20)),
            ("split_count=3", Setting::SplitCount(3)),
            ("buffers=16M", Setting::Buffers(16 << 20)),
            ("offload=on", Setting::Offload(true)),
            ("offload=off", Setting::Offload(false)),
            ("throttle=50%", Setting::Percent(50)),
            ("throttle=100M/s", Setting::BytesPerSecond(100 << 20)),
            ("throttle=none", Setting::NoThrottle),
        ] {
            assert_eq!(parse_setting(text).expect(text), setting);
        }
        for bad in
            ["throttle", "throttle=0%", "throttle=101%", "throttle=5", "colour=red", "subjob_size=8G", "offload=1"]
        {
            assert!(parse_setting(bad).is_err(), "{bad}");
        }
    }
}
