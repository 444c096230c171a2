//! `SEEK_DATA` and `SEEK_HOLE`.
//!
//! Of a file in few pieces every hole is told, to the page. A file in many pieces is told to be data except for
//! its large holes: that is allowed, and whoever copies it (`cp` asks for every hole of a sparse file) then
//! clones it at once instead of in a thousand pieces, with all its holes.

use forkdisk::{BLOCK_SIZE, Device, Volume};

use super::{Failed, Outcome, Volumes};
use crate::codec::Reply;

/// Runs of data or holes up to which a file counts as in few pieces.
const FEW: usize = 256;
/// Places looked at for a large hole, one per block, before the rest is told to be data.
const LOOKS: usize = 1 << 16;

impl<D: Device> Volumes<D> {
    pub(super) async fn seek(&self, handle: u64, offset: u64, whence: u32) -> Outcome {
        let file = self.file(handle)?;
        let volume = &file.volume;
        let size = volume.size();
        if offset >= size {
            return Err(Failed(libc::ENXIO));
        }
        let least = if is_in_few_pieces(volume).await? { 0 } else { least_hole(size) };
        let found = match whence as i32 {
            libc::SEEK_DATA => data_at(volume, offset, least).await?,
            libc::SEEK_HOLE => Some(hole_at(volume, offset, least).await?),
            _ => return Err(Failed(libc::EINVAL)),
        };
        found.map(Reply::Position).ok_or(Failed(libc::ENXIO))
    }
}

/// Shortest hole that is told of a file in many pieces.
fn least_hole(size: u64) -> u64 {
    (size / 16).next_multiple_of(BLOCK_SIZE).max(BLOCK_SIZE)
}

async fn is_in_few_pieces<D: Device>(volume: &Volume<D>) -> Outcome<bool> {
    let (mut at, mut pieces, mut looks) = (0, 0, 0);
    let mut last = None;
    while at < volume.size() {
        let run = volume.run_at(at).await?;
        looks += 1;
        pieces += usize::from(last != Some(run.data));
        (at, last) = (run.end, Some(run.data));
        if pieces > FEW || looks > LOOKS {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The end of the hole at `offset`, or `offset` if there is none; `None` if it reaches to the end.
async fn data_at<D: Device>(volume: &Volume<D>, offset: u64, least: u64) -> Outcome<Option<u64>> {
    let mut at = offset;
    while at < volume.size() {
        let run = volume.run_at(at).await?;
        if run.data {
            return Ok(Some(if at - offset < least { offset } else { at }));
        }
        at = run.end;
    }
    Ok(None)
}

/// Where the first hole of at least `least` bytes begins; the end of the file is one of any length.
async fn hole_at<D: Device>(volume: &Volume<D>, offset: u64, least: u64) -> Outcome<u64> {
    let (mut at, mut begun) = (offset, None);
    for _ in 0..LOOKS {
        if at >= volume.size() {
            break;
        }
        let run = volume.run_at(at).await?;
        if run.data {
            begun = None;
            at = if least == 0 { run.end } else { run.end.max((at + 1).next_multiple_of(BLOCK_SIZE)) };
            continue;
        }
        let begin = *begun.get_or_insert(at);
        if run.end - begin >= least || run.end >= volume.size() {
            return Ok(begin);
        }
        // A block that is a hole at its beginning only counts as data.
        let is_whole = run.end.is_multiple_of(BLOCK_SIZE);
        begun = begun.filter(|_| is_whole);
        at = if is_whole { run.end } else { run.end.next_multiple_of(BLOCK_SIZE) };
    }
    Ok(volume.size())
}
