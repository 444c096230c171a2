//! Processors of this machine, and threads that run on one of them.

use std::fs;

use rustix::thread::{CpuSet, sched_setaffinity};

/// Returns the processors that run.
pub fn online_processors() -> Vec<usize> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    parse(list.trim())
}

/// Parses a list such as `0-3,8`.
fn parse(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    };
    list.split(',').filter_map(range).flatten().filter(|&processor| processor < CpuSet::MAX_CPU).collect()
}

/// Runs `work` on a separate thread that stays on `processor`; the thread ends at once if it may not run there.
pub fn spawn_on(processor: usize, work: impl FnOnce() + Send + 'static) -> std::thread::JoinHandle<bool> {
    std::thread::spawn(move || {
        let mut only = CpuSet::new();
        only.set(processor);
        let may = sched_setaffinity(None, &only).is_ok();
        if may {
            work();
        }
        may
    })
}

/// Returns whether threads of this process may run on every processor that runs.
pub fn may_run_everywhere() -> bool {
    let processors = online_processors();
    let tried: Vec<_> = processors.iter().map(|&processor| spawn_on(processor, || {})).collect();
    !tried.is_empty() && tried.into_iter().all(|thread| thread.join().unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_parsed() {
        assert_eq!(parse("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!((parse("0"), parse(""), parse("x-2,1")), (vec![0], vec![], vec![1]));
        assert!(!online_processors().is_empty());
    }
}
