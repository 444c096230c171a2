//! A pool in a file on the timed device, mounted by a thread of this process: the requests of its
//! engine to the device are counted, and its CPU time is this process's.

use std::fs;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use forkdisk::testing::{Recording, RecordingDevice};
use forkdisk::{FormatOptions, GatherPolicy, OpenOptions, Pool};
use forkdisk_fuse::{MountOptions, Session, Volumes, VolumesOptions};
use forkdisk_uring::{Config, DeviceOptions, Rt, UringDevice, Watched, block_on};

use super::passthrough;
use super::rounds::{Counts, Place};
use crate::ending::{Thing, Undoable};
use crate::limits::LIMIT;
use crate::load::{self, Job, sequential};
use crate::runner::Context;

const PIECE: usize = 1 << 20;
const PAGE: u64 = 4096;
/// The server is at rest when it has made no request for this long: longer than a flush takes and
/// shorter than the wait before gathering. The wait for rest ends after `PAUSES` attempts.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSES: usize = 10;

type MountedPool = Pool<RecordingDevice<UringDevice>>;

/// Command to the thread that owns the pool.
enum Question {
    /// Do all deferred work.
    Settle,
    /// Write all changed metadata to its place.
    WriteOut,
    /// Return the device's counters and the space in use.
    Figures,
    /// Gather a volume's pages.
    Gather(String),
    /// Start recording the device's requests.
    Record,
    /// Return the recording.
    Recorded,
    /// Read a volume in order, this many bytes; return the device's requests.
    Read(String, u64),
    /// Unmount and close.
    End,
}

/// Reply of that thread.
enum Answer {
    Done,
    Figures(Counts, u64, u64),
    Recording(Recording),
}

/// A mounted pool. Unmounted when dropped.
pub struct Bed {
    dir: PathBuf,
    wake: PipeWriter,
    questions: Sender<Question>,
    answers: Receiver<Result<Answer>>,
    thread: Option<JoinHandle<()>>,
    /// Space in use in an empty pool.
    empty: u64,
    _undoable: Undoable,
}

impl Bed {
    /// Creates a pool of `size` bytes on the timed device, mounted as users do. It does not return
    /// space to the file system below; neither do its peers.
    pub fn new(context: &Context<'_>, size: u64) -> Result<Bed> {
        Bed::gathering(context, size, GatherPolicy::USUAL)
    }

    /// As [`new`](Self::new), with this policy of gathering for its files.
    pub fn gathering(context: &Context<'_>, size: u64, gather: GatherPolicy) -> Result<Bed> {
        Bed::at(context.disk("mnt"), context.disk("pool"), size, gather)
    }

    /// Creates a pool of `size` bytes in memory.
    pub fn in_memory(context: &Context<'_>, size: u64) -> Result<Bed> {
        Bed::at(context.disk("mnt"), context.ram("pool"), size, GatherPolicy::USUAL)
    }

    fn at(dir: PathBuf, file: PathBuf, size: u64, gather: GatherPolicy) -> Result<Bed> {
        anyhow::ensure!(Path::new("/dev/fuse").exists(), "/dev/fuse does not exist: load the kernel module fuse");
        fs::create_dir_all(&dir)?;
        let _ = fs::remove_file(&file);
        let (woken, wake) = io::pipe()?;
        let (questions, asked) = channel();
        let (answer, answers) = channel();
        let at = dir.clone();
        let undoable = Undoable::new(Thing::Mount(dir.clone()));
        let thread = std::thread::spawn(move || {
            let outcome = block_on(Config::default(), |rt| {
                let answer = answer.clone();
                async move { serve(&rt, (&file, size), (&at, gather), woken.into(), &asked, &answer).await }
            });
            // Fails if the receiver is gone.
            let _ = answer.send(outcome.map_err(Into::into).and_then(|done| done).map(|()| Answer::Done));
        });
        let mut bed = Bed { dir, wake, questions, answers, thread: Some(thread), empty: 0, _undoable: undoable };
        bed.answer()?;
        bed.empty = bed.figures()?.2;
        Ok(bed)
    }

    fn answer(&self) -> Result<Answer> {
        self.answers.recv_timeout(LIMIT).map_err(|error| match error {
            RecvTimeoutError::Disconnected => anyhow!("the thread that serves the pool has ended"),
            RecvTimeoutError::Timeout => anyhow!("the thread that serves the pool did not answer within {LIMIT:?}"),
        })?
    }

    fn ask(&self, question: Question) -> Result<Answer> {
        self.questions.send(question).map_err(|_| anyhow!("the thread that serves the pool has ended"))?;
        (&self.wake).write_all(&[0])?;
        self.answer()
    }

