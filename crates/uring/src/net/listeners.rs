//! Listening sockets that outlive their process: passed to the one that serves after it, with the connections in the
//! kernel's queue.
//!
//! A socket is known by its place: `unix:PATH`, `tcp:ADDRESS` as it was requested, or `passed:NAME` for one that a
//! service manager opened. A listener at a place for which a socket was inherited uses that socket.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::time::Duration;

use super::stream::{self, Stream};
use super::unix::SocketFile;
use crate::driver::Driver;
use crate::executor::Rt;
use crate::handle::Handle;

/// Interval at which cancelled accepts are counted.
const LOOK: Duration = Duration::from_millis(1);
/// Most times that they are counted.
const MAX_LOOKS_COUNT: usize = 1000;

/// A listening socket on its way to another process.
#[derive(Debug)]
pub struct PassedListener {
    /// Its place.
    pub place: String,
    /// The socket.
    pub socket: OwnedFd,
    /// Connections that were accepted and not served.
    pub accepted: Vec<OwnedFd>,
}

impl PassedListener {
    /// Describes a socket that a service manager opened under this name.
    pub fn activated(name: &str, socket: OwnedFd) -> PassedListener {
        PassedListener { place: format!("{}{name}", super::unix::NAMED), socket, accepted: Vec::new() }
    }

    /// Returns its name if a service manager opened it.
    pub fn name(&self) -> Option<&str> {
        self.place.strip_prefix(super::unix::NAMED)
    }
}

/// The listening sockets of a ring.
#[derive(Default)]
pub(crate) struct Listeners {
    open: RefCell<Vec<Weak<Listening>>>,
    inherited: RefCell<Vec<PassedListener>>,
    /// Sockets that another process gets, by the handle on which accepts are in flight.
    leaving: RefCell<Vec<(Rc<Handle>, PassedListener)>>,
}

impl Listeners {
    /// Keeps a connection of a listener that another process gets; returns any other.
    pub(crate) fn keep(&self, listener: &Rc<Handle>, connection: OwnedFd) -> Option<OwnedFd> {
        let mut leaving = self.leaving.borrow_mut();
        match leaving.iter_mut().find(|(handle, _)| Rc::ptr_eq(handle, listener)) {
            Some((_, passed)) => passed.accepted.push(connection),
            None => return Some(connection),
        }
        None
    }

    /// Takes the inherited socket of a place.
    pub(super) fn take(&self, place: &str) -> Option<PassedListener> {
        let mut inherited = self.inherited.borrow_mut();
        let at = inherited.iter().position(|passed| passed.place == place)?;
        Some(inherited.swap_remove(at))
    }
}

/// A listening socket in use.
pub(crate) struct Listening {
    pub(super) handle: Rc<Handle>,
    place: String,
    pub(super) file: Option<SocketFile>,
    /// Connections that the process before has accepted.
    accepted: RefCell<VecDeque<OwnedFd>>,
}

impl Listening {
    /// Registers a new socket.
    pub(super) fn new(driver: &Rc<Driver>, place: String, fd: OwnedFd, file: Option<SocketFile>) -> Rc<Listening> {
        Listening::of(driver, PassedListener { place, socket: fd, accepted: Vec::new() }, file)
    }

    /// Registers a socket.
    pub(super) fn of(driver: &Rc<Driver>, passed: PassedListener, file: Option<SocketFile>) -> Rc<Listening> {
        let PassedListener { place, socket, accepted } = passed;
        let (handle, accepted) = (Handle::new(driver, socket), RefCell::new(accepted.into()));
        let listening = Rc::new(Listening { handle, place, file, accepted });
        let mut open = driver.listeners.open.borrow_mut();
        open.retain(|other| other.strong_count() > 0);
        open.push(Rc::downgrade(&listening));
        listening
    }

    pub(super) async fn accept(&self) -> io::Result<Stream> {
        let accepted = self.accepted.borrow_mut().pop_front();
        match accepted {
            Some(connection) => Ok(Stream::of(self.handle.driver(), connection)),
            None => stream::accept(&self.handle).await,
        }
    }
}

impl Rt {
    /// Adds listening sockets of another process; a listener at the place of one of them uses it.
    pub fn inherit_listeners(&self, passed: Vec<PassedListener>) {
        self.driver().listeners.inherited.borrow_mut().extend(passed);
    }

    /// Takes the inherited sockets that a service manager opened.
    pub fn take_activated(&self) -> Vec<PassedListener> {
        let mut inherited = self.driver().listeners.inherited.borrow_mut();
        let (named, others): (Vec<_>, Vec<_>) = inherited.drain(..).partition(|passed| passed.name().is_some());
        inherited.extend(others);
        named
    }

    /// Returns the number of listening sockets in use.
    pub fn listeners(&self) -> usize {
        self.driver().listeners.open.borrow().iter().filter(|listening| listening.strong_count() > 0).count()
    }

    /// Closes the inherited sockets that no listener uses, and removes their files.
    pub fn close_unused_listeners(&self) {
        let unused = std::mem::take(&mut *self.driver().listeners.inherited.borrow_mut());
        for PassedListener { place, socket, .. } in unused {
            drop(socket);
            if let Some(path) = place.strip_prefix(super::unix::AT_PATH) {
                SocketFile::remove_unused(Path::new(path));
            }
        }
    }

