//! `stats`: shows the state and space of a pool.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use forkdisk::{Mode, PoolInfo, uuid_text};
use forkdisk_control::params;
use forkdisk_monitor::{OriginFigures, RequestsRecord, Statistics};
use rustix::fs::access;
use serde::Serialize;

use crate::global::Global;
use crate::output::{Column, TableArgs, percent_of, print_json};
use crate::session::{Access, Caller, with_pool};
use crate::verbs::examples::examples;

/// Show the state of a pool and its use of space
#[derive(Args)]
#[command(after_help = examples!["forkdisk stats /srv/pool.img"])]
pub struct StatsArgs {
    /// The pool
    pool: Option<PathBuf>,

    #[command(flatten)]
    table: TableArgs,
}

/// A pool as a JSON object; counters of a served pool are under `live`.
#[derive(Serialize)]
struct Record {
    #[serde(flatten)]
    pool: PoolInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    live: Option<Box<Statistics>>,
}

/// Shows the pool, and the counters of its server.
pub fn run(args: StatsArgs, global: &Global) -> Result<()> {
    let path = global.pool(args.pool.as_deref())?;
    let mut record = with_pool(global, &path, Access::Read, async |caller| {
        let pool = caller.call(params::Stats {}, None).await?;
        let live = match caller {
            Caller::Served(_) => Some(caller.call(params::Statistics {}, None).await?),
            Caller::Idle(_) => None,
        };
        Ok(Record { pool, live })
    })?;
    if record.pool.mode == Mode::ReadOnly && access(&path, rustix::fs::Access::WRITE_OK).is_ok() {
        // Only this open was read-only.
        record.pool.mode = Mode::ReadWrite;
    }
    if global.output.json() {
        return print_json(&record);
    }
    let mut rows = rows(&record.pool, &args.table);
    if let Some(live) = &record.live {
        rows.extend(live_rows(live, &args.table));
    }
    args.table.print(&[Column::Left("PROPERTY"), Column::Left("VALUE")], &rows)
}

/// Returns the rows of counters since the serving process opened the pool.
fn live_rows(s: &Statistics, table: &TableArgs) -> Vec<Vec<String>> {
    let (a, mut rows) = (&s.activity, Vec::new());
    let mut add = |name: &str, value: String| rows.push(vec![name.to_string(), value]);
    for (kind, o) in a.volumes.operations.all() {
        let plural = if matches!(kind, "flush" | "zero") { "es" } else { "s" };
        add(&format!("{kind}{plural}"), o.operations.to_string());
        if kind != "flush" {
            add(&format!("{kind}_bytes"), table.size(o.bytes));
        }
        add(&format!("{kind}_errors"), o.errors.to_string());
    }
    add("provisioned", table.size(a.volumes.provision.bytes));
    add("broken", table.size(a.volumes.breaks.bytes));
    let requests = [
        ("device_data_read", a.data_read),
        ("device_data_written", a.data_write),
        ("device_metadata_read", a.metadata_read),
        ("device_metadata_written", a.metadata_write),
        ("device_journal_written", a.journal_write),
        ("device_discarded", a.discard),
    ];
    for (name, r) in requests {
        add(name, format!("{} in {} requests", table.size(r.bytes), r.count));
    }
    add("device_flushes", a.flushes.to_string());
    if !s.origins.is_empty() {
        let all = |of: fn(&OriginFigures) -> &RequestsRecord| {
            let (count, bytes) = s.origins.iter().map(of).fold((0, 0), |(n, b), r| (n + r.count, b + r.bytes));
            format!("{} in {count} requests", table.size(bytes))
        };
        add("origins_device_read", all(|o| &o.read));
        add("origins_device_written", all(|o| &o.write));
        add("origins_device_flushes", s.origins.iter().map(|o| o.flushes).sum::<u64>().to_string());
    }
    add("commits", a.commit_group.count.to_string());
    add("checkpoints", a.checkpoints.to_string());
    add("cache_hits", a.cache_hits.to_string());
    add("cache_misses", a.cache_misses.to_string());
    let c = &a.shared_cache;
    add(
        "shared_cache",
        format!(
            "{} ({} hits, {} misses, {} joined, {} evicted)",
            table.size(c.bytes),
            c.hits,
            c.misses,
            c.joined,
            c.evictions
        ),
    );
    add("reaped_volumes", a.reaped.to_string());
    add("dropped_snapshots", a.dropped.to_string());
    add("retained", table.size(a.retained_bytes));
    add("gathered", table.size(a.gathered_bytes));
    let (c, seconds) = (&s.copier.all, |nanoseconds: u64| format!("{:.3} s", nanoseconds as f64 / 1e9));
    add(
        "copier_jobs",
        format!("{} ({} failed, {} queued, {} sub-jobs in flight)", c.jobs, c.failed, c.queued, c.in_flight),
    );
    add("copier_read", table.size(c.read));
    add("copier_written", table.size(c.written));
    add("copier_buffers", format!("{} of {}", table.size(s.copier.buffers_used), table.size(s.copier.buffers)));
    add("copier_buffer_waits", format!("{}, {} altogether", c.buffer_waits, seconds(c.buffer_wait)));
    add("copier_throttle_waits", c.throttle_waits.to_string());
    if let Some(server) = &s.server {
        add("connections", server.connections.to_string());
    }
    rows
}

fn rows(pool: &PoolInfo, table: &TableArgs) -> Vec<Vec<String>> {
    let rows = [
        ("uuid", uuid_text(&pool.uuid)),
        ("created", table.time(pool.created)),
        ("mode", pool.mode.to_string()),
        ("clean", if pool.clean { "yes" } else { "no" }.to_string()),
        ("size", table.size(pool.size)),
        ("used", table.size(pool.used)),
        ("free", table.size(pool.free)),
        ("freeing", table.size(pool.freeing)),
        ("low_water", table.size(pool.low_water)),
        ("low", if pool.low { "yes" } else { "no" }.to_string()),
        ("metadata", table.size(pool.metadata)),
        ("volumes", pool.volumes.to_string()),
        ("origins", pool.origins.to_string()),
        ("snapshots", pool.snapshots.to_string()),
        ("kept", table.size(pool.kept)),
        ("referenced", table.size(pool.referenced)),
        ("fragmentation", percent_of(pool.scattered, pool.referenced)),
        ("dirty", table.size(pool.dirty)),
        ("journal_size", table.size(pool.journal_size)),
        ("journal_used", table.size(pool.journal_used)),
        ("generation", pool.generation.to_string()),
    ];
    rows.into_iter().map(|(name, value)| vec![name.to_string(), value]).collect()
}
