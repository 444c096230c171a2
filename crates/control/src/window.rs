//! A window of tasks: several requests in flight, outcomes in the order in which they were
//! started. No task is dropped before its end.

use std::collections::VecDeque;
use std::future::Future;

use forkdisk_uring::{JoinHandle, Rt};

/// At most `depth` tasks in flight.
pub struct Window<T> {
    runtime: Rt,
    depth: usize,
    running: VecDeque<JoinHandle<T>>,
}

impl<T: 'static> Window<T> {
    /// Creates an empty window for `depth` tasks, at least one.
    pub fn new(runtime: Rt, depth: usize) -> Window<T> {
        Window { runtime, depth: depth.max(1), running: VecDeque::new() }
    }

    /// Starts `future`. If the window is full, waits for the oldest task and returns its outcome.
    pub async fn push(&mut self, future: impl Future<Output = T> + 'static) -> Option<T> {
        let oldest = if self.running.len() >= self.depth { self.pop().await } else { None };
        self.running.push_back(self.runtime.spawn(future));
        oldest
    }

    /// Waits for the oldest task; `None` when there is none left.
    pub async fn pop(&mut self) -> Option<T> {
        Some(self.running.pop_front()?.await)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use forkdisk_uring::{Config, block_on};

    use super::*;

    #[test]
    fn outcomes_come_in_the_order_of_starting_and_the_depth_is_kept() {
        let (outcomes, most) = block_on(Config::default(), |runtime| async move {
            let mut window = Window::new(runtime.clone(), 3);
            let (mut outcomes, mut most) = (Vec::new(), 0);
            for i in 0..10u64 {
                let sleep = runtime.sleep_for(Duration::from_millis(10 - i));
                let task = async move {
                    sleep.await;
                    i
                };
                outcomes.extend(window.push(task).await);
                most = most.max(window.running.len());
            }
            while let Some(outcome) = window.pop().await {
                outcomes.push(outcome);
            }
            (outcomes, most)
        })
        .unwrap();
        assert_eq!(outcomes, (0..10).collect::<Vec<_>>());
        assert_eq!(most, 3);
    }
}
