//! Creation of a volume from a raw image.
//!
//! Data goes to a volume without a name, which is named when everything is durable: a volume with a
//! name is always complete, and what a killed import leaves is deleted when the pool is opened again.

use std::sync::atomic::Ordering;

use forkdisk::{ErrorKind, Volume, VolumeInfo};
use forkdisk_uring::UringDevice;

use super::volumes::create_options;
use crate::bridge::{self, Receiver};
use crate::call::{Call, settle};
use crate::failure::{Failure, FailureKind};
use crate::files::STEP_BYTES;
use crate::image::{Part, Source, read_image};
use crate::lifetimes::given;
use crate::method::params;
use crate::observer::Step;
use crate::reply::VolumeRecord;
use crate::session::Session;
use crate::window::Window;

/// Writes in flight.
const DEPTH_COUNT: usize = 8;
/// Most parts of the image that are read ahead.
const AHEAD_COUNT: usize = 4;
/// Initial size of a volume whose final length is unknown, in bytes; it doubles when it is full.
const FIRST_SIZE: u64 = 64 << 20;

type Parts = Receiver<Result<Part, Failure>>;

/// Imports an image; a failure leaves nothing behind.
pub async fn import(session: &Session, p: params::Import, call: &Call) -> Result<VolumeRecord, Failure> {
    check_free(&session.pool.list(), &p.volume)?;
    let extension = given!(p).of_new(session, call)?;
    let image = call.file()?;
    let _turn = session.begin_copy()?;
    let (sender, parts) = bridge::queue(AHEAD_COUNT);
    let source = Source { format: p.format, shown: p.source, force: p.force };
    std::thread::spawn(move || read_image(image, &source, &sender));
    let first = parts.receive().await;
    let known = match &first {
        Some(Ok(Part::Length(len))) => Some(*len),
        Some(Err(failure)) => return Err(failure.clone()),
        _ => None,
    };
    let options = create_options(session, p.size.or(known).unwrap_or(FIRST_SIZE), p.chunk).with_extension(extension);
    let made = session.pool.create_unnamed(&options);
    let volume = made.map_err(|e| Failure::from(e).about("making the volume"))?;
    let filled = fill(session, &volume, p.size, first, &parts, call).await;
    let named = match filled {
        Ok(()) => match session.pool.bound_unnamed(&volume, p.diverge.unwrap_or(0), p.reserve.unwrap_or(0)) {
            Ok(()) => session.pool.name_volume(&volume, &p.volume).await.map_err(Failure::from),
            Err(error) => Err(error.into()),
        },
        Err(failure) => Err(failure),
    };
    // A volume without a name is deleted with its last handle.
    drop(volume);
    if let Err(failure) = named {
        return Err(undone(session, failure, call).await);
    }
    Ok((&session.pool.find(&p.volume)?).into())
}

/// Refuses a name that is taken, before the long copy instead of after it.
fn check_free(all: &[VolumeInfo], wanted: &str) -> Result<(), Failure> {
    let below = |outer: &str, inner: &str| inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'));
    for info in all {
        let name = info.name.split('@').next().unwrap_or_default();
        if name == wanted {
            let text = format!("{wanted} exists already: choose another name, or delete it first");
            return Err(Failure::new(ErrorKind::Exists, text));
        }
        if below(wanted, name) || below(name, wanted) {
            let text = format!("{wanted}: {name} exists, and a name is never both a volume and a folder");
            return Err(Failure::new(ErrorKind::Exists, text));
        }
    }
    Ok(())
}

/// Waits until the space of a failed import is free, then returns the import's failure.
async fn undone(session: &Session, failure: Failure, call: &Call) -> Failure {
    match settle(session, call).await {
        Ok(()) => failure,
        Err(e) => failure.about(format!("the space of the partial import is not free yet ({e})")),
    }
}

async fn fill(
    session: &Session,
    volume: &Volume<UringDevice>,
    wanted: Option<u64>,
    first: Option<Result<Part, Failure>>,
    parts: &Parts,
    call: &Call,
) -> Result<(), Failure> {
    let window = Window::new(session.runtime.clone(), DEPTH_COUNT);
    let mut writer = Writer { session, volume, wanted, window };
    let copied = copy(&mut writer, first, parts, call).await;
    // No request may be in flight when the volume is dropped.
    let ended = writer.drain().await;
    copied?;
    ended
}

async fn copy(
    writer: &mut Writer<'_>,
    first: Option<Result<Part, Failure>>,
    parts: &Parts,
    call: &Call,
) -> Result<(), Failure> {
    let mut next = first;
    let mut total = None;
    loop {
        if call.cancelled.load(Ordering::Relaxed) {
            return Err(Failure::new(FailureKind::Cancelled, "the import was cancelled"));
        }
        let reached = match next.transpose()? {
            Some(Part::Length(len)) => {
                writer.check_fits(len)?;
                total = Some(len);
                0
            }
            Some(Part::Data { offset, bytes }) => {
                let end = offset + bytes.len() as u64;
                writer.write(offset, &bytes).await?;
                end
            }
            Some(Part::Reached(at)) => {
                writer.check_fits(at)?;
                at
            }
            Some(Part::End(len)) => return writer.set_len(len).await,
            None => return Err(Failure::new(ErrorKind::Io, "the image was not read to its end")),
        };
        call.observer.reached(Step::bytes("importing", reached, total));
        next = parts.receive().await;
    }
}

/// Writes to a volume with several requests in flight and extends it as needed.
struct Writer<'a> {
    session: &'a Session,
    volume: &'a Volume<UringDevice>,
    /// Requested length, independent of the image's.
    wanted: Option<u64>,
    window: Window<forkdisk::Result<()>>,
}

impl Writer<'_> {
    /// Refuses an image that is longer than the requested length.
    fn check_fits(&self, len: u64) -> Result<(), Failure> {
        match self.wanted.filter(|wanted| len > *wanted) {
            None => Ok(()),
            Some(wanted) => {
                let text = format!("the image is longer than the requested size ({wanted} bytes)");
                Err(Failure::new(ErrorKind::Invalid, text))
            }
        }
    }

    /// Starts writing `bytes` at `offset`; fails if an earlier write failed.
    async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        debug_assert!(bytes.len() <= STEP_BYTES);
        let end = offset + bytes.len() as u64;
        self.check_fits(end)?;
        let size = self.volume.size();
        if end > size {
            self.volume.set_size((size * 2).max(end)).await?;
        }
        let mut buf = self.session.pool.buffer(bytes.len());
        buf.copy_from_slice(bytes);
        let volume = self.volume.clone();
        let earlier = self.window.push(async move { volume.write(offset, buf, false).await.0 }).await;
        Ok(earlier.unwrap_or(Ok(()))?)
    }

    async fn set_len(&mut self, len: u64) -> Result<(), Failure> {
        self.drain().await?;
        self.check_fits(len)?;
        let len = self.wanted.unwrap_or(len);
        if self.volume.size() != len {
            self.volume.set_size(len).await?;
        }
        Ok(())
    }

    /// Waits for all writes; returns the first failure.
    async fn drain(&mut self) -> Result<(), Failure> {
        let mut outcome = Ok(());
        while let Some(ended) = self.window.pop().await {
            outcome = outcome.and(ended);
        }
        Ok(outcome?)
    }
}
