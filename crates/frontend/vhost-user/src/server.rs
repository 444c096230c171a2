//! The server: one session per disk and socket at a time, and how sessions end.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkdisk_uring::{ByteStream, Changes, PeerCred, Rt, Stream, UnixListener};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::disk::{Disk, Disks, SERIAL_BYTES};
use crate::options::ServerOptions;
use crate::passed::{PassedSession, duplicate};
use crate::session::{Control, Session};

/// Pause after a failed accept, for example when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long the connection of a front end that was killed may outlive it: its process gives up its memory first. The
/// next constant is the interval of looks.
const LEAVING: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(10);

/// A vhost-user-blk server for a set of disks. Clones are the same server.
pub struct Server<X: Disks> {
    rt: Rt,
    disks: X,
    options: ServerOptions,
    sessions: Rc<Sessions>,
}

impl<X: Disks> Clone for Server<X> {
    fn clone(&self) -> Server<X> {
        let (rt, disks, options) = (self.rt.clone(), self.disks.clone(), self.options.clone());
        Server { rt, disks, options, sessions: self.sessions.clone() }
    }
}

#[derive(Default)]
struct Sessions {
    all: RefCell<Vec<Rc<Entry>>>,
    changes: Changes,
    is_stopped: Cell<bool>,
    /// New sessions are passed on to another process, too.
    are_leaving: Cell<bool>,
    passed: RefCell<Vec<PassedSession>>,
}

/// A session in the list.
struct Entry {
    /// Returns the current name of its disk.
    name: Box<dyn Fn() -> String>,
    /// Returns the serial number of its disk.
    serial: Box<dyn Fn() -> [u8; SERIAL_BYTES]>,
    peer: Option<PeerCred>,
    control: Rc<Control>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        std::ptr::eq(self, other)
    }
}

/// Removes its session from the list.
struct Listed {
    sessions: Rc<Sessions>,
    entry: Rc<Entry>,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.sessions.all.borrow_mut().retain(|entry| !Rc::ptr_eq(entry, &self.entry));
        self.sessions.changes.wake();
    }
}

/// A connected front end.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientInfo {
    /// Current name of its disk.
    pub disk: String,
    /// The peer's credentials; `None` if the socket does not provide them.
    pub peer: Option<PeerCred>,
}

/// Looks at a server and stops it; usable anywhere on the server's thread.
#[derive(Clone)]
pub struct ServerHandle {
    rt: Rt,
    options: ServerOptions,
    sessions: Rc<Sessions>,
}

impl ServerHandle {
    /// Returns the front ends.
    pub fn clients(&self) -> Vec<ClientInfo> {
        let all = self.sessions.all.borrow();
        all.iter().map(|entry| ClientInfo { disk: (entry.name)(), peer: entry.peer }).collect()
    }

    /// Ends the sessions of a disk, by its current name, after their requests in flight. Returns how many are left.
    pub fn disconnect(&self, disk: &str) -> usize {
        let all = self.sessions.all.borrow().clone();
        let theirs = all.iter().filter(|entry| (entry.name)() == disk);
        theirs.inspect(|entry| entry.control.close()).count()
    }

    /// Returns whether all front ends of a disk, by its current name, can be told that its size has changed.
    pub fn learn_of_changes(&self, disk: &str) -> bool {
        let all = self.sessions.all.borrow();
        all.iter().filter(|entry| (entry.name)() == disk).all(|entry| entry.control.learns_of_changes())
    }

    /// Tells the front ends of a disk that its size has changed.
    pub fn announce_change(&self, disk: &str) {
        let all = self.sessions.all.borrow().clone();
        for entry in all.iter().filter(|entry| (entry.name)() == disk) {
            entry.control.announce_change(&self.rt, &self.options);
        }
    }

    /// Ends all sessions after their requests in flight and returns them for another process, which continues them with
    /// [`Server::resume`]. Sessions that begin later are returned by a second call, after their listeners have ended.
    pub async fn pass_on(&self) -> Vec<PassedSession> {
        self.sessions.are_leaving.set(true);
        let all = self.sessions.all.borrow().clone();
        all.iter().for_each(|entry| entry.control.leave());
        let gone = self.sessions.changes.until(|| self.sessions.all.borrow().is_empty());
        let limit = self.options.drain_timeout;
        if self.rt.timeout(limit, gone).await.is_err() {
            let left = self.sessions.all.borrow().len();
            tracing::warn!("requests of {left} vhost-user devices have not ended within {limit:?}: disconnected");
            all.iter().for_each(|entry| entry.control.close());
        }
        self.sessions.passed.take()
    }

    /// Ends all sessions after their requests in flight, and waits for that, for `drain_timeout` at most.
    pub async fn stop(&self) {
        self.sessions.is_stopped.set(true);
        self.sessions.changes.wake();
        let all = self.sessions.all.borrow().clone();
        all.iter().for_each(|entry| entry.control.close());
        let gone = self.sessions.changes.until(|| self.sessions.all.borrow().is_empty());
        let limit = self.options.drain_timeout;
        if self.rt.timeout(limit, gone).await.is_err() {
            let left = self.sessions.all.borrow().len();
            tracing::warn!("requests of {left} vhost-user devices have not ended within {limit:?}");
        }
    }
}

