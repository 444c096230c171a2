//! The pool as files, served by the daemon besides exports and devices.
//!
//! Invariants: a change made by another path is visible through every mount before it is
//! acknowledged; the pool is flushed when a mount has ended, and the mount is listed until then.

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use forkdisk::{GatherPolicy, Pool, VolumeId};
use forkdisk_control::{Failure, gather_policy, params, runtime_dir};
use forkdisk_fuse::{
    Exchange, InUse, MountOptions, MountRecord, OverIoUring, RequestLog, Session, SessionHandle, Volumes,
    VolumesOptions, connect, unmount,
};
use forkdisk_uring::{Rt, UringDevice};

use super::hand_over::PassedMount;
use super::keeper::{Descriptors, Keeper, Left};
use crate::left_mount;
use crate::served_mount::syscall_helper;

/// Interval at which ending mounts are counted.
const LOOK: Duration = Duration::from_millis(5);
/// The limit of a keeper that another daemon has started.
const KEEPER_LIMIT: Duration = Duration::from_secs(600);
/// Environment variable that makes mounts with a keeper use the request log, even if the kernel can send requests
/// again.
const REQUEST_LOG: &str = "FORKDISK_REQUEST_LOG";

/// All mounts of a daemon. Clones share their state.
#[derive(Clone)]
pub struct Mounts(Rc<Inner>);

struct Inner {
    runtime: Rt,
    pool: Pool<UringDevice>,
    all: RefCell<Vec<Mounted>>,
    /// Returns whether a volume is in use other than through a mount.
    others: RefCell<Option<InUse>>,
    /// The mounts go to another process.
    is_leaving: Cell<bool>,
    /// Holds the mounts while no daemon does.
    keeper: Option<Rc<Keeper>>,
    /// Whether requests come by io_uring.
    fuse_uring: OverIoUring,
    /// How long the keeper waits for another daemon.
    keeper_limit: Duration,
}

#[derive(Clone)]
struct Mounted {
    dir: PathBuf,
    /// How it was requested.
    mount: params::Mount,
    volumes: Rc<Volumes<UringDevice>>,
    handle: SessionHandle,
}

impl Mounts {
    /// `keeper_limit`: how long the keeper waits for another daemon, if that is known.
    pub fn new(
        runtime: &Rt,
        pool: &Pool<UringDevice>,
        (keeper, keeper_limit): (Option<Rc<Keeper>>, Option<Duration>),
        fuse_uring: OverIoUring,
    ) -> Mounts {
        Mounts(Rc::new(Inner {
            runtime: runtime.clone(),
            pool: pool.clone(),
            all: RefCell::default(),
            others: RefCell::default(),
            is_leaving: Cell::default(),
            keeper,
            fuse_uring,
            keeper_limit: keeper_limit.unwrap_or(KEEPER_LIMIT),
        }))
    }

    /// Sets `in_use`, which returns whether a volume is in use other than through a mount; `None`:
    /// no volume is any more.
    pub fn guard(&self, in_use: Option<InUse>) {
        *self.0.others.borrow_mut() = in_use;
    }

    /// Returns whether an NBD client or a block device uses a volume.
    fn is_used_beside(&self, own: &Rc<Volumes<UringDevice>>, name: &str) -> bool {
        let elsewhere = self.0.others.borrow().as_ref().is_some_and(|in_use| in_use(name));
        let Ok(info) = self.0.pool.find(name) else { return elsewhere };
        let devices = self.mount_of_devices();
        let is_of_devices = |other: &Mounted| devices.as_ref() == Some(&other.dir);
        let all = self.0.all.borrow();
        let is_used = |other: &Mounted| !Rc::ptr_eq(&other.volumes, own) && other.volumes.is_open(info.id);
        elsewhere || all.iter().any(|other| is_of_devices(other) && is_used(other))
    }

