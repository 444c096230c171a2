//! The process that freezes file systems and thaws them: when it is told to, when its parent
//! process ends, and at the latest when its time limit is reached.
//!
//! A byte or the end of its standard input tells it to thaw. It prints lines on standard output: for each file system
//! in turn `frozen`, `busy` (frozen by another program), or the number of the error; and at the end `held` or `late`.
//! It opens nothing after the first freeze and leaves its folder, so it needs nothing on the frozen file systems.

use std::fs::File;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forkdisk_uring::{freeze, thaw};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::syncfs;

pub const FROZEN: &str = "frozen";
pub const BUSY: &str = "busy";
pub const HELD: &str = "held";

/// Frozen file systems, and whether they are to be thawed.
#[derive(Default)]
struct State {
    frozen: Vec<usize>,
    since: Option<Instant>,
    is_over: bool,
}

/// Freezes the file systems of `files` and holds them for `limit` at most.
pub fn hold(files: Vec<File>, limit: Duration) -> Result<()> {
    // An interrupt key that ends the parent must not end this process.
    let _ = rustix::process::setsid();
    std::env::set_current_dir("/").context("leaving the folder")?;
    // Writes most data now, while writers need not wait yet. A failure here occurs again below.
    for file in &files {
        let _ = syncfs(file);
    }
    let (files, state) = (Arc::new(files), Arc::new(Mutex::new(State::default())));
    let freezing = (files.clone(), state.clone());
    std::thread::spawn(move || freeze_all(&freezing.0, &freezing.1));
    let is_late = wait_for_end(&state, limit);
    let frozen = {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_over = true;
        std::mem::take(&mut state.frozen)
    };
    for &index in frozen.iter().rev() {
        let _ = thaw(&files[index]);
    }
    say(if is_late { "late" } else { HELD });
    Ok(())
}

/// Returns whether the limit was reached before the parent wrote something or ended.
fn wait_for_end(state: &Mutex<State>, limit: Duration) -> bool {
    const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let input = io::stdin();
    loop {
        let told = poll(&mut [PollFd::new(&input, PollFlags::IN)], Some(&LOOK));
        if told.is_ok_and(|told| told > 0) {
            return false;
        }
        let since = state.lock().unwrap_or_else(PoisonError::into_inner).since;
        if since.is_some_and(|since| since.elapsed() >= limit) {
            return true;
        }
    }
}

fn freeze_all(files: &[File], state: &Mutex<State>) {
    for (index, file) in files.iter().enumerate() {
        let outcome = freeze(file);
        {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.is_over {
                if outcome.is_ok() {
                    let _ = thaw(file);
                }
                return;
            }
            if outcome.is_ok() {
                state.frozen.push(index);
                state.since.get_or_insert_with(Instant::now);
            }
        }
        match outcome {
            Ok(()) => say(FROZEN),
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => say(BUSY),
            Err(e) => say(&e.raw_os_error().unwrap_or_default().to_string()),
        }
    }
}

/// Prints a line. Ignores errors: the other end of the pipe may be closed.
fn say(line: &str) {
    let mut output = io::stdout().lock();
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}
