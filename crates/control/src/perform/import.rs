//! Making a volume out of a raw image.
//!
//! Data goes to a volume under a provisional name, which gets its real one when everything is
//! durable: a volume with the wanted name is always whole.

use std::sync::atomic::Ordering;

use forkdisk::{Volume, VolumeInfo};
use forkdisk_uring::UringDevice;

use super::volumes::create_options;
use super::{Call, settle};
use crate::bridge::{self, Receiver};
use crate::failure::{Failure, FailureKind};
use crate::files::{Part, STEP, read_image};
use crate::method::params;
use crate::observer::Step;
use crate::reply::VolumeRecord;
use crate::session::Session;
use crate::window::Window;

/// Writes in flight.
const DEPTH: usize = 8;
/// Parts of the image that are read ahead.
const AHEAD: usize = 4;
/// First size of a volume whose length is not known yet; it doubles when it is full.
const FIRST_SIZE: u64 = 64 << 20;

type Parts = Receiver<Result<Part, Failure>>;

/// Imports; on failure nothing of it stays behind.
pub async fn import(session: &Session, p: params::Import, call: &Call) -> Result<VolumeRecord, Failure> {
    check_free(&session.pool.list(), &p.volume)?;
    let image = call.file()?;
    let _turn = session.begin_copy()?;
    clear_away(session).await?;
    let (sender, parts) = bridge::queue(AHEAD);
    std::thread::spawn(move || read_image(image, &sender));
    let partial = session.begin_import();
    let mut options = create_options(session, FIRST_SIZE, p.chunk);
    let first = parts.receive().await;
    if let Some(Ok(Part::Length(len))) = first {
        options.size = len;
    }
    let made = session.pool.create(&partial.name, &options).await;
    made.map_err(|e| Failure::from(e).about("making the volume"))?;
    let filled = fill(session, &partial.name, first, &parts, call).await;
    let named = match filled {
        Ok(()) => session.pool.rename(&partial.name, &p.volume).await.map_err(Failure::from),
        Err(failure) => Err(failure),
    };
    if let Err(failure) = named {
        return Err(undo(session, &partial.name, failure, call).await);
    }
    Ok((&session.pool.find(&p.volume)?).into())
}

/// Deletes what imports that were killed have left. Imports that go on are this session's: the pool is
/// open here alone.
async fn clear_away(session: &Session) -> Result<(), Failure> {
    let all = session.pool.list();
    let has_snapshots = |name: &str| all.iter().any(|info| info.name.split_once('@').is_some_and(|(of, _)| of == name));
    let is_left = |info: &&VolumeInfo| {
        is_partial(&info.name) && info.in_use == 0 && !session.is_importing(&info.name) && !has_snapshots(&info.name)
    };
    let left: Vec<&str> = all.iter().filter(is_left).map(|info| info.name.as_str()).collect();
    if left.is_empty() {
        return Ok(());
    }
    tracing::warn!("deleting {}: left by an import that was killed", left.join(", "));
    Ok(session.pool.delete(&left).await?)
}

/// Whether a volume has a provisional name.
fn is_partial(name: &str) -> bool {
    let number = name.strip_prefix("import-").and_then(|rest| rest.strip_suffix(".partial"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Refuses a name that is taken, before the long work rather than after it.
fn check_free(all: &[VolumeInfo], wanted: &str) -> Result<(), Failure> {
    let below = |outer: &str, inner: &str| inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'));
    for info in all {
        let name = info.name.split('@').next().unwrap_or_default();
        if name == wanted {
            let text = format!("{wanted} exists already: choose another name, or delete it first");
            return Err(Failure::new(FailureKind::Exists, text));
        }
        if below(wanted, name) || below(name, wanted) {
            let text = format!("{wanted}: {name} exists, and a name is never both a volume and a folder");
            return Err(Failure::new(FailureKind::Exists, text));
        }
    }
    Ok(())
}

async fn undo(session: &Session, partial: &str, failure: Failure, call: &Call) -> Failure {
    let removed = match session.pool.delete(&[partial]).await {
        Ok(()) => settle(session, call).await,
        Err(e) => Err(e.into()),
    };
    match removed {
        Ok(()) => failure,
        Err(e) => failure.about(format!("{partial} holds what was imported so far and could not be removed ({e})")),
    }
}

async fn fill(
    session: &Session,
    name: &str,
    first: Option<Result<Part, Failure>>,
    parts: &Parts,
    call: &Call,
) -> Result<(), Failure> {
    let volume = session.pool.volume(name)?;
    let _using = session.using(volume.id().0, "an import");
    let window = Window::new(session.runtime.clone(), DEPTH);
    let mut writer = Writer { session, name, volume, window };
    let copied = copy(&mut writer, first, parts, call).await;
    let ended = writer.end().await;
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
            return Err(Failure::new(FailureKind::Cancelled, "the import was given up"));
        }
        let reached = match next.transpose()? {
            Some(Part::Length(len)) => {
                total = Some(len);
                0
            }
            Some(Part::Data { offset, bytes }) => {
                let end = offset + bytes.len() as u64;
                writer.write(offset, &bytes).await?;
                end
            }
            Some(Part::Reached(at)) => at,
            Some(Part::End(len)) => return writer.set_len(len).await,
            None => return Err(Failure::new(FailureKind::Io, "the image was not read to its end")),
        };
        call.observer.reached(Step::bytes("importing", reached, total));
        next = parts.receive().await;
    }
}

/// Writes to a volume, several in flight, and makes it longer as needed.
struct Writer<'a> {
    session: &'a Session,
    name: &'a str,
    volume: Volume<UringDevice>,
    window: Window<forkdisk::Result<()>>,
}

impl Writer<'_> {
    /// Starts writing `bytes` at `offset`; fails if an earlier write failed.
    async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        debug_assert!(bytes.len() <= STEP);
        let end = offset + bytes.len() as u64;
        let size = self.volume.size();
        if end > size {
            self.session.pool.resize(self.name, (size * 2).max(end)).await?;
        }
        let mut buf = self.session.pool.buffer(bytes.len());
        buf.copy_from_slice(bytes);
        let volume = self.volume.clone();
        let earlier = self.window.push(async move { volume.write(offset, buf, false).await.0 }).await;
        Ok(earlier.unwrap_or(Ok(()))?)
    }

    async fn set_len(&mut self, len: u64) -> Result<(), Failure> {
        self.drain().await?;
        if self.volume.size() != len {
            self.session.pool.resize(self.name, len).await?;
        }
        Ok(())
    }

    /// Waits for all writes; the first failure is the one reported.
    async fn drain(&mut self) -> Result<(), Failure> {
        let mut outcome = Ok(());
        while let Some(ended) = self.window.pop().await {
            outcome = outcome.and(ended);
        }
        Ok(outcome?)
    }

    /// Waits for all writes and makes them durable.
    async fn end(mut self) -> Result<(), Failure> {
        self.drain().await?;
        Ok(self.volume.flush().await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_provisional_names_are_cleared_away() {
        assert!(is_partial("import-123.partial"));
        for name in ["import-.partial", "import-1x.partial", "import-1", "a/import-1.partial", "import-1.partial@x"] {
            assert!(!is_partial(name), "{name}");
        }
    }
}
