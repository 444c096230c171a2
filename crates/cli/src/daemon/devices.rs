//! The pool's volumes as block devices of the kernel's ublk driver, served on the pool's own thread.
//!
//! The driver does not store the address of a device, so a file for each lies under [`RECORDS`]
//! while its daemon lives.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk::{ErrorKind, Pool};
use forkdisk_control::{Failure, params};
use forkdisk_nbd::Export;
use forkdisk_uring::{Rt, UblkDevice, UblkOperation, UblkRequest, UringDevice, ublk_forget, ublk_missing};

use super::exports::{Served, ServedExport};
use super::outlets::{By, Outlet, replace};
use crate::attach::{self, LeftBehind, RECORDS};

/// Interval at which ending devices are counted; the next constant is the limit of the wait.
const LOOK: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(60);
const SECTOR: u64 = 512;

/// All devices of a daemon. Clones share their state.
#[derive(Clone)]
pub struct Devices(Rc<Inner>);

struct Inner {
    runtime: Rt,
    path: PathBuf,
    /// The pool; `None` while it is passed to another process.
    exports: RefCell<Option<Rc<Served>>>,
    all: RefCell<Vec<Attached>>,
    /// Requests that are being carried out.
    requests: Cell<usize>,
}

#[derive(Clone)]
struct Attached {
    object: Rc<RefCell<String>>,
    device: Rc<UblkDevice>,
    read_only: bool,
    /// The open volume or snapshot; `None` while the pool is passed to another process.
    export: Rc<RefCell<Option<Rc<ServedExport>>>>,
}

impl Devices {
    pub fn new(runtime: &Rt, path: &Path, exports: Served) -> Devices {
        let (runtime, path) = (runtime.clone(), path.to_path_buf());
        let path = path.canonicalize().unwrap_or(path);
        let (exports, all, requests) = (RefCell::new(Some(Rc::new(exports))), RefCell::default(), Cell::default());
        Devices(Rc::new(Inner { runtime, path, exports, all, requests }))
    }

    /// Returns the path of the pool.
    pub fn pool_path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the number of devices.
    pub fn count(&self) -> usize {
        self.0.all.borrow().len()
    }

    /// Waits for the requests that are being carried out and releases the pool. Further requests wait: for
    /// [`resume`](Self::resume), or for another process after the end of this one.
    pub async fn pause(&self) {
        self.0.exports.take();
        while self.0.requests.get() > 0 {
            self.0.runtime.sleep_for(LOOK).await;
        }
        for attached in &*self.0.all.borrow() {
            attached.export.take();
        }
    }

    /// Continues with the pool that was opened again.
    pub fn resume(&self, exports: Served) -> Result<(), Failure> {
        for attached in &*self.0.all.borrow() {
            let export = exports.open_named(&attached.object.borrow(), By::Device)?;
            *attached.export.borrow_mut() = Some(Rc::new(export));
        }
        *self.0.exports.borrow_mut() = Some(Rc::new(exports));
        Ok(())
    }

    /// Takes over the devices of another process when it has ended.
    pub async fn adopt_later(self, count: usize) {
        let start = Instant::now();
        while self.count() < count && start.elapsed() < PATIENCE {
            self.adopt().await;
            self.0.runtime.sleep_for(LOOK).await;
        }
        if self.count() < count {
            tracing::error!("{} of {count} devices were not released by the process before", count - self.count());
        }
    }

    fn exports(&self) -> Result<Rc<Served>, Failure> {
        let leaving = || Failure::new(ErrorKind::Busy, "the pool is being passed to another process");
        self.0.exports.borrow().clone().ok_or_else(leaving)
    }

    /// Attaches a volume or snapshot; returns the device's path.
    pub async fn attach(&self, attach: params::Attach) -> Result<String, Failure> {
        let inner = &self.0;
        let exports = self.exports()?;
        exports.pool.find(&attach.object)?;
        if let Some(why) = ublk_missing() {
            return Err(Failure::new(ErrorKind::Unsupported, why));
        }
        let export = Rc::new(exports.open_named(&attach.object, By::Device)?);
        let size = export.size();
        if size < SECTOR {
            let text = format!("it has {size} bytes, and a block device has at least one sector of {SECTOR}");
            return Err(Failure::new(ErrorKind::Invalid, text));
        }
        let read_only = attach.read_only || export.info().read_only;
        let failed = |what: &str, e: std::io::Error| Failure::file(format!("the ublk driver: {what}"), e);
        let device = UblkDevice::add(&inner.runtime, size, read_only).await.map_err(|e| failed("a new device", e))?;
        let device = Rc::new(device);
        self.serve(&device, &export, (&attach.object, read_only));
        let shown = device.path().display().to_string();
        let begun = match note(&inner.path, &attach.object, &device.path()) {
            Ok(()) => device.start().await.map_err(|e| failed("starting the device", e)),
            Err(e) => Err(Failure::file(RECORDS, e)),
        };
        drop(device);
        match begun {
            Ok(()) => {
                tracing::info!(device = %shown, object = %attach.object, "attached");
                Ok(shown)
            }
            Err(failure) => {
                let _ = self.detach(shown).await;
                Err(failure)
            }
        }
    }

