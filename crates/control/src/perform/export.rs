//! Export of a volume or snapshot as a raw image, with holes where it has no data.

use std::sync::atomic::Ordering;

use forkdisk::{Buf, ErrorKind, Volume};
use forkdisk_uring::UringDevice;

use crate::bridge::{self, Gone, Sender};
use crate::call::Call;
use crate::failure::Failure;
use crate::files::{Chunk, STEP_BYTES, write_image};
use crate::method::params;
use crate::observer::Step;
use crate::reply::Done;
use crate::session::Session;
use crate::window::Window;

/// Reads in flight.
const DEPTH_COUNT: usize = 8;
/// Most chunks that wait to be written.
const AHEAD_COUNT: usize = 4;
/// Bytes of a volume whose extents are looked up at a time.
const LOOK_AHEAD_BYTES: u64 = 64 << 20;

type ReadTask = (u64, forkdisk::Result<()>, Buf);

/// Exports a volume or snapshot. Writes during the export of a volume may or may not be in the image.
pub async fn export(session: &Session, p: params::Export, call: &Call) -> Result<Done, Failure> {
    let volume = session.pool.volume(&p.object)?;
    let _using = session.using(volume.id().0, "an export to a file");
    let _turn = session.begin_copy()?;
    let file = call.file()?;
    let (size, shown) = (volume.size(), p.target.unwrap_or_else(|| "the target".to_string()));
    let (chunks, incoming) = bridge::queue(AHEAD_COUNT);
    let (report, outcome) = bridge::queue(1);
    let cancelled = call.cancelled.clone();
    std::thread::spawn(move || {
        let is_wanted = || !cancelled.load(Ordering::Relaxed);
        let written = write_image(file, &shown, size, p.force, &incoming, &is_wanted);
        drop(incoming);
        // Fails only if the caller is gone.
        let _ = report.send_blocking(written);
    });
    let window = Window::new(session.runtime.clone(), DEPTH_COUNT);
    let mut reader = Reader { session, volume: &volume, chunks, window };
    let read = reader.run(size, call).await;
    // Requests in flight end before the volume is released.
    while reader.window.pop().await.is_some() {}
    drop(reader);
    let broken = || Err(Failure::new(ErrorKind::Io, "the export broke off"));
    let written = outcome.receive().await.unwrap_or_else(broken);
    match read {
        Err(Stop::Failed(failure)) => Err(failure),
        // If the file refused a write, that is the reason why sending failed: report it.
        Ok(()) | Err(Stop::Refused) => written.map(|()| Done {}),
    }
}

/// Why reading ended early.
enum Stop {
    /// A read failed.
    Failed(Failure),
    /// The thread that writes the file has ended.
    Refused,
}

impl From<forkdisk::Error> for Stop {
    fn from(error: forkdisk::Error) -> Stop {
        Stop::Failed(error.into())
    }
}

impl From<Gone> for Stop {
    fn from(_: Gone) -> Stop {
        Stop::Refused
    }
}

/// Reads a volume's data in order, with several requests in flight, and sends it to the writing thread.
struct Reader<'a> {
    session: &'a Session,
    volume: &'a Volume<UringDevice>,
    chunks: Sender<Option<Chunk>>,
    window: Window<ReadTask>,
}

impl Reader<'_> {
    async fn run(&mut self, size: u64, call: &Call) -> Result<(), Stop> {
        let mut from = 0;
        while from < size {
            let len = LOOK_AHEAD_BYTES.min(size - from);
            for extent in self.volume.extents(from, len).await?.iter().filter(|extent| extent.data) {
                self.read(extent.offset, extent.len, size, call).await?;
            }
            from += len;
            call.observer.reached(Step::bytes("exporting", from, Some(size)));
            self.session.runtime.yield_now().await;
        }
        while let Some(ended) = self.window.pop().await {
            self.pass_on(ended).await?;
        }
        Ok(self.chunks.send(None).await?)
    }

    async fn read(&mut self, offset: u64, len: u64, size: u64, call: &Call) -> Result<(), Stop> {
        let mut done = 0;
        while done < len {
            let n = (STEP_BYTES as u64).min(len - done);
            let (at, volume) = (offset + done, self.volume.clone());
            let buf = self.session.pool.buffer(n as usize);
            let task = async move {
                let (result, buf) = volume.read(at, buf).await;
                (at, result, buf)
            };
            if let Some(ended) = self.window.push(task).await {
                self.pass_on(ended).await?;
            }
            done += n;
            call.observer.reached(Step::bytes("exporting", offset + done, Some(size)));
        }
        Ok(())
    }

    async fn pass_on(&self, (offset, result, buf): ReadTask) -> Result<(), Stop> {
        result?;
        Ok(self.chunks.send(Some((offset, buf.to_vec()))).await?)
    }
}
