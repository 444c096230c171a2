//! What the CPU time of requests is measured on: doors of forkdisk and of others, each with a client, on files in
//! memory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context as _, Result};
use forkdisk::{OpenOptions, Pool};
use forkdisk_uring::{Config, DeviceOptions, UringDevice, block_on};
use rustix::fs::{Advice, fadvise};

use crate::bare::Bare;
use crate::cases::file::{self, VOLUME};
use crate::cases::fio::{self, Load};
use crate::cases::server::Server;
use crate::clock::{KernelThreads, Stopwatch};
use crate::ending::{Thing, Undoable};
use crate::load::{self, Job};
use crate::mounted::LoopDevice;
use crate::process::Process;
use crate::runner::Context;

use crate::cases::guest::{Client, Requests};
use crate::cases::pools::{Daemon, MountedPool, Place, PoolAt};

pub const QEMU: &str = "qemu-storage-daemon";
pub const NBDKIT: &str = "nbdkit";
pub const BARE: &str = "bare-io_uring";
pub const OURS: &str = "forkdisk";

/// Microseconds per request.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// CPU of the server alone; without a server, of everything.
    pub server: f64,
    /// CPU of server and client, and of the kernel's threads if the door has any.
    pub all: f64,
    /// Wall-clock time.
    pub wall: f64,
}

/// Work on a door.
pub struct Work {
    pub name: &'static str,
    pub job: Job,
    pub span: u64,
}

/// A server with its client, or something without a server.
pub trait Subject {
    fn run(&mut self, work: &Work) -> Result<Cost>;

    /// Returns the number of the server's process, if there is one.
    fn server(&self) -> Option<u32>;
}

/// A door of a program.
pub struct Door {
    pub name: &'static str,
    pub target: &'static str,
    pub subject: Box<dyn Subject>,
}