    /// Starts a task for each slot of a device.
    fn serve(&self, device: &Rc<UblkDevice>, export: &Rc<ServedExport>, (object, read_only): (&str, bool)) {
        let inner = &self.0;
        let export = Rc::new(RefCell::new(Some(export.clone())));
        let object = Rc::new(RefCell::new(object.to_string()));
        let attached = Attached { object, device: device.clone(), read_only, export };
        let serving: Vec<_> = device
            .places()
            .map(|place| inner.runtime.spawn(self.clone().serve_place(attached.clone(), place)))
            .collect();
        inner.all.borrow_mut().push(attached);
        let (ending, device) = (self.clone(), device.clone());
        inner.runtime.spawn(async move {
            for place in serving {
                place.await;
            }
            ending.ended(device).await;
        });
    }

    /// Serves the devices of this pool that have no daemon since theirs was killed, and their queued requests.
    pub async fn adopt(&self) {
        for left in attach::left_behind(&self.0.path) {
            let shown = left.device.display().to_string();
            match self.recover(&left).await {
                Ok(()) => tracing::warn!(device = %shown, object = %left.object, "its daemon was killed: served again"),
                Err(error) if error.kind != ErrorKind::NotFound => {
                    // Its requests stay queued; `attach` tries again, `detach` removes it.
                    tracing::error!(device = %shown, object = %left.object, %error, "a device without a daemon");
                }
                Err(error) => {
                    tracing::error!(device = %shown, object = %left.object, %error, "removed: its volume is gone");
                    let forgotten = ublk_forget(left.number);
                    tracing::debug!(device = %shown, ?forgotten, "removed");
                    let _ = fs::remove_file(record_of(&left.device));
                }
            }
        }
    }

    async fn recover(&self, left: &LeftBehind) -> Result<(), Failure> {
        let inner = &self.0;
        let failed = |what: &str, e: std::io::Error| Failure::file(format!("the ublk driver: {what}"), e);
        let export = Rc::new(self.exports()?.open_named(&left.object, By::Device)?);
        let device = UblkDevice::recover(&inner.runtime, left.number).await.map_err(|e| failed("taking it over", e))?;
        let device = Rc::new(device);
        self.serve(&device, &export, (&left.object, export.disk().read_only));
        note(&inner.path, &left.object, &left.device).map_err(|e| Failure::file(RECORDS, e))?;
        device.resume().await.map_err(|e| failed("continuing", e))
    }

    /// Serves the requests of one slot of a device, one after the other, until the device is stopped.
    async fn serve_place(self, attached: Attached, place: (u16, u16)) {
        let (inner, device) = (&self.0, &attached.device);
        let mut next = device.fetch(place).await;
        while let Ok(request) = next {
            let (exports, export) = loop {
                let open = (inner.exports.borrow().clone(), attached.export.borrow().clone());
                if let (Some(exports), Some(export)) = open {
                    break (exports, export);
                }
                inner.runtime.sleep_for(LOOK).await;
            };
            inner.requests.set(inner.requests.get() + 1);
            let pass = export.outlet.turnstile.pass().await;
            let result = match carry_out(&exports.pool, device, &export, &request).await {
                Ok(count) => count,
                Err(errno) => -errno,
            };
            drop((exports, export, pass));
            inner.requests.set(inner.requests.get() - 1);
            next = device.answer(request, result).await;
        }
    }

    /// Removes a device after all its request slots have ended.
    async fn ended(&self, device: Rc<UblkDevice>) {
        let path = device.path();
        self.0.all.borrow_mut().retain(|attached| !Rc::ptr_eq(&attached.device, &device));
        let mut device = device;
        // The task that stops the device holds a reference for a moment.
        let device = loop {
            match Rc::try_unwrap(device) {
                Ok(device) => break device,
                Err(held) => device = held,
            }
            self.0.runtime.sleep_for(LOOK).await;
        };
        if let Err(error) = device.delete().await {
            tracing::error!(device = %path.display(), %error, "a stopped device stays registered in the kernel");
        }
        if let Ok(exports) = self.exports()
            && let Err(error) = exports.pool.flush().await
        {
            tracing::error!(device = %path.display(), %error, "flushing after a device has ended");
        }
        let _ = fs::remove_file(record_of(&path));
        tracing::info!(device = %path.display(), "detached");
    }

    /// Removes a device, after writing what the kernel has cached for it.
    pub async fn detach(&self, device: String) -> Result<(), Failure> {
        let found = self.0.all.borrow().iter().find(|a| a.device.path() == Path::new(&device)).cloned();
        let Some(found) = found else {
            return Err(Failure::new(ErrorKind::NotFound, format!("{device} is no device of this daemon")));
        };
        let stopped = found.device.stop().await;
        drop(found);
        stopped.map_err(|e| Failure::file(&device, e))?;
        let record = record_of(Path::new(&device));
        let mut waited = Duration::ZERO;
        while record.exists() {
            if waited > PATIENCE {
                let text = format!("{device} was stopped, and its last requests have not ended after {PATIENCE:?}");
                return Err(Failure::new(ErrorKind::Busy, text));
            }
            self.0.runtime.sleep_for(LOOK).await;
            waited += LOOK;
        }
        Ok(())
    }