    /// Begins to pass all listening sockets to another process: their files stay when the listeners are dropped, and
    /// connections that are accepted meanwhile are passed with them.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn begin_to_pass_listeners(&self) -> io::Result<()> {
        let listeners = &self.driver().listeners;
        let open: Vec<Rc<Listening>> = listeners.open.borrow().iter().filter_map(Weak::upgrade).collect();
        let mut leaving = Vec::with_capacity(open.len());
        for listening in &open {
            let socket = listening.handle.fd().try_clone_to_owned()?;
            let passed = PassedListener { place: listening.place.clone(), socket, accepted: Vec::new() };
            leaving.push((listening.handle.clone(), passed));
        }
        open.iter().filter_map(|listening| listening.file.as_ref()).for_each(SocketFile::keep);
        for (listening, (_, passed)) in open.iter().zip(&mut leaving) {
            passed.accepted.extend(listening.accepted.borrow_mut().drain(..));
        }
        *listeners.leaving.borrow_mut() = leaving;
        Ok(())
    }

    /// Returns the sockets for the other process, after all listeners have been dropped.
    pub async fn pass_listeners(&self) -> Vec<PassedListener> {
        for _ in 0..MAX_LOOKS_COUNT {
            if !self.driver().is_accepting() {
                break;
            }
            self.sleep_for(LOOK).await;
        }
        let listeners = &self.driver().listeners;
        let leaving = std::mem::take(&mut *listeners.leaving.borrow_mut());
        leaving.into_iter().map(|(_, passed)| passed).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::SocketAddr;
    use std::os::unix::net::UnixStream;

    use forkdisk::Buf;

    use super::*;
    use crate::{Config, SocketAccess, TcpListener, UnixListener, block_on, is_interrupted};

    #[test]
    fn listeners_keep_their_clients_and_files_when_they_are_passed() {
        let dir = tempfile::tempdir().unwrap();
        let path = &dir.path().join("socket");
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let (passed, early, port) = block_on(Config::default(), |rt| async move {
            let (unix, tcp) = (UnixListener::bind(&rt, path).unwrap(), TcpListener::bind(&rt, any).unwrap());
            let port = tcp.local_addr();
            // One is accepted in the moment at which the listeners end, one waits in the kernel's queue.
            let accepting = rt.spawn(async move { drop(unix.accept().await) });
            rt.yield_now().await;
            rt.begin_to_pass_listeners().unwrap();
            let early = [UnixStream::connect(path).unwrap(), UnixStream::connect(path).unwrap()];
            accepting.cancel().await;
            drop(tcp);
            (rt.pass_listeners().await, early, port)
        })
        .unwrap();
        assert_eq!(passed.len(), 2);
        block_on(Config::default(), |rt| async move {
            rt.inherit_listeners(passed);
            let access = SocketAccess { mode: 0o666, group: None };
            let unix = UnixListener::bind_for(&rt, path, access).unwrap();
            assert_eq!(TcpListener::bind(&rt, any).unwrap().local_addr(), port);
            for mut client in early {
                let stream = unix.accept().await.unwrap();
                stream.send_vectored(vec![b"x".to_vec().into()]).await.0.unwrap();
                client.read_exact(&mut [0]).unwrap();
            }
            rt.close_unused_listeners();
        })
        .unwrap();
        assert!(!path.exists(), "the second listener removes the file");
    }

    #[test]
    fn what_was_sent_and_received_before_an_interruption_counts() {
        block_on(Config::default(), |rt| async move {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let stream = Stream::from_fd(&rt, ours.into());
            let mut theirs = theirs;
            theirs.write_all(b"abc").unwrap();
            let receiving = rt.spawn(stream.recv_exact(Buf::zeroed(10), 0, 10));
            rt.sleep_for(5 * LOOK).await;
            let (result, buf, count) = loop {
                stream.interrupt();
                rt.sleep_for(LOOK).await;
                if receiving.is_finished() {
                    break receiving.await;
                }
            };
            assert!(is_interrupted(&result.unwrap_err()));
            assert_eq!(&buf[..count], b"abc");
            let bytes: Vec<u8> = (0..8 << 20).map(|n| (n % 251) as u8).collect();
            let sending = rt.spawn(stream.send_vectored(vec![bytes.clone().into()]));
            rt.sleep_for(20 * LOOK).await;
            stream.interrupt_send();
            let (result, mut rest) = sending.await;
            assert!(is_interrupted(&result.unwrap_err()));
            let passed = UnixStream::from(stream.pass_on().unwrap());
            drop(stream);
            let rest = rest.pop().unwrap().bytes().to_vec();
            assert!(!rest.is_empty() && rest.len() < bytes.len(), "{}", rest.len());
            let mut passed = passed;
            let sender = std::thread::spawn(move || passed.write_all(&rest).unwrap());
            let mut received = vec![0; bytes.len()];
            theirs.read_exact(&mut received).unwrap();
            sender.join().unwrap();
            assert!(received == bytes);
        })
        .unwrap();
    }
}
