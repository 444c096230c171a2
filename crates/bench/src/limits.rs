//! Waiting for other processes with a limit, so that no started process can block its caller.
//! A process that does not end in time is killed, and the error describes it.

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// Time limit of a program that a benchmark runs.
pub const LIMIT: Duration = Duration::from_secs(1800);
/// How long a killed process may take to disappear: one in a request to a hanging device
/// cannot.
const DEATH: Duration = Duration::from_secs(30);

/// Most processes, and threads of each, that an error shows.
const SHOWN: usize = 16;

/// A command that is run to its end, with a time limit.
pub trait Limited {
    /// As [`Command::output`]; the output is collected even if another process keeps it open.
    fn output_within(&mut self, limit: Duration) -> io::Result<Output>;
    /// As [`Command::status`].
    fn status_within(&mut self, limit: Duration) -> io::Result<ExitStatus>;
}

/// Runs a program with root's search path to its end; returns its output. An error contains its messages.
pub fn output_of(command: &mut Command) -> anyhow::Result<String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let done = command.env("PATH", path).output_within(LIMIT).with_context(|| format!("{command:?}"))?;
    ensure!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Waits for a running process, with a time limit.
pub trait LimitedWait {
    /// As [`Child::wait`].
    fn wait_within(&mut self, limit: Duration) -> io::Result<ExitStatus>;
    /// As [`Child::wait_with_output`].
    fn output_within(self, limit: Duration) -> io::Result<Output>;
    /// Kills it and waits until it has ended.
    fn put_down(&mut self) -> io::Result<ExitStatus>;
}

impl Limited for Command {
    fn output_within(&mut self, limit: Duration) -> io::Result<Output> {
        let child = self.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        child.output_within(limit).map_err(|error| named(self, &error))
    }

    fn status_within(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        self.spawn()?.wait_within(limit).map_err(|error| named(self, &error))
    }
}

fn named(command: &Command, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{command:?}: {error}"))
}

