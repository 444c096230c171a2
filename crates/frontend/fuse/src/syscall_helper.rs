//! System calls on the process's own mount, made by a helper: a process that does not hold the
//! connection to the kernel.
//!
//! Such a call waits for a reply of the serving process. A process that is killed during such a
//! call of its own cannot end, and while it holds the connection the kernel lets no other caller
//! end either. A helper ends when the serving process is gone, since the connection ends with it.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::mount::unmount;
use crate::notify_worker::{NOTIFY, carry_out_orders};
use crate::processors::{online_processors, spawn_on};
use crate::session::unmount_patiently;

/// How a helper is started. It must write the result of [`carry_out`] for the arguments after
/// [`args`](Self::args) to its standard output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyscallHelper {
    /// The program.
    pub program: PathBuf,
    /// First arguments.
    pub args: Vec<OsString>,
}

/// A system call on the process's own mount or one of its files. Never made on the thread that serves the mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountCall {
    /// Writes back what the kernel has cached for a file.
    WriteBack(PathBuf),
    /// Writes back what the kernel has cached for the whole mount.
    WriteBackAll(PathBuf),
    /// Unmounts as [`unmount_patiently`] does.
    Unmount(PathBuf),
    /// Unmounts lazily, even if in use.
    Detach(PathBuf),
    /// Makes a request that the kernel does not answer from its cache.
    Probe(PathBuf),
    /// Makes so many requests on each processor at a time, and waits for their replies.
    Occupy(PathBuf, u16),
}

/// Failure of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub errno: i32,
    text: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal { errno: error.raw_os_error().unwrap_or(libc::EIO), text: error.to_string() }
    }
}

impl From<forkdisk::Error> for Refusal {
    fn from(error: forkdisk::Error) -> Refusal {
        Refusal { errno: error.errno(), text: error.to_string() }
    }
}

/// Prefix of a count.
const OCCUPY: &str = "occupy-";

type Outcome = Result<(), Refusal>;

/// Makes the call that `words` describe and returns its outcome for standard output; the work of a
/// helper. `None` if they describe no call.
pub fn carry_out(words: &[OsString]) -> Option<String> {
    if let [word, dir] = words
        && word == NOTIFY
    {
        return Some(to_line(&carry_out_orders(Path::new(dir)).map_err(Refusal::from)));
    }
    MountCall::from_words(words).map(|call| to_line(&call.make_here()))
}

/// Makes a request to the mount at `dir` that the kernel does not answer from its cache; returns when it is answered.
///
/// # Errors
/// The error of the request: `ENOTCONN` or `ECONNABORTED` if the process of the mount has ended.
pub fn probe(dir: &Path, syscall_helper: &SyscallHelper) -> io::Result<()> {
    let outcome = MountCall::Probe(dir.to_path_buf()).make(Some(syscall_helper));
    outcome.map_err(|refusal| io::Error::from_raw_os_error(refusal.errno))
}

impl MountCall {
    /// Makes the call through the helper, and waits for its end. Without a helper, makes it in this process.
    pub fn make(&self, syscall_helper: Option<&SyscallHelper>) -> Outcome {
        let Some(syscall_helper) = syscall_helper else { return self.make_here() };
        match syscall_helper.start(self) {
            Ok(child) => finish(child),
            Err(error) => {
                // Writing the cache matters more than a clean end after a kill.
                tracing::warn!(%error, "{} cannot be started for a call on the \
                    mount", syscall_helper.program.display());
                self.make_here()
            }
        }
    }

    fn make_here(&self) -> Outcome {
        match self {
            MountCall::WriteBack(file) => Ok(File::open(file)?.sync_data()?),
            MountCall::WriteBackAll(dir) => Ok(rustix::fs::syncfs(File::open(dir)?).map_err(io::Error::from)?),
            MountCall::Unmount(dir) => Ok(unmount_patiently(dir)?),
            MountCall::Detach(dir) => Ok(unmount(dir, true)?),
            MountCall::Probe(dir) => Ok(rustix::fs::statfs(dir).map(drop).map_err(io::Error::from)?),
            MountCall::Occupy(dir, count) => occupy(dir, *count),
        }
    }

    fn words(&self) -> (String, &Path) {
        match self {
            MountCall::WriteBack(file) => ("write-back".to_string(), file),
            MountCall::WriteBackAll(dir) => ("write-back-all".to_string(), dir),
            MountCall::Unmount(dir) => ("unmount".to_string(), dir),
            MountCall::Detach(dir) => ("detach".to_string(), dir),
            MountCall::Probe(dir) => ("probe".to_string(), dir),
            MountCall::Occupy(dir, count) => (format!("{OCCUPY}{count}"), dir),
        }
    }

    fn from_words(words: &[OsString]) -> Option<MountCall> {
        let [call, path] = words else { return None };
        let path = PathBuf::from(path);
        Some(match call.to_str()? {
            "write-back" => MountCall::WriteBack(path),
            "write-back-all" => MountCall::WriteBackAll(path),
            "unmount" => MountCall::Unmount(path),
            "detach" => MountCall::Detach(path),
            "probe" => MountCall::Probe(path),
            other => MountCall::Occupy(path, other.strip_prefix(OCCUPY)?.parse().ok()?),
        })
    }
}

