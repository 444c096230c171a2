//! A pool opened for one command: the device, the engine on the io_uring runtime, and a clean close
//! whatever the command's outcome.

use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use forkdisk::{OpenOptions, Pool, Runtime, WhenFull};
use forkdisk_uring::{Config, DeviceOptions, UringDevice};

use crate::owner;

/// The engine on the device that the program uses.
pub type DiskPool = Pool<UringDevice>;

/// What a command does to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Looks only: nothing on the device changes.
    Read,
    /// Changes it.
    Write,
}

/// An open pool and the runtime under it.
#[derive(Clone)]
pub struct Session {
    /// The engine.
    pub pool: DiskPool,
    /// Where tasks run.
    pub runtime: Rc<dyn Runtime>,
}

/// Opens the pool at `path`, runs `work` and closes the pool.
pub fn with_pool<T, F, Fut>(path: &Path, access: Access, work: F) -> Result<T>
where
    T: 'static,
    F: FnOnce(Session) -> Fut + 'static,
    Fut: Future<Output = Result<T>>,
{
    with_pool_when_full(path, access, WhenFull::Error, work)
}

/// As [`with_pool`], with a policy for a full pool.
pub fn with_pool_when_full<T, F, Fut>(path: &Path, access: Access, when_full: WhenFull, work: F) -> Result<T>
where
    T: 'static,
    F: FnOnce(Session) -> Fut + 'static,
    Fut: Future<Output = Result<T>>,
{
    let path = path.to_path_buf();
    on_runtime(move |runtime| async move {
        let device = open_device(&runtime, &path, access).await?;
        let options = OpenOptions { read_only: access == Access::Read, when_full, ..OpenOptions::default() };
        let runtime: Rc<dyn Runtime> = Rc::new(runtime);
        let pool = Pool::open(device, runtime.clone(), options).await.with_context(|| path.display().to_string())?;
        let outcome = work(Session { pool: pool.clone(), runtime }).await;
        let closed = pool.close().await.with_context(|| format!("{}: closing the pool", path.display()));
        let value = outcome?;
        closed?;
        Ok(value)
    })
}

/// Runs `work` on a new io_uring runtime.
pub fn on_runtime<T, F, Fut>(work: F) -> Result<T>
where
    F: FnOnce(forkdisk_uring::Handle) -> Fut,
    Fut: Future<Output = Result<T>>,
{
    forkdisk_uring::block_on(Config::default(), work).context("io_uring cannot be used")?
}

/// Opens the file or block device at `path`, alone; says who has it if it cannot.
pub async fn open_device(runtime: &forkdisk_uring::Handle, path: &Path, access: Access) -> Result<UringDevice> {
    let options = DeviceOptions { read_only: access == Access::Read, ..DeviceOptions::default() };
    UringDevice::open(runtime, path, &options).await.map_err(|error| owner::explain(path, error))
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// Waits until deletions have given their space back, so that the next command sees it free.
pub async fn settle(session: &Session) -> Result<()> {
    let _progress = crate::progress::Progress::spinner("giving space back");
    session.pool.settle().await?;
    Ok(())
}
