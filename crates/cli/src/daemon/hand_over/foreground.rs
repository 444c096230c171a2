//! A daemon in the foreground keeps its process number over upgrades: the first process waits for the end of the one
//! that serves, passes on signals, and ends with the same status.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use forkdisk_uring::{Config, Rt, block_on};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, kill_process, set_child_subreaper, set_parent_process_death_signal, wait,
};

use super::first_process;
use crate::owner;

/// Exit status of a process that a signal ended, less the signal's number.
const SIGNALLED_STATUS: i32 = 128;
/// Interval at which the end of the last process is looked for.
const LOOK: Duration = Duration::from_millis(20);
const RING_ENTRIES: u32 = 8;

/// Makes the child of a child a child of this process when the one between has ended. Undone with `false`.
pub(super) fn keep_descendants(keep: bool) -> Result<()> {
    set_child_subreaper(keep.then(getpid)).context("keeping processes of later upgrades")
}

/// Waits for the end of all children, those of later upgrades included, but for keepers and helpers of mounts. Returns
/// the status of the last one.
pub fn wait_for_children() -> Result<ExitCode> {
    let mut config = Config::default();
    config.entries = RING_ENTRIES;
    config.buffers.clear();
    block_on(config, |runtime| async move {
        let forwarded = [Signal::TERM, Signal::INT, Signal::HUP];
        let wanted: Vec<i32> = forwarded.iter().chain([&Signal::CHILD]).map(|signal| signal.as_raw()).collect();
        let signals = runtime.signals(&wanted)?;
        let mut status = 0;
        // The last signal that was passed on, and to which processes.
        let mut sent: (Option<Signal>, Vec<Pid>) = (None, Vec::new());
        loop {
            loop {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some((_, ended))) => {
                        let signal = ended.terminating_signal().map(|signal| SIGNALLED_STATUS + signal);
                        status = ended.exit_status().or(signal).unwrap_or(status);
                    }
                    Ok(None) if !children().is_empty() => break,
                    Ok(None) | Err(Errno::CHILD) => return Ok(ExitCode::from(u8::try_from(status).unwrap_or(1))),
                    Err(error) => return Err(error).context("waiting for the process that serves"),
                }
            }
            let signal = signals.recv().await.context("signals cannot be received")?;
            if let Some(signal) = forwarded.iter().find(|forwarded| forwarded.as_raw() == signal) {
                sent = (Some(*signal), Vec::new());
            }
            // Also to a process that has become a child since: the one before may have ignored the signal.
            for child in children().into_iter().filter(|child| !sent.1.contains(child)).collect::<Vec<_>>() {
                if let Some(signal) = sent.0 {
                    // It may have ended.
                    let _ = kill_process(child, signal);
                    sent.1.push(child);
                }
            }
            if sent.0 == Some(Signal::HUP) {
                sent.0 = None;
            }
        }
    })?
}

/// Returns the children of this process that serve, which keepers and helpers of mounts do not.
fn children() -> Vec<Pid> {
    let own = getpid();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_child = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // After the name, which may contain anything: the state and the parent.
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse::<i32>().ok());
        parent == Some(own.as_raw_nonzero().get())
    };
    let serves = |pid: &i32| ["keeper", "on-mount"].iter().all(|verb| !owner::is_verb(pid.unsigned_abs(), verb));
    pids.filter(is_child).filter(serves).filter_map(Pid::from_raw).collect()
}

/// Ends this process as the kernel would if the first process of a daemon in the foreground is killed. `before`: the
/// process from which this one took over, its parent until that ends. The first process is the parent afterwards.
pub async fn follow_first(runtime: Rt, before: Option<Pid>) {
    let first = Some(first_process());
    while getppid() != first && before.is_some() && getppid() == before {
        runtime.sleep_for(LOOK).await;
    }
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        tracing::debug!(%error, "a kill of the first process does not end this one");
    }
    // It was killed before the kernel had been told to watch it.
    if getppid() != first {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}
