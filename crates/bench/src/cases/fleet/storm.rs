//! A storm of starts: all clones of one image are read from the beginning to the end at the same time, and nothing of
//! the image is in memory.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use rustix::fs::{Advice, fadvise};

use crate::cases::file;
use crate::cases::guest::{Client, Requests};
use crate::cases::pools::{MountedPool, PoolAt};
use crate::cases::serve::idle::allow_files;
use crate::cases::server::{QEMU_NBD, Server};
use crate::load::sequential;
use crate::mounted::{DeviceCounts, Mounted};
use crate::nbd::Nbd;
use crate::rows::Row;
use crate::runner::Context;

use super::bed::{Served, drop_cache, file_system, open, overlay, pool, reflink};
use super::{OURS, QCOW2, ratios, row};

/// Bytes of a request; each client has one under way.
const PIECE: usize = 256 << 10;
/// Descriptors of a guest's queue: memory for five requests.
const QUEUE_SIZE: u16 = 16;
const IMAGE: &str = "base";

/// A number of clones, and the bytes of each.
#[derive(Clone, Copy)]
struct Plan {
    clones: usize,
    span: u64,
}

/// A client that reads its whole clone.
type Reader<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;

/// What was measured in each round.
#[derive(Default)]
struct Measured {
    seconds: Vec<f64>,
    read_bytes: Vec<f64>,
}

/// Something with clones that can be read; nothing of them is in memory when a round begins.
trait Target {
    fn round(&mut self, context: &Context<'_>, plan: Plan) -> Result<(f64, u64)>;
}

type Make = fn(&Context<'_>, Plan) -> Result<Box<dyn Target>>;

const NBD: &str = "nbd";
/// Ours, by the door.
const DOORS: [(&str, Make); 3] = [(NBD, nbd), ("mount", mount), ("vhost-user", vhost_user)];
const PEERS: [(&str, Make); 2] = [(QCOW2, overlays), ("xfs", reflinks)];

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let plan =
        Plan { clones: context.scale.pick(20, 100, 100), span: context.scale.pick(64 << 20, 256 << 20, 256 << 20) };
    let rounds = context.scale.pick(3, 3, 5);
    allow_files()?;
    let peers = PEERS.iter().filter(|_| context.options.peers);
    let mut targets = Vec::new();
    for &(name, make) in DOORS.iter().chain(peers) {
        match make(context, plan) {
            Ok(target) => targets.push((name, target, Measured::default())),
            Err(error) => context.say(&format!("  {name} cannot be measured here: {error:#}")),
        }
    }
    for round in 0..rounds {
        for (name, target, measured) in &mut targets {
            context.say(&format!("  round {} of {rounds}: {name}", round + 1));
            match target.round(context, plan) {
                Ok((seconds, bytes)) => {
                    measured.seconds.push(seconds);
                    measured.read_bytes.push(bytes as f64);
                }
                Err(error) => context.say(&format!("    {name}: {error:#}")),
            }
        }
    }
    let theirs = targets.iter().find(|(name, ..)| *name == QCOW2).map(|(.., measured)| &measured.seconds[..]);
    let mut rows = Vec::new();
    for (name, _, measured) in &targets {
        let is_ours = DOORS.iter().any(|(door, _)| door == name);
        let (case, target) = if is_ours { (format!("storm/{name}"), OURS) } else { ("storm".into(), *name) };
        let images = measured.read_bytes.iter().map(|bytes| bytes / plan.span as f64).collect();
        rows.push(row(&case, target, "device_bytes_read_over_image", "ratio", &images));
        rows.push(row(&case, target, "seconds", "s", &measured.seconds.iter().copied().collect()));
        let rate = |seconds: &f64| plan.clones as f64 * plan.span as f64 / seconds / (1 << 20) as f64;
        rows.push(row(&case, target, "rate", "MiB/s", &measured.seconds.iter().map(rate).collect()));
        if let Some(theirs) = theirs.filter(|_| is_ours) {
            rows.push(row(&case, target, "seconds_ratio_to_qcow2", "ratio", &ratios(&measured.seconds, theirs)));
        }
    }
    Ok(rows)
}

/// Returns the seconds until all `readers` are done, which begin together.
fn together(readers: Vec<Reader<'_>>) -> Result<f64> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let running: Vec<_> = readers.into_iter().map(|reader| scope.spawn(reader)).collect();
        let ended =
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a client panicked"))));
        ended.collect::<Result<Vec<()>>>()
    })?;
    Ok(start.elapsed().as_secs_f64())
}

