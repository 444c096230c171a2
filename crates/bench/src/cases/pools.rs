//! Closed pools in files and on loop devices, and the daemons that serve them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Result;
use forkdisk::{CreateOptions, FormatOptions, OpenOptions, Pool};
use forkdisk_uring::{Config, DeviceOptions, UringDevice, block_on};

use crate::cases::file;
use crate::ending::{Thing, Undoable};
use crate::load::{self, Job, sequential};
use crate::mounted::LoopDevice;
use crate::process::Process;
use crate::runner::Context;

const PIECE: usize = 1 << 20;

/// What a pool lies in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A file without allocated space.
    Sparse,
    /// A file that was completely written.
    Preallocated,
    /// A loop device over a file that was completely written, as the file systems beside it have.
    Loop,
}

impl Place {
    pub const ALL: [Place; 3] = [Place::Sparse, Place::Preallocated, Place::Loop];

    pub fn name(self) -> &'static str {
        match self {
            Place::Sparse => "sparse",
            Place::Preallocated => "preallocated",
            Place::Loop => "loop",
        }
    }
}

/// A closed pool.
pub struct PoolAt {
    path: PathBuf,
    device: Option<LoopDevice>,
}

impl PoolAt {
    /// Creates a pool of `size` bytes at `path` with `volumes` of `span` bytes each, completely written.
    pub fn new(path: &Path, place: Place, size: u64, (volumes, span): (&[&str], u64)) -> Result<PoolAt> {
        let device = match place {
            Place::Sparse => {
                File::create_new(path)?.set_len(size)?;
                None
            }
            Place::Preallocated => {
                file::plain(path, size)?;
                None
            }
            Place::Loop => {
                file::plain(path, size)?;
                Some(LoopDevice::new(&File::options().read(true).write(true).open(path)?)?)
            }
        };
        let path = device.as_ref().map_or(path, LoopDevice::path).to_path_buf();
        let names: Vec<String> = volumes.iter().map(|&name| name.to_string()).collect();
        let at = path.clone();
        let preallocated = place == Place::Preallocated;
        let format = FormatOptions::new(size, identity(), 0).with_preallocated(preallocated);
        block_on(Config::default(), |rt| async move {
            let device = UringDevice::open(&rt, &at, &DeviceOptions::default())?;
            Pool::format(&device, &format).await?;
            let pool = Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await?;
            for name in &names {
                pool.create(name, &CreateOptions::new(span, 0)).await?;
                let fill = Job { write: true, len: PIECE, depth: 8, offsets: sequential(span, PIECE) };
                load::run(&rt, &pool, &pool.volume(name)?, &fill).await?;
            }
            pool.checkpoint().await?;
            anyhow::Ok(pool.close().await?)
        })??;
        Ok(PoolAt { path, device })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the loop device that it lies on.
    pub fn device(&self) -> Option<&LoopDevice> {
        self.device.as_ref()
    }
}

/// An identity of its own for each pool: several are open at a time.
fn identity() -> [u8; 16] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut identity = *b"forkdisk-door\0\0\0";
    identity[13..].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes()[1..]);
    identity
}

/// A daemon that serves a pool, and its control socket.
pub struct Daemon {
    pub process: Process,
    pub control: PathBuf,
}

impl Daemon {
    /// Starts `forkdisk serve` with `flags`; its files in memory begin with `name`. `is_ready` says when clients can
    /// come.
    pub fn serve(
        context: &Context<'_>,
        pool: &Path,
        name: &str,
        flags: &[&std::ffi::OsStr],
        is_ready: impl Fn() -> Result<bool>,
    ) -> Result<Daemon> {
        let control = context.ram(&format!("{name}.control"));
        let mut command = Command::new(&context.options.program);
        command.arg("serve").arg(pool).args(["--log", "error", "--control"]).arg(&control);
        command.arg("--socket").arg(context.ram(&format!("{name}.sock"))).args(flags);
        Ok(Daemon { process: Process::start(command, is_ready)?, control })
    }

    /// Starts a daemon with a vhost-user socket for each volume in the folder that is returned.
    pub fn vhost_user(context: &Context<'_>, pool: &Path, name: &str, volume: &str) -> Result<(Daemon, PathBuf)> {
        let dir = context.ram(&format!("{name}.vm"));
        let socket = dir.join(format!("{volume}.sock"));
        let flags = ["--vhost-user".as_ref(), dir.as_os_str()];
        Ok((Daemon::serve(context, pool, name, &flags, || Ok(socket.exists()))?, dir))
    }
}

/// A pool that a process of its own has mounted. Unmounted when dropped.
pub struct MountedPool {
    pub process: Process,
    dir: PathBuf,
    undoable: Undoable,
}

impl MountedPool {
    /// Runs `forkdisk mount`; `volume` is a volume of the pool, `fuse_uring` whether requests come by io_uring.
    pub fn new(
        context: &Context<'_>,
        pool: &Path,
        (name, fuse_uring): (&str, &str),
        volume: &str,
    ) -> Result<MountedPool> {
        MountedPool::with_settings(context, pool, (name, fuse_uring), volume, &[])
    }

    /// As [`new`](Self::new), with settings as variables of the environment.
    pub fn with_settings(
        context: &Context<'_>,
        pool: &Path,
        (name, fuse_uring): (&str, &str),
        volume: &str,
        settings: &[(&str, &str)],
    ) -> Result<MountedPool> {
        let dir = context.disk(&format!("{name}.mnt"));
        std::fs::create_dir_all(&dir)?;
        let undoable = Undoable::new(Thing::Mount(dir.clone()));
        let mut command = Command::new(&context.options.program);
        command.arg("mount").arg(pool).arg(&dir).args(["--log", "error"]);
        command.arg("-o").arg(format!("fuse_uring={fuse_uring}")).envs(settings.iter().copied());
        let file = dir.join(volume);
        Ok(MountedPool { process: Process::start(command, || Ok(file.exists()))?, dir, undoable })
    }

    pub fn file(&self, volume: &str) -> PathBuf {
        self.dir.join(volume)
    }

    /// Ends it, which unmounts it.
    pub fn stop(self) -> Result<()> {
        self.process.stop()
    }

    /// Returns the process, and what removes the mount if the benchmark is told to end.
    pub fn into_parts(self) -> (Process, Undoable) {
        (self.process, self.undoable)
    }
}
