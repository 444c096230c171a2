//! The process that makes notifications for which the kernel waits: a helper with the connection, and without anything
//! else of the serving process.
//!
//! When the serving process is gone while the kernel waits for requests of the mount, either another process continues
//! the mount, or this one ends it: the kernel keeps a connection as long as a call on it lasts.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::descriptor::receive_descriptor;
use crate::mount::mounted_at;

/// Name of this work among the arguments of a helper.
pub const NOTIFY: &str = "notify";
/// Length of an order.
pub const ORDER_BYTES: usize = 32;
/// Length of an answer: the id of the order, and the errno or 0.
pub const ANSWER_BYTES: usize = 12;

const INVALIDATE_INODE_CODE: i32 = 2;

/// A part of a node: its number, the first byte (-1: nothing but the attributes) and the length (0: to its end).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub node: u64,
    pub from: i64,
    pub len: i64,
}

/// From the serving process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Let the kernel drop what it has cached; answer with the id, which is not 0.
    Drop(u64, Part),
    /// Another process holds the connection after the end of the serving one, for this time at most. No answer.
    Kept(Duration),
}

impl Order {
    pub fn bytes(self) -> [u8; ORDER_BYTES] {
        let words = match self {
            Order::Drop(id, Part { node, from, len }) => [id, node, from as u64, len as u64],
            Order::Kept(limit) => [0, limit.as_secs(), 0, 0],
        };
        let mut bytes = [0; ORDER_BYTES];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
        bytes
    }

    fn of(bytes: &[u8; ORDER_BYTES]) -> Order {
        let [id, node, from, len] = [0, 1, 2, 3].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * at..8 * at + 8]);
            u64::from_ne_bytes(word)
        });
        match id {
            0 => Order::Kept(Duration::from_secs(node)),
            id => Order::Drop(id, Part { node, from: from as i64, len: len as i64 }),
        }
    }
}

/// Returns the id and the errno of an answer.
pub fn answer_of(answer: &[u8; ANSWER_BYTES]) -> (u64, i32) {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *answer;
    (u64::from_ne_bytes([a, b, c, d, e, f, g, h]), i32::from_ne_bytes([i, j, k, l]))
}

impl Part {
    /// Makes the kernel drop what it has cached.
    pub fn drop_cached(self, connection: BorrowedFd<'_>) -> io::Result<()> {
        let mut message = Vec::with_capacity(40);
        message.extend_from_slice(&40u32.to_ne_bytes());
        message.extend_from_slice(&INVALIDATE_INODE_CODE.to_ne_bytes());
        message.extend_from_slice(&0u64.to_ne_bytes());
        message.extend_from_slice(&self.node.to_ne_bytes());
        message.extend_from_slice(&self.from.to_ne_bytes());
        message.extend_from_slice(&self.len.to_ne_bytes());
        match rustix::io::write(connection, &message) {
            // The kernel has nothing cached for the node.
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

struct Shared {
    connection: OwnedFd,
    state: Mutex<State>,
    /// An order has arrived, or one was carried out.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    orders: VecDeque<(u64, Part)>,
    /// Orders that were received and not answered, and threads without one.
    unanswered: usize,
    idle: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all orders are carried out, for `limit` at most. Returns whether they are.
    fn wait(&self, limit: Duration) -> bool {
        let (start, mut state) = (Instant::now(), self.lock());
        while state.unanswered > 0 {
            let Some(left) = limit.checked_sub(start.elapsed()) else { return false };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Carries out the orders that arrive on standard input about the mount at `dir`, until the serving process is gone.
pub fn carry_out_orders(dir: &Path) -> io::Result<()> {
    let socket = rustix::stdio::stdin().try_clone_to_owned()?;
    let connection = receive_descriptor(&socket)?.ok_or(io::ErrorKind::InvalidData)?;
    let minor = mounted_at(dir).map(|mount| mount.device.1);
    let (mut socket, mut kept) = (UnixStream::from(socket), None);
    let shared = Arc::new(Shared { connection, state: Mutex::default(), changed: Condvar::new() });
    let mut order = [0; ORDER_BYTES];
    while socket.read_exact(&mut order).is_ok() {
        match Order::of(&order) {
            Order::Kept(limit) => kept = Some(limit),
            Order::Drop(id, part) => {
                let mut state = shared.lock();
                state.orders.push_back((id, part));
                state.unanswered += 1;
                if state.idle < state.orders.len() {
                    let (shared, socket) = (shared.clone(), socket.try_clone()?);
                    thread::spawn(move || work(&shared, &socket));
                } else {
                    shared.changed.notify_all();
                }
            }
        }
    }
    if !shared.wait(kept.unwrap_or_default()) {
        end_connection(dir, minor);
    }
    Ok(())
}

/// Carries out orders, each when it arrives.
fn work(shared: &Shared, mut socket: &UnixStream) {
    let mut state = shared.lock();
    loop {
        let Some((id, part)) = state.orders.pop_front() else {
            state.idle += 1;
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            continue;
        };
        drop(state);
        let dropped = part.drop_cached(shared.connection.as_fd());
        let errno = dropped.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        let mut answer = [0; ANSWER_BYTES];
        answer[..8].copy_from_slice(&id.to_ne_bytes());
        answer[8..].copy_from_slice(&errno.to_ne_bytes());
        state = shared.lock();
        // The serving process may be gone. Answers are short enough not to be divided.
        let _ = socket.write_all(&answer);
        state.unanswered -= 1;
        shared.changed.notify_all();
    }
}

/// Ends the connection of the mount at `dir`, with the number `minor`: all requests fail.
fn end_connection(dir: &Path, minor: Option<u32>) {
    let Some(minor) = minor else { return };
    if fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1").is_ok() {
        return;
    }
    if mounted_at(dir).is_some_and(|mount| mount.device.1 == minor) {
        // It fails if the mount is in use, after the connection has ended.
        let _ = rustix::mount::unmount(dir, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_their_bytes_belong_together() {
        let drop = |from, len| Order::Drop(7, Part { node: u64::MAX, from, len });
        for order in [drop(-1, 0), drop(4096, i64::MAX), Order::Kept(Duration::from_secs(600))] {
            assert_eq!(Order::of(&order.bytes()), order);
        }
    }

    #[test]
    fn orders_that_are_not_carried_out_are_waited_for() {
        let connection = OwnedFd::from(fs::File::open("/dev/null").unwrap());
        let shared = Shared { connection, state: Mutex::default(), changed: Condvar::new() };
        assert!(shared.wait(Duration::ZERO));
        shared.lock().unanswered = 1;
        assert!(!shared.wait(Duration::from_millis(1)));
    }
}
