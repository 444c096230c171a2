//! A pool mounted by the real program, for one test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{
    LIMIT, Lab, Limited, LimitedWait, PATIENCE, POOL, client, first_line, missing, succeed, wait_at_most, wait_until,
};

/// `forkdisk mount` on a lab's pool. Removed when dropped.
pub struct Mounted {
    child: Option<Child>,
    dir: PathBuf,
}

impl Mounted {
    /// Mounts the pool; `None` (after saying why) if FUSE is not available.
    #[track_caller]
    pub fn new(lab: &Lab) -> Option<Mounted> {
        Mounted::with(lab, &[])
    }

    /// As [`new`](Self::new), with further arguments.
    #[track_caller]
    pub fn with(lab: &Lab, args: &[&str]) -> Option<Mounted> {
        if !Path::new("/dev/fuse").exists() {
            missing("/dev/fuse does not exist: load the kernel module fuse");
            return None;
        }
        client("fusermount3", "fuse3")?;
        let dir = lab.path("mnt");
        fs::create_dir_all(&dir).unwrap();
        let program = lab.command(&[&["mount", POOL, "mnt"], args].concat());
        // If the test fails, the kernel ends its server.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program.get_program()).args(program.get_args());
        command.current_dir(lab.path("")).env_remove("FORKDISK_POOL").env_remove("FORKDISK_LOG");
        let log = File::options().create(true).append(true).open(lab.path("mount.log")).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn().expect("setpriv");
        let ready = first_line(child.stdout.take().unwrap(), PATIENCE).unwrap_or_else(|e| format!("{e}"));
        let said = || fs::read_to_string(lab.path("mount.log")).unwrap_or_default();
        assert!(ready.contains("is mounted on"), "not mounted: {ready:?} {}", said());
        Some(Mounted { child: Some(child), dir })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of a file in the mount.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Unmounts with `forkdisk umount`: when that has ended, the pool is closed.
    #[track_caller]
    pub fn unmount(mut self, lab: &Lab) {
        lab.ok(&["umount", "mnt"]);
        self.wait();
    }

    /// Ends the server by SIGTERM.
    #[track_caller]
    pub fn terminate(mut self) {
        kill_process(Pid::from_child(self.child.as_ref().unwrap()), Signal::TERM).unwrap();
        self.wait();
    }

    #[track_caller]
    fn wait(&mut self) {
        let status = wait_at_most(&mut self.child.take().unwrap(), PATIENCE);
        assert!(status.success(), "the server ended with {status}");
    }

    /// Stops the server's process, so that it answers no requests.
    pub fn pause(&self) {
        kill_process(Pid::from_child(self.child.as_ref().unwrap()), Signal::STOP).unwrap();
    }

    /// Kills the server, as a crash would. The mount stays until this is dropped, so that every
    /// access fails and does not reach the folder below it.
    pub fn kill(&mut self) {
        let child = self.child.as_mut().unwrap();
        if let Err(error) = child.put_down() {
            // Processes that wait for the mount would hang the test, too.
            self.abort();
            panic!("{error}");
        }
    }

    /// Removes the mount of a killed server; it is not in use for long.
    #[track_caller]
    pub fn release(mut self) {
        assert!(self.child.take().is_some_and(|mut child| child.try_wait().unwrap().is_some()), "it was not killed");
        wait_until("the mount is released", || {
            let mut unmount = client("fusermount3", "fuse3").unwrap();
            unmount.arg("-u").arg(&self.dir).output_within(LIMIT).unwrap().status.success()
        });
    }

    /// Makes the kernel end the connection, whichever process holds it.
    fn abort(&self) {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let place = self.dir.to_str().unwrap();
        let numbers = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        for words in numbers.filter(|words| words.get(4) == Some(&place)) {
            let number = words[2].trim_start_matches("0:");
            let _ = fs::write(format!("/sys/fs/fuse/connections/{number}/abort"), "1");
        }
    }

    fn detach(&self) {
        if let Some(mut unmount) = client("fusermount3", "fuse3") {
            let _ = unmount.args(["-u", "-q", "-z"]).arg(&self.dir).output_within(LIMIT);
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // A failed test may have left files open.
        let _ = child.put_down();
        self.detach();
    }
}

/// Runs a shell script in the mount; returns its output.
#[track_caller]
pub fn sh(mount: &Mounted, script: &str) -> String {
    let mut shell = Command::new("bash");
    succeed(shell.args(["-euo", "pipefail", "-c", script]).current_dir(mount.dir()))
}

/// Runs a Python script in the mount; returns its output.
#[track_caller]
pub fn python(mount: &Mounted, script: &str) -> Option<String> {
    let mut python = client("python3", "python3")?;
    Some(succeed(python.args(["-c", script]).current_dir(mount.dir())))
}