    /// Returns the directory of the private mount, which holds the files of loop devices only.
    fn mount_of_devices(&self) -> Option<PathBuf> {
        runtime_dir::own_control(&self.0.pool.info().uuid).map(|control| control.with_file_name("mnt"))
    }

    /// Mounts at `dir`, as the user of the daemon.
    pub async fn mount_at(&self, dir: &Path, source: &Path) -> Result<()> {
        left_mount::make_way(dir, source)?;
        let dir = dir.canonicalize().with_context(|| dir.display().to_string())?;
        let options = MountOptions::default().with_source(source.display().to_string());
        let connection = connect(&dir, &options)?;
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let shown = dir.display().to_string();
        let mount = params::Mount { dir: shown, uid, gid, gather: None, show_snapshots: false };
        let begun = self.begin(mount, connection).await;
        if begun.is_err() {
            let _ = unmount(&dir, true);
        }
        Ok(begun?)
    }

    /// Serves a mount that the caller has made.
    pub async fn begin(&self, mount: params::Mount, connection: OwnedFd) -> Result<(), Failure> {
        let (runtime, dir) = (&self.0.runtime, PathBuf::from(&mount.dir));
        let volumes = Volumes::new(self.0.pool.clone(), self.options(&mount)?);
        let held = connection.try_clone().map_err(|e| Failure::file(&mount.dir, e))?;
        let session = Session::adopt(runtime, volumes.clone(), &dir, connection).await?;
        self.keep(&session.handle(), (&volumes, held), &mount);
        self.add(session, volumes, mount);
        tracing::info!(dir = %dir.display(), "mounted");
        Ok(())
    }

    /// Continues a mount of another process.
    pub fn resume(&self, passed: PassedMount<OwnedFd>) -> Result<(), Failure> {
        let PassedMount { mount, connection, held, survives, queues } = passed;
        let (pool, dir) = (self.0.pool.clone(), PathBuf::from(&mount.dir));
        let volumes = Volumes::resume(pool, self.options(&mount)?, &held)?;
        let held = connection.try_clone().map_err(|e| Failure::file(&mount.dir, e))?;
        let session = Session::resume(&self.0.runtime, volumes.clone(), &dir, (connection, queues))?;
        session.handle().set_resends(survives);
        self.keep(&session.handle(), (&volumes, held), &mount);
        self.add(session, volumes, mount);
        Ok(())
    }

    /// Continues a mount of a process that was killed. If that fails the mount ends.
    pub fn take_over(&self, left: Left) {
        let dir = PathBuf::from(&left.mount.dir);
        match self.try_take_over(left) {
            Ok(()) => tracing::warn!(dir = %dir.display(), "its daemon was killed: served again"),
            Err(error) => {
                tracing::error!(dir = %dir.display(), %error, "the mount of a killed daemon cannot be continued");
                self.release(&dir);
                std::thread::spawn(move || drop(unmount(&dir, true)));
            }
        }
    }

    fn try_take_over(&self, left: Left) -> Result<(), Failure> {
        let Left { mount, connection, record, log } = left;
        let dir = PathBuf::from(&mount.dir);
        let left = MountRecord::read(record).map_err(|e| Failure::file(&mount.dir, e))?;
        let log = log.map(RequestLog::again).transpose().map_err(|e| Failure::file(&mount.dir, e))?;
        let volumes = Volumes::take_over(self.0.pool.clone(), self.options(&mount)?, left)?;
        let session = Session::take_over(&self.0.runtime, volumes.clone(), &dir, connection, log)?;
        session.handle().set_kept(self.0.keeper_limit);
        self.add(session, volumes.clone(), mount);
        drop(self.0.runtime.spawn(async move { volumes.forget_cached().await }));
        Ok(())
    }

