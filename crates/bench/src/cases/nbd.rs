//! CPU time per request over NBD, server and client together, beside qemu-nbd on a plain file. Both
//! serve files in memory to the same client, fio, in turns.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use forkdisk_uring::{Config, block_on};
use serde_json::Value;

use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::file;

/// How long a server may take to come up.
const PATIENCE: Duration = Duration::from_secs(20);
/// Clock ticks per second in `/proc/PID/stat`; the same on all Linux that io_uring runs on.
const TICKS: f64 = 100.0;
/// The peer, and how its rows are marked.
const PEER: &str = "qemu-nbd";

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let (span, times) = (context.scale.pick(128 << 20, 256 << 20, 1 << 30), context.scale.pick(3, 7, 15));
    let count = context.scale.pick(60_000, 120_000, 240_000);
    let (pool, plain) = (context.ram("pool"), context.ram("plain"));
    file::plain(&plain, span)?;
    block_on(Config::default(), |rt| {
        let pool = pool.clone();
        async move {
            let (pool, volume) = file::filled(&rt, &pool, span).await?;
            drop(volume);
            anyhow::Ok(pool.close().await?)
        }
    })??;
    let ours = serve(&context.options.program, &pool, &context.ram("ours.sock"))?;
    let peer = serve_peer(&plain, &context.ram("peer.sock"))?;
    let mut rows = Vec::new();
    for (case, mode) in [("nbd/read-4k-random", "randread"), ("nbd/write-4k-random", "randwrite")] {
        let (mut mine, mut theirs, mut ratio) = (Samples::default(), Samples::default(), Samples::default());
        for round in 0..=times {
            let (a, b) = (ours.cost(mode, span, count)?, peer.cost(mode, span, count)?);
            if round > 0 {
                mine.push(a);
                theirs.push(b);
                ratio.push(a / b);
            }
        }
        rows.push(Row::engine(case, "cpu_ratio", "ratio", &ratio));
        rows.push(Row::engine(case, "cpu_per_op", "us", &mine));
        rows.push(Row::new("engine", case, PEER, "cpu_per_op", "us", &theirs));
    }
    ours.stop()?;
    Ok(rows)
}

/// A server, stopped when it is dropped.
struct Server {
    child: Child,
    uri: String,
}

fn serve(program: &Path, pool: &Path, socket: &Path) -> Result<Server> {
    let mut command = Command::new(program);
    command.arg("serve").arg(pool).arg("--socket").arg(socket).args(["--log", "error"]);
    Server::start(command, socket, file::VOLUME)
}

fn serve_peer(plain: &Path, socket: &Path) -> Result<Server> {
    let mut command = Command::new(PEER);
    command.args(["-f", "raw", "-t", "-e", "8", "-x", file::VOLUME, "--cache=none", "--aio=io_uring", "-k"]);
    command.arg(socket).arg(plain);
    Server::start(command, socket, file::VOLUME)
}

impl Server {
    fn start(mut command: Command, socket: &Path, export: &str) -> Result<Server> {
        let name = command.get_program().to_string_lossy().into_owned();
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = quiet.spawn().with_context(|| format!("starting {name}"))?;
        let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
        let mut server = Server { child, uri };
        let start = Instant::now();
        while !socket.exists() {
            ensure!(start.elapsed() < PATIENCE, "{name} does not come up");
            if let Some(status) = server.child.try_wait()? {
                bail!("{name} ended with {status}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    /// Microseconds of CPU per request, this server's and its client's.
    fn cost(&self, mode: &str, span: u64, count: usize) -> Result<f64> {
        let before = cpu_of(self.child.id())?;
        let client = fio(&self.uri, mode, span, count)?;
        Ok((client + cpu_of(self.child.id())? - before) * 1e6 / count as f64)
    }

    /// Lets it end as it does when somebody terminates it.
    fn stop(mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended already cannot be killed, and that is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Seconds of CPU that a process has used, threads that have ended included.
fn cpu_of(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name before it, in brackets, may hold anything.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).context("an odd /proc/PID/stat");
    Ok((ticks(11)? + ticks(12)?) / TICKS)
}

/// Seconds of CPU of a client that makes `count` requests of 4 KiB, 32 in flight.
fn fio(uri: &str, mode: &str, span: u64, count: usize) -> Result<f64> {
    let mut command = Command::new("fio");
    command.args(["--name=c", "--ioengine=nbd", "--bs=4k", "--iodepth=32", "--thread", "--output-format=json"]);
    command.arg(format!("--uri={uri}")).arg(format!("--rw={mode}")).arg(format!("--size={span}"));
    command.args(["--norandommap", "--io_size=1t"]).arg(format!("--number_ios={count}"));
    let output = command.stdin(Stdio::null()).output().context("starting fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "fio failed: {}", String::from_utf8_lossy(&output.stderr));
    // Remarks come before the JSON.
    let json: Value = serde_json::from_str(text.get(text.find('{').unwrap_or(0)..).unwrap_or_default())?;
    let job = &json["jobs"][0];
    let figure = |name: &str| job[name].as_f64().with_context(|| format!("{name} in what fio says"));
    let done = job["read"]["total_ios"].as_u64().unwrap_or(0) + job["write"]["total_ios"].as_u64().unwrap_or(0);
    ensure!(done == count as u64, "fio made {done} requests instead of {count}");
    Ok((figure("usr_cpu")? + figure("sys_cpu")?) / 100.0 * figure("job_runtime")? / 1e3)
}
