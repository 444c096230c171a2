//! A door is pointed at another volume or snapshot, under its clients.
//!
//! The turnstiles of all its outlets are closed, the requests in flight end, the volume is flushed, the switch is noted
//! for the daemon after a killed one, the outlets show the new volume, and the turnstiles are opened.

use std::rc::Rc;
use std::time::Duration;

use forkdisk::{ErrorKind, VolumeInfo};
use forkdisk_control::{Failure, Switched, params};
use forkdisk_nbd::Export;
use forkdisk_uring::{Closed, Rt};
use forkdisk_vhost_user::ServerHandle as VhostHandle;

use super::devices::Devices;
use super::exchange::Claimed;
use super::exports::Served;
use super::outlets::{Disk, Door, Outlet};
use super::socket_dir::SocketDir;
use super::vhost_sockets::VhostSockets;
use crate::attach;

/// How long requests in flight may take before the switch is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the last answers of the old volume may take to the kernel.
const ARRIVAL: Duration = Duration::from_millis(1);

/// What a switch needs of the daemon.
pub struct Switch {
    pub runtime: Rt,
    pub exports: Served,
    pub devices: Devices,
    pub disks: VhostHandle,
    pub socket_dirs: Vec<SocketDir>,
    pub vhost_sockets: VhostSockets,
}

/// A door, and the volume of its name.
struct Place {
    door: Door,
    /// The volume that it shows unless it was switched; `None` if there is none any more.
    usual: Option<VolumeInfo>,
}

impl Switch {
    pub async fn perform(self, p: params::Switch) -> Result<Switched, Failure> {
        let place = self.place(&p.door)?;
        let door = &place.door;
        let to = self.exports.pool.find(&p.to)?;
        let new = Rc::new(self.exports.disk(to.id)?);
        let from = self.shown_name(&place);
        let devices = self.devices_of(door);
        self.check_devices(door, &devices, &to)?;
        let claimed = Claimed::claim(&door.shown(), devices).await?;

        let mut closed: Vec<(Rc<Outlet>, Closed)> = Vec::new();
        // A client that has come meanwhile has opened the old volume, too.
        loop {
            let all = self.outlets(door);
            let fresh: Vec<_> = all.into_iter().filter(|o| !closed.iter().any(|(old, _)| Rc::ptr_eq(o, old))).collect();
            if fresh.is_empty() && !closed.is_empty() {
                break;
            }
            self.check(door, &fresh, &new)?;
            let count = closed.len();
            for outlet in fresh {
                let turnstile = outlet.turnstile.close().ok_or_else(|| {
                    Failure::new(ErrorKind::Busy, format!("{} is being switched already: try again", door.shown()))
                })?;
                closed.push((outlet, turnstile));
            }
            if closed.is_empty() {
                break;
            }
            self.quiesce(door, &closed[count..]).await?;
        }
        self.check_in_use(door, &new, !closed.is_empty())?;
        self.note(&place, &to)?;
        let name = match door {
            Door::Export(name) if new.export.info().name != *name => Some(name.clone()),
            _ => None,
        };
        let has_other_size = closed.iter().any(|(outlet, _)| outlet.disk().export.size() != new.export.size());
        for (outlet, turnstile) in &closed {
            outlet.show(&new, name.clone());
            turnstile.exchanged();
        }
        let clients = closed.iter().filter(|(outlet, _)| outlet.has_client.get()).count();
        drop(closed);
        if has_other_size {
            self.disks.announce_change(&to.name);
        }
        tracing::info!(door = %door.shown(), from, to = to.name, clients, "switched");
        if claimed.has_any() {
            // Answers that were sent reach the kernel: what it is reading for its cache cannot be dropped.
            self.runtime.sleep_for(ARRIVAL).await;
        }
        claimed.drop_caches().await?;
        Ok(Switched { door: p.door, from, to: to.name, clients })
    }

    /// Finds a door by what a request calls it.
    fn place(&self, text: &str) -> Result<Place, Failure> {
        let pool = &self.exports.pool;
        let export = |name: &str| {
            let (door, usual) = (Door::Export(name.to_string()), pool.find(name).ok());
            let is_there = usual.is_some() || self.exports.outlets.switched(&door).is_some();
            is_there.then_some(Place { door, usual })
        };
        let missing = |what: &str| Failure::new(ErrorKind::NotFound, format!("{text} is {what}"));
        if !text.starts_with('/') {
            return export(text).ok_or_else(|| missing("no volume or snapshot, and so no export"));
        }
        let path = std::path::Path::new(text);
        if self.devices.outlet(text).is_some() {
            return Ok(Place { door: Door::Device(text.to_string()), usual: None });
        }
        if let Some(name) = attach::export_of(path, self.devices.pool_path()) {
            return export(&name).ok_or_else(|| missing("connected to an export that does not exist any more"));
        }
        if let Some(id) = self.vhost_sockets.made_for(path) {
            let usual = self.exports.disk(id).ok().and_then(|disk| pool.find(&disk.export.info().name).ok());
            return Ok(Place { door: Door::Socket(text.to_string()), usual });
        }
        for dir in &self.socket_dirs {
            let Some(volume) = dir.volume_at(path) else { continue };
            return match dir.offers_exports() {
                true => export(&volume).ok_or_else(|| missing("the socket of a volume that is deleted")),
                false => Ok(Place { door: Door::Socket(text.to_string()), usual: pool.find(&volume).ok() }),
            };
        }
        Err(missing(
            "no socket of one volume and no device that this daemon serves; devices of the loop driver cannot be \
             switched: `detach` and `attach` them",
        ))
    }

