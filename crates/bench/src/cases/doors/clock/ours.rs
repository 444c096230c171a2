//! forkdisk's doors to a pool on a disk. Each has a pool of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::cases::fio::{self, At};
use crate::cases::server::Server;
use crate::limits::output_of;
use crate::runner::Context;

use super::{ALONE, BASE, CLONE, Named, Target, Work};
use crate::cases::guest::{Client, Requests};
use crate::cases::pools::{Daemon, MountedPool, Place, PoolAt};

pub const NBD: &str = "nbd";
const MOUNT: &str = "mount";
const VHOST_USER: &str = "vhost-user";
/// How long a volume may be in use, or its space be freed, after its last client has gone.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(10);
/// How long a mount has to free the space of a removed file.
const REST: Duration = Duration::from_millis(300);
/// Queues of a guest: one for each client.
const QUEUES: u16 = 4;

/// Makes the pools at a place and opens a door to each. What cannot be opened is told and left out.
pub fn open(context: &Context<'_>, place: Place, span: u64) -> Vec<Named> {
    let mut all = Vec::new();
    for door in [NBD, MOUNT, VHOST_USER] {
        let name = format!("{door}-{}", place.name());
        match target(context, place, span, door, &name) {
            Ok(target) => {
                let (alone, shared) = (format!("{name}, in place"), format!("{name}, clone"));
                all.push(Named { alone, shared, ours: Some(name), target });
            }
            Err(error) => context.say(&format!("    {name} cannot be measured here: {error:#}")),
        }
    }
    all
}

fn target(context: &Context<'_>, place: Place, span: u64, door: &str, name: &str) -> Result<Box<dyn Target>> {
    // Room for two volumes and a clone that shares nothing any more, and for a deleted one before its space is free.
    let size = 4 * span + (256 << 20);
    let pool = PoolAt::new(&context.disk(&format!("{name}.pool")), place, size, (&[BASE, ALONE], span))?;
    let program = context.options.program.clone();
    let verbs = |control: PathBuf| Verbs { program, control, pool: pool.path().to_path_buf() };
    Ok(match door {
        NBD => {
            let socket = context.ram(&format!("{name}.sock"));
            let server = Server::forkdisk(context, pool.path(), &socket, &[])?;
            let verbs = verbs(socket.with_extension("control"));
            Box::new(OverNbd { server, verbs, _pool: pool })
        }
        MOUNT => {
            let mounted = MountedPool::new(context, pool.path(), (name, "no"), ALONE)?;
            Box::new(OverMount { mounted, _pool: pool })
        }
        _ => {
            let (daemon, dir) = Daemon::vhost_user(context, pool.path(), name, ALONE)?;
            let verbs = verbs(daemon.control.clone());
            Box::new(OverVhostUser { _daemon: daemon, dir, verbs, _pool: pool })
        }
    })
}

/// Verbs for a daemon.
struct Verbs {
    program: PathBuf,
    control: PathBuf,
    pool: PathBuf,
}

impl Verbs {
    fn run(&self, verb: &str, arguments: &[&Path]) -> Result<String> {
        let mut command = Command::new(&self.program);
        output_of(command.arg("--control").arg(&self.control).arg(verb).args(arguments))
    }

    /// Replaces the clone by a new one, and waits until the space of the last one is free.
    fn renew(&self) -> Result<()> {
        let clone = self.pool.join(CLONE);
        let start = Instant::now();
        while self.has_clone()? {
            // Its last client may still be connected.
            if let Err(error) = self.run("delete", &[&clone]) {
                ensure!(start.elapsed() < PATIENCE, "{error:#}");
                std::thread::sleep(PAUSE);
            }
        }
        while self.stats()?["freeing"].as_u64() != Some(0) {
            ensure!(start.elapsed() < PATIENCE, "the space of a clone is not freed");
            std::thread::sleep(PAUSE);
        }
        self.run("clone", &[&self.pool.join(BASE), &clone]).map(drop)
    }

    fn stats(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.run("stats", &[&self.pool, Path::new("--json")])?)?)
    }

    fn has_clone(&self) -> Result<bool> {
        let stats = self.stats()?;
        let volumes = stats["live"]["volumes"].as_array().context("volumes in the figures of the daemon")?;
        Ok(volumes.iter().any(|volume| volume["name"] == CLONE))
    }
}

struct OverNbd {
    server: Server,
    verbs: Verbs,
    _pool: PoolAt,
}

impl Target for OverNbd {
    fn measure(&mut self, work: &Work, shared: bool) -> Result<f64> {
        if shared {
            self.verbs.renew()?;
        }
        let export = if shared { CLONE } else { ALONE };
        work.fio(|load| self.server.load_export(export, load))
    }
}

struct OverMount {
    mounted: MountedPool,
    _pool: PoolAt,
}

impl Target for OverMount {
    fn measure(&mut self, work: &Work, shared: bool) -> Result<f64> {
        let file = self.mounted.file(if shared { CLONE } else { ALONE });
        if shared {
            if file.exists() {
                fs::remove_file(&file)?;
                std::thread::sleep(REST);
            }
            output_of(Command::new("cp").arg(self.mounted.file(BASE)).arg(&file))?;
        }
        fs::File::open(&file)?.sync_all()?;
        work.fio(|load| fio::run(&At::File(&file), load))
    }
}

struct OverVhostUser {
    _daemon: Daemon,
    dir: PathBuf,
    verbs: Verbs,
    _pool: PoolAt,
}

impl Target for OverVhostUser {
    fn measure(&mut self, work: &Work, shared: bool) -> Result<f64> {
        if shared {
            self.verbs.renew()?;
        }
        let socket = self.dir.join(format!("{}.sock", if shared { CLONE } else { ALONE }));
        let mut client = connected(&socket)?;
        let offsets = work.offsets();
        let requests = |offsets| Requests { write: work.write, len: work.len as usize, offsets, flush: work.flush };
        let jobs: Vec<Requests<'_>> = offsets.iter().map(|offsets| requests(&offsets[..])).collect();
        let took = client.run(work.depth as usize, &jobs)?;
        Ok((work.jobs * work.count as u64) as f64 / took.as_secs_f64())
    }
}

/// Connects as soon as the socket is there and the last session has ended.
fn connected(socket: &Path) -> Result<Client> {
    let start = Instant::now();
    loop {
        match Client::connect(socket, QUEUES) {
            Ok(client) => return Ok(client),
            Err(error) if start.elapsed() > PATIENCE => bail!("{}: {error:#}", socket.display()),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
