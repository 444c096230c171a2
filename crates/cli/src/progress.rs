//! Progress on stderr: shown after one second, and only on a terminal.

use std::cell::RefCell;
use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use forkdisk_control::{Observer, Step};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const PATIENCE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(125);

const LASTING: &str = "{spinner} {msg} {elapsed}";
const STREAM: &str = "{spinner} {msg} {binary_bytes} {binary_bytes_per_sec}";
const BYTES: &str = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";

/// A bar (if the total is known) or a spinner, cleared when dropped.
pub struct Progress {
    bar: ProgressBar,
    shown: RefCell<Shown>,
    shower: Option<(Sender<()>, JoinHandle<()>)>,
}

/// Text and template that the bar shows.
#[derive(Default, PartialEq)]
struct Shown {
    what: String,
    template: &'static str,
}

impl Progress {
    /// Creates a progress display without a text.
    pub fn new() -> Progress {
        let bar = ProgressBar::hidden();
        let shower = std::io::stderr().is_terminal().then(|| show_later(bar.clone()));
        Progress { bar, shown: RefCell::default(), shower }
    }

    /// Creates a spinner with the text `what`.
    pub fn spinner(what: &str) -> Progress {
        let progress = Progress::new();
        progress.reached(Step::lasting(what));
        progress
    }

    fn set_up(&self, what: String, template: &'static str) {
        let next = Shown { what, template };
        if *self.shown.borrow() == next {
            return;
        }
        self.bar.set_style(ProgressStyle::with_template(template).expect("a well-formed template"));
        self.bar.set_message(next.what.clone());
        self.bar.reset();
        *self.shown.borrow_mut() = next;
    }
}

impl Observer for Progress {
    fn reached(&self, step: Step) {
        if self.shower.is_none() {
            return;
        }
        let template = match (step.done, step.total) {
            (None, _) => LASTING,
            (Some(_), None) => STREAM,
            (Some(_), Some(_)) => BYTES,
        };
        self.set_up(step.what, template);
        if let Some(total) = step.total {
            self.bar.set_length(total);
        }
        self.bar.set_position(step.done.unwrap_or(0));
    }
}

fn show_later(bar: ProgressBar) -> (Sender<()>, JoinHandle<()>) {
    let (stop, stopped) = channel();
    let thread = std::thread::spawn(move || {
        if stopped.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(TICK);
        }
    });
    (stop, thread)
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.shower.take() {
            drop(stop);
            // The thread only draws; it has no result.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}