    fn outlets(&self, door: &Door) -> Vec<Rc<Outlet>> {
        match door {
            Door::Device(path) => self.devices.outlet(path).into_iter().map(|(outlet, _)| outlet).collect(),
            door => self.exports.outlets.of(door),
        }
    }

    /// Returns the name of what a door shows.
    fn shown_name(&self, place: &Place) -> String {
        let switched = self.exports.outlets.switched(&place.door).and_then(|id| self.exports.disk(id).ok());
        let open = || self.outlets(&place.door).first().map(|outlet| outlet.disk().export.info().name);
        let usual = || place.usual.as_ref().map(|info| info.name.clone());
        switched.map(|disk| disk.export.info().name).or_else(open).or_else(usual).unwrap_or_default()
    }

    /// Returns the block devices behind a door; their caches are dropped with a switch.
    fn devices_of(&self, door: &Door) -> Vec<String> {
        match door {
            Door::Device(path) => vec![path.clone()],
            Door::Socket(_) => Vec::new(),
            Door::Export(name) => {
                let devices = attach::devices_of(self.devices.pool_path(), None, name);
                devices.into_iter().map(|device| device.display().to_string()).collect()
            }
        }
    }

    /// Refuses a second device of a volume: each would cache what the other overwrites.
    fn check_devices(&self, door: &Door, devices: &[String], to: &VolumeInfo) -> Result<(), Failure> {
        let Some(device) = devices.first() else { return Ok(()) };
        let others =
            self.devices.of(&to.name, &self.exports.mounts.dirs()).into_iter().find(|other| !devices.contains(other));
        match others {
            Some(other) => {
                let (door, to) = (door.shown(), &to.name);
                let text = format!("{to} is attached already, as {other}; {door} ({device}) would be a second device");
                Err(Failure::new(ErrorKind::Busy, text))
            }
            None => Ok(()),
        }
    }

    /// Refuses a volume that clients cannot take for the one that they have opened.
    fn check(&self, door: &Door, open: &[Rc<Outlet>], new: &Disk) -> Result<(), Failure> {
        let (shown, to) = (door.shown(), new.export.info().name);
        for outlet in open {
            let old = outlet.disk();
            let (size, new_size) = (old.export.size(), new.export.size());
            let learns = matches!(door, Door::Socket(_)) && self.disks.learn_of_changes(&old.export.info().name);
            if size != new_size && !learns {
                let text = format!(
                    "{to} has {new_size} bytes, and the clients of {shown} have opened a disk of {size}, which they \
                     cannot be told to be of another size: `forkdisk resize` makes both of one size"
                );
                return Err(Failure::new(ErrorKind::Busy, text));
            }
            let reads_only = old.read_only || matches!(door, Door::Device(path) if self.device_is_read_only(path));
            if new.read_only && !reads_only {
                let text = format!(
                    "{to} cannot be written, and the clients of {shown} have opened a disk that can: clone it, and \
                     switch to the clone"
                );
                return Err(Failure::new(ErrorKind::Busy, text));
            }
        }
        self.check_in_use(door, new, !open.is_empty())
    }

    fn device_is_read_only(&self, path: &str) -> bool {
        self.devices.outlet(path).is_some_and(|(_, read_only)| read_only)
    }

    /// Refuses a second virtual machine on a disk.
    fn check_in_use(&self, door: &Door, new: &Disk, has_clients: bool) -> Result<(), Failure> {
        let to = new.export.info().name;
        let is_own = |outlet: &Rc<Outlet>| outlet.disk().id == new.id;
        if !matches!(door, Door::Socket(_)) || !has_clients || self.outlets(door).iter().any(is_own) {
            return Ok(());
        }
        if self.disks.clients().iter().any(|client| client.disk == to) {
            let text = format!("{to} is the disk of a virtual machine already, by another socket");
            return Err(Failure::new(ErrorKind::Busy, text));
        }
        Ok(())
    }

    /// Waits for the requests in flight, and makes durable what they have written and what was written before.
    async fn quiesce(&self, door: &Door, closed: &[(Rc<Outlet>, Closed)]) -> Result<(), Failure> {
        let ended = async {
            for (_, turnstile) in closed {
                turnstile.emptied().await;
            }
        };
        if self.runtime.timeout(PATIENCE, ended).await.is_err() {
            let text = format!("requests to {} have not ended within {PATIENCE:?}: it is as it was", door.shown());
            return Err(Failure::new(ErrorKind::Busy, text));
        }
        let Some((outlet, _)) = closed.first().filter(|(outlet, _)| !outlet.disk().read_only) else { return Ok(()) };
        let flushed = outlet.disk().export.flush().await;
        flushed
            .map_err(|error| Failure::new(error.kind(), format!("flushing what {} has shown: {error}", door.shown())))
    }

    /// Notes the switch for the next daemon, if this one is killed.
    fn note(&self, place: &Place, to: &VolumeInfo) -> Result<(), Failure> {
        let noted = match &place.door {
            Door::Device(path) => self.devices.note_switched(path, &to.name),
            door => {
                let is_usual = place.usual.as_ref().is_some_and(|usual| usual.id == to.id);
                self.exports.outlets.record(door, (!is_usual).then_some(to.id))
            }
        };
        noted.map_err(|error| Failure::file("noting the switch for the next daemon", error))
    }
}