fn read_nbd(mut client: Nbd, span: u64) -> Result<()> {
    let mut piece = vec![0; PIECE];
    sequential(span, PIECE).iter().try_for_each(|&offset| client.read(offset, &mut piece))
}

/// Reads a file through the page cache, and drops each piece of it: the pieces of all clones together are larger than
/// memory.
fn read_file(file: &File, span: u64) -> Result<()> {
    let mut piece = vec![0; PIECE];
    for &offset in sequential(span, PIECE).iter() {
        file.read_exact_at(&mut piece, offset)?;
        fadvise(file, offset, std::num::NonZeroU64::new(PIECE as u64), Advice::DontNeed)?;
    }
    Ok(())
}

fn clones(plan: Plan) -> Vec<String> {
    (0..plan.clones).map(|i| format!("vm{i}")).collect()
}

/// A pool with an image and its clones, closed.
struct Image {
    pool: PoolAt,
    shared_cache: String,
}

impl Image {
    fn new(context: &Context<'_>, plan: Plan, name: &str) -> Result<Image> {
        let pool = pool(context, name, plan.span + plan.span / 2 + (256 << 20), (&[IMAGE], plan.span))?;
        let mut served = Served::start(context, &pool, name, &[])?;
        served.fork(IMAGE, &clones(plan))?;
        served.stop()?;
        Ok(Image { pool, shared_cache: format!("{}M", (2 * plan.span) >> 20) })
    }

    fn counts(&self) -> Result<DeviceCounts> {
        self.pool.device().context("a pool on a loop device")?.counts()
    }

    /// Serves the pool with an empty cache that has room for the image.
    fn serve(&self, context: &Context<'_>, flags: &[&str]) -> Result<Served> {
        let cache = ["--shared-cache", &self.shared_cache, "--max-connections", "1000"];
        Served::start(context, &self.pool, "storm", &[&cache[..], flags].concat())
    }
}

struct OverNbd(Image);

fn nbd(context: &Context<'_>, plan: Plan) -> Result<Box<dyn Target>> {
    Ok(Box::new(OverNbd(Image::new(context, plan, "storm-nbd")?)))
}

impl Target for OverNbd {
    fn round(&mut self, context: &Context<'_>, plan: Plan) -> Result<(f64, u64)> {
        let before = self.0.counts()?;
        let served = self.0.serve(context, &[])?;
        let clients = clones(plan).iter().map(|name| served.nbd(name)).collect::<Result<Vec<_>>>()?;
        let reader = |client| -> Reader<'_> { Box::new(move || read_nbd(client, plan.span)) };
        let seconds = together(clients.into_iter().map(reader).collect())?;
        let bytes = self.0.counts()?.since(before).read_bytes;
        served.stop()?;
        Ok((seconds, bytes))
    }
}

struct OverMount(Image);

fn mount(context: &Context<'_>, plan: Plan) -> Result<Box<dyn Target>> {
    Ok(Box::new(OverMount(Image::new(context, plan, "storm-mount")?)))
}

impl Target for OverMount {
    fn round(&mut self, context: &Context<'_>, plan: Plan) -> Result<(f64, u64)> {
        let before = self.0.counts()?;
        let settings = [("FORKDISK_SHARED_CACHE", &self.0.shared_cache[..])];
        let mounted = MountedPool::with_settings(context, self.0.pool.path(), ("storm", "auto"), IMAGE, &settings)?;
        let files = clones(plan).iter().map(|name| open(&mounted.file(name))).collect::<Result<Vec<_>>>()?;
        let reader = |file| -> Reader<'_> { Box::new(move || read_file(&file, plan.span)) };
        let seconds = together(files.into_iter().map(reader).collect())?;
        let bytes = self.0.counts()?.since(before).read_bytes;
        mounted.stop()?;
        Ok((seconds, bytes))
    }
}

struct OverVhostUser(Image);

fn vhost_user(context: &Context<'_>, plan: Plan) -> Result<Box<dyn Target>> {
    Ok(Box::new(OverVhostUser(Image::new(context, plan, "storm-vhost-user")?)))
}

