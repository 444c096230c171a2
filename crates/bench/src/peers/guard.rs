//! A process between a benchmark and a guest. The guest's own processes would outlive it if only it
//! is killed, and a benchmark may end at any moment (Ctrl-C, a time limit): so this process holds
//! the other end of the benchmark's pipe, and when that closes it kills all its descendants. It
//! runs in a separate process group, which Ctrl-C does not reach.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, stdin};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio, exit};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, getpid, kill_process, set_child_subreaper};

/// How long killed processes may take to disappear.
const PATIENCE: Duration = Duration::from_secs(20);
/// Clock ticks per second in `/proc`; the same on all Linux systems that support io_uring.
const TICKS: f64 = 100.0;

/// `FOLDER PROGRAM ARGUMENTS…`: runs the program and exits with its result. If the benchmark ends
/// before that, removes FOLDER.
pub fn run(arguments: &[OsString]) -> Result<()> {
    let [folder, program, rest @ ..] = arguments else { anyhow::bail!("a folder and a program are needed") };
    // Orphaned descendants become children of this process, and are found.
    set_child_subreaper(Some(getpid())).context("becoming the parent of orphans")?;
    let aborted = PathBuf::from(folder);
    let mut child = Command::new(program).args(rest).stdin(Stdio::null()).spawn();
    thread::spawn(move || {
        let _ = stdin().read_to_end(&mut Vec::new());
        end();
        let _ = fs::remove_dir_all(&aborted);
        exit(1);
    });
    let status: Result<ExitStatus> = match &mut child {
        Ok(child) => child.wait().context("waiting for the guest"),
        Err(_) => child.map(|_| unreachable!("it was not started")).with_context(|| program.display().to_string()),
    };
    end();
    exit(status?.code().unwrap_or(1));
}

/// Kills all descendants of this process.
fn end() {
    // A process in a request to a hanging device cannot be killed.
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let all = descendants(getpid());
        if all.is_empty() {
            break;
        }
        for pid in all {
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns all running descendants of `of`.
fn descendants(of: Pid) -> Vec<Pid> {
    let processes: Vec<(Pid, Pid)> = living();
    let (mut found, mut next) = (Vec::new(), vec![of]);
    while let Some(parent) = next.pop() {
        let children = processes.iter().filter(|&&(_, its)| its == parent).map(|&(pid, _)| pid);
        let before = found.len();
        found.extend(children);
        next.extend(&found[before..]);
    }
    found
}

/// Returns all running processes with their parents.
fn living() -> Vec<(Pid, Pid)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let parse = |entry: fs::DirEntry| {
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        let fields = stat(pid)?;
        let parent = Pid::from_raw(fields.get(1)?.parse().ok()?)?;
        (fields[0] != "Z").then_some((pid, parent))
    };
    entries.flatten().filter_map(parse).collect()
}

/// Returns the fields of `/proc/PID/stat` from the state on.
fn stat(pid: Pid) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name, in brackets, may contain any characters.
    Some(text.rsplit_once(')')?.1.split_whitespace().map(String::from).collect())
}

/// Returns the seconds of CPU of all descendants of a process, including ended ones.
pub fn cpu_below(process: u32) -> f64 {
    let Some(of) = Pid::from_raw(process as i32) else { return 0.0 };
    let ticks = |pid: Pid| -> u64 {
        // utime, stime, and the same of children that were waited for.
        stat(pid).map_or(0, |fields| fields.iter().skip(11).take(4).filter_map(|f| f.parse::<u64>().ok()).sum())
    };
    descendants(of).into_iter().map(ticks).sum::<u64>() as f64 / TICKS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_of_a_child_is_found_and_one_that_ended_is_not() {
        let mut child = Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let below = loop {
            let below = descendants(pid);
            if !below.is_empty() {
                break below;
            }
            thread::yield_now();
        };
        assert!(descendants(getpid()).contains(&below[0]));
        below.iter().chain([&pid]).for_each(|&pid| kill_process(pid, Signal::KILL).unwrap());
        child.wait().unwrap();
        assert!(!living().iter().any(|&(process, _)| process == pid));
    }
}
