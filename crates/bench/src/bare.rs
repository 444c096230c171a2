//! Baseline for the engine: reads and writes of a file through io_uring at the least cost, with one
//! ring, registered buffers, a registered file, and a loop.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use forkdisk::Buf;
use io_uring::{IoUring, opcode, types::Fixed};

use crate::clock::{Stopwatch, Took};
use crate::load::Job;
use crate::rows::Samples;

/// Trials of each batch size.
const TUNING: usize = 5;

/// A file with its own ring. Between two calls of [`run`](Self::run) nothing is in flight.
pub struct Bare {
    ring: IoUring,
    _file: File,
    /// One piece per request in flight. Declared after the ring, so that it is dropped later.
    memory: Option<Buf>,
    depth: usize,
    len: usize,
    /// Completions to wait for before the queue is processed.
    batch: usize,
}

impl Bare {
    /// Opens `path`, bypassing the page cache if the file system allows it, for jobs with this depth and length.
    pub fn open(path: &Path, depth: usize, len: usize) -> Result<Bare> {
        let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        let file = open(libc::O_DIRECT).or_else(|_| open(0)).with_context(|| path.display().to_string())?;
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(depth as u32)
            .context("setting up a ring")?;
        let mut memory = Buf::zeroed(depth * len);
        // The same kind of memory as the pool's large buffers. Where there are no huge pages, both have small ones.
        // SAFETY: only this function uses the memory, and its contents stay the same.
        unsafe { libc::madvise(memory.as_mut_ptr().cast(), memory.len(), libc::MADV_HUGEPAGE) };
        let piece = |chunk: &mut [u8]| libc::iovec { iov_base: chunk.as_mut_ptr().cast(), iov_len: chunk.len() };
        let pieces: Vec<libc::iovec> = memory.chunks_mut(len).map(piece).collect();
        // SAFETY: the pieces lie in `memory`, which lives as long as the ring and never moves: a
        // `Buf` keeps its bytes on the heap.
        unsafe { ring.submitter().register_buffers(&pieces) }.context("registering buffers")?;
        ring.submitter().register_files(&[file.as_raw_fd()]).context("registering a file")?;
        Ok(Bare { ring, _file: file, memory: Some(memory), depth, len, batch: 1 })
    }

    /// Chooses the number of completions to wait for that makes `job` cheapest by `cost`: waiting
    /// for each one takes the least time, waiting for many the least CPU.
    pub fn tune(&mut self, job: &Job, cost: impl Fn(&Took) -> f64) -> Result<()> {
        let mut best = (f64::INFINITY, 1);
        for batch in [1, self.depth / 4, self.depth / 2] {
            self.batch = batch.max(1);
            // A small batch is sometimes cheap by chance; the median decides.
            let mut costs = Samples::default();
            for _ in 0..TUNING {
                let watch = Stopwatch::start();
                self.run(job)?;
                costs.push(cost(&watch.stop()));
            }
            let usual = costs.median().unwrap_or(f64::INFINITY);
            if usual < best.0 {
                best = (usual, self.batch);
            }
        }
        self.batch = best.1;
        Ok(())
    }

    /// Runs the job; a new request starts when one has ended.
    pub fn run(&mut self, job: &Job) -> Result<()> {
        ensure!((job.depth, job.len) == (self.depth, self.len), "this ring is for jobs of another shape");
        let mut offsets = job.offsets.iter();
        let mut in_flight = 0;
        for (slot, &offset) in (0..self.depth).zip(offsets.by_ref()) {
            self.push(job.write, slot, offset)?;
            in_flight += 1;
        }
        let mut failed = Ok(());
        let mut ended = Vec::with_capacity(self.depth);
        while in_flight > 0 {
            self.wait(self.batch.min(in_flight))?;
            ended.extend(self.ring.completion().map(|c| (c.user_data() as usize, c.result())));
            for (slot, result) in ended.drain(..) {
                in_flight -= 1;
                if result != self.len as i32 {
                    failed = Err(short(result));
                }
                if let (Ok(()), Some(&offset)) = (&failed, offsets.next()) {
                    self.push(job.write, slot, offset)?;
                    in_flight += 1;
                }
            }
        }
        Ok(failed?)
    }

    fn push(&mut self, write: bool, slot: usize, offset: u64) -> Result<()> {
        let (len, index) = (self.len as u32, slot as u16);
        let memory = self.memory.as_mut().context("this ring has failed")?;
        let piece = memory[slot * self.len..(slot + 1) * self.len].as_mut_ptr();
        let entry = match write {
            true => opcode::WriteFixed::new(Fixed(0), piece, len, index).offset(offset).build(),
            false => opcode::ReadFixed::new(Fixed(0), piece, len, index).offset(offset).build(),
        };
        let entry = entry.user_data(slot as u64);
        // SAFETY: the piece lies in `memory`, has no other user while its slot is in flight, and
        // `run` does not return before it has ended (or leaks the memory, in `wait`).
        Ok(unsafe { self.ring.submission().push(&entry) }?)
    }

    fn wait(&mut self, count: usize) -> Result<()> {
        loop {
            match self.ring.submit_and_wait(count) {
                Ok(_) => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    // Requests in flight may still access the memory.
                    std::mem::forget(self.memory.take());
                    return Err(e).context("waiting for the ring");
                }
            }
        }
    }
}

fn short(result: i32) -> io::Error {
    match result {
        error if error < 0 => io::Error::from_raw_os_error(-error),
        _ => io::ErrorKind::UnexpectedEof.into(),
    }
}

/// Returns the CPU time of a process so far: of all its threads, ended ones and the kernel's workers for it included.
pub fn cpu_of(pid: u32) -> io::Result<std::time::Duration> {
    let mut clock: libc::clockid_t = 0;
    let mut time = std::mem::MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: `clock` has room for a number of a clock.
    match unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) } {
        0 => {}
        error => return Err(io::Error::from_raw_os_error(error)),
    }
    // SAFETY: `time` has room for the struct, which is valid with any numbers.
    let time = unsafe {
        if libc::clock_gettime(clock, time.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        time.assume_init()
    };
    Ok(std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Returns the CPU time of all children that have ended and were waited for.
pub fn children_cpu() -> std::time::Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` has room for the struct, which is valid with any numbers.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |t: libc::timeval| std::time::Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{random, sequential};

    #[test]
    fn the_clock_of_this_process_is_the_one_that_others_see() {
        let before = crate::clock::process_cpu();
        let seen = cpu_of(std::process::id()).unwrap();
        assert!(before <= seen && seen <= crate::clock::process_cpu());
        let beyond_all = (1 << 22) + 1;
        assert!(cpu_of(beyond_all).is_err());
    }

    #[test]
    fn every_piece_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1u8; 1 << 20]).unwrap();
        let offsets = random(1 << 20, 4096, 200, 1);
        let mut bare = Bare::open(&path, 32, 4096).unwrap();
        bare.run(&Job { write: true, len: 4096, depth: 32, offsets }).unwrap();
        let zeroes = std::fs::read(&path).unwrap().iter().filter(|&&b| b == 0).count();
        assert_eq!(zeroes, 200 * 4096);
    }

    #[test]
    fn an_error_ends_the_job_and_the_ring_can_be_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1u8; 1 << 20]).unwrap();
        let mut bare = Bare::open(&path, 4, 4096).unwrap();
        let job = |span| Job { write: false, len: 4096, depth: 4, offsets: sequential(span, 4096) };
        assert!(bare.run(&job(2 << 20)).is_err(), "reads past the end");
        bare.run(&job(1 << 20)).unwrap();
    }
}