    fn figures(&self) -> Result<(Counts, u64, u64)> {
        match self.ask(Question::Figures)? {
            Answer::Figures(counts, contents, used) => Ok((counts, contents, used)),
            _ => Err(anyhow!("a reply to another command")),
        }
    }

    /// Gathers the pages of the file `name`.
    pub fn gather(&self, name: &str) -> Result<()> {
        self.ask(Question::Gather(name.to_string())).map(drop)
    }

    /// Starts recording the device's requests.
    pub fn record(&self) -> Result<()> {
        self.ask(Question::Record).map(drop)
    }

    /// Returns the requests since then.
    pub fn recorded(&self) -> Result<Recording> {
        self.recording(Question::Recorded)
    }

    fn recording(&self, question: Question) -> Result<Recording> {
        match self.ask(question)? {
            Answer::Recording(recording) => Ok(recording),
            _ => Err(anyhow!("a reply to another command")),
        }
    }

    /// Unmounts and closes the pool.
    pub fn end(mut self) -> Result<()> {
        self.ask(Question::End)?;
        let thread = self.thread.take().context("it runs")?;
        joined(thread, "the thread that serves the pool")
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = self.ask(Question::End);
            let _ = joined(thread, "the thread that serves the pool");
        }
    }
}

impl Place for Bed {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn settle(&self) -> Result<()> {
        self.ask(Question::Settle).map(drop)
    }

    /// Pages replaced by a checkpoint are freed by the next checkpoint, for whatever reason that runs.
    fn write_out(&self) -> Result<()> {
        self.ask(Question::WriteOut).map(drop)
    }

    /// A commit or an emptying of the log may still be running after the last write was answered.
    fn rest(&self) -> Result<()> {
        let mut before = self.counts()?.requests;
        for _ in 0..PAUSES {
            std::thread::sleep(PAUSE);
            let now = self.counts()?.requests;
            if now == before {
                break;
            }
            before = now;
        }
        Ok(())
    }

    fn counts(&self) -> Result<Counts> {
        Ok(self.figures()?.0)
    }

    fn read(&self, name: &str, len: u64) -> Result<Recording> {
        self.recording(Question::Read(name.to_string(), len))
    }

    fn used(&self) -> Result<Option<(u64, u64)>> {
        let (_, contents, used) = self.figures()?;
        Ok(Some((contents, used - self.empty)))
    }
}

async fn serve(
    rt: &Rt,
    (file, size): (&Path, u64),
    (dir, gather): (&Path, GatherPolicy),
    woken: OwnedFd,
    asked: &Receiver<Question>,
    answer: &Sender<Result<Answer>>,
) -> Result<()> {
    let device = UringDevice::create(rt, file, size, false, &DeviceOptions::default())?;
    let device = RecordingDevice::new(device, |_| true);
    device.pause(true);
    Pool::format(&device, &FormatOptions::new(size, *b"forkdisk-bench-5", 0)).await?;
    let pool = Pool::open(device, Rc::new(rt.clone()), OpenOptions::default().with_discard(false)).await?;
    let options = VolumesOptions::new(dir.to_path_buf(), 0, 0)
        .with_alone(true)
        .with_gather(gather)
        .with_show_snapshots(false)
        .with_syscall_helper(None);
    let volumes = Volumes::new(pool.clone(), options);
    let session = Session::mount(rt, volumes, dir, &MountOptions::default().with_source("bench")).await?;
    let handle = session.handle();
    let serving = rt.spawn(session.serve());
    let woken = Watched::new(rt, woken);
    let tell = |what| answer.send(what).map_err(|_| anyhow!("the receiver is gone"));
    tell(Ok(Answer::Done))?;
    loop {
        woken.readable().await?;
        let mut byte = [0];
        let _ = io::PipeReader::from(std::os::fd::AsFd::as_fd(&woken).try_clone_to_owned()?).read(&mut byte)?;
        match asked.recv()? {
            Question::Settle => tell(settle(&pool).await.map(|()| Answer::Done))?,
            Question::WriteOut => tell(write_out(&pool).await.map(|()| Answer::Done))?,
            Question::Figures => tell(Ok(figures(&pool)))?,
            Question::Gather(name) => {
                tell(pool.gather(&name, |_, _| true).await.map(|_| Answer::Done).map_err(Into::into))?
            }
            Question::Record => {
                pool.device().take();
                pool.device().pause(false);
                tell(Ok(Answer::Done))?
            }
            Question::Recorded => {
                pool.device().pause(true);
                tell(Ok(Answer::Recording(pool.device().take())))?
            }
            Question::Read(name, len) => tell(read(rt, &pool, &name, len).await.map(Answer::Recording))?,
            Question::End => break,
        }
    }
    handle.stop().await;
    serving.await?;
    Ok(pool.close().await?)
}

