//! Share of one connection next to others that are greedy, slow or hostile, counted in requests
//! served while a disk with its own clock makes a number of ticks. No real time is involved:
//! streams are in memory, and everything runs in the order of the executor's queue.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod support;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use forkdisk::{Buf, Result, WriteFlags, WriteIntent};
use forkdisk_nbd::codec::*;
use forkdisk_nbd::memory::MemoryStream;
use forkdisk_nbd::{Export, ExportInfo, Exports, Server, ServerOptions};
use forkdisk_uring::{ByteStream, Config, Rt, block_on};

/// Requests that the disk serves at a time, one tick each; others queue in order.
const CHANNELS: usize = 128;
const NEIGHBOURS: usize = 64;
const TICKS: usize = 400;
/// Turns of the executor's whole queue between ticks: more than needed from a disk's answer to
/// the client and back to the disk.
const TURNS: usize = 32;

#[derive(Clone, Default)]
struct Disk(Rc<Queue>);

#[derive(Default)]
struct Queue {
    waiting: RefCell<VecDeque<Rc<Cell<bool>>>>,
    longest: Cell<usize>,
}

impl Disk {
    /// Runs one tick: completes the first requests in the queue.
    fn tick(&self) {
        let mut waiting = self.0.waiting.borrow_mut();
        self.0.longest.set(self.0.longest.get().max(waiting.len()));
        let n = waiting.len().min(CHANNELS);
        waiting.drain(..n).for_each(|done| done.set(true));
    }

    async fn serve(&self) {
        let done = Rc::new(Cell::new(false));
        self.0.waiting.borrow_mut().push_back(done.clone());
        std::future::poll_fn(|cx| {
            if done.get() {
                return std::task::Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            std::task::Poll::Pending
        })
        .await;
    }
}

impl Exports for Disk {
    type Export = Disk;

    fn list(&self, _after: &str, _most: usize) -> Vec<(String, String)> {
        vec![]
    }

    fn open(&self, _name: &str) -> Result<Disk> {
        Ok(self.clone())
    }

    fn buffer(&self, len: usize) -> Buf {
        Buf::zeroed(len)
    }
}

impl Export for Disk {
    type Context = ();

    fn announce_write(&self, _offset: u64, _len: u64) -> Option<WriteIntent> {
        None
    }

    fn info(&self) -> ExportInfo {
        ExportInfo {
            name: "disk".into(),
            description: String::new(),
            size: self.size(),
            read_only: false,
            multi_conn: true,
        }
    }

    fn size(&self) -> u64 {
        1 << 40
    }

    async fn read(&self, _offset: u64, buf: Buf) -> (Result<()>, Buf) {
        self.serve().await;
        (Ok(()), buf)
    }

    async fn write(&self, _offset: u64, buf: Buf, _flags: WriteFlags) -> (Result<()>, Buf) {
        self.serve().await;
        (Ok(()), buf)
    }

    async fn write_zeroes(&self, _offset: u64, _len: u64, _fua: bool, _no_hole: bool) -> Result<()> {
        self.serve().await;
        Ok(())
    }

    fn zeroing_is_fast(&self, _offset: u64, _len: u64) -> bool {
        true
    }

    async fn trim(&self, _offset: u64, _len: u64, _fua: bool) -> Result<()> {
        self.serve().await;
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        self.serve().await;
        Ok(())
    }

    fn contexts(&self) -> Vec<String> {
        vec![]
    }

    fn context(&self, _name: &str) -> Option<()> {
        None
    }

