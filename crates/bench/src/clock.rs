//! CPU time and wall-clock time of work in this process, and CPU time of the kernel's own threads.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of all threads of this process, including kernel workers on its behalf.
pub fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Measures a piece of work.
pub struct Stopwatch {
    wall: Instant,
    cpu: Duration,
}

/// Times of a piece of work.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    /// Seconds of wall-clock time.
    pub wall: f64,
    /// Seconds of CPU.
    pub cpu: f64,
}

impl Stopwatch {
    /// Starts the measurement.
    pub fn start() -> Stopwatch {
        Stopwatch { wall: Instant::now(), cpu: process_cpu() }
    }

    /// Returns the times since the start.
    pub fn stop(self) -> Took {
        let (wall, cpu) = (self.wall.elapsed(), process_cpu() - self.cpu);
        Took { wall: wall.as_secs_f64(), cpu: cpu.as_secs_f64() }
    }
}

/// CPU time of all threads of the kernel since their start.
pub struct KernelThreads(HashMap<u32, Duration>);

/// The threads are at rest when they have run for less than `REST` in `PAUSE`; the wait ends after `PAUSES` attempts.
const REST: Duration = Duration::from_micros(200);
const PAUSE: Duration = Duration::from_millis(20);
const PAUSES: usize = 50;

impl KernelThreads {
    /// Reads the current times; `None` if the kernel does not provide them.
    pub fn now() -> Option<KernelThreads> {
        let numbers = fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let of_kernel = |pid: &u32| {
            // After the name, which may contain any characters: state and parent. The parent of
            // kernel threads is kthreadd (2).
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)) == Some("2")
        };
        let runtime = |pid: u32| Some((pid, runtime(&fs::read_to_string(format!("/proc/{pid}/sched")).ok()?)?));
        let all: HashMap<u32, Duration> = numbers.filter(of_kernel).filter_map(runtime).collect();
        (!all.is_empty()).then_some(KernelThreads(all))
    }

    /// Waits until the threads have completed deferred work.
    pub fn at_rest() -> Option<KernelThreads> {
        let mut before = KernelThreads::now()?;
        for _ in 0..PAUSES {
            std::thread::sleep(PAUSE);
            let now = KernelThreads::now()?;
            if now.since(&before) < REST {
                return Some(now);
            }
            before = now;
        }
        Some(before)
    }

    /// Returns the CPU time since `before`.
    pub fn since(&self, before: &KernelThreads) -> Duration {
        let ran = |(pid, now): (&u32, &Duration)| now.saturating_sub(before.0.get(pid).copied().unwrap_or_default());
        self.0.iter().map(ran).sum()
    }
}

/// Parses the run time of a task from the milliseconds in its `sched`.
fn runtime(sched: &str) -> Option<Duration> {
    let line = sched.lines().find(|line| line.starts_with("se.sum_exec_runtime"))?;
    let millis: f64 = line.rsplit(' ').next()?.parse().ok()?;
    Some(Duration::from_secs_f64(millis / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_read_to_the_microsecond() {
        let sched =
            "kworker/0:1 (12, #threads: 1)\n---\nse.exec_start  :  10.5\nse.sum_exec_runtime   :   1234.567891\n";
        assert_eq!(runtime(sched).map(|ran| ran.as_micros()), Some(1_234_567));
        assert_eq!(runtime("nothing"), None);
    }

    #[test]
    fn a_thread_that_began_meanwhile_counts_and_one_that_ended_does_not() {
        let threads = |of: &[(u32, u64)]| {
            KernelThreads(of.iter().map(|&(pid, millis)| (pid, Duration::from_millis(millis))).collect())
        };
        let (before, now) = (threads(&[(1, 10), (2, 50)]), threads(&[(1, 13), (3, 4)]));
        assert_eq!(now.since(&before), Duration::from_millis(7));
    }
}