async fn settle(pool: &MountedPool) -> Result<()> {
    let before = pool.statistics().gathered_bytes;
    // Two checkpoints: space freed by the first, including replaced tables, is free after the second.
    pool.wait_freed().await?;
    if has_gathered(pool, before).await {
        pool.wait_freed().await?;
    }
    Ok(())
}

async fn write_out(pool: &MountedPool) -> Result<()> {
    let before = pool.statistics().gathered_bytes;
    pool.checkpoint().await?;
    if has_gathered(pool, before).await {
        pool.checkpoint().await?;
    }
    Ok(())
}

/// Waits until nothing is left to gather; returns whether any bytes were gathered since the count `before`.
async fn has_gathered(pool: &MountedPool, before: u64) -> bool {
    pool.wait_gathered().await;
    pool.statistics().gathered_bytes > before
}

fn figures(pool: &MountedPool) -> Answer {
    let seen = pool.statistics();
    let all = [seen.data.read, seen.data.write, seen.metadata.read, seen.metadata.write, seen.journal];
    let counts = Counts {
        requests: all.iter().map(|r| r.count).sum::<u64>() + seen.flushes + seen.discards.count,
        bytes: all.iter().map(|r| r.bytes).sum(),
        map_pages: (seen.metadata.read.bytes + seen.metadata.write.bytes) / PAGE,
    };
    let contents = pool.list().iter().map(|volume| volume.referenced).sum();
    Answer::Figures(counts, contents, pool.info().used)
}

async fn read(rt: &Rt, pool: &MountedPool, name: &str, len: u64) -> Result<Recording> {
    let volume = pool.volume(name)?;
    let job = Job { write: false, len: PIECE, depth: super::read::DEPTH, offsets: sequential(len, PIECE) };
    pool.device().pause(false);
    pool.device().take();
    let done = load::run(rt, pool, &volume, &job).await;
    pool.device().pause(true);
    done?;
    Ok(pool.device().take())
}

/// Returns the result of a thread, if it ends in time.
fn joined<T>(thread: JoinHandle<T>, what: &str) -> Result<T> {
    let start = Instant::now();
    while !thread.is_finished() {
        anyhow::ensure!(start.elapsed() < LIMIT, "{what} did not end within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    thread.join().map_err(|_| anyhow!("{what} has panicked"))
}

/// A plain file in memory, passed through by a thread of this process. Unmounted when dropped.
pub struct Through {
    dir: PathBuf,
    end: Option<PipeWriter>,
    thread: Option<JoinHandle<Result<()>>>,
    _undoable: Undoable,
}

impl Through {
    /// Creates a file of `size` bytes.
    pub fn new(context: &Context<'_>, size: u64) -> Result<Through> {
        let (dir, file) = (context.disk("through"), context.ram("through"));
        fs::create_dir_all(&dir)?;
        fs::File::create(&file)?.set_len(size)?;
        let (ended, end) = io::pipe()?;
        let (ready, is_ready) = channel();
        let at = dir.clone();
        let undoable = Undoable::new(Thing::Mount(dir.clone()));
        let thread = std::thread::spawn(move || {
            block_on(Config::default(), |rt| async move {
                let (handle, serving) = passthrough::mount(&rt, &file, &at).await?;
                let ended = Watched::new(&rt, ended.into());
                // Fails if the receiver has failed meanwhile.
                let _ = ready.send(());
                ended.readable().await?;
                handle.stop().await;
                Ok(serving.await?)
            })?
        });
        let mut through = Through { dir, end: Some(end), thread: Some(thread), _undoable: undoable };
        match is_ready.recv_timeout(LIMIT) {
            Ok(()) => Ok(through),
            Err(RecvTimeoutError::Timeout) => {
                through.thread = None;
                Err(anyhow!("the passthrough did not come up within {LIMIT:?}"))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(through.finish().err().unwrap_or_else(|| anyhow!("the passthrough ended at once")))
            }
        }
    }

    /// Returns the mount point.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Unmounts.
    pub fn end(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        drop(self.end.take());
        let Some(thread) = self.thread.take() else { return Ok(()) };
        joined(thread, "the thread of the passthrough")?
    }
}

impl Drop for Through {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}
