//! CPU time and wall-clock time of pieces of work in this process.

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
