//! A server of disks in memory on a thread of its own, for front ends in the tests.
#![allow(dead_code, clippy::unwrap_used, reason = "every test program uses a part of it")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use forkdisk::{Buf, Error, ErrorKind, Result, WriteFlags};
use forkdisk_uring::{Config, Rt, UnixListener, block_on};
use forkdisk_vhost_user::{Disk, DiskInfo, Disks, Server, ServerOptions};

/// A disk in memory.
#[derive(Default)]
pub struct MemoryDisk {
    pub name: String,
    pub bytes: RefCell<Vec<u8>>,
    pub read_only: bool,
    pub flushes: Cell<u32>,
    pub durable_writes: Cell<u32>,
    /// How long a write takes.
    pub delay: Duration,
    pub fails: bool,
    /// Refuses requests in other memory than the guest's.
    pub takes_no_copies: bool,
}

#[derive(Clone)]
pub struct MemoryDisks {
    rt: Rt,
    pub all: Rc<BTreeMap<String, Rc<MemoryDisk>>>,
}

pub struct OpenDisk {
    rt: Rt,
    disk: Rc<MemoryDisk>,
}

impl Disks for MemoryDisks {
    type Disk = OpenDisk;

    fn open(&self, name: &str) -> Result<OpenDisk> {
        let disk = self.all.get(name).cloned().ok_or_else(|| Error::new(ErrorKind::NotFound, "no such disk"))?;
        Ok(OpenDisk { rt: self.rt.clone(), disk })
    }

    fn buffer(&self, len: usize) -> Buf {
        self.rt.buffer(len)
    }
}

impl OpenDisk {
    fn outcome_of(&self, buf: &Buf) -> Result<()> {
        match self.disk.takes_no_copies && !buf.is_shared() {
            true => Err(Error::new(ErrorKind::Invalid, "a copy")),
            false => self.outcome(),
        }
    }

    fn outcome(&self) -> Result<()> {
        if self.disk.fails { Err(Error::new(ErrorKind::NoSpace, "full")) } else { Ok(()) }
    }
}

impl Disk for OpenDisk {
    fn info(&self) -> DiskInfo {
        let mut serial = [0; 20];
        serial[..6].copy_from_slice(b"serial");
        serial[7..7 + self.disk.name.len()].copy_from_slice(self.disk.name.as_bytes());
        DiskInfo { name: self.disk.name.clone(), size: self.size(), read_only: self.disk.read_only, serial }
    }

    fn size(&self) -> u64 {
        self.disk.bytes.borrow().len() as u64
    }

    fn read_only(&self) -> bool {
        self.disk.read_only
    }

    async fn read(&self, offset: u64, mut buf: Buf) -> (Result<()>, Buf) {
        let len = buf.len();
        buf.copy_from_slice(&self.disk.bytes.borrow()[offset as usize..offset as usize + len]);
        (self.outcome_of(&buf), buf)
    }

    async fn write(&self, offset: u64, buf: Buf, flags: WriteFlags) -> (Result<()>, Buf) {
        if !self.disk.delay.is_zero() {
            self.rt.sleep_for(self.disk.delay).await;
        }
        let copy = buf.to_vec();
        if buf.is_lost() {
            return (Err(Error::new(ErrorKind::Invalid, "memory that was taken away")), buf);
        }
        self.disk.bytes.borrow_mut()[offset as usize..offset as usize + copy.len()].copy_from_slice(&copy);
        self.disk.durable_writes.set(self.disk.durable_writes.get() + u32::from(flags.fua));
        (self.outcome_of(&buf), buf)
    }

    async fn write_zeroes(&self, offset: u64, len: u64, _fua: bool) -> Result<()> {
        self.disk.bytes.borrow_mut()[offset as usize..(offset + len) as usize].fill(0);
        self.outcome()
    }

    async fn discard(&self, offset: u64, len: u64, _fua: bool) -> Result<()> {
        self.disk.bytes.borrow_mut()[offset as usize..(offset + len) as usize].fill(0xdd);
        self.outcome()
    }