    /// Lets the keeper hold a mount. If that fails it ends with this process.
    fn keep(
        &self,
        session: &SessionHandle,
        (volumes, connection): (&Volumes<UringDevice>, OwnedFd),
        mount: &params::Mount,
    ) {
        let Some(keeper) = &self.0.keeper else { return };
        if session.has_queues() {
            tracing::warn!(dir = mount.dir, "a kill of this process ends the mount: it has queues of io_uring");
            return;
        }
        let is_logged = !session.resends() || std::env::var_os(REQUEST_LOG).is_some_and(|value| value == "1");
        let kept = || -> Result<()> {
            let (record, log) = (MountRecord::new()?, is_logged.then(RequestLog::new).transpose()?);
            let log_file = log.as_ref().map(RequestLog::file);
            let descriptors = Descriptors { connection: connection.as_fd(), record: record.files(), log: log_file };
            keeper.hold(mount.clone(), descriptors)?;
            volumes.keep(record)?;
            log.into_iter().for_each(|log| session.log_requests(log));
            session.set_kept(self.0.keeper_limit);
            Ok(())
        };
        if let Err(error) = kept() {
            tracing::error!(dir = mount.dir, "a kill of this process ends the mount: {error:#}");
        }
    }

    /// Lets the keeper drop a mount that has ended.
    fn release(&self, dir: &Path) {
        if let Some(keeper) = &self.0.keeper
            && let Err(error) = keeper.release(dir)
        {
            tracing::warn!(dir = %dir.display(), "{error:#}");
        }
    }

    /// Returns whether the pool is mounted on `dir`. Without a system call on `dir` itself, which this process serves.
    pub fn has(&self, dir: &Path) -> bool {
        let found = match (dir.parent().map(Path::canonicalize), dir.file_name()) {
            (Some(Ok(parent)), Some(name)) => parent.join(name),
            _ => return false,
        };
        self.0.all.borrow().iter().any(|mounted| mounted.dir == found)
    }

    fn options(&self, mount: &params::Mount) -> Result<VolumesOptions, Failure> {
        let (dir, uid, gid) = (PathBuf::from(&mount.dir), mount.uid, mount.gid);
        let gather = mount.gather.as_deref().map_or(Ok(GatherPolicy::USUAL), gather_policy)?;
        // An upgrade needs requests of this process's user, which the kernel refuses on mounts of others.
        let over_io_uring = match rustix::process::getuid().as_raw() == uid {
            true => self.0.fuse_uring,
            false => OverIoUring::No,
        };
        Ok(VolumesOptions::new(dir, uid, gid)
            .with_alone(false)
            .with_gather(gather)
            .with_show_snapshots(mount.show_snapshots)
            .with_over_io_uring(over_io_uring)
            .with_syscall_helper(Some(syscall_helper())))
    }

    /// Serves a mount.
    fn add(&self, session: Session<Volumes<UringDevice>>, volumes: Rc<Volumes<UringDevice>>, mount: params::Mount) {
        let mounted = Mounted { dir: PathBuf::from(&mount.dir), mount, volumes, handle: session.handle() };
        let (others, own) = (Rc::downgrade(&self.0), Rc::downgrade(&mounted.volumes));
        mounted.volumes.watch(Box::new(move |id, offset, len| {
            let (others, own) = (others.upgrade().map(Mounts), own.upgrade());
            Box::pin(async move {
                if let (Some(others), Some(own)) = (others, own) {
                    others.changed_but_for(Some(&own), id, offset, len).await;
                }
            })
        }));
        let (others, own) = (Rc::downgrade(&self.0), Rc::downgrade(&mounted.volumes));
        mounted.volumes.guard(Box::new(move |name| match (others.upgrade().map(Mounts), own.upgrade()) {
            (Some(others), Some(own)) => others.is_used_beside(&own, name),
            _ => false,
        }));
        self.0.all.borrow_mut().push(mounted.clone());
        let mounts = self.clone();
        self.0.runtime.spawn(async move { mounts.serve(session, mounted).await });
    }