impl<X: Disks> Server<X> {
    /// Creates a server of `disks` that runs on `rt`.
    pub fn new(rt: &Rt, disks: X, options: ServerOptions) -> Server<X> {
        Server { rt: rt.clone(), disks, options, sessions: Rc::default() }
    }

    /// Returns a handle to this server.
    pub fn handle(&self) -> ServerHandle {
        let (rt, options, sessions) = (self.rt.clone(), self.options.clone(), self.sessions.clone());
        ServerHandle { rt, options, sessions }
    }

    /// Serves the disk `name` to the front ends that connect to `listener`, one at a time, until it is cancelled or the
    /// server is stopped.
    pub async fn listen(&self, listener: UnixListener, name: &str) {
        self.listen_at(listener, "", || name.to_string()).await;
    }

    /// As [`listen`](Self::listen), for the disk that `name` returns when a front end connects; `place` is the path of
    /// the socket.
    pub async fn listen_at(&self, listener: UnixListener, place: &str, name: impl Fn() -> String) {
        while !self.sessions.is_stopped.get() {
            match listener.accept().await {
                Ok(stream) => self.welcome(stream, place, &name()).await,
                Err(error) => {
                    let name = name();
                    tracing::warn!("{name}: cannot accept a vhost-user connection: {error}");
                    self.rt.sleep_for(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Begins a session, unless another front end of the disk is still connected.
    async fn welcome(&self, stream: Stream, place: &str, name: &str) {
        let refused = |error: forkdisk::Error| tracing::warn!("refused a vhost-user front end: {error}");
        let serial = match self.disks.open(name) {
            Ok(disk) => disk.info().serial,
            Err(error) => return refused(error),
        };
        // Also by another socket, or by the socket of an earlier name.
        let others = |sessions: &Sessions| -> Vec<Rc<Entry>> {
            sessions.all.borrow().iter().filter(|entry| (entry.serial)() == serial).cloned().collect()
        };
        let is_used = |entry: &Rc<Entry>| !entry.control.is_closing() && !is_gone(&entry.control.stream);
        let start = Instant::now();
        loop {
            let found = others(&self.sessions);
            if found.is_empty() {
                break;
            }
            if !found.iter().any(is_used) {
                found.iter().for_each(|entry| entry.control.close());
                // Requests of the last session that are in flight must not run beside those of the next.
                self.sessions.changes.until(|| others(&self.sessions) != found).await;
            } else if start.elapsed() > LEAVING {
                return tracing::warn!("{name}: a vhost-user front end is connected already; refused another one");
            } else {
                self.rt.sleep_for(LOOK).await;
            }
        }
        if self.sessions.is_stopped.get() {
            return;
        }
        // Opened again: it may have been closed to new users meanwhile.
        let disk = match self.disks.open_at(name, place) {
            Ok(disk) => Rc::new(disk),
            Err(error) => return refused(error),
        };
        let (listed, session) = self.begin(stream, place, disk, &self.options);
        tracing::info!("a vhost-user front end of {:?} has connected", (listed.entry.name)());
        self.serve(listed, session);
    }

    /// Enters a session in the list.
    fn begin(&self, stream: Stream, place: &str, disk: Rc<X::Disk>, options: &ServerOptions) -> (Listed, Session<X>) {
        let control = Control::new(stream.clone(), place);
        if self.sessions.are_leaving.get() {
            control.leave();
        }
        let (named, numbered) = (disk.clone(), disk.clone());
        let (name, serial) = (Box::new(move || named.info().name), Box::new(move || numbered.info().serial));
        let entry = Rc::new(Entry { name, serial, peer: ByteStream::peer(&stream), control: control.clone() });
        self.sessions.all.borrow_mut().push(entry.clone());
        let listed = Listed { sessions: self.sessions.clone(), entry };
        (listed, Session::new(&self.rt, self.disks.clone(), disk, options, control))
    }

    fn serve(&self, listed: Listed, session: Session<X>) {
        self.rt.spawn(async move {
            let shown = (listed.entry.name)();
            match session.run().await {
                Ok(None) => tracing::info!("a vhost-user front end of {shown:?} has gone"),
                Ok(Some(passed)) => listed.sessions.passed.borrow_mut().push(passed),
                Err(closed) => tracing::warn!("closed the vhost-user session of {shown:?}: {closed}"),
            }
        });
    }

    /// Continues a session of another process.
    ///
    /// # Errors
    /// The disk cannot be opened, or memory of the guest cannot be mapped any more. The connection is closed.
    pub fn resume(&self, passed: PassedSession) -> Result<(), String> {
        let disk = self.disks.open_at(&passed.disk, &passed.place).map_err(|error| error.to_string())?;
        let stream = Stream::from_fd(&self.rt, duplicate(&passed.socket).map_err(|error| error.to_string())?);
        let count = passed.queues.len() as u16;
        let options = ServerOptions { max_queues: count, block_size: passed.block_size, ..self.options.clone() };
        let (listed, mut session) = self.begin(stream, &passed.place, Rc::new(disk), &options);
        session.resume(passed)?;
        self.serve(listed, session);
        Ok(())
    }
}

/// Whether the peer has closed its side of a connection, with messages of it that were not read or without.
fn is_gone(stream: &Stream) -> bool {
    let mut watched = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    poll(&mut watched, Some(&now)).is_ok() && watched[0].revents().intersects(gone)
}
