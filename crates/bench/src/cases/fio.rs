//! fio as a client, of an NBD server or a file.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::limits::{LIMIT, Limited as _};

/// Results of a client, over all its connections.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// Bytes per second of wall-clock time.
    pub rate: f64,
    /// Seconds of CPU that the client used.
    pub cpu: f64,
    /// Requests.
    pub requests: u64,
}

/// Work of a client, as flags of fio besides the address.
pub struct Load<'a> {
    /// fio's name of the access pattern.
    pub mode: &'a str,
    /// Bytes per request.
    pub len: u64,
    /// Requests in flight on each connection.
    pub depth: u64,
    /// Connections; each uses its own part of `span`.
    pub connections: u64,
    /// Bytes of the export in use.
    pub span: u64,
    /// More flags.
    pub flags: &'a [String],
}

/// Where the work is done.
pub enum At<'a> {
    /// An export, by its URI.
    Nbd(&'a str),
    /// A file, bypassing the page cache.
    File(&'a Path),
}

/// Flags for a number of requests, at any places, some of them repeatedly.
pub fn counted(count: usize) -> [String; 3] {
    ["--norandommap".into(), "--io_size=1t".into(), format!("--number_ios={count}")]
}

/// Runs fio.
pub fn run(at: &At<'_>, load: &Load<'_>) -> Result<Done> {
    let part = load.span / load.connections;
    let mut command = Command::new("fio");
    command.args(["--name=c", "--thread", "--group_reporting", "--output-format=json"]);
    match at {
        At::Nbd(uri) => command.arg("--ioengine=nbd").arg(format!("--uri={uri}")),
        At::File(path) => command.args(["--ioengine=io_uring", "--direct=1"]).arg("--filename").arg(path),
    };
    command.arg(format!("--rw={}", load.mode));
    command.arg(format!("--bs={}", load.len)).arg(format!("--iodepth={}", load.depth));
    command.arg(format!("--numjobs={}", load.connections)).arg(format!("--size={part}"));
    command.arg(format!("--offset_increment={part}")).args(load.flags);
    let output = command.output_within(LIMIT).context("starting fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "fio failed: {}", String::from_utf8_lossy(&output.stderr));
    // Remarks precede the JSON.
    let json: Value = serde_json::from_str(text.get(text.find('{').unwrap_or(0)..).unwrap_or_default())?;
    let job = &json["jobs"][0];
    let figure = |name: &str| job[name].as_f64().with_context(|| format!("{name} in fio's output"));
    let both = |name: &str| ["read", "write"].iter().filter_map(|kind| job[kind][name].as_f64()).sum::<f64>();
    let cpu = (figure("usr_cpu")? + figure("sys_cpu")?) / 100.0 * figure("job_runtime")? / 1e3;
    Ok(Done { rate: both("bw_bytes"), cpu, requests: both("total_ios") as u64 })
}
