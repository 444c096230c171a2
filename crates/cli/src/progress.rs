//! Progress on stderr: nothing for the first second, nothing at all when stderr is no terminal.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const PATIENCE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(125);

/// A bar (when the end is known) or a spinner, cleared when dropped.
pub struct Progress {
    bar: ProgressBar,
    shower: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// A bar for `total` bytes.
    pub fn bytes(what: &str, total: u64) -> Progress {
        let style = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
        Progress::start(ProgressBar::hidden(), Some(total), what, style)
    }

    /// A count of bytes whose end is unknown.
    pub fn stream(what: &str) -> Progress {
        Progress::start(ProgressBar::hidden(), None, what, "{spinner} {msg} {binary_bytes} {binary_bytes_per_sec}")
    }

    /// Says that `what` is going on.
    pub fn spinner(what: &str) -> Progress {
        Progress::start(ProgressBar::hidden(), None, what, "{spinner} {msg} {elapsed}")
    }

    fn start(bar: ProgressBar, total: Option<u64>, what: &str, template: &str) -> Progress {
        bar.set_style(ProgressStyle::with_template(template).expect("a well-formed template"));
        bar.set_message(what.to_string());
        if let Some(total) = total {
            bar.set_length(total);
        }
        let shower = std::io::stderr().is_terminal().then(|| show_later(bar.clone()));
        Progress { bar, shower }
    }

    /// `bytes` more are done.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
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
            // A thread that only draws has nothing to report.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}
