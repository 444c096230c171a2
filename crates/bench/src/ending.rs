//! What is undone when a benchmark is told to end (Ctrl-C, SIGTERM, SIGHUP): mounts, loop devices, folders. A
//! process that waits for an answer of a file system that it serves itself cannot be killed, and holds up every
//! `sync` of the machine: so such a mount is taken away by force first.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;

use forkdisk_uring::detach_loop;
use rustix::mount::{UnmountFlags, unmount};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Something to undo.
#[derive(Clone, Debug, PartialEq)]
pub enum Thing {
    /// A file system is mounted here.
    Mount(PathBuf),
    /// A loop device.
    Loop(PathBuf),
    /// A folder and what is in it.
    Folder(PathBuf),
}

impl Thing {
    /// In which turn it is undone: whatever waits for a mount of this process has to be let go before anything else.
    fn turn(&self) -> u8 {
        match self {
            Thing::Mount(_) => 0,
            Thing::Loop(_) => 1,
            Thing::Folder(_) => 2,
        }
    }

    /// False: it is still there.
    fn undo(&self) -> bool {
        match self {
            Thing::Mount(dir) => unmount(dir, UnmountFlags::FORCE | UnmountFlags::DETACH).is_ok(),
            Thing::Loop(device) => detach_loop(device).is_ok(),
            Thing::Folder(dir) => fs::remove_dir_all(dir).is_ok(),
        }
    }
}

/// What there is now, in the order in which it was made.
static THINGS: Mutex<Vec<Thing>> = Mutex::new(Vec::new());

fn things() -> MutexGuard<'static, Vec<Thing>> {
    THINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As long as this lives, its thing is undone if the benchmark is told to end.
pub struct Undoable(Thing);

impl Undoable {
    /// To be called before `thing` is made, or at once after it, where only then it has a name.
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

/// A thread that waits for signals. Without it they end the process as ever.
fn watch() {
    if let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) {
        thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                // Nothing is made any more while this is held.
                let things = things();
                undo(&things);
                let _ = emulate_default_handler(signal);
            }
        });
    }
}

/// What was made last goes first. A folder stays while something is mounted in it: its contents are not its own then.
fn undo(things: &[Thing]) {
    let mut stays: Vec<&Path> = Vec::new();
    let mut all: Vec<&Thing> = things.iter().rev().collect();
    all.sort_by_key(|thing| thing.turn());
    for thing in all {
        let is_in = |dir: &Path| stays.iter().any(|mounted| mounted.starts_with(dir));
        if matches!(thing, Thing::Folder(dir) if is_in(dir)) {
            continue;
        }
        if let (false, Thing::Mount(dir)) = (thing.undo(), thing) {
            stays.push(dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_unless_something_may_be_mounted_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.join("mnt")).unwrap();
            path
        };
        let (plain, mounted) = (folder("plain"), folder("mounted"));
        // Nothing is mounted there, so that it cannot be unmounted.
        let all = [Thing::Folder(plain.clone()), Thing::Folder(mounted.clone()), Thing::Mount(mounted.join("mnt"))];
        undo(&all);
        assert!(!plain.exists() && mounted.exists());
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
