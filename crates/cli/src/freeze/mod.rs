//! Freezing of file systems mounted from attached volumes, so that a snapshot holds a consistent file system.
//!
//! Between freeze and thaw the program writes neither messages nor files: they might lie on a frozen file system.

mod file_systems;
mod holder;

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use forkdisk_uring::thaw;
use rustix::io::{Errno, FdFlags, fcntl_setfd};

use file_systems::{FileSystem, mounted_from};
pub use holder::hold;

/// File systems that are frozen until this is dropped.
pub struct Frozen {
    /// File systems that could not be frozen, each with the reason.
    pub not_frozen: Vec<String>,
    file_systems: Vec<FileSystem>,
    frozen: Vec<usize>,
    holder: Option<Holder>,
}

/// The process that freezes and thaws.
struct Holder {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Frozen {
    /// Freezes the file systems mounted from `devices`, for `limit` at most. `needed` are files on which the snapshot
    /// depends: a file system that contains one of them is not frozen, since the snapshot would wait for itself.
    pub fn begin(devices: &[PathBuf], needed: &[PathBuf], limit: Duration) -> Result<Frozen> {
        let (mut file_systems, mut not_frozen) = (mounted_from(devices)?, Vec::new());
        let needed = file_systems::those_of(needed);
        file_systems.retain(|found| {
            let is_needed = needed.contains(&found.numbers);
            if is_needed {
                not_frozen.push(format!("{}: the pool or a file of its daemon lies there", found.at.display()));
            }
            !is_needed
        });
        let mut frozen = Frozen { not_frozen, file_systems, frozen: Vec::new(), holder: None };
        if !frozen.file_systems.is_empty() {
            frozen.freeze(limit)?;
        }
        Ok(frozen)
    }

    fn freeze(&mut self, limit: Duration) -> Result<()> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("hold-frozen").arg(limit.as_millis().to_string());
        for FileSystem { at, file, .. } in &self.file_systems {
            fcntl_setfd(file, FdFlags::empty()).with_context(|| at.display().to_string())?;
            command.arg(file.as_raw_fd().to_string());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("starting the process that freezes file systems")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (input, output) = input.zip(output).context("the pipes of the process that freezes file systems")?;
        self.holder = Some(Holder { child, input, output: BufReader::new(output) });
        for index in 0..self.file_systems.len() {
            let said = self.holder.as_mut().map_or(String::new(), Holder::hear);
            let at = self.file_systems[index].at.display().to_string();
            let code = said.parse::<i32>().map(Errno::from_raw_os_error);
            match (said.as_str(), code) {
                (holder::FROZEN, _) => self.frozen.push(index),
                // Frozen by another program, which will thaw it.
                (holder::BUSY, _) => {}
                (_, Ok(errno @ (Errno::OPNOTSUPP | Errno::NOTTY | Errno::PERM))) => {
                    self.not_frozen.push(format!("{at}: {}", io::Error::from(errno)));
                }
                (_, Ok(errno)) => bail!("{at} cannot be frozen: {}", io::Error::from(errno)),
                _ => bail!("{at} cannot be frozen: the process that does it has ended or was too slow ({said})"),
            }
        }
        Ok(())
    }

    /// Thaws the file systems. Returns whether all were frozen until now.
    pub fn end(mut self) -> bool {
        self.thaw()
    }

    fn thaw(&mut self) -> bool {
        let Some(Holder { mut child, input, mut output }) = self.holder.take() else { return true };
        drop(input);
        let mut said = String::new();
        while output.read_line(&mut said).is_ok_and(|read| read > 0) && said.trim_end() != holder::HELD {
            said.clear();
        }
        let was_held = said.trim_end() == holder::HELD;
        let _ = child.wait();
        if !was_held {
            // The process thaws its file systems, unless it was killed. Thawing one that is not
            // frozen fails harmlessly.
            for &index in self.frozen.iter().rev() {
                let _ = thaw(&self.file_systems[index].file);
            }
        }
        was_held
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.thaw();
    }
}

impl Holder {
    /// Reads the next line.
    fn hear(&mut self) -> String {
        let mut line = String::new();
        let _ = self.output.read_line(&mut line);
        line.trim_end().to_string()
    }
}

/// Returns the files that a process has open, including its folder.
pub fn files_of(pid: u32) -> Vec<PathBuf> {
    let dir = Path::new("/proc").join(pid.to_string());
    let open = fs::read_dir(dir.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
    open.chain([dir.join("cwd")]).collect()
}
