//! One mounted file system: receives requests, runs each as a separate task and sends its reply.
//!
//! Invariants: everything happens on the thread of the runtime, except what waits for the mount itself;
//! the memory of requests in flight is bounded; every request that needs a reply gets exactly one.

mod handle;
mod memory;
mod notify;
mod notify_process;
mod queues;
mod request_log;

use std::cell::{Cell, OnceCell, RefCell};
use std::future::{Future, poll_fn};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use forkdisk::{Buf, Error, ErrorKind, Result};
use forkdisk_uring::{Rt, Watched};
use pin_project_lite::pin_project;
use rustix::io::Errno;

use crate::codec::{Capabilities, Decoded, HEAD, Header, InitReply, InitRequest, MAX_WRITE, Operation, Reply, Request};
use crate::mount::{MountOptions, mount, raise_read_ahead, unmount};
use crate::syscall_helper::SyscallHelper;
use memory::Memory;
use queues::Queues;
use request_log::{Received, Slot};

pub use handle::SessionHandle;
pub use notify::Notifier;
pub use queues::{OverIoUring, PassedQueues};
pub use request_log::RequestLog;

/// Most background requests, for which no program waits.
const BACKGROUND_REQUESTS: u16 = 64;
/// Most bytes of contents in requests in flight; above it no further request is read.
const CONTENTS_BYTES: usize = 256 << 20;
/// Requests received before other tasks run.
const BATCH_REQUESTS: usize = 32;
/// Usually a program waits for a reply before it makes the next request: one attempt in so many to receive a second
/// request without waiting shows whether there are more.
const LONE_REQUESTS: u32 = 16;
/// How long files that are still open when the session stops remain usable.
const GRACE: Duration = Duration::from_secs(2);
/// Interval at which the requests of a mount that goes to another process are counted.
const LEAVING_LOOK: Duration = Duration::from_millis(1);

/// A file system. Any number of its requests may be in flight.
pub trait Handler: 'static {
    /// Called when the file system is mounted; `notifier` sends notifications to the kernel.
    fn mounted(&self, _notifier: Notifier) {}

    /// Returns whether the kernel may cache writes and send them later. Must be false if the same
    /// files are also read or written other than through this mount.
    fn caches_writes(&self) -> bool {
        true
    }

    /// Returns whether requests come through queues of io_uring. No other process can continue such a mount after a
    /// kill: the kernel does not send requests of the queues again.
    fn over_io_uring(&self) -> OverIoUring {
        OverIoUring::No
    }

    /// Returns the helper for system calls on the mount itself. Without one a thread of this
    /// process makes them, and a kill during one leaves a process that does not end.
    fn syscall_helper(&self) -> Option<SyscallHelper> {
        None
    }

    /// Carries out an operation. The future is run to its end.
    fn handle(self: Rc<Self>, header: Header, operation: Operation) -> impl Future<Output = Reply>;

    /// Allocates a buffer of `len` bytes that suits the device; its contents are unspecified.
    fn buffer(&self, len: usize) -> Buf;
}

struct State {
    rt: Rt,
    connection: Watched,
    notifier: Notifier,
    dir: PathBuf,
    syscall_helper: Option<SyscallHelper>,
    memory: Memory,
    requests: Cell<usize>,
    stopping: Cell<bool>,
    /// The mount goes to another process.
    leaving: Cell<bool>,
    /// The task that waits for requests.
    waiting: Cell<Option<Waker>>,
    /// The last request has ended.
    left: Cell<bool>,
    /// The kernel can send requests again that were not answered.
    resends: Cell<bool>,
    /// Where requests are received otherwise, if another process is to continue the mount after a kill.
    log: OnceCell<RequestLog>,
    /// Requests come through queues of io_uring.
    queues: RefCell<Option<Rc<Queues>>>,
    /// Number of requests that came through them.
    by_queues: Cell<u64>,
}

