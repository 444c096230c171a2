//! Wakes of a daemon that has a vhost-user socket for each of a thousand volumes, and nothing to do.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::cases::serve::idle::allow_files;
use crate::cases::server::served_pool;
use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::row;
use crate::cases::pools::Daemon;

const SOCKETS: usize = 1000;
const CASE: &str = "idle/1000-vhost-user-sockets";
/// Longer than the interval of commits, after which nothing is left to do.
const REST: Duration = Duration::from_secs(8);
const INTERVAL: Duration = Duration::from_secs(5);

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let pool = context.ram("pool");
    served_pool(&pool, 1 << 20, SOCKETS - 1)?;
    allow_files()?;
    let dir = context.ram("vm");
    let flags = ["--vhost-user".as_ref(), dir.as_os_str()];
    let is_ready = || Ok(fs::read_dir(&dir).map_or(0, Iterator::count) >= SOCKETS);
    let daemon = Daemon::serve(context, &pool, "idle", &flags, is_ready)?;
    std::thread::sleep(REST);
    let (mut wakes, mut cpu) = (Samples::default(), Samples::default());
    for _ in 0..context.scale.pick(3, 6, 12) {
        let before = (switches(daemon.process.id())?, daemon.process.cpu()?, Instant::now());
        std::thread::sleep(INTERVAL);
        let (switches, seconds) = (switches(daemon.process.id())? - before.0, before.2.elapsed().as_secs_f64());
        wakes.push(switches as f64 / seconds);
        cpu.push((daemon.process.cpu()? - before.1) * 1e6 / seconds);
    }
    daemon.process.stop()?;
    Ok(vec![
        row(CASE, "forkdisk", "wakes_per_second", "1/s", &wakes),
        row(CASE, "forkdisk", "cpu_per_second", "us", &cpu),
    ])
}

/// Returns how often the threads of a process have gone to sleep: as often as they were woken.
fn switches(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = fs::read_to_string(thread?.path().join("status"))?;
        let count = |name: &str| -> Option<u64> {
            status.lines().find_map(|line| line.strip_prefix(name)).and_then(|rest| rest.trim().parse().ok())
        };
        sum += count("voluntary_ctxt_switches:").context("the switches of a thread")?;
    }
    Ok(sum)
}
