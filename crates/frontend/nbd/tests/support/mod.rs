//! A server on a separate thread, controllable exports, and a client that sends
//! exactly the bytes a test wants.
#![allow(dead_code, unused_imports, reason = "every test program uses a part of it")]

mod client;
mod probe;
pub mod tls;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;

use forkdisk::Buf;
use forkdisk_nbd::codec::{OPT_SET_META_CONTEXT, ReplyStyle};
use forkdisk_nbd::{Exports, Security, Server, ServerOptions};
use forkdisk_uring::{Config, Rt, Stream, UnixListener, block_on};

pub use client::{Chunk, Client, Reply, connect};
pub use probe::{Probe, ProbeExports};

/// A server that runs until it is dropped.
pub struct TestServer {
    dir: tempfile::TempDir,
    /// Closing it stops the server.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    /// Serves the result of `exports`.
    pub fn start<X: Exports>(options: ServerOptions, exports: impl FnOnce(&Rt) -> X + Send + 'static) -> TestServer {
        TestServer::start_with(options, move |rt| std::future::ready(exports(&rt)))
    }

    /// Serves the result of the future that `exports` returns.
    pub fn start_with<X: Exports, F: Future<Output = X>>(
        options: ServerOptions,
        exports: impl FnOnce(Rt) -> F + Send + 'static,
    ) -> TestServer {
        TestServer::start_as(options, Security::Clear, exports)
    }

    /// As [`start_with`](Self::start_with), protected by `security`.
    pub fn start_as<X: Exports, F: Future<Output = X>>(
        options: ServerOptions,
        security: Security,
        exports: impl FnOnce(Rt) -> F + Send + 'static,
    ) -> TestServer {
        let dir = tempfile::tempdir().expect("a folder for the socket");
        let path = dir.path().join("nbd.sock");
        let (stop, stopped) = UnixStream::pair().expect("a pair of sockets");
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let main = |rt: Rt| async move {
                let listener = UnixListener::bind(&rt, &path).expect("a socket to listen on");
                let server = Server::new(&rt, exports(rt.clone()).await, options);
                let (handle, stopped) = (server.handle(), Stream::from_fd(&rt, OwnedFd::from(stopped)));
                rt.spawn(async move {
                    let _ = stopped.recv(Buf::zeroed(1), 0, 1).await;
                    handle.stop();
                });
                ready.send(()).expect("the test waits");
                server.serve_as(listener, security).await;
            };
            block_on(Config::default(), main).expect("a ring");
        });
        is_ready.recv().expect("the server starts");
        TestServer { dir, stop: Some(stop), thread: Some(thread) }
    }

    /// Serves two writable disks of 1 MiB, `a` and `b`, and a read-only one, `frozen`.
    pub fn of_probe(probe: &Probe, options: ServerOptions) -> TestServer {
        let probe = probe.clone();
        TestServer::start(options, move |rt| {
            ProbeExports::new(rt, &probe).with("a", 1 << 20, false).with("b", 1 << 20, false).with(
                "frozen",
                1 << 20,
                true,
            )
        })
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a client in transmission on `export`.
    pub fn client(&self, export: &str) -> Client {
        let mut client = self.raw();
        client.go(export);
        client
    }

    /// Returns a client in transmission on `export` with this style of replies, and with the
    /// requested contexts.
    pub fn styled(&self, style: ReplyStyle, export: &str, contexts: &[&str]) -> Client {
        let mut client = self.raw();
        client.negotiate(style);
        if !contexts.is_empty() {
            let chosen = client.contexts(OPT_SET_META_CONTEXT, export, contexts);
            assert_eq!(chosen.map(|list| list.len()), Ok(contexts.len()));
        }
        client.go(export);
        client
    }

    /// Returns a client that has read the greeting and sent its flags.
    pub fn raw(&self) -> Client {
        let mut client = connect(&self.socket());
        assert_eq!(client.bytes(18), forkdisk_nbd::codec::GREETING);
        client.send(&3u32.to_be_bytes());
        client
    }

    /// Tells the server to stop, without waiting for it.
    pub fn begin_stop(&mut self) {
        self.stop = None;
    }

    /// Waits until the server has stopped.
    pub fn join(&mut self) {
        self.begin_stop();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server ends without a panic");
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.begin_stop();
        let result = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            result.unwrap_or(Ok(())).expect("the server ends without a panic");
        }
    }
}
