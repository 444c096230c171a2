//! Cleanup when a benchmark is told to end (Ctrl-C, SIGTERM, SIGHUP): mounts, loop devices, processes,
//! folders. A process that waits for a file system that it serves itself cannot be killed, and
//! blocks every `sync` of the machine: so such mounts are removed by force first.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;

use forkdisk_uring::{abandon_loop, detach_loop};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// An object to remove.
#[derive(Clone, Debug, PartialEq)]
pub enum Thing {
    /// A mount point.
    Mount(PathBuf),
    /// A loop device.
    Loop(PathBuf),
    /// A started process that was not waited for.
    Process(Pid),
    /// A folder with its contents.
    Folder(PathBuf),
}

impl Thing {
    /// Returns the order of removal: calls that wait for a mount of this process must end before anything else.
    fn turn(&self) -> u8 {
        match self {
            Thing::Mount(_) => 0,
            // A loop device can be detached when nothing has it open.
            Thing::Process(_) => 1,
            Thing::Loop(_) => 2,
            Thing::Folder(_) => 3,
        }
    }

    /// Removes the object, as far as that is possible.
    fn undo(&self) {
        match self {
            Thing::Mount(dir) => drop(unmount(dir, UnmountFlags::FORCE | UnmountFlags::DETACH)),
            // Its file may have gone with the server.
            Thing::Loop(device) => drop(detach_loop(device).or_else(|_| abandon_loop(device))),
            Thing::Process(pid) => drop(kill_process(*pid, Signal::KILL)),
            Thing::Folder(dir) => drop(fs::remove_dir_all(dir)),
        }
    }
}

/// Existing objects, in the order of creation.
static THINGS: Mutex<Vec<Thing>> = Mutex::new(Vec::new());

fn things() -> MutexGuard<'static, Vec<Thing>> {
    THINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While this lives, its object is removed if the benchmark is told to end.
pub struct Undoable(Thing);

impl Undoable {
    /// Registers `thing`; called before it is created, or immediately afterwards if it only then has a name.
    pub fn new(thing: Thing) -> Undoable {
        static WATCHED: Once = Once::new();
        WATCHED.call_once(watch);
        things().push(thing.clone());
        Undoable(thing)
    }
}

impl Drop for Undoable {
    fn drop(&mut self) {
        let mut things = things();
        if let Some(i) = things.iter().rposition(|thing| *thing == self.0) {
            things.remove(i);
        }
    }
}

/// Starts a thread that waits for signals. Without it they end the process as usual.
fn watch() {
    if let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) {
        thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                // Blocks further registrations.
                let things = things();
                undo(&things);
                let _ = emulate_default_handler(signal);
            }
        });
    }
}

/// Removes the newest objects first. A folder stays while a file system is mounted in it: the
/// files there are not its own.
fn undo(things: &[Thing]) {
    let mut all: Vec<&Thing> = things.iter().rev().collect();
    all.sort_by_key(|thing| thing.turn());
    for thing in all {
        if let Thing::Folder(dir) = thing {
            // One that appeared when its registered mount was not there yet.
            for mounted in mounted_below(dir) {
                let _ = unmount(&mounted, UnmountFlags::FORCE | UnmountFlags::DETACH);
            }
            if !mounted_below(dir).is_empty() {
                continue;
            }
        }
        thing.undo();
    }
}

/// Returns the mount points in a folder, the newest first.
fn mounted_below(dir: &Path) -> Vec<PathBuf> {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let places = table.lines().rev().filter_map(|line| line.split(' ').nth(4));
    places.map(|place| PathBuf::from(place.replace("\\040", " "))).filter(|place| place.starts_with(&dir)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_also_if_a_mount_in_it_has_gone_before() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.join("mnt")).unwrap();
            path
        };
        let (plain, unmounted) = (folder("plain"), folder("unmounted"));
        let mount = Thing::Mount(unmounted.join("mnt"));
        undo(&[Thing::Folder(plain.clone()), Thing::Folder(unmounted.clone()), mount]);
        assert!(!plain.exists() && !unmounted.exists());
    }

    #[test]
    fn mount_points_are_found_by_their_folder() {
        assert!(mounted_below(Path::new("/")).contains(&PathBuf::from("/proc")));
        assert_eq!(mounted_below(Path::new("/proc/self/fd")), Vec::<PathBuf>::new());
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let thing = |name: &str| Thing::Folder(PathBuf::from("/nowhere").join(name));
        let (first, second) = (Undoable::new(thing("first")), Undoable::new(thing("second")));
        let has = |name: &str| things().contains(&thing(name));
        assert!(has("first") && has("second"));
        drop(first);
        assert!(!has("first") && has("second"));
        drop(second);
        assert!(!has("second"));
    }
}
