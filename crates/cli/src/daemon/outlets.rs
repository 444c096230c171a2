//! What clients have open, and by which door: so that a door can be pointed at another volume under them.
//!
//! A door is an NBD export, a socket of one disk for virtual machines, or a block device. Doors that show another
//! volume than that of their name are kept in a file in memory, which outlives the daemon: a client that connects again
//! must not find another disk.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};

use forkdisk::{Pool, VolumeId};
use forkdisk_control::runtime_dir;
use forkdisk_nbd::{Export, PoolContext, PoolExport};
use forkdisk_uring::{Turnstile, UringDevice};
use serde::{Deserialize, Serialize};

use crate::host;

/// Prefix of the name of the file; the rest identifies the file or device of the pool.
const NAME: &str = "switched";

/// A way by which clients use a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Door {
    /// An NBD export, by its name.
    Export(String),
    /// The socket of a disk of a virtual machine, by its path.
    Socket(String),
    /// A device of the ublk driver, by its path.
    Device(String),
}

impl Door {
    /// Returns it as messages name it.
    pub fn shown(&self) -> String {
        match self {
            Door::Export(name) => format!("the export {name}"),
            Door::Socket(path) | Door::Device(path) => path.clone(),
        }
    }
}

/// An open volume or snapshot.
pub struct Disk {
    pub export: PoolExport<UringDevice>,
    pub id: VolumeId,
    pub serial: [u8; SERIAL_BYTES],
    pub read_only: bool,
}

/// Bytes of a serial number.
pub const SERIAL_BYTES: usize = 20;

/// A metadata context, by its name; `None` if the disk that is shown now has none of this name.
pub struct NamedContext {
    name: String,
    /// Through which it was opened, which may be another one than that of its client: it follows switches of the door.
    _outlet: Rc<Outlet>,
    open: RefCell<Option<Rc<PoolContext<UringDevice>>>>,
}

impl NamedContext {
    /// Returns it as it is now.
    pub fn now(&self) -> Option<Rc<PoolContext<UringDevice>>> {
        self.open.borrow().clone()
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// What one client has open.
pub struct Outlet {
    by: By,
    pub turnstile: Rc<Turnstile>,
    /// A client, or a device, has it open; else it is kept by contexts.
    pub has_client: Cell<bool>,
    disk: RefCell<Rc<Disk>>,
    /// The name of the export while it shows another disk than that of this name.
    switched: RefCell<Option<String>>,
    contexts: RefCell<Vec<Weak<NamedContext>>>,
}

/// The kind of an outlet's door.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum By {
    Export,
    Socket(String),
    Device,
}

impl Outlet {
    /// Returns the disk that it shows.
    pub fn disk(&self) -> Rc<Disk> {
        self.disk.borrow().clone()
    }

    /// Returns the name by which clients find it.
    pub fn name(&self) -> String {
        let switched = self.switched.borrow().clone();
        switched.unwrap_or_else(|| self.disk().export.info().name)
    }

    /// Opens a context of the disk.
    pub fn context(self: &Rc<Self>, name: &str) -> Option<Rc<NamedContext>> {
        let open = RefCell::new(Some(Rc::new(self.disk().export.context(name)?)));
        let context = Rc::new(NamedContext { name: name.to_string(), _outlet: self.clone(), open });
        let mut contexts = self.contexts.borrow_mut();
        contexts.retain(|context| context.strong_count() > 0);
        contexts.push(Rc::downgrade(&context));
        Some(context)
    }

    /// Shows another disk. `switched`: under this name, which is not its own.
    pub fn show(&self, disk: &Rc<Disk>, switched: Option<String>) {
        *self.switched.borrow_mut() = switched;
        *self.disk.borrow_mut() = disk.clone();
        for context in self.contexts.borrow().iter().filter_map(Weak::upgrade) {
            *context.open.borrow_mut() = disk.export.context(&context.name).map(Rc::new);
        }
    }

    fn is_of(&self, door: &Door) -> bool {
        match (&self.by, door) {
            (By::Export, Door::Export(name)) => self.name() == *name,
            (By::Socket(path), Door::Socket(other)) => path == other,
            _ => false,
        }
    }
}

/// All outlets of a daemon, and the doors that were switched. Clones share their state.
#[derive(Clone, Default)]
pub struct Outlets(Rc<Inner>);

#[derive(Default)]
struct Inner {
    open: RefCell<Vec<Weak<Outlet>>>,
    switched: RefCell<Switched>,
    file: PathBuf,
}

/// The volumes of doors that were switched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Switched {
    /// The boot of the machine, which ends all switches.
    boot: [u8; 16],
    exports: BTreeMap<String, u64>,
    sockets: BTreeMap<String, u64>,
}