    /// Stops to serve all mounts between two requests and returns them for another process. They stay in the list, with
    /// what is open, until this is dropped.
    pub async fn pass_on(&self) -> std::io::Result<Vec<PassedMount<OwnedFd>>> {
        self.0.is_leaving.set(true);
        let all = self.0.all.borrow().clone();
        let mut passed = Vec::new();
        for Mounted { mount, volumes, handle, .. } in all {
            let Some(connection) = handle.pass_on().await? else { continue };
            let (survives, queues) = (handle.resends(), handle.pass_on_queues()?);
            passed.push(PassedMount { mount, connection, held: volumes.pass_on(), survives, queues });
        }
        Ok(passed)
    }

    async fn serve(self, session: Session<Volumes<UringDevice>>, mounted: Mounted) {
        let dir = mounted.dir.display();
        if let Err(error) = session.serve().await {
            tracing::error!(%dir, %error, "a mount has ended");
        }
        if self.0.is_leaving.get() {
            return;
        }
        self.release(&mounted.dir);
        if let Err(error) = self.0.pool.flush().await {
            tracing::error!(%dir, %error, "flushing after an unmount");
        }
        tracing::info!(%dir, "unmounted");
        self.0.all.borrow_mut().retain(|other| !Rc::ptr_eq(&other.volumes, &mounted.volumes));
    }

    /// Returns whether a mount has queues of io_uring.
    pub fn has_queues(&self) -> bool {
        self.0.all.borrow().iter().any(|mounted| mounted.handle.has_queues())
    }

    /// Returns the directories where the pool is mounted.
    pub fn dirs(&self) -> Vec<String> {
        self.0.all.borrow().iter().map(|mounted| mounted.dir.display().to_string()).collect()
    }

    /// Describes the mounts on which programs have the volume or snapshot `name` open.
    pub fn users(&self, name: &str) -> Vec<String> {
        let Ok(info) = self.0.pool.find(name) else { return Vec::new() };
        let all = self.0.all.borrow();
        let users = all.iter().filter(|mounted| mounted.volumes.is_open(info.id));
        users.map(|mounted| format!("programs on the mount {}", mounted.dir.display())).collect()
    }

    /// Reports a change of volume `id` made other than through a mount; resolves when every mount shows it.
    pub async fn changed(&self, id: VolumeId, offset: u64, len: u64) {
        self.changed_but_for(None, id, offset, len).await;
    }

    async fn changed_but_for(&self, own: Option<&Rc<Volumes<UringDevice>>>, id: VolumeId, offset: u64, len: u64) {
        let is_own = |mounted: &Mounted| own.is_some_and(|own| Rc::ptr_eq(own, &mounted.volumes));
        let concerned = |mounted: &&Mounted| !is_own(mounted) && mounted.volumes.is_open(id);
        let shown: Vec<_> = self.0.all.borrow().iter().filter(concerned).map(|m| m.volumes.clone()).collect();
        for volumes in shown {
            volumes.changed(id, offset, len).await;
        }
    }

    /// Volume `id` is about to get other contents: writes back what the kernel has cached of it on any mount.
    pub async fn exchange(&self, id: VolumeId) -> std::io::Result<Vec<Exchange<UringDevice>>> {
        let open = |mounted: &&Mounted| mounted.volumes.is_open(id);
        let all: Vec<_> = self.0.all.borrow().iter().filter(open).map(|m| m.volumes.clone()).collect();
        let mut begun = Vec::new();
        for volumes in all {
            begun.push(volumes.exchange(id).await?);
        }
        Ok(begun)
    }

    /// As [`changed`](Self::changed), for all of the volume `name`.
    pub async fn changed_name(&self, name: &str) {
        if let Ok(info) = self.0.pool.find(name) {
            self.changed(info.id, 0, 0).await;
        }
    }

    /// Ends all mounts.
    pub async fn stop(&self) {
        let all: Vec<SessionHandle> = self.0.all.borrow().iter().map(|mounted| mounted.handle.clone()).collect();
        for handle in all {
            handle.stop().await;
        }
        while !self.0.all.borrow().is_empty() {
            self.0.runtime.sleep_for(LOOK).await;
        }
    }
}