    /// Returns the devices as which the volume or snapshot `name` is attached, by any means. A loop
    /// device may lie on any mount of the pool.
    pub fn of(&self, name: &str, mounts: &[String]) -> Vec<String> {
        let all = self.0.all.borrow();
        let own =
            all.iter().filter(|attached| *attached.object.borrow() == name).map(|attached| attached.device.path());
        let mounts = mounts.iter().map(|dir| Some(Path::new(dir))).chain([None]);
        let others = mounts.flat_map(|mount| attach::devices_of(&self.0.path, mount, name));
        let found: BTreeSet<String> = own.chain(others).map(|path| path.display().to_string()).collect();
        found.into_iter().collect()
    }

    /// Returns what a device shows, and whether it cannot be written; `None` if it is no device of this daemon.
    pub fn outlet(&self, device: &str) -> Option<(Rc<Outlet>, bool)> {
        let all = self.0.all.borrow();
        let found = all.iter().find(|attached| attached.device.path() == Path::new(device))?;
        let export = found.export.borrow().clone()?;
        Some((export.outlet.clone(), found.read_only))
    }

    /// Notes that a device shows another volume or snapshot from now on, also after a kill of this process.
    pub fn note_switched(&self, device: &str, object: &str) -> std::io::Result<()> {
        let all = self.0.all.borrow();
        let path = Path::new(device);
        let found = all.iter().find(|attached| attached.device.path() == path).ok_or(std::io::ErrorKind::NotFound)?;
        replace(&record_of(path), &record(&self.0.path, object))?;
        *found.object.borrow_mut() = object.to_string();
        Ok(())
    }

    /// Returns whether the volume or snapshot `name` is attached by ublk.
    pub fn has(&self, name: &str) -> bool {
        self.0.all.borrow().iter().any(|attached| *attached.object.borrow() == name)
    }

    /// Removes all devices.
    pub async fn stop(&self) {
        let all: Vec<PathBuf> = self.0.all.borrow().iter().map(|attached| attached.device.path()).collect();
        for path in all {
            if let Err(error) = self.detach(path.display().to_string()).await {
                tracing::error!(device = %path.display(), %error, "a device could not be stopped");
            }
        }
    }
}

/// Returns the path of a device's record.
fn record_of(device: &Path) -> PathBuf {
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    Path::new(RECORDS).join(name.trim_start_matches("ublkb"))
}

fn note(pool: &Path, object: &str, device: &Path) -> std::io::Result<()> {
    fs::create_dir_all(RECORDS)?;
    fs::write(record_of(device), record(pool, object))
}

fn record(pool: &Path, object: &str) -> Vec<u8> {
    format!("{}\n{}\n{object}\n", std::process::id(), pool.display()).into_bytes()
}

async fn carry_out(
    pool: &Pool<UringDevice>,
    device: &UblkDevice,
    export: &ServedExport,
    request: &UblkRequest,
) -> Result<i32, i32> {
    let &UblkRequest { operation, offset, len, fua, .. } = request;
    let in_kernel = |e: std::io::Error| e.raw_os_error().unwrap_or(EIO);
    let count = i32::try_from(len).unwrap_or(i32::MAX);
    match operation {
        UblkOperation::Read => {
            let (result, buf) = export.read(offset, pool.buffer(len as usize)).await;
            result.map_err(errno)?;
            device.give(request, &buf).map_err(in_kernel)?;
            Ok(count)
        }
        UblkOperation::Write => {
            let mut buf = pool.buffer(len as usize);
            device.take(request, &mut buf).map_err(in_kernel)?;
            export.write(offset, buf, fua.into()).await.0.map_err(errno)?;
            Ok(count)
        }
        UblkOperation::Flush => export.flush().await.map(|()| 0).map_err(errno),
        UblkOperation::Discard => export.trim(offset, len, fua).await.map(|()| count).map_err(errno),
        UblkOperation::WriteZeroes => export.write_zeroes(offset, len, fua, false).await.map(|()| count).map_err(errno),
        UblkOperation::Unknown => Err(rustix::io::Errno::OPNOTSUPP.raw_os_error()),
    }
}

const EIO: i32 = rustix::io::Errno::IO.raw_os_error();

/// Returns the error number for the kernel.
fn errno(error: forkdisk::Error) -> i32 {
    use rustix::io::Errno;
    match error.kind() {
        forkdisk::ErrorKind::NoSpace => Errno::NOSPC.raw_os_error(),
        forkdisk::ErrorKind::ReadOnly => Errno::ROFS.raw_os_error(),
        forkdisk::ErrorKind::Invalid => Errno::INVAL.raw_os_error(),
        _ => EIO,
    }
}
