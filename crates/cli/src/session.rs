//! A pool opened for one command: the device, the engine on the io_uring runtime, and a clean close
//! whatever the command's outcome.

use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use forkdisk::{OpenOptions, Pool, WhenFull};
use forkdisk_uring::{Config, DeviceOptions, Rt, UringDevice};

use crate::owner;
use crate::progress::Progress;

/// What a command does to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Looks only: nothing on the device changes, and others may look at the same time.
    Read,
    /// Changes it.
    Write,
}

/// An open pool and the runtime under it.
#[derive(Clone)]
pub struct Session {
    /// The engine on its device.
    pub pool: Pool<UringDevice>,
    /// Where tasks run.
    pub runtime: Rt,
}

/// Opens the pool at `path`, runs `work` and closes the pool.
pub fn with_pool<T, Fut>(path: &Path, access: Access, work: impl FnOnce(Session) -> Fut) -> Result<T>
where
    Fut: Future<Output = Result<T>>,
{
    with_pool_when_full(path, access, WhenFull::Error, work)
}

/// As [`with_pool`], with a policy for writes that find the pool full.
pub fn with_pool_when_full<T, Fut>(
    path: &Path,
    access: Access,
    when_full: WhenFull,
    work: impl FnOnce(Session) -> Fut,
) -> Result<T>
where
    Fut: Future<Output = Result<T>>,
{
    forkdisk_uring::block_on(Config::default(), |runtime| async move {
        let read_only = access == Access::Read;
        let device_options = DeviceOptions { read_only, ..DeviceOptions::default() };
        let device = UringDevice::open(&runtime, path, &device_options).map_err(|e| owner::explain(path, e))?;
        let options = OpenOptions { read_only, when_full, ..OpenOptions::default() };
        let pool = Pool::open(device, Rc::new(runtime.clone()), options).await.context(path.display().to_string())?;
        let outcome = work(Session { pool: pool.clone(), runtime }).await;
        let closed = pool.close().await.with_context(|| format!("{}: closing the pool", path.display()));
        let value = outcome?;
        closed?;
        Ok(value)
    })?
}

/// Waits until deletions have given their space back, so that the next command finds it free.
pub async fn settle(session: &Session) -> Result<()> {
    let _progress = Progress::spinner("giving space back");
    Ok(session.pool.settle().await?)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}