/// A mounted file system. Unmounted when dropped.
pub struct Session<H: Handler> {
    state: Rc<State>,
    handler: Rc<H>,
    /// Requests that a killed process has received and not answered.
    again: Cell<Vec<(Request, Slot)>>,
}

/// How long to retry unmounting a mount in use: programs that are just being started hold it for
/// a moment.
const PATIENCE: Duration = Duration::from_millis(500);

/// As [`unmount`], but retries for a while if in use. Never call it on the thread that serves the mount.
///
/// # Errors
/// Those of [`unmount`], `ResourceBusy` if it stays in use.
pub fn unmount_patiently(dir: &Path) -> Result<()> {
    let start = std::time::Instant::now();
    loop {
        match unmount(dir, false) {
            Err(error) if error.kind() == ErrorKind::Busy && start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            outcome => return outcome,
        }
    }
}

impl<H: Handler> Session<H> {
    /// Mounts `handler` at `dir` and negotiates with the kernel.
    ///
    /// # Errors
    /// Those of [`connect`](crate::connect), and `Unsupported` if the kernel's protocol is too old.
    pub async fn mount(rt: &Rt, handler: Rc<H>, dir: &Path, options: &MountOptions) -> Result<Session<H>> {
        let dir = dir.canonicalize().map_err(|e| Error::io(dir.display().to_string(), e))?;
        let connection = mount(&dir, options)?;
        Session::adopt(rt, handler, &dir, connection).await
    }

    /// Serves an existing mount at `dir`, an absolute path without links: `connection` is the
    /// result of [`connect`](crate::connect) there. Negotiates with the kernel.
    ///
    /// # Errors
    /// The kernel does not answer, or its protocol is too old.
    pub async fn adopt(rt: &Rt, handler: Rc<H>, dir: &Path, connection: OwnedFd) -> Result<Session<H>> {
        let session = Session::new(rt, handler, dir, connection)?;
        if let Some(queues) = session.agree().await? {
            session.serve_queues(&queues);
        }
        raise_read_ahead(&session.state.dir, MAX_WRITE);
        session.handler.mounted(session.state.notifier.clone());
        Ok(session)
    }

    fn new(rt: &Rt, handler: Rc<H>, dir: &Path, connection: OwnedFd) -> Result<Session<H>> {
        let (connection, syscall_helper) = (Watched::new(rt, connection), handler.syscall_helper());
        let notifier = Notifier::new(&connection, dir, syscall_helper.clone())
            .map_err(|e| Error::io("duplicating the connection to the kernel", e))?;
        let state = State {
            rt: rt.clone(),
            connection,
            notifier,
            dir: dir.to_path_buf(),
            syscall_helper,
            memory: Memory::new(
                CONTENTS_BYTES,
                Box::new({
                    let handler = handler.clone();
                    move |len| handler.buffer(len)
                }),
            ),
            requests: Cell::new(0),
            stopping: Cell::new(false),
            leaving: Cell::new(false),
            waiting: Cell::new(None),
            left: Cell::new(false),
            resends: Cell::new(false),
            log: OnceCell::new(),
            queues: RefCell::default(),
            by_queues: Cell::new(0),
        };
        Ok(Session { state: Rc::new(state), handler, again: Cell::default() })
    }

    /// Continues a mount of another process ([`SessionHandle::pass_on`]) at `dir`.
    ///
    /// # Errors
    /// There is no free descriptor, or no room for the queues.
    pub fn resume(
        rt: &Rt,
        handler: Rc<H>,
        dir: &Path,
        (connection, queues): (OwnedFd, Option<PassedQueues<OwnedFd>>),
    ) -> Result<Session<H>> {
        let session = Session::new(rt, handler, dir, connection)?;
        if let Some(passed) = queues {
            let state = &session.state;
            let queues = Queues::resume(&state.rt, &state.connection, &session.state.notifier, passed);
            session.serve_queues(&queues.map_err(|e| Error::io("continuing FUSE over io_uring", e))?);
        }
        session.handler.mounted(session.state.notifier.clone());
        Ok(session)
    }

