//! Processes that run beside a benchmark. They end with it, also when it fails or is told to end. Ctrl-C does not reach
//! them: a mount that ended by itself could not be told from one that cannot be removed.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::bare::cpu_of;
use crate::ending::{Thing, Undoable};
use crate::limits::{LIMIT, LimitedWait as _};

/// How long a process may take to start.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long one that is not needed any more may take to end by itself: its mounts go with it.
const FAREWELL: Duration = Duration::from_secs(5);
/// Interval at which readiness is checked.
const PAUSE: Duration = Duration::from_millis(20);

/// A running process, ended when dropped.
pub struct Process {
    child: Child,
    name: String,
    _undoable: Undoable,
}

impl Process {
    /// Starts a process and waits until `is_ready`.
    pub fn start(mut command: Command, is_ready: impl Fn() -> Result<bool>) -> Result<Process> {
        let name = command.get_program().to_string_lossy().into_owned();
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let child = quiet.spawn().with_context(|| format!("starting {name}"))?;
        let undoable = Undoable::new(Thing::Process(Pid::from_child(&child)));
        let mut process = Process { child, name, _undoable: undoable };
        let start = Instant::now();
        while !is_ready()? {
            ensure!(start.elapsed() < PATIENCE, "{} does not come up", process.name);
            if let Some(status) = process.child.try_wait()? {
                bail!("{} ended with {status}", process.name);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(process)
    }

    /// Returns its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the seconds of CPU that it has used, including ended threads.
    pub fn cpu(&self) -> Result<f64> {
        let cpu = cpu_of(self.id()).with_context(|| format!("the CPU time of {}", self.name))?;
        Ok(cpu.as_secs_f64())
    }

    /// Ends it by SIGTERM.
    pub fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let status = self.child.wait_within(LIMIT)?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Each fails if it has ended already.
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            let _ = self.child.wait_within(FAREWELL);
            let _ = self.child.put_down();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_ends_too_early_is_an_error_and_one_that_is_dropped_ends() {
        let shell = |script: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]);
            shell
        };
        let error = Process::start(shell("exit 3"), || Ok(false)).err().unwrap().to_string();
        assert!(error.contains("ended with"), "{error}");
        let process = Process::start(shell("exec sleep 600"), || Ok(true)).unwrap();
        let pid = process.id();
        assert!(process.cpu().unwrap() < 1.0);
        drop(process);
        assert!(cpu_of(pid).is_err());
    }
}
