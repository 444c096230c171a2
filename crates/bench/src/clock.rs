//! CPU time and wall-clock time of pieces of work in this process, and what the kernel's own threads do meanwhile.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// CPU time of all threads of this process, kernel workers on its behalf included.
pub fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// A piece of work under way.
pub struct Stopwatch {
    wall: Instant,
    cpu: Duration,
}

/// What a piece of work took.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    /// Seconds that passed.
    pub wall: f64,
    /// Seconds of CPU.
    pub cpu: f64,
}

impl Stopwatch {
    /// Begins.
    pub fn start() -> Stopwatch {
        Stopwatch { wall: Instant::now(), cpu: process_cpu() }
    }

    /// What passed since the beginning.
    pub fn stop(self) -> Took {
        let (wall, cpu) = (self.wall.elapsed(), process_cpu() - self.cpu);
        Took { wall: wall.as_secs_f64(), cpu: cpu.as_secs_f64() }
    }
}

/// CPU time of all threads of the kernel since they began.
pub struct KernelThreads(HashMap<u32, Duration>);

/// They are at rest when they have run for less than `REST` in `PAUSE`; nobody waits for that more than `PAUSES` times.
const REST: Duration = Duration::from_micros(200);
const PAUSE: Duration = Duration::from_millis(20);
const PAUSES: usize = 50;

impl KernelThreads {
    /// Now; `None` where the kernel does not tell.
    pub fn now() -> Option<KernelThreads> {
        let numbers = fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let of_kernel = |pid: &u32| {
            // Behind the name, which may hold anything: the state, and the parent. Theirs is kthreadd.
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)) == Some("2")
        };
        let runtime = |pid: u32| Some((pid, runtime(&fs::read_to_string(format!("/proc/{pid}/sched")).ok()?)?));
        let all: HashMap<u32, Duration> = numbers.filter(of_kernel).filter_map(runtime).collect();
        (!all.is_empty()).then_some(KernelThreads(all))
    }

    /// As soon as they have done what they put off.
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

    /// What they have run since `before`.
    pub fn since(&self, before: &KernelThreads) -> Duration {
        let ran = |(pid, now): (&u32, &Duration)| now.saturating_sub(before.0.get(pid).copied().unwrap_or_default());
        self.0.iter().map(ran).sum()
    }
}

/// How long a task has run, from the milliseconds that its `sched` tells.
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
