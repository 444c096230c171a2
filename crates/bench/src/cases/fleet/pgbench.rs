//! PostgreSQL on branches of one data folder: transactions per second of all of them together.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Pid;

use crate::cases::pools::PoolAt;
use crate::ending::{Thing, Undoable};
use crate::limits::{LIMIT, LimitedWait as _, output_of};
use crate::mounted::Mounted;
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::bed::{Served, file_system, pool};
use super::{OURS, row};

/// The user of the servers, which refuse to run as root.
const NOBODY: &str = "65534";
const DATA: &str = "data";
const BRANCHES: [usize; 2] = [1, 20];
const VERSIONS: &str = "/usr/lib/postgresql";

struct Plan {
    bin: PathBuf,
    /// pgbench's size of the database: 15 MB each.
    scale: u32,
    /// Duration of the load.
    seconds: u32,
    rounds: usize,
}

/// A folder of data folders.
trait Target {
    fn dir(&self) -> &Path;

    /// Makes branches of the data folder.
    fn branch(&mut self, names: &[String]) -> Result<()>;
}

type Make = fn(&Context<'_>) -> Result<Box<dyn Target>>;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let versions = fs::read_dir(VERSIONS).into_iter().flatten().flatten();
    let bin = versions.map(|version| version.path().join("bin")).filter(|bin| bin.join("initdb").exists()).max();
    let Some(bin) = bin else {
        context.say("  PostgreSQL is not installed (on Debian: apt-get install postgresql): left out");
        return Ok(Vec::new());
    };
    let (scale, seconds) = (context.scale.pick(1, 5, 20), context.scale.pick(2, 10, 30));
    let plan = Plan { bin, scale, seconds, rounds: context.scale.pick(1, 2, 5) };
    let all: [(&str, Make); 2] = [(OURS, ours), ("xfs", xfs)];
    let mut targets = Vec::new();
    for (name, make) in all.into_iter().filter(|(name, _)| context.options.peers || *name == OURS) {
        match make(context).and_then(|target| prepare(context, target.as_ref(), &plan).map(|()| target)) {
            Ok(target) => targets.push((name, target)),
            Err(error) => context.say(&format!("  {name} cannot be measured here: {error:#}")),
        }
    }
    let mut rows = Vec::new();
    for branches in BRANCHES {
        let mut all = vec![(Vec::new(), Vec::new()); targets.len()];
        for round in 0..plan.rounds {
            for ((name, target), (rates, times)) in targets.iter_mut().zip(&mut all) {
                context.say(&format!("  {branches} branches of {name}, round {} of {}", round + 1, plan.rounds));
                let names: Vec<String> = (0..branches).map(|i| format!("branch{branches}-{round}-{i}")).collect();
                let start = Instant::now();
                target.branch(&names)?;
                times.push(start.elapsed().as_secs_f64());
                rates.push(transactions(context, target.dir(), &names, &plan)?);
            }
        }
        let case = format!("pgbench/{branches}-branches");
        for ((name, _), (rates, times)) in targets.iter().zip(&all) {
            rows.push(row(&case, name, "transactions", "1/s", &rates.iter().copied().collect()));
            rows.push(row(&case, name, "seconds_to_branch", "s", &times.iter().copied().collect::<Samples>()));
        }
        if let [(ours, _), (theirs, _)] = &all[..] {
            rows.push(row(&case, OURS, "transactions_ratio_to_xfs", "ratio", &super::ratios(ours, theirs)));
        }
    }
    Ok(rows)
}

/// Creates the database and writes it back, so that a branch does not begin with its recovery.
fn prepare(context: &Context<'_>, target: &dyn Target, plan: &Plan) -> Result<()> {
    let data = target.dir().join(DATA);
    fs::create_dir(&data)?;
    output_of(Command::new("chown").arg(NOBODY).arg(&data))?;
    output_of(as_nobody(plan, "initdb").args(["-U", "postgres", "-A", "trust", "-D"]).arg(&data))?;
    let server = Server::start(context, &data, plan)?;
    output_of(server.client("pgbench").args(["-q", "-i", "-s"]).arg(plan.scale.to_string()).arg("postgres"))?;
    server.stop()
}

/// Runs a server and a client on each branch; returns the sum of their transactions per second.
fn transactions(context: &Context<'_>, dir: &Path, names: &[String], plan: &Plan) -> Result<f64> {
    let start = |name: &String| Server::start(context, &dir.join(name), plan);
    let servers = names.iter().map(start).collect::<Result<Vec<_>>>()?;
    let load = |server: &Server| {
        let mut client = server.client("pgbench");
        client.args(["-n", "-c", "1", "-T"]).arg(plan.seconds.to_string()).arg("postgres");
        client.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("starting pgbench")
    };
    let clients = servers.iter().map(load).collect::<Result<Vec<_>>>()?;
    let mut sum = 0.0;
    for client in clients {
        let output = client.output_within(LIMIT)?;
        ensure!(output.status.success(), "pgbench: {}", String::from_utf8_lossy(&output.stderr));
        sum += rate(&String::from_utf8_lossy(&output.stdout))?;
    }
    servers.into_iter().try_for_each(Server::stop)?;
    Ok(sum)
}

