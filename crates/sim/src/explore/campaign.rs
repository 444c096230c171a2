//! Many seeds on several threads. Every run is single-threaded; the threads share a counter.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use super::{Recipe, Report};
use crate::history::{Stats, Violation};

/// A run that broke a promise.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What was run.
    pub recipe: Recipe,
    /// The violation.
    pub violation: Violation,
}

/// A set of runs.
pub struct Campaign {
    /// What to run.
    pub recipes: Vec<Recipe>,
    /// Threads.
    pub jobs: usize,
    /// Stop after this many failures.
    pub enough: usize,
}

impl Campaign {
    /// Runs all of them, and calls `progress` with the number that have ended and the sums so far.
    pub fn run(&self, mut progress: impl FnMut(usize, &Stats, usize)) -> (Stats, Vec<Failure>) {
        let (mut stats, mut failures, mut ended) = (Stats::default(), Vec::new(), 0);
        spread(
            self.jobs,
            self.recipes.len(),
            |i| self.recipes[i].run(false),
            |i, report: Report| {
                stats.add(&report.stats);
                ended += 1;
                if let Some(violation) = report.violation {
                    failures.push(Failure { recipe: self.recipes[i].clone(), violation });
                }
                progress(ended, &stats, failures.len());
                failures.len() < self.enough
            },
        );
        (stats, failures)
    }
}

/// Runs `work(0..n)` on `jobs` threads and passes the results to `take` as they arrive, until it returns
/// false.
pub(super) fn spread<T: Send>(
    jobs: usize,
    n: usize,
    work: impl Fn(usize) -> T + Sync,
    mut take: impl FnMut(usize, T) -> bool,
) {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, results) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            let (sender, next, stop, work) = (sender.clone(), &next, &stop, &work);
            scope.spawn(move || {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= n || stop.load(Ordering::Relaxed) || sender.send((i, work(i))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        for (i, result) in results {
            if !take(i, result) {
                stop.store(true, Ordering::Relaxed);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_work_is_done_once_and_can_be_stopped() {
        let mut seen = vec![0; 100];
        spread(
            3,
            100,
            |i| i * 2,
            |i, double| {
                assert_eq!(double, i * 2);
                seen[i] += 1;
                true
            },
        );
        assert!(seen.iter().all(|&n| n == 1));
        let mut taken = 0;
        spread(
            2,
            1_000_000,
            |i| i,
            |_, _| {
                taken += 1;
                taken < 5
            },
        );
        assert!(taken < 1_000_000);
    }
}