impl Outlets {
    /// Reads what daemons before have switched. Call it while this process has the lock of the pool at `path`.
    pub fn open(path: &Path, uuid: &[u8; 16]) -> Outlets {
        let identity = runtime_dir::file_identity(path).unwrap_or_default().replace(':', "-");
        let mut folders = runtime_dir::folders_in_memory(uuid).into_iter();
        let folder = folders.find(|folder| runtime_dir::make_private(folder).is_ok()).unwrap_or_default();
        let file = folder.join(format!("{NAME}-{identity}"));
        let boot = host::boot_id().unwrap_or_default();
        let found = fs::read(&file).ok().and_then(|bytes| serde_json::from_slice::<Switched>(&bytes).ok());
        let switched = found.filter(|found| found.boot == boot).unwrap_or(Switched { boot, ..Switched::default() });
        // Fails if there is a file in it.
        let _ = fs::remove_dir(&folder);
        for (door, id) in switched.exports.iter().chain(&switched.sockets) {
            tracing::warn!("{door} was switched: it shows the volume with the number {id}");
        }
        Outlets(Rc::new(Inner { open: RefCell::default(), switched: RefCell::new(switched), file }))
    }

    /// Opens an outlet.
    pub fn add(&self, by: By, disk: Disk, switched: Option<String>) -> Rc<Outlet> {
        let (disk, switched) = (RefCell::new(Rc::new(disk)), RefCell::new(switched));
        let (turnstile, has_client, contexts) = (Rc::default(), Cell::new(true), RefCell::default());
        let outlet = Rc::new(Outlet { by, turnstile, has_client, disk, switched, contexts });
        let mut open = self.0.open.borrow_mut();
        open.retain(|outlet| outlet.strong_count() > 0);
        open.push(Rc::downgrade(&outlet));
        outlet
    }

    /// Returns the outlets of a door.
    pub fn of(&self, door: &Door) -> Vec<Rc<Outlet>> {
        self.0.open.borrow().iter().filter_map(Weak::upgrade).filter(|outlet| outlet.is_of(door)).collect()
    }

    /// Returns the volume that a door was switched to.
    pub fn switched(&self, door: &Door) -> Option<VolumeId> {
        let switched = self.0.switched.borrow();
        let found = match door {
            Door::Export(name) => switched.exports.get(name),
            Door::Socket(path) => switched.sockets.get(path),
            Door::Device(_) => None,
        };
        found.copied().map(VolumeId)
    }

    /// Records that a door shows the volume `to`, or that of its name. The file has it when this returns.
    pub fn record(&self, door: &Door, to: Option<VolumeId>) -> io::Result<()> {
        let mut changed = self.0.switched.borrow().clone();
        let (all, name) = match door {
            Door::Export(name) => (&mut changed.exports, name),
            Door::Socket(path) => (&mut changed.sockets, path),
            Door::Device(_) => return Ok(()),
        };
        match to {
            Some(id) => all.insert(name.clone(), id.0),
            None => all.remove(name),
        };
        if changed == *self.0.switched.borrow() {
            return Ok(());
        }
        self.write(&changed)?;
        *self.0.switched.borrow_mut() = changed;
        Ok(())
    }

    fn write(&self, switched: &Switched) -> io::Result<()> {
        let Some(folder) = self.0.file.parent() else { return Err(io::ErrorKind::NotFound.into()) };
        if switched.exports.is_empty() && switched.sockets.is_empty() {
            return match fs::remove_file(&self.0.file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        runtime_dir::make_private(folder)?;
        replace(&self.0.file, &serde_json::to_vec(switched)?)
    }
}

/// Gives a file other contents, all of them or none.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, bytes)?;
    fs::rename(&new, path)
}

/// Opens a volume or snapshot by its number.
pub fn open_disk(pool: &Pool<UringDevice>, uuid: &[u8; 16], id: VolumeId) -> forkdisk::Result<Disk> {
    let export = PoolExport::new(pool, pool.volume_by_id(id)?);
    let read_only = export.info().read_only;
    Ok(Disk { export, id, serial: serial(uuid, id), read_only })
}

/// Returns the serial number of a disk: the pool's identity and the number of the volume, which never changes.
fn serial(uuid: &[u8; 16], id: VolumeId) -> [u8; SERIAL_BYTES] {
    let pool_part: String = uuid[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    let text = format!("{pool_part}-{:x}", id.0);
    let mut serial = [0; SERIAL_BYTES];
    let len = text.len().min(SERIAL_BYTES);
    serial[..len].copy_from_slice(&text.as_bytes()[..len]);
    serial
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_switched_outlives_the_daemon_until_it_is_switched_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("switched-1");
        let outlets = || {
            let found = fs::read(&file).map(|bytes| serde_json::from_slice(&bytes).unwrap()).unwrap_or_default();
            let (open, switched) = (RefCell::default(), RefCell::new(found));
            Outlets(Rc::new(Inner { open, switched, file: file.clone() }))
        };
        let (export, socket) = (Door::Export("a/b".to_string()), Door::Socket("/run/a.sock".to_string()));
        outlets().record(&export, Some(VolumeId(7))).unwrap();
        outlets().record(&socket, Some(VolumeId(8))).unwrap();
        let again = outlets();
        assert_eq!((again.switched(&export), again.switched(&socket)), (Some(VolumeId(7)), Some(VolumeId(8))));
        again.record(&export, None).unwrap();
        assert_eq!((outlets().switched(&export), outlets().switched(&socket)), (None, Some(VolumeId(8))));
        again.record(&socket, None).unwrap();
        assert!(!file.exists());
        again.record(&socket, None).unwrap();
        again.record(&Door::Device("/dev/ublkb0".to_string()), Some(VolumeId(1))).unwrap();
        assert!(!file.exists(), "the kernel and the note of the device have it");
    }
}