    /// Continues a mount of a process that was killed, with what that has received and not answered: it is in `log`, or
    /// without a log the kernel sends it again.
    ///
    /// # Errors
    /// There is no free descriptor; `Unsupported` if there is no log and the kernel cannot send requests again.
    pub fn take_over(
        rt: &Rt,
        handler: Rc<H>,
        dir: &Path,
        connection: OwnedFd,
        log: Option<RequestLog>,
    ) -> Result<Session<H>> {
        let session = Session::resume(rt, handler, dir, (connection, None))?;
        let state = &session.state;
        match log {
            Some(log) => {
                session.again.set(log.left(state.connection.as_fd(), |len| state.memory.buffer(len)));
                let _ = state.log.set(log);
            }
            None => {
                session.state.notifier.resend().map_err(|e| Error::io("making the kernel send requests again", e))?;
                state.resends.set(true);
            }
        }
        Ok(session)
    }

    /// Returns a handle that stops the session.
    pub fn handle(&self) -> SessionHandle {
        SessionHandle::new(&self.state)
    }

    /// Negotiates. Returns the queues of io_uring to serve, if they were chosen.
    async fn agree(&self) -> Result<Option<Rc<Queues>>> {
        let over_io_uring = self.handler.over_io_uring();
        let state = &self.state;
        let queues = Queues::choose(&state.rt, over_io_uring, &state.connection, &self.state.notifier)?;
        let mut buf = Buf::zeroed(MAX_WRITE);
        let mut head = [0; HEAD];
        loop {
            self.state.connection.readable().await.map_err(|e| Error::io("waiting for the kernel", e))?;
            let decoded = match self.state.receive(&mut head, &mut buf) {
                Ok(len) => Request::decode(&head, buf, len, Buf::zeroed),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => continue,
                Err(e) => return Err(Error::io("mounting", e.into())),
            };
            let Some(Decoded::Request(Request { header, operation: Operation::Init(init) }, _)) = decoded else {
                return Err(Error::new(ErrorKind::Unsupported, "the kernel's first request is not INIT"));
            };
            self.state.resends.set(init.offered.has(Capabilities::RESEND));
            let queues = queues.filter(|_| init.offered.has(Capabilities::OVER_IO_URING));
            if queues.is_none() && over_io_uring == OverIoUring::Yes {
                return Err(Error::new(ErrorKind::Unsupported, queues::NOT_OFFERED));
            }
            let reply = greet(&init, self.handler.caches_writes(), queues.is_some())?;
            self.state.send(header.unique, Reply::Init(reply));
            return Ok(queues);
        }
    }

    /// Serves until the file system is unmounted, or [passed on](SessionHandle::pass_on).
    ///
    /// # Errors
    /// The connection to the kernel fails other than by the end of the mount.
    pub async fn serve(self) -> Result<()> {
        self.again.take().into_iter().for_each(|(request, slot)| self.start(request, Some(slot)));
        let outcome = self.receive_all().await;
        if outcome.is_ok() && self.state.leaving.get() && !self.state.stopping.get() {
            return self.leave().await;
        }
        while self.state.requests.get() > 0 {
            self.state.memory.changed().await;
        }
        outcome
    }

    /// Waits for the requests in flight. Some of them wait for the kernel, which may wait for further requests: those
    /// are served, too.
    async fn leave(&self) -> Result<()> {
        let queues = self.state.queues.borrow().clone();
        let mut is_occupied = queues.is_none();
        while self.state.requests.get() > 0 || !is_occupied {
            self.state.rt.sleep_for(LEAVING_LOOK).await;
            if self.state.notifier.is_busy() {
                self.receive_all().await?;
            } else if self.state.requests.get() == 0
                && let Some(queues) = &queues
            {
                queues.occupy(&self.state).await;
                is_occupied = true;
            }
        }
        self.state.left.set(true);
        Ok(())
    }