/// Parses the rate that pgbench prints.
fn rate(printed: &str) -> Result<f64> {
    let line = printed.lines().find_map(|line| line.strip_prefix("tps = ")).context("the rate in pgbench's output")?;
    Ok(line.split_whitespace().next().unwrap_or_default().parse()?)
}

fn as_nobody(plan: &Plan, program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--"]).arg(plan.bin.join(program));
    command.current_dir("/").env("LC_ALL", "C");
    command
}

/// A server on a data folder. Stopped when dropped.
struct Server<'a> {
    plan: &'a Plan,
    data: PathBuf,
    sockets: PathBuf,
    is_running: bool,
    _undoable: Option<Undoable>,
}

impl<'a> Server<'a> {
    fn start(context: &Context<'_>, data: &Path, plan: &'a Plan) -> Result<Server<'a>> {
        let name = data.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let sockets = context.ram(&format!("pg-{name}"));
        if !sockets.exists() {
            open_to_all(sockets.parent().context("a folder in memory")?, 0o755)?;
            fs::create_dir(&sockets)?;
            open_to_all(&sockets, 0o777)?;
        }
        let options =
            format!("-c listen_addresses='' -c shared_buffers=16MB -c max_connections=10 -k {}", sockets.display());
        let mut start = as_nobody(plan, "pg_ctl");
        start.arg("-D").arg(data).args(["-w", "-o", &options, "-l"]).arg(sockets.join("log")).arg("start");
        let mut server = Server { plan, data: data.to_path_buf(), sockets, is_running: true, _undoable: None };
        output_of(&mut start)?;
        let file = fs::read_to_string(data.join("postmaster.pid"))?;
        let number = file.lines().next().and_then(|line| line.trim().parse().ok());
        server._undoable = number.and_then(Pid::from_raw).map(|pid| Undoable::new(Thing::Process(pid)));
        Ok(server)
    }

    fn client(&self, program: &str) -> Command {
        let mut command = as_nobody(self.plan, program);
        command.arg("-h").arg(&self.sockets).args(["-U", "postgres"]);
        command
    }

    fn end(&mut self, how: &str) -> Result<()> {
        self.is_running = false;
        output_of(as_nobody(self.plan, "pg_ctl").arg("-D").arg(&self.data).args(["-w", "-m", how, "stop"])).map(drop)
    }

    fn stop(mut self) -> Result<()> {
        self.end("fast")
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        if self.is_running {
            // Fails if it did not start.
            let _ = self.end("immediate");
        }
    }
}

fn open_to_all(dir: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(dir, Permissions::from_mode(mode))?)
}

/// A folder on a mount of a served pool, forked as a whole.
struct Ours {
    dir: PathBuf,
    served: Served,
    _undoable: Undoable,
    _pool: PoolAt,
}

fn ours(context: &Context<'_>) -> Result<Box<dyn Target>> {
    let pool = pool(context, "pgbench", context.scale.pick(3 << 30, 6 << 30, 12 << 30), (&[], 0))?;
    let dir = context.disk("pgbench.mnt");
    open_to_all(dir.parent().context("a folder on the disk")?, 0o755)?;
    fs::create_dir(&dir)?;
    let served = Served::start(context, &pool, "pgbench", &[])?;
    let undoable = Undoable::new(Thing::Mount(dir.clone()));
    let mut mount = Command::new(&context.options.program);
    mount.arg("--control").arg(&served.daemon.control).arg("mount").arg(pool.path()).arg(&dir);
    output_of(mount.args(["-o", "allow_other"]))?;
    Ok(Box::new(Ours { dir, served, _undoable: undoable, _pool: pool }))
}

impl Target for Ours {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn branch(&mut self, names: &[String]) -> Result<()> {
        self.served.fork(DATA, names)
    }
}

/// A folder on XFS, copied by `cp` with reflinks.
struct Xfs(Mounted);

fn xfs(context: &Context<'_>) -> Result<Box<dyn Target>> {
    let files = file_system(context, "xfs", "pgbench-xfs", context.scale.pick(3 << 30, 6 << 30, 12 << 30))?;
    open_to_all(files.dir().parent().context("a folder on the disk")?, 0o755)?;
    Ok(Box::new(Xfs(files)))
}

impl Target for Xfs {
    fn dir(&self) -> &Path {
        self.0.dir()
    }

    fn branch(&mut self, names: &[String]) -> Result<()> {
        let dir = self.dir();
        for name in names {
            output_of(Command::new("cp").args(["-a", "--reflink=always"]).arg(dir.join(DATA)).arg(dir.join(name)))?;
        }
        Ok(rustix::fs::syncfs(fs::File::open(dir)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_what_pgbench_prints() {
        let printed = "number of failed transactions: 0 (0.000%)\nlatency average = 0.5 ms\ntps = 1834.25 (without \
            initial connection time)\n";
        assert_eq!(rate(printed).unwrap(), 1834.25);
        assert!(rate("nothing").is_err());
    }
}