    async fn flush(&self) -> Result<()> {
        self.disk.flushes.set(self.disk.flushes.get() + 1);
        self.outcome()
    }
}

/// A disk of `size` bytes with a pattern.
pub fn disk(name: &str, size: usize) -> MemoryDisk {
    let bytes = (0..size).map(|n| (n / 512) as u8).collect();
    MemoryDisk { name: name.to_string(), bytes: RefCell::new(bytes), ..MemoryDisk::default() }
}

/// What the thread of the server is told to do.
pub enum Order {
    Disconnect(String),
    Grow(String, usize),
    Stop,
}

/// Flushes, durable writes and contents of each disk.
pub type Ended = BTreeMap<String, (u32, u32, Vec<u8>)>;

/// A running server.
pub struct Fixture {
    pub dir: tempfile::TempDir,
    orders: mpsc::Sender<Order>,
    thread: Option<JoinHandle<Ended>>,
}

impl Fixture {
    /// Serves disks, each at `DIR/NAME`. They are made on the thread of the server.
    pub fn new(options: ServerOptions, make: impl FnOnce() -> Vec<MemoryDisk> + Send + 'static) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let (orders, received) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let at = dir.path().to_path_buf();
        let thread = std::thread::spawn(move || {
            let served = block_on(Config::default(), |rt| async move {
                let all: BTreeMap<_, _> = make().into_iter().map(|disk| (disk.name.clone(), Rc::new(disk))).collect();
                let disks = MemoryDisks { rt: rt.clone(), all: Rc::new(all) };
                let server = Server::new(&rt, disks.clone(), options);
                for name in disks.all.keys() {
                    let listener = UnixListener::bind(&rt, at.join(name)).unwrap();
                    let (server, name) = (server.clone(), name.clone());
                    rt.spawn(async move { server.listen(listener, &name).await });
                }
                ready.send(()).unwrap();
                obey(&rt, &server, &disks, received).await;
                let result = |disk: &Rc<MemoryDisk>| {
                    (disk.flushes.get(), disk.durable_writes.get(), disk.bytes.borrow().clone())
                };
                disks.all.iter().map(|(name, disk)| (name.clone(), result(disk))).collect()
            });
            served.unwrap()
        });
        is_ready.recv().unwrap();
        Fixture { dir, orders, thread: Some(thread) }
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn order(&self, order: Order) {
        self.orders.send(order).unwrap();
    }

    /// Ends the server; returns flushes, durable writes and contents of each disk.
    pub fn end(mut self) -> Ended {
        self.order(Order::Stop);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = self.orders.send(Order::Stop);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the server panicked");
        }
    }
}

async fn obey(rt: &Rt, server: &Server<MemoryDisks>, disks: &MemoryDisks, orders: mpsc::Receiver<Order>) {
    loop {
        match orders.try_recv() {
            Ok(Order::Stop) | Err(mpsc::TryRecvError::Disconnected) => return server.handle().stop().await,
            Ok(Order::Disconnect(name)) => {
                server.handle().disconnect(&name);
            }
            Ok(Order::Grow(name, size)) => {
                disks.all[&name].bytes.borrow_mut().resize(size, 0);
                server.handle().announce_change(&name);
            }
            Err(mpsc::TryRecvError::Empty) => rt.sleep_for(Duration::from_millis(1)).await,
        }
    }
}

/// One disk `d` of 8 MiB.
pub fn one_disk() -> Fixture {
    Fixture::new(ServerOptions::default(), || vec![disk("d", 8 << 20)])
}

/// Whether the server still serves `socket`.
pub fn is_served(socket: &Path) -> bool {
    let Ok(mut guest) = forkdisk_vhost_user::testing::Guest::connect(socket, 1, 64, 64 << 10) else { return false };
    guest.request(0, 0, &[], 512).is_ok_and(|(status, _)| status == 0)
}
