//! NBD servers, forkdisk's and others', each in its own process, with fio as the client of all of them.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use forkdisk::CreateOptions;
use forkdisk_uring::{Config, block_on};
use serde_json::Value;

use crate::limits::{LIMIT, Limited as _, LimitedWait as _};
use crate::runner::Context;

use super::file;

/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(20);
/// Clock ticks per second in `/proc/PID/stat`; the same on all Linux systems that support io_uring.
const TICKS: f64 = 100.0;
/// Peers: programs and labels of their rows.
pub const QEMU_NBD: &str = "qemu-nbd";
const NBDKIT: &str = "nbdkit";

/// Creates a pool at `path` with one volume of `span` bytes, completely written, and `others` empty
/// volumes, `idle0`, `idle1`, …
pub fn served_pool(path: &Path, span: u64, others: usize) -> Result<()> {
    block_on(Config::default(), |rt| {
        let path = path.to_owned();
        async move {
            let (pool, volume) = file::filled(&rt, &path, span).await?;
            drop(volume);
            for i in 0..others {
                pool.create(&format!("idle{i}"), &CreateOptions::new(1 << 30, 0)).await?;
            }
            anyhow::Ok(pool.close().await?)
        }
    })?
}

/// A running server, stopped when dropped.
pub struct Server {
    child: Child,
    uri: String,
}

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

/// Work of a client, as flags of fio besides the server's address.
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

impl Server {
    /// Starts `forkdisk serve` on a pool of [`served_pool`].
    pub fn forkdisk(context: &Context<'_>, pool: &Path, socket: &Path, flags: &[&str]) -> Result<Server> {
        let mut command = Command::new(&context.options.program);
        command.arg("serve").arg(pool).arg("--socket").arg(socket).args(["--log", "error"]).args(flags);
        // Explicit, since the default path depends on the pool's identity, which all benchmark pools share.
        command.arg("--control").arg(socket.with_extension("control"));
        Server::start(command, socket, file::VOLUME)
    }

    /// Starts `qemu-nbd` on a plain file, bypassing the page cache.
    pub fn qemu_nbd(plain: &Path, socket: &Path) -> Result<Server> {
        let mut command = Command::new(QEMU_NBD);
        command.args(["-f", "raw", "-t", "-e", "32", "-x", file::VOLUME, "--cache=none", "--aio=io_uring", "-k"]);
        command.arg(socket).arg(plain);
        Server::start(command, socket, file::VOLUME)
    }

    /// Starts `qemu-nbd` on its null driver: reads are undefined, writes are lost.
    pub fn qemu_nbd_null(span: u64, socket: &Path) -> Result<Server> {
        let mut command = Command::new(QEMU_NBD);
        command.args(["-t", "-e", "32", "-x", file::VOLUME, "-k"]).arg(socket);
        command.arg(format!(r#"json:{{"driver":"null-co","size":{span},"read-zeroes":false}}"#));
        Server::start(command, socket, file::VOLUME)
    }

    /// Starts `nbdkit` with a plugin and its arguments.
    pub fn nbdkit(arguments: &[&OsStr], socket: &Path) -> Result<Server> {
        let mut command = Command::new(NBDKIT);
        command.args(["-f", "-U"]).arg(socket).args(arguments);
        Server::start(command, socket, "")
    }

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

    /// Returns the microseconds of CPU per request, of server and client: 4 KiB each, 32 in flight.
    pub fn cost(&self, mode: &str, span: u64, count: usize) -> Result<f64> {
        let flags = ["--norandommap".into(), "--io_size=1t".into(), format!("--number_ios={count}")];
        let before = cpu_of(self.child.id())?;
        let done = self.load(&Load { mode, len: 4096, depth: 32, connections: 1, span, flags: &flags })?;
        ensure!(done.requests == count as u64, "fio made {} requests instead of {count}", done.requests);
        Ok((done.cpu + cpu_of(self.child.id())? - before) * 1e6 / count as f64)
    }

    /// Runs fio on the export.
    pub fn load(&self, load: &Load<'_>) -> Result<Done> {
        let part = load.span / load.connections;
        let mut command = Command::new("fio");
        command.args(["--name=c", "--ioengine=nbd", "--thread", "--group_reporting", "--output-format=json"]);
        command.arg(format!("--uri={}", self.uri)).arg(format!("--rw={}", load.mode));
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

    /// Ends the server by SIGTERM.
    pub fn stop(mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = self.child.wait_within(LIMIT)?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.child.put_down();
    }
}

/// Returns the seconds of CPU that a process has used, including ended threads.
fn cpu_of(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name before it, in brackets, may contain any characters.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).context("parsing /proc/PID/stat");
    Ok((ticks(11)? + ticks(12)?) / TICKS)
}