    async fn status(&self, _context: &(), _offset: u64, len: u64, _looks: usize) -> Result<Vec<StatusExtent>> {
        Ok(vec![StatusExtent { len, flags: 0 }])
    }
}

/// Behaviour of the other clients.
#[derive(Clone, Copy, Debug)]
enum Neighbour {
    /// As many reads of this size as fit into the stream, all the time.
    Greedy(u32),
    /// As many writes of this size as fit, all the time.
    Writer(u32),
    /// Sends reads and never receives a reply.
    Deaf,
    /// Sends most of a large write, and waits.
    HalfWrite,
    /// Sends invalid bytes, is disconnected, and reconnects at the next tick.
    Nonsense,
    /// Never ends its handshake.
    Silent,
}

async fn send(stream: &MemoryStream, bytes: Vec<u8>) -> bool {
    stream.send_vectored(vec![bytes.into()]).await.0.is_ok()
}

async fn connect(server: &Server<Disk>) -> MemoryStream {
    let (client, theirs) = MemoryStream::pair(64 << 10);
    server.welcome(theirs);
    client.recv_exact(Buf::zeroed(18), 0, 18).await.0.expect("a greeting");
    let go = b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";
    assert!(send(&client, go.to_vec()).await);
    // The size and flags, and the acknowledgement.
    client.recv_exact(Buf::zeroed(52), 0, 52).await.0.expect("it is served");
    client
}

fn request(command: u16, length: u32) -> Vec<u8> {
    let style = ReplyStyle::Simple;
    Request { style, flags: 0, command, cookie: 1, offset: 0, length: length.into() }.encode()
}

/// Receives everything up to the end.
async fn fetch(stream: MemoryStream) {
    let mut buf = Buf::zeroed(64 << 10);
    loop {
        let (result, back) = stream.recv(buf, 0, 64 << 10).await;
        buf = back;
        if !matches!(result, Ok(n) if n > 0) {
            return;
        }
    }
}

async fn neighbour(rt: Rt, server: Server<Disk>, kind: Neighbour) {
    if let Neighbour::Silent = kind {
        let (client, theirs) = MemoryStream::pair(64 << 10);
        server.welcome(theirs);
        return fetch(client).await;
    }
    loop {
        let stream = connect(&server).await;
        if !matches!(kind, Neighbour::Deaf) {
            rt.spawn(fetch(stream.clone()));
        }
        let bytes = match kind {
            Neighbour::Greedy(len) => request(CMD_READ, len).repeat(100),
            Neighbour::Writer(len) => [request(CMD_WRITE, len), vec![0; len as usize]].concat(),
            Neighbour::Deaf => request(CMD_READ, 100_000).repeat(100),
            Neighbour::HalfWrite => [request(CMD_WRITE, 1 << 20), vec![0; 1 << 19]].concat(),
            Neighbour::Nonsense | Neighbour::Silent => b"nonsense".repeat(1000),
        };
        while send(&stream, bytes.clone()).await {
            if let Neighbour::HalfWrite = kind {
                std::future::pending::<()>().await;
            }
        }
        for _ in 0..TURNS {
            rt.yield_now().await;
        }
    }
}

/// Returns how many requests a client that waits for each reply is served next to these neighbours,
/// and the longest queue of the disk.
fn served(neighbours: &[Neighbour], started_requests: usize) -> (usize, usize) {
    let options = ServerOptions::default().with_shared_memory(64 << 20).with_started_requests(started_requests);
    let main = |rt: Rt| async move {
        let disk = Disk::default();
        let server = Server::new(&rt, disk.clone(), options);
        for &kind in neighbours {
            rt.spawn(neighbour(rt.clone(), server.clone(), kind));
        }
        let count = Rc::new(Cell::new(0));
        let (modest, served) = (connect(&server).await, count.clone());
        rt.spawn(async move {
            loop {
                assert!(send(&modest, request(CMD_READ, 512)).await);
                modest.recv_exact(Buf::zeroed(528), 0, 528).await.0.expect("a reply");
                served.set(served.get() + 1);
            }
        });
        for _ in 0..TICKS {
            for _ in 0..TURNS {
                rt.yield_now().await;
            }
            disk.tick();
        }
        (count.get(), disk.0.longest.get())
    };
    block_on(Config::default(), main).expect("a ring")
}

fn beside(kind: Neighbour) {
    let shared = ServerOptions::default().started_requests;
    let (alone, _) = served(&[], shared);
    assert!(alone >= TICKS - 2, "alone it has every tick: {alone}");
    let (count, queue) = served(&[kind; NEIGHBOURS], shared);
    println!("{kind:?}: {count} of {alone}, longest queue {queue}");
    assert!(2 * count >= alone, "{count} requests beside {NEIGHBOURS} × {kind:?}, {alone} alone");
}

#[test]
fn a_modest_client_is_served_at_half_its_pace_or_better_beside_64_greedy_ones() {
    beside(Neighbour::Greedy(512));
}

#[test]
fn large_reads_of_others_do_not_hold_up_a_modest_client() {
    beside(Neighbour::Greedy(256 << 10));
}

#[test]
fn writers_do_not_hold_up_a_modest_client() {
    beside(Neighbour::Writer(4096));
}

#[test]
fn clients_that_never_read_do_not_hold_up_a_modest_client() {
    beside(Neighbour::Deaf);
}

#[test]
fn clients_in_the_middle_of_a_write_do_not_hold_up_a_modest_client() {
    beside(Neighbour::HalfWrite);
}

#[test]
fn clients_that_talk_nonsense_again_and_again_do_not_hold_up_a_modest_client() {
    beside(Neighbour::Nonsense);
}

#[test]
fn handshakes_that_do_not_end_do_not_hold_up_a_modest_client() {
    beside(Neighbour::Silent);
}

/// The baseline for the other tests: shows that the shares make the difference.
#[test]
fn without_shares_a_modest_client_would_wait_for_all_that_others_sent_before() {
    let (count, queue) = served(&[Neighbour::Greedy(512); NEIGHBOURS], usize::MAX);
    assert!(count < TICKS / 10 && queue > 4000, "{count} requests, longest queue {queue}");
}