/// Makes `count` requests on each processor.
fn occupy(dir: &Path, count: u16) -> Outcome {
    let request = |processor| {
        let dir = dir.to_path_buf();
        // Any request occupies an entry.
        spawn_on(processor, move || {
            let _ = rustix::fs::statfs(&dir);
        })
    };
    let processors = online_processors();
    let threads: Vec<_> = (0..count).flat_map(|_| processors.iter().copied().map(request)).collect();
    threads.into_iter().for_each(|thread| drop(thread.join()));
    Ok(())
}

impl SyscallHelper {
    fn start(&self, call: &MountCall) -> io::Result<Child> {
        let (word, path) = call.words();
        let mut command = Command::new(&self.program);
        command.args(&self.args).arg(word).arg(path).stdin(Stdio::null()).stdout(Stdio::piped());
        if matches!(call, MountCall::Probe(_)) {
            // It may outlive the caller, and must not hold the caller's output open.
            command.stderr(Stdio::null());
        }
        // Own process group, so that signals from the terminal do not interrupt a call that has started.
        command.process_group(0).spawn()
    }
}

/// Waits until a helper has ended. Its output is the outcome, not its exit status.
fn finish(mut child: Child) -> Outcome {
    let mut said = Vec::new();
    let read = child.stdout.take().map_or(Ok(0), |mut stdout| stdout.read_to_end(&mut said));
    let ended = child.wait();
    from_line(&String::from_utf8_lossy(&said)).unwrap_or_else(|| {
        let how = read.and(ended).map_or_else(|error| error.to_string(), |status| status.to_string());
        let text = format!("a process for a call on the mount ended without an answer: {how}");
        tracing::error!("{text}");
        Err(Refusal { errno: libc::EIO, text })
    })
}

/// Formats an outcome: errno, 0 for success, and a text.
fn to_line(outcome: &Outcome) -> String {
    match outcome {
        Ok(()) => "0 done".to_string(),
        Err(Refusal { errno, text }) => format!("{errno} {text}"),
    }
}

fn from_line(line: &str) -> Option<Outcome> {
    let (errno, text) = line.trim_end().split_once(' ')?;
    Some(match errno.parse().ok()? {
        0 => Ok(()),
        errno => Err(Refusal { errno, text: text.to_string() }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a helper that runs a shell script, with the call as `$1` and the path as `$2`.
    fn shell(script: &str) -> SyscallHelper {
        SyscallHelper { program: "/bin/sh".into(), args: ["-c", script, "syscall_helper"].map(OsString::from).to_vec() }
    }

    #[test]
    fn calls_and_their_words_belong_together() {
        let path = || PathBuf::from("/a b");
        let all =
            [MountCall::WriteBack, MountCall::WriteBackAll, MountCall::Unmount, MountCall::Detach, MountCall::Probe];
        for call in all.map(|call| call(path())) {
            let (word, path) = call.words();
            assert_eq!(MountCall::from_words(&[word.into(), path.into()]), Some(call.clone()));
        }
        let occupy = MountCall::Occupy(path(), 32);
        let (word, dir) = occupy.words();
        assert_eq!(
            (word.as_str(), MountCall::from_words(&["occupy-32".into(), dir.into()])),
            ("occupy-32", Some(occupy.clone()))
        );
        assert_eq!(MountCall::from_words(&["occupy-".into(), "/".into()]), None);
        assert_eq!(MountCall::from_words(&["sing".into(), "/".into()]), None);
        assert_eq!(MountCall::from_words(&["unmount".into()]), None);
    }

    #[test]
    fn outcomes_reach_the_caller() {
        let full = Err(Refusal { errno: libc::ENOSPC, text: "no room, and\nno more to say".to_string() });
        for outcome in [Ok(()), full] {
            assert_eq!(from_line(&format!("{}\n", to_line(&outcome))), Some(outcome));
        }
        assert_eq!(from_line(""), None);
        assert_eq!(from_line("out of luck"), None);
    }

    #[test]
    fn the_outcome_of_a_helper_is_passed_on() {
        let call = MountCall::WriteBack("/nowhere/at all".into());
        let said = shell(r#"test "$1 $2" = "write-back /nowhere/at all" && echo "28 full""#);
        assert_eq!(call.make(Some(&said)), Err(Refusal { errno: libc::ENOSPC, text: "full".to_string() }));
        assert_eq!(call.make(Some(&shell("echo 0 done"))), Ok(()));
        // One that ends without output has failed, whatever its status.
        assert_eq!(call.make(Some(&shell("exit 0"))).unwrap_err().errno, libc::EIO);
        assert_eq!(call.make(Some(&shell("kill -9 $$"))).unwrap_err().errno, libc::EIO);
    }

    #[test]
    fn without_a_helper_calls_are_made_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let none = SyscallHelper { program: dir.path().join("none"), args: Vec::new() };
        for syscall_helper in [None, Some(&none)] {
            assert_eq!(MountCall::WriteBack(file.clone()).make(syscall_helper), Ok(()));
            assert_eq!(MountCall::WriteBackAll(dir.path().into()).make(syscall_helper), Ok(()));
            let refusal = MountCall::WriteBack(dir.path().join("gone")).make(syscall_helper).unwrap_err();
            assert_eq!(refusal.errno, libc::ENOENT, "{refusal}");
        }
    }
}
