//! Tasks with an outcome that can be awaited, and a window of them: several requests in flight,
//! outcomes in the order in which they were started. Nothing is ever dropped half-way.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use forkdisk::Runtime;

struct Slot<T> {
    outcome: Option<T>,
    waker: Option<Waker>,
}

/// Resolves to the outcome of a spawned task. Dropping it leaves the task running.
pub struct Task<T>(Rc<RefCell<Slot<T>>>);

/// Runs `future` to its end on `runtime`, whether or not anybody waits for it.
pub fn spawn<T: 'static>(runtime: &dyn Runtime, future: impl Future<Output = T> + 'static) -> Task<T> {
    let slot = Rc::new(RefCell::new(Slot { outcome: None, waker: None }));
    let end = slot.clone();
    runtime.spawn(Box::pin(async move {
        let outcome = future.await;
        let mut slot = end.borrow_mut();
        slot.outcome = Some(outcome);
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
    }));
    Task(slot)
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut slot = self.0.borrow_mut();
        if let Some(outcome) = slot.outcome.take() {
            return Poll::Ready(outcome);
        }
        slot.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// At most `depth` tasks in flight.
pub struct Window<T> {
    runtime: Rc<dyn Runtime>,
    depth: usize,
    running: VecDeque<Task<T>>,
}

impl<T: 'static> Window<T> {
    /// An empty window for `depth` tasks, at least one.
    pub fn new(runtime: Rc<dyn Runtime>, depth: usize) -> Window<T> {
        Window { runtime, depth: depth.max(1), running: VecDeque::new() }
    }

    /// Starts `future`. When the window is full, waits for the oldest task and returns its outcome.
    pub async fn push(&mut self, future: impl Future<Output = T> + 'static) -> Option<T> {
        let oldest = if self.running.len() >= self.depth { self.pop().await } else { None };
        self.running.push_back(spawn(&*self.runtime, future));
        oldest
    }

    /// Waits for the oldest task; `None` when there is none left.
    pub async fn pop(&mut self) -> Option<T> {
        Some(self.running.pop_front()?.await)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use forkdisk::LocalFuture;

    use super::*;

    #[derive(Default)]
    struct Queue(RefCell<Vec<LocalFuture<()>>>);

    impl Runtime for Queue {
        fn spawn(&self, task: LocalFuture<()>) {
            self.0.borrow_mut().push(task);
        }

        fn sleep(&self, _: Duration) -> LocalFuture<()> {
            Box::pin(std::future::ready(()))
        }
    }

    /// Polls `main`, and every spawned task newest first whenever `main` has to wait.
    fn run<T>(queue: &Queue, main: impl Future<Output = T>) -> T {
        let mut main = std::pin::pin!(main);
        let mut cx = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(value) = main.as_mut().poll(&mut cx) {
                return value;
            }
            let mut task = queue.0.borrow_mut().pop().expect("a task that the main one waits for");
            assert!(task.as_mut().poll(&mut cx).is_ready());
        }
    }

    #[test]
    fn outcomes_come_in_the_order_of_starting_and_the_depth_is_kept() {
        let queue = Rc::new(Queue::default());
        let most = Rc::new(Cell::new(0));
        let outcomes = run(&queue, async {
            let mut window = Window::new(queue.clone(), 3);
            let mut outcomes = Vec::new();
            for i in 0..10 {
                outcomes.extend(window.push(async move { i }).await);
                most.set(most.get().max(window.running.len()));
            }
            while let Some(outcome) = window.pop().await {
                outcomes.push(outcome);
            }
            outcomes
        });
        assert_eq!(outcomes, (0..10).collect::<Vec<_>>());
        assert_eq!(most.get(), 3);
    }
}