    async fn receive_all(&self) -> Result<()> {
        let mut head = [0; HEAD];
        let mut spare = None;
        let mut batch = 0;
        // Whether the last attempt to receive a second request without waiting found one.
        let (mut is_busy, mut lone) = (false, 0u32);
        loop {
            if self.state.leaving.get() && !self.state.notifier.is_busy() {
                return Ok(());
            }
            self.state.memory.wait_for_room().await;
            let Received { len, body, slot } = match self.state.receive_next(&mut head, &mut spare) {
                Ok(received) => received,
                Err(error) => {
                    if batch > 0 {
                        is_busy = batch > 1;
                    }
                    batch = 0;
                    match error {
                        Errno::AGAIN if self.state.leaving.get() => return Ok(()),
                        Errno::AGAIN if self.wait().await? => continue,
                        Errno::INTR | Errno::NOENT => continue,
                        Errno::AGAIN | Errno::NODEV | Errno::CONNABORTED => {
                            self.state.stopping.set(true);
                            return Ok(());
                        }
                        e => return Err(Error::io("receiving from the kernel", e.into())),
                    }
                }
            };
            match Request::decode(&head, body, len, |n| self.state.memory.buffer(n)) {
                Some(Decoded::Request(request, body)) => {
                    spare = if slot.is_none() { body } else { spare };
                    self.start(request, slot);
                }
                Some(Decoded::Nonsense(unique, body)) => {
                    spare = if slot.is_none() { Some(body) } else { spare };
                    self.state.send(unique, Reply::Error(libc::EIO));
                    self.state.release(slot);
                }
                None => return Err(Error::new(ErrorKind::Io, "the kernel sent half a request")),
            }
            batch += 1;
            if batch == BATCH_REQUESTS {
                batch = 0;
                self.state.rt.yield_now().await;
            } else if batch == 1 && !is_busy {
                lone = lone.wrapping_add(1);
                if !lone.is_multiple_of(LONE_REQUESTS) {
                    batch = 0;
                    if !self.wait().await? {
                        self.state.stopping.set(true);
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Waits for a request, or until the mount leaves or is to end. Returns false if there will be none.
    async fn wait(&self) -> Result<bool> {
        let mut readable = pin!(self.state.connection.readable());
        let ready = match self.state.stopping.get() {
            false => {
                let arrives = poll_fn(|cx| {
                    if self.state.leaving.get() || self.state.stopping.get() {
                        return Poll::Ready(Ok(()));
                    }
                    self.state.waiting.set(Some(cx.waker().clone()));
                    readable.as_mut().poll(cx)
                });
                arrives.await
            }
            true => loop {
                let before = self.state.by_queues.get();
                match self.state.rt.timeout(GRACE, readable.as_mut()).await {
                    Ok(ready) => break ready,
                    // What the kernel writes back comes through the queues.
                    Err(_) if self.state.by_queues.get() != before || self.state.requests.get() > 0 => {}
                    Err(_) => return Ok(false),
                }
            },
        };
        ready.map(|()| true).map_err(|e| Error::io("waiting for the kernel", e))
    }

    fn start(&self, request: Request, slot: Option<Slot>) {
        let Request { header, operation } = request;
        let charge = match &operation {
            Operation::Write { data, .. } => data.len(),
            Operation::Read { buf, .. } => buf.len(),
            Operation::Interrupt => return self.state.release(slot),
            _ => 0,
        };
        let to = (!matches!(operation, Operation::Forget(_))).then_some((header.unique, slot));
        if to.is_none() {
            self.state.release(slot);
        }
        let state = self.state.clone();
        state.requests.set(state.requests.get() + 1);
        state.memory.take(charge);
        let work = self.handler.clone().handle(header, operation);
        self.state.rt.spawn(UnderWay { work, state, to, charge });
    }
}

pin_project! {
    /// A request in flight. A hand-written future, since an async block would store the work twice.
    struct UnderWay<F> {
        #[pin]
        work: F,
        state: Rc<State>,
        // Id of the reply, if the request needs one, and where it is logged.
        to: Option<(u64, Option<Slot>)>,
        // Bytes of contents, charged to the memory limit.
        charge: usize,
    }
}

impl<F: Future<Output = Reply>> Future for UnderWay<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        let reply = ready!(this.work.poll(cx));
        if let Some((unique, slot)) = *this.to {
            this.state.send(unique, reply);
            this.state.release(slot);
        }
        this.state.requests.set(this.state.requests.get() - 1);
        this.state.memory.give_back(*this.charge);
        Poll::Ready(())
    }
}

impl<H: Handler> Drop for Session<H> {
    fn drop(&mut self) {
        if !self.state.left.get() && !self.state.stopping.replace(true) {
            let dir = self.state.dir.clone();
            // The mount is not served any more: closing the connection ends all calls that wait for it.
            std::thread::spawn(move || drop(unmount(&dir, true)));
        }
    }
}

/// Chooses from the kernel's offer.
fn greet(init: &InitRequest, caches_writes: bool, over_io_uring: bool) -> Result<InitReply> {
    const NEEDED: Capabilities = Capabilities::BIG_WRITES.and(Capabilities::MAX_PAGES);
    const WANTED: Capabilities = NEEDED
        .and(Capabilities::ASYNC_READ)
        .and(Capabilities::ASYNC_DIO)
        .and(Capabilities::READDIRPLUS)
        .and(Capabilities::PARALLEL_DIROPS)
        .and(Capabilities::HANDLE_KILLPRIV_V2)
        .and(Capabilities::DIRECT_IO_ALLOW_MMAP)
        .and(Capabilities::NO_EXPORT_SUPPORT)
        .and(Capabilities::RESEND);
    if init.major != 7 || init.minor < 31 || !init.offered.has(NEEDED) {
        let why =
            format!("the kernel speaks version {}.{} of FUSE; 7.31 (Linux 5.4) is needed", init.major, init.minor);
        return Err(Error::new(ErrorKind::Unsupported, why));
    }
    let wanted = if caches_writes { WANTED.and(Capabilities::WRITEBACK_CACHE) } else { WANTED };
    let wanted = if over_io_uring { wanted.and(Capabilities::OVER_IO_URING) } else { wanted };
    let wanted = Capabilities(wanted.0 & init.offered.0);
    let max_readahead = init.max_readahead.max(MAX_WRITE as u32);
    Ok(InitReply { max_readahead, wanted, max_background: BACKGROUND_REQUESTS, max_write: MAX_WRITE as u32 })
}

impl State {
    /// Lets the task that waits for requests look again.
    fn wake(&self) {
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    fn receive(&self, head: &mut [u8; HEAD], body: &mut Buf) -> rustix::io::Result<usize> {
        rustix::io::readv(&self.connection, &mut [IoSliceMut::new(head), IoSliceMut::new(body)])
    }

    fn send(&self, unique: u64, reply: Reply) {
        let head = reply.head(unique);
        let sent = match &reply {
            Reply::Data(data) => rustix::io::writev(&self.connection, &[IoSlice::new(&head), IoSlice::new(data)]),
            _ => rustix::io::writev(&self.connection, &[IoSlice::new(&head)]),
        };
        match sent {
            Ok(_) => {}
            // The caller was interrupted, or the mount is gone.
            Err(Errno::NOENT | Errno::NODEV) => {}
            Err(error) => {
                tracing::error!(%error, ?unique, "a reply was refused by the kernel");
                let head = Reply::Error(libc::EIO).head(unique);
                let _ = rustix::io::writev(&self.connection, &[IoSlice::new(&head)]);
            }
        }
        if let Reply::Data(buf) | Reply::Stored(buf) = reply {
            self.memory.keep(buf);
        }
    }
}
