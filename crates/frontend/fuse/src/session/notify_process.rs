//! The process that makes notifications for which the kernel waits, as the serving process sees it.
//!
//! Such a notification waits in the kernel for requests that only a serving process answers, and no signal ends that.
//! A process of its own waits, so that the serving process ends at once when it is killed, with its locks.
//! It is started for the first notification and ends with this process. If it is killed the next one repeats its work.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use crate::descriptor::send_descriptor;
use crate::notify_worker::{ANSWER_BYTES, NOTIFY, Order, Part, answer_of};
use crate::syscall_helper::SyscallHelper;

/// How often a notification is repeated after the end of the process that was to make it.
const ATTEMPTS_COUNT: usize = 10;

pub(super) struct NotifyProcess {
    helper: SyscallHelper,
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: Option<Arc<Running>>,
    /// How long another process holds the connection after the end of this one.
    kept: Option<Duration>,
    last_id: u64,
}

/// A process that was started. Told to end when dropped.
struct Running {
    socket: UnixStream,
    /// Notifications in progress; `None` if the process has ended.
    waiting: Mutex<Option<HashMap<u64, Sender<io::Result<()>>>>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NotifyProcess {
    pub(super) fn new(helper: SyscallHelper, dir: &Path) -> NotifyProcess {
        NotifyProcess { helper, dir: dir.to_path_buf(), state: Mutex::default() }
    }

    pub(super) fn set_kept(&self, limit: Duration) {
        let mut state = lock(&self.state);
        state.kept = Some(limit);
        if let Some(running) = &state.running {
            // If it has ended, the next one is told.
            let _ = (&running.socket).write_all(&Order::Kept(limit).bytes());
        }
    }

    /// Makes the kernel drop what it has cached, and waits for that. `None` if there is no process that does it.
    pub(super) fn drop_cached(&self, part: Part, connection: BorrowedFd<'_>) -> Option<io::Result<()>> {
        for _ in 0..ATTEMPTS_COUNT {
            let (sender, receiver) = channel();
            let running = match self.begin(part, connection, sender) {
                Ok(running) => running,
                Err(error) => {
                    tracing::warn!(%error, "{} cannot be started for notifications", self.helper.program.display());
                    return None;
                }
            };
            if let Ok(dropped) = receiver.recv() {
                return Some(dropped);
            }
            // It was killed.
            let mut state = lock(&self.state);
            if state.running.as_ref().is_some_and(|other| Arc::ptr_eq(other, &running)) {
                state.running = None;
            }
        }
        tracing::warn!("processes for notifications end without an answer");
        None
    }

    /// Sends an order to the process, which is started if there is none. `sender` is dropped when the process ends.
    fn begin(
        &self,
        part: Part,
        connection: BorrowedFd<'_>,
        sender: Sender<io::Result<()>>,
    ) -> io::Result<Arc<Running>> {
        let mut state = lock(&self.state);
        let running = match &state.running {
            Some(running) => running.clone(),
            None => {
                let running = self.start(connection, state.kept)?;
                state.running.insert(running).clone()
            }
        };
        state.last_id += 1;
        let id = state.last_id;
        if let Some(waiting) = lock(&running.waiting).as_mut() {
            waiting.insert(id, sender);
        }
        if (&running.socket).write_all(&Order::Drop(id, part).bytes()).is_err()
            && let Some(waiting) = lock(&running.waiting).as_mut()
        {
            waiting.remove(&id);
        }
        Ok(running)
    }

    fn start(&self, connection: BorrowedFd<'_>, kept: Option<Duration>) -> io::Result<Arc<Running>> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(&self.helper.program);
        command.args(&self.helper.args).arg(NOTIFY).arg(&self.dir);
        // A name by which it is recognised, and neither the terminal nor the folder of this process.
        command.arg0("forkdisk").current_dir("/").process_group(0);
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        drop(command);
        let running = Arc::new(Running { socket: ours.try_clone()?, waiting: Mutex::new(Some(HashMap::new())) });
        let followed = Arc::downgrade(&running);
        thread::spawn(move || {
            follow(ours, &followed);
            let _ = child.wait();
        });
        send_descriptor(running.socket.as_fd(), connection)?;
        if let Some(limit) = kept {
            (&running.socket).write_all(&Order::Kept(limit).bytes())?;
        }
        Ok(running)
    }
}

/// Passes on the answers of a process, until it ends or nothing waits for it any more.
fn follow(mut socket: UnixStream, running: &Weak<Running>) {
    let mut answer = [0; ANSWER_BYTES];
    while socket.read_exact(&mut answer).is_ok()
        && let Some(running) = running.upgrade()
    {
        let (id, errno) = answer_of(&answer);
        let dropped = if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
        let sender = lock(&running.waiting).as_mut().and_then(|waiting| waiting.remove(&id));
        // Its receiver waits.
        if let Some(sender) = sender {
            let _ = sender.send(dropped);
        }
    }
    if let Some(running) = running.upgrade() {
        lock(&running.waiting).take();
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs::File;

    use super::*;

    fn process(program: &str, args: &[&str]) -> NotifyProcess {
        let args = args.iter().map(OsString::from).collect();
        NotifyProcess::new(SyscallHelper { program: program.into(), args }, Path::new("/nowhere"))
    }

    const PART: Part = Part { node: 7, from: 0, len: 0 };

    #[test]
    fn answers_reach_the_callers_of_their_notifications() {
        // One byte with the descriptor, then two orders; both answers are 5 (EIO), in the other order.
        let answers = r"for id in 2 1; do printf '\00'$id'\0\0\0\0\0\0\0\05\0\0\0' >&0; done";
        let script = format!("head -c 65 > /dev/null; {answers}; cat > /dev/null");
        let (process, connection) = (process("/bin/sh", &["-c", &script]), File::open("/dev/null").unwrap());
        thread::scope(|scope| {
            let calls: Vec<_> = (0..2).map(|_| scope.spawn(|| process.drop_cached(PART, connection.as_fd()))).collect();
            for call in calls {
                let dropped = call.join().unwrap().unwrap();
                assert_eq!(dropped.unwrap_err().raw_os_error(), Some(libc::EIO));
            }
        });
    }

    #[test]
    fn without_a_program_that_answers_the_caller_has_to_do_it() {
        let connection = File::open("/dev/null").unwrap();
        for program in ["/bin/true", "/nowhere/at/all"] {
            assert!(process(program, &[]).drop_cached(PART, connection.as_fd()).is_none(), "{program}");
        }
    }
}
