//! One guest: started with a scenario, observed through its console, and ended with all its processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::Lab;
use super::result::Measured;
use super::trace;
use crate::limits::{LIMIT, LimitedWait as _};

/// Lines of the console that an error message shows.
const SHOWN: usize = 12;

/// A guest and its scenario.
pub struct Guest<'a> {
    /// Kernel and scripts.
    pub lab: &'a Lab,
    /// The `forkdisk` program, which serves its disks.
    pub program: &'a Path,
    /// Name of the scenario: `scenarios/NAME.sh`.
    pub scenario: &'a str,
    /// Variables of the scenario.
    pub variables: Vec<(&'static str, String)>,
    /// Number of disks.
    pub disks: usize,
    /// Time limit.
    pub limit: Duration,
}

impl Guest<'_> {
    /// Runs the guest to its end; `progress` is called with each measurement.
    pub fn run(&self, folder: &Path, progress: &dyn Fn(&str)) -> Result<Vec<Measured>> {
        let work = folder.join(format!("guest-{}", self.scenario));
        fs::create_dir_all(&work)?;
        let outcome = self.listen(&work, progress);
        let _ = fs::remove_dir_all(&work);
        outcome.with_context(|| format!("the guest with {}", self.scenario))
    }

    fn listen(&self, work: &Path, progress: &dyn Fn(&str)) -> Result<Vec<Measured>> {
        let running = Running::start(self, work)?;
        let deadline = Instant::now() + self.limit;
        let (mut console, mut found, mut halted, mut cpu) = (Vec::new(), Vec::new(), false, [0.0; 2]);
        loop {
            let line = match running.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => line,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    bail!("it did not end within {:?}:\n{}", self.limit, tail(&console))
                }
            };
            match line.as_str() {
                "@0" => cpu[0] = running.cpu(),
                "@1" => cpu[1] = running.cpu(),
                _ if line.starts_with("R ") => {
                    found.push(Measured::parse(&line, (cpu[1] - cpu[0]).max(0.0))?);
                    let told = line.split(" rep=").next().unwrap_or(&line);
                    progress(&format!("    {}", told.splitn(3, ' ').last().unwrap_or(told)));
                }
                _ => {}
            }
            halted |= line.contains("System halted");
            ensure!(!line.starts_with("FAILED"), "{line}\n{}", tail(&console));
            console.push(line);
        }
        ensure!(halted && !found.is_empty(), "it did not finish:\n{}", tail(&console));
        let text = fs::read_to_string(work.join("trace")).context("the guest left no trace")?;
        let traces = trace::parse(&text, self.disks)?;
        ensure!(traces.len() == found.len(), "{} measurements, {} traces", found.len(), traces.len());
        Ok(found.into_iter().zip(traces).map(|(measured, seen)| Measured { seen, ..measured }).collect())
    }

    fn command(&self, work: &Path) -> Command {
        let mut command = Command::new(self.program);
        let shown = |path: &Path| path.display().to_string();
        command.args(["bench", "inside", "guard"]).arg(work).arg(&self.lab.kernel);
        command.args(["mem=1G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", "quiet"]);
        command.args(["con=null", "con0=fd:0,fd:1"]);
        command.arg(format!("uml_dir={}", shown(work)));
        command.arg(format!("init={}", shown(&self.lab.scripts.join("init.sh"))));
        // Words that the kernel does not know become the environment of its first process.
        let own = [
            ("SCEN", self.scenario.to_string()),
            ("LAB", shown(&self.lab.scripts)),
            ("LABOUT", shown(work)),
            ("KIND", "disks".to_string()),
            ("FORKDISK", shown(self.program)),
            ("NDISKS", self.disks.to_string()),
        ];
        command.args(own.iter().chain(&self.variables).map(|(name, value)| format!("{name}={value}")));
        if let Some(library) = &self.lab.preload {
            command.env("LD_PRELOAD", library);
        }
        command
    }
}

/// Returns the last lines of the console.
fn tail(console: &[String]) -> String {
    console[console.len().saturating_sub(SHOWN)..].join("\n")
}

/// A guest under its guard. Dropping it makes the guard end it.
struct Running {
    guard: Child,
    alive: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Running {
    fn start(guest: &Guest<'_>, work: &Path) -> Result<Running> {
        fs::create_dir_all(work.join("mnt"))?;
        let mut command = guest.command(work);
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut guard = command.spawn().context("starting the guest's guard")?;
        let (alive, console) = (guard.stdin.take(), guard.stdout.take().context("a console")?);
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_string();
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Running { guard, alive, lines })
    }

    /// Returns the seconds of CPU of the guest's processes, including ended ones.
    fn cpu(&self) -> f64 {
        super::guard::cpu_below(self.guard.id())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.alive.take());
        // The guard kills the guest, which takes a moment.
        let _ = self.guard.wait_within(LIMIT);
    }
}