impl Target for OverVhostUser {
    fn round(&mut self, context: &Context<'_>, plan: Plan) -> Result<(f64, u64)> {
        let before = self.0.counts()?;
        let dir = context.ram("storm.vm");
        let served = self.0.serve(context, &["--vhost-user", &dir.to_string_lossy()])?;
        let connect = |name: &String| Client::with_size(&dir.join(format!("{name}.sock")), 1, QUEUE_SIZE);
        let clients = clones(plan).iter().map(connect).collect::<Result<Vec<_>>>()?;
        let offsets = sequential(plan.span, PIECE).to_vec();
        let offsets = &offsets[..];
        let reader = |mut client: Client| -> Reader<'_> {
            let requests = Requests { write: false, len: PIECE, offsets, flush: false };
            Box::new(move || client.run(1, &[requests]).map(drop))
        };
        let seconds = together(clients.into_iter().map(reader).collect())?;
        let bytes = self.0.counts()?.since(before).read_bytes;
        served.stop()?;
        fs::remove_dir_all(&dir).ok();
        Ok((seconds, bytes))
    }
}

/// qcow2 overlays on one image, each with a qemu-nbd of its own; the kernel caches the image for all of them.
struct Overlays {
    _servers: Vec<Server>,
    sockets: Vec<PathBuf>,
    image: PathBuf,
    files: Mounted,
}

fn overlays(context: &Context<'_>, plan: Plan) -> Result<Box<dyn Target>> {
    let files = file_system(context, "xfs", "overlays", 2 * plan.span + (1 << 30))?;
    let image = files.dir().join(IMAGE);
    file::plain(&image, plan.span)?;
    let (mut servers, mut sockets) = (Vec::new(), Vec::new());
    for name in clones(plan) {
        let (at, socket) = (files.dir().join(format!("{name}.qcow2")), context.ram(&format!("{name}.qemu")));
        overlay(&image, "raw", &at)?;
        let mut command = Command::new(QEMU_NBD);
        command.args(["-t", "-e", "32", "-x", IMAGE, "-f", "qcow2", "--cache=writeback", "-k"]).arg(&socket).arg(&at);
        servers.push(Server::start(command, &socket, IMAGE)?);
        sockets.push(socket);
    }
    Ok(Box::new(Overlays { _servers: servers, sockets, image, files }))
}

impl Target for Overlays {
    fn round(&mut self, _: &Context<'_>, plan: Plan) -> Result<(f64, u64)> {
        drop_cache(&self.image)?;
        let before = self.files.counts()?;
        let clients = self.sockets.iter().map(|socket| Nbd::connect(socket, IMAGE)).collect::<Result<Vec<_>>>()?;
        let reader = |client| -> Reader<'_> { Box::new(move || read_nbd(client, plan.span)) };
        let seconds = together(clients.into_iter().map(reader).collect())?;
        Ok((seconds, self.files.counts()?.since(before).read_bytes))
    }
}

/// Clones of a file on XFS.
struct Reflinks(Mounted);

fn reflinks(context: &Context<'_>, plan: Plan) -> Result<Box<dyn Target>> {
    let size = 2 * plan.span + (1 << 30);
    let files = file_system(context, "xfs", "reflinks", size)?;
    let image = files.dir().join(IMAGE);
    file::plain(&image, plan.span)?;
    for name in clones(plan) {
        reflink(&image, &files.dir().join(name))?;
    }
    rustix::fs::syncfs(File::open(files.dir())?)?;
    Ok(Box::new(Reflinks(files)))
}

impl Target for Reflinks {
    fn round(&mut self, _: &Context<'_>, plan: Plan) -> Result<(f64, u64)> {
        let paths: Vec<PathBuf> = clones(plan).iter().map(|name| self.0.dir().join(name)).collect();
        paths.iter().try_for_each(|path| drop_cache(path))?;
        let before = self.0.counts()?;
        let files = paths.iter().map(|path| open(path)).collect::<Result<Vec<_>>>()?;
        let reader = |file| -> Reader<'_> { Box::new(move || read_file(&file, plan.span)) };
        let seconds = together(files.into_iter().map(reader).collect())?;
        Ok((seconds, self.0.counts()?.since(before).read_bytes))
    }
}
