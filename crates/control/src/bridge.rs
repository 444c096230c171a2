//! Bounded queues between the thread that serves the pool and threads that may block on a caller's files.
//!
//! One side waits by sleeping, the other by awaiting. Each notices when the other has gone: a full queue
//! never outlives its reader, an empty one never its writer.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

struct Queue<T> {
    items: VecDeque<T>,
    room: usize,
    /// The sender is dropped: no items follow those in the queue.
    ended: bool,
    /// The receiver is dropped: no item is taken out any more.
    refused: bool,
    waker: Option<Waker>,
}

struct Shared<T> {
    queue: Mutex<Queue<T>>,
    changed: Condvar,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the waiting side, task or thread; called after every change.
    fn announce(&self, mut queue: MutexGuard<'_, Queue<T>>) {
        let waker = queue.waker.take();
        drop(queue);
        self.changed.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The sending half of a queue.
pub struct Sender<T>(Arc<Shared<T>>);

/// The receiving half of a queue.
pub struct Receiver<T>(Arc<Shared<T>>);

/// The other half of the queue was dropped.
#[derive(Debug, PartialEq, Eq)]
pub struct Gone;

/// Creates a queue for at most `room` items.
pub fn queue<T>(room: usize) -> (Sender<T>, Receiver<T>) {
    let queue = Queue { items: VecDeque::new(), room: room.max(1), ended: false, refused: false, waker: None };
    let shared = Arc::new(Shared { queue: Mutex::new(queue), changed: Condvar::new() });
    (Sender(shared.clone()), Receiver(shared))
}

impl<T> Sender<T> {
    /// Appends `item`; blocks the thread while the queue is full.
    pub fn send_blocking(&self, item: T) -> Result<(), Gone> {
        let mut queue = self.0.lock();
        while queue.items.len() == queue.room && !queue.refused {
            queue = self.0.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.refused {
            return Err(Gone);
        }
        queue.items.push_back(item);
        self.0.announce(queue);
        Ok(())
    }

    /// Appends `item`; waits while the queue is full.
    pub async fn send(&self, item: T) -> Result<(), Gone> {
        let mut item = Some(item);
        poll_fn(|cx| {
            let mut queue = self.0.lock();
            if queue.refused {
                return Poll::Ready(Err(Gone));
            }
            if queue.items.len() == queue.room {
                queue.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            queue.items.extend(item.take());
            self.0.announce(queue);
            Poll::Ready(Ok(()))
        })
        .await
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.ended = true;
        self.0.announce(queue);
    }
}

impl<T> Receiver<T> {
    /// Takes the next item; blocks the thread while the queue is empty. `None` after the last item.
    pub fn receive_blocking(&self) -> Option<T> {
        let mut queue = self.0.lock();
        loop {
            if let Some(item) = queue.items.pop_front() {
                self.0.announce(queue);
                return Some(item);
            }
            if queue.ended {
                return None;
            }
            queue = self.0.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes the next item; waits while the queue is empty. `None` after the last item.
    pub async fn receive(&self) -> Option<T> {
        poll_fn(|cx| {
            let mut queue = self.0.lock();
            if let Some(item) = queue.items.pop_front() {
                self.0.announce(queue);
                return Poll::Ready(Some(item));
            }
            if queue.ended {
                return Poll::Ready(None);
            }
            queue.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.refused = true;
        queue.items.clear();
        self.0.announce(queue);
    }
}

#[cfg(test)]
mod tests {
    use forkdisk_uring::{Config, block_on};

    use super::*;

    #[test]
    fn what_a_thread_sends_arrives_in_order_through_a_small_queue() {
        let (sender, receiver) = queue(2);
        let thread = std::thread::spawn(move || (0..1000).try_for_each(|i| sender.send_blocking(i)));
        let received = block_on(Config::default(), |_| async move {
            let mut received = Vec::new();
            while let Some(i) = receiver.receive().await {
                received.push(i);
            }
            received
        });
        assert_eq!(received.unwrap(), (0..1000).collect::<Vec<_>>());
        assert_eq!(thread.join().unwrap(), Ok(()));
    }

    #[test]
    fn what_is_sent_to_a_thread_arrives_in_order() {
        let (sender, receiver) = queue(2);
        let thread = std::thread::spawn(move || std::iter::from_fn(|| receiver.receive_blocking()).collect::<Vec<_>>());
        block_on(Config::default(), |_| async move {
            for i in 0..1000 {
                sender.send(i).await.unwrap();
            }
        })
        .unwrap();
        assert_eq!(thread.join().unwrap(), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn neither_side_waits_for_one_that_is_gone() {
        let (sender, receiver) = queue(1);
        sender.send_blocking(1).unwrap();
        let thread = std::thread::spawn(move || sender.send_blocking(2));
        drop(receiver);
        assert_eq!(thread.join().unwrap(), Err(Gone));
        let (sender, receiver) = queue::<u8>(1);
        drop(sender);
        assert_eq!(receiver.receive_blocking(), None);
    }
}