type Make = fn(&Context<'_>, u64) -> Result<Box<dyn Subject>>;

/// FUSE over io_uring, beside `fuse`, which is over /dev/fuse.
pub const FUSE_URING: &str = "fuse-uring";

/// All doors: name, program, and how it is made for `span` bytes of data.
const DOORS: [(&str, &str, Make); 11] = [
    ("library", BARE, |context, span| Ok(Box::new(Bottom::new(context, span)?))),
    ("library", OURS, |context, span| Ok(Box::new(Library(pool(context, span, "library")?)))),
    ("vhost-user", OURS, our_vhost_user),
    ("vhost-user", QEMU, their_vhost_user),
    ("nbd", OURS, our_nbd),
    ("nbd", QEMU, their_nbd),
    ("nbd", NBDKIT, nbdkit),
    ("fuse", OURS, our_fuse),
    (FUSE_URING, OURS, our_fuse_uring),
    ("fuse", QEMU, their_fuse),
    ("loop", OURS, our_loop),
];

/// Opens all doors; those of peers only if they are wanted. What cannot be opened is told and left out.
pub fn open(context: &Context<'_>, span: u64) -> Vec<Door> {
    let is_wanted = |target: &str| context.options.peers || target == OURS || target == BARE;
    let mut doors = Vec::new();
    for (name, target, make) in DOORS.into_iter().filter(|(_, target, _)| is_wanted(target)) {
        match make(context, span) {
            Ok(subject) => doors.push(Door { name, target, subject }),
            Err(error) => context.say(&format!("  {name} of {target} cannot be measured here: {error:#}")),
        }
    }
    doors
}

fn pool(context: &Context<'_>, span: u64, name: &str) -> Result<PoolAt> {
    let size = span + span / 4 + (256 << 20);
    PoolAt::new(&context.ram(&format!("{name}.pool")), Place::Sparse, size, (&[VOLUME], span))
}

fn plain(context: &Context<'_>, span: u64, name: &str) -> Result<PathBuf> {
    let path = context.ram(name);
    file::plain(&path, span)?;
    Ok(path)
}

/// Returns the cost per request of `seconds` of CPU of the server, the client and others, and of wall-clock time.
fn cost(work: &Work, [server, client, others, wall]: [f64; 4]) -> Cost {
    let each = |seconds: f64| seconds * 1e6 / work.job.offsets.len() as f64;
    Cost { server: each(server), all: each(server + client + others), wall: each(wall) }
}

/// A bare loop over io_uring, tuned for the least CPU.
struct Bottom {
    path: PathBuf,
    rings: Vec<(&'static str, Bare)>,
}

impl Bottom {
    fn new(context: &Context<'_>, span: u64) -> Result<Bottom> {
        Ok(Bottom { path: plain(context, span, "bare")?, rings: Vec::new() })
    }
}

impl Subject for Bottom {
    fn run(&mut self, work: &Work) -> Result<Cost> {
        if !self.rings.iter().any(|(name, _)| *name == work.name) {
            let mut ring = Bare::open(&self.path, work.job.depth, work.job.len)?;
            if work.job.depth > 1 {
                ring.tune(&work.job, |took| took.cpu)?;
            }
            self.rings.push((work.name, ring));
        }
        let ring = self.rings.iter_mut().find(|(name, _)| *name == work.name);
        let (_, ring) = ring.context("it was opened")?;
        let watch = Stopwatch::start();
        ring.run(&work.job)?;
        let took = watch.stop();
        Ok(cost(work, [took.cpu, 0.0, 0.0, took.wall]))
    }

    fn server(&self) -> Option<u32> {
        None
    }
}

/// The engine in this process.
struct Library(PoolAt);

impl Subject for Library {
    fn run(&mut self, work: &Work) -> Result<Cost> {
        let (path, job) = (self.0.path().to_path_buf(), work.job.clone());
        let took = block_on(Config::default(), |rt| async move {
            let device = UringDevice::open(&rt, &path, &DeviceOptions::default())?;
            let pool = Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await?;
            let volume = pool.volume(VOLUME)?;
            // Its metadata is in memory from here on, as that of a daemon.
            let offsets = load::sequential(work.span, 1 << 20);
            load::run(&rt, &pool, &volume, &Job { write: false, len: 1 << 20, depth: 8, offsets }).await?;
            let watch = Stopwatch::start();
            load::run(&rt, &pool, &volume, &job).await?;
            let took = watch.stop();
            drop(volume);
            pool.close().await?;
            anyhow::Ok(took)
        })??;
        Ok(cost(work, [took.cpu, 0.0, 0.0, took.wall]))
    }

    fn server(&self) -> Option<u32> {
        None
    }
}

/// A vhost-user socket.
struct VhostUser {
    client: Client,
    process: Process,
    _pool: Option<PoolAt>,
}

impl Subject for VhostUser {
    fn run(&mut self, work: &Work) -> Result<Cost> {
        let Job { write, len, depth, offsets } = &work.job;
        let requests = Requests { write: *write, len: *len, offsets, flush: false };
        let (server, watch) = (self.process.cpu()?, Stopwatch::start());
        let wall = self.client.run(*depth, &[requests])?;
        let (took, server) = (watch.stop(), self.process.cpu()? - server);
        Ok(cost(work, [server, took.cpu, 0.0, wall.as_secs_f64()]))
    }

    fn server(&self) -> Option<u32> {
        Some(self.process.id())
    }
}

fn our_vhost_user(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    let pool = pool(context, span, "vhost-user")?;
    let (daemon, dir) = Daemon::vhost_user(context, pool.path(), "vhost-user", VOLUME)?;
    let client = Client::connect(&dir.join(format!("{VOLUME}.sock")), 1)?;
    Ok(Box::new(VhostUser { client, process: daemon.process, _pool: Some(pool) }))
}

fn their_vhost_user(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    let (plain, socket) = (plain(context, span, "qemu-vhost-user")?, context.ram("qemu-vhost-user.sock"));
    let export = format!("vhost-user-blk,id=e,node-name=f,writable=on,addr.type=unix,addr.path={}", socket.display());
    let process = Process::start(storage_daemon(&plain, &["--export", &export]), || Ok(socket.exists()))?;
    Ok(Box::new(VhostUser { client: Client::connect(&socket, 1)?, process, _pool: None }))
}

/// Returns the command of a `qemu-storage-daemon` on a plain file, bypassing the page cache.
fn storage_daemon(plain: &Path, arguments: &[&str]) -> Command {
    let node = serde_json::json!({
        "driver": "file", "node-name": "f", "filename": plain, "cache": {"direct": true}, "aio": "io_uring",
    });
    let mut command = Command::new(QEMU);
    command.arg("--blockdev").arg(node.to_string()).args(arguments);
    command
}

/// An NBD server, with fio as its client.
struct Nbd {
    server: Server,
    _pool: Option<PoolAt>,
}

impl Subject for Nbd {
    fn run(&mut self, work: &Work) -> Result<Cost> {
        let Job { write, len, depth, offsets } = &work.job;
        let mode = match (*write, *len <= 4096) {
            (false, true) => "randread",
            (true, true) => "randwrite",
            (false, false) => "read",
            (true, false) => "write",
        };
        let flags = fio::counted(offsets.len());
        let load =
            Load { mode, len: *len as u64, depth: *depth as u64, connections: 1, span: work.span, flags: &flags };
        let before = self.server.process().cpu()?;
        let done = self.server.load(&load)?;
        let server = self.server.process().cpu()? - before;
        Ok(cost(work, [server, done.cpu, 0.0, work.job.bytes() as f64 / done.rate]))
    }

    fn server(&self) -> Option<u32> {
        Some(self.server.process().id())
    }
}

fn our_nbd(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    let pool = pool(context, span, "nbd")?;
    let server = Server::forkdisk(context, pool.path(), &context.ram("nbd.sock"), &[])?;
    Ok(Box::new(Nbd { server, _pool: Some(pool) }))
}

fn their_nbd(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    let (plain, socket) = (plain(context, span, "qemu-nbd")?, context.ram("qemu-nbd.sock"));
    let address = format!("addr.type=unix,addr.path={}", socket.display());
    let export = format!("nbd,id=e,node-name=f,writable=on,name={VOLUME}");
    let command = storage_daemon(&plain, &["--nbd-server", &address, "--export", &export]);
    Ok(Box::new(Nbd { server: Server::start(command, &socket, VOLUME)?, _pool: None }))
}

fn nbdkit(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    let plain = plain(context, span, "nbdkit")?;
    let server = Server::nbdkit(&["file".as_ref(), plain.as_os_str()], &context.ram("nbdkit.sock"))?;
    Ok(Box::new(Nbd { server, _pool: None }))
}

/// A file or block device that a process serves, with a bare loop as its client. The device, if there is one, is
/// detached before the process ends.
struct Served {
    path: PathBuf,
    device: Option<LoopDevice>,
    process: Process,
    _undoable: Option<Undoable>,
    _pool: Option<PoolAt>,
}

impl Subject for Served {
    fn run(&mut self, work: &Work) -> Result<Cost> {
        let path = self.device.as_ref().map_or(self.path.as_path(), LoopDevice::path);
        fadvise(File::open(path)?, 0, None, Advice::DontNeed)?;
        let mut client = Bare::open(path, work.job.depth, work.job.len)?;
        let threads = self.device.as_ref().and_then(|_| KernelThreads::at_rest());
        let (server, watch) = (self.process.cpu()?, Stopwatch::start());
        client.run(&work.job)?;
        let (took, server) = (watch.stop(), self.process.cpu()? - server);
        let since = |before: &KernelThreads| Some(KernelThreads::now()?.since(before).as_secs_f64());
        let kernel = threads.as_ref().and_then(since).unwrap_or(0.0);
        Ok(cost(work, [server, took.cpu, kernel, took.wall]))
    }

    fn server(&self) -> Option<u32> {
        Some(self.process.id())
    }
}

fn served(
    context: &Context<'_>,
    span: u64,
    (name, fuse_uring): (&str, &str),
    is_attached: bool,
) -> Result<Box<dyn Subject>> {
    anyhow::ensure!(Path::new("/dev/fuse").exists(), "/dev/fuse does not exist: load the kernel module fuse");
    let pool = pool(context, span, name)?;
    let mounted = MountedPool::new(context, pool.path(), (name, fuse_uring), VOLUME)?;
    let path = mounted.file(VOLUME);
    let device = is_attached.then(|| LoopDevice::new(&File::options().read(true).write(true).open(&path)?));
    let (process, undoable) = mounted.into_parts();
    let device = device.transpose()?;
    Ok(Box::new(Served { path, device, process, _undoable: Some(undoable), _pool: Some(pool) }))
}

fn our_fuse(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    served(context, span, ("fuse", "no"), false)
}

fn our_fuse_uring(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    served(context, span, (FUSE_URING, "yes"), false)
}

/// The volume's file on a loop device with direct I/O, as `forkdisk attach --by loop` makes it.
fn our_loop(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    served(context, span, ("loop", "auto"), true)
}

fn their_fuse(context: &Context<'_>, span: u64) -> Result<Box<dyn Subject>> {
    let (plain, path) = (plain(context, span, "qemu-fuse")?, context.ram("qemu-fuse.mnt"));
    File::create_new(&path)?;
    let undoable = Undoable::new(Thing::Mount(path.clone()));
    let export = format!("fuse,id=e,node-name=f,writable=on,allow-other=off,mountpoint={}", path.display());
    let is_ready = || Ok(path.metadata()?.len() == span);
    let process = Process::start(storage_daemon(&plain, &["--export", &export]), is_ready)?;
    Ok(Box::new(Served { path, device: None, process, _undoable: Some(undoable), _pool: None }))
}