impl LimitedWait for Child {
    fn wait_within(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        let start = Instant::now();
        // Starts with a short pause, so that short programs are not delayed.
        let mut pause = Duration::from_micros(200);
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if start.elapsed() >= limit {
                let place = place(self.id());
                // Report the exceeded limit, whether or not the process can be killed.
                let _ = self.put_down();
                return Err(late(self.id(), limit, &place, ""));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    fn output_within(mut self, limit: Duration) -> io::Result<Output> {
        let pid = self.id();
        drop(self.stdin.take());
        let (stdout, stderr) = (collect(self.stdout.take()), collect(self.stderr.take()));
        let start = Instant::now();
        let late_with = |error: io::Error, said: &[u8]| {
            let said = String::from_utf8_lossy(&said[said.len().saturating_sub(2000)..]).into_owned();
            if error.kind() == io::ErrorKind::TimedOut {
                io::Error::new(error.kind(), format!("{error}{said}"))
            } else {
                error
            }
        };
        let status = self.wait_within(limit);
        let left = limit.saturating_sub(start.elapsed()).max(Duration::from_secs(1));
        match status {
            Ok(status) => {
                let all = |whole: Collected, name: &str| {
                    whole
                        .all(left)
                        .map_err(|_| late(pid, limit, "it has ended", &format!("; its {name} is still held open")))
                };
                Ok(Output { status, stdout: all(stdout, "standard output")?, stderr: all(stderr, "standard error")? })
            }
            Err(error) => Err(late_with(error, &stderr.all(DEATH).unwrap_or_default())),
        }
    }

    fn put_down(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.try_wait()? {
            return Ok(status);
        }
        kill_process(Pid::from_child(self), Signal::KILL)?;
        let start = Instant::now();
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if start.elapsed() >= DEATH {
                return Err(late(self.id(), DEATH, &place(self.id()), " although it was killed"));
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Reads the first line of `from`, without its line end; fails if that takes longer than `limit`.
pub fn first_line(from: impl Read + Send + 'static, limit: Duration) -> io::Result<String> {
    let (sender, line) = channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(from);
        let mut line = String::new();
        let read = reader.read_line(&mut line).map(|_| line);
        // Fails if the limit has passed and the receiver is gone.
        let _ = sender.send(read);
        // Drains later output, so that its writer does not block.
        let _ = io::copy(&mut reader, &mut io::sink());
    });
    let none = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no output within {} s", limit.as_secs()));
    line.recv_timeout(limit).map_err(none)?
}

/// Output that a thread reads from a pipe.
struct Collected(Option<Receiver<io::Result<Vec<u8>>>>);

fn collect(pipe: Option<impl Read + Send + 'static>) -> Collected {
    Collected(pipe.map(|mut pipe| {
        let (sender, whole) = channel();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = pipe.read_to_end(&mut bytes).map(|_| bytes);
            // Fails if the limit has passed and the receiver is gone.
            let _ = sender.send(read);
        });
        whole
    }))
}

impl Collected {
    fn all(self, limit: Duration) -> io::Result<Vec<u8>> {
        let Some(whole) = self.0 else { return Ok(Vec::new()) };
        whole.recv_timeout(limit).map_err(|_: RecvTimeoutError| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

/// Describes what a process and its children are doing, thread by thread.
fn place(pid: u32) -> String {
    let mut all = vec![pid];
    let mut text = String::new();
    let mut i = 0;
    while let Some(&pid) = all.get(i).filter(|_| i < SHOWN) {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let mut threads: Vec<u32> = names(&format!("/proc/{pid}/task"));
        threads.sort_unstable();
        for thread in threads.iter().take(SHOWN) {
            let of = |name: &str| read(&format!("task/{thread}/{name}"));
            let status = of("status");
            let field =
                |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("?").trim().to_owned();
            // The kernel stack, outermost call last; readable by root only.
            let stack: Vec<String> = of("stack").lines().take(6).map(|line| line.replace("[<0>] ", "")).collect();
            let sep = if text.is_empty() { "" } else { "; " };
            let (name, state) = (field("Name:"), field("State:"));
            text += &format!("{sep}{pid}/{thread} {name}: state {state}, in {} {}", of("wchan"), stack.join(" < "));
            all.extend(of("children").split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
        }
        i += 1;
    }
    text
}

fn names(dir: &str) -> Vec<u32> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn late(pid: u32, limit: Duration, place: &str, what: &str) -> io::Error {
    let text = format!("process {pid} did not end within {} s ({place}){what}\n", limit.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(300);

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        shell
    }

    #[test]
    fn what_ends_in_time_is_told_whole() {
        let done = shell("echo out; echo err >&2; exit 3").output_within(DEATH).unwrap();
        assert_eq!((done.status.code(), &done.stdout[..], &done.stderr[..]), (Some(3), &b"out\n"[..], &b"err\n"[..]));
    }

    #[test]
    fn what_does_not_end_is_killed_and_named_with_what_it_said() {
        let error = shell("echo stuck >&2; exec sleep 600").output_within(SHORT).unwrap_err().to_string();
        assert!(error.contains("sleep 600") && error.contains("did not end") && error.contains("stuck"), "{error}");
        let error = shell("exec sleep 600").status_within(SHORT).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn one_that_holds_the_output_open_is_not_waited_for() {
        let start = Instant::now();
        let error = shell("sleep 20 & exit 0").output_within(SHORT).unwrap_err().to_string();
        assert!(error.contains("held open") && start.elapsed() < Duration::from_secs(15), "{error}");
    }

    #[test]
    fn a_first_line_is_not_waited_for_forever() {
        let mut child = shell("exec sleep 600").stdout(Stdio::piped()).spawn().unwrap();
        assert_eq!(first_line(child.stdout.take().unwrap(), SHORT).unwrap_err().kind(), io::ErrorKind::TimedOut);
        child.put_down().unwrap();
        let mut child = shell("echo ready; echo more").stdout(Stdio::piped()).spawn().unwrap();
        assert_eq!(first_line(child.stdout.take().unwrap(), DEATH).unwrap(), "ready\n");
        assert!(child.wait_within(DEATH).unwrap().success());
    }
}
